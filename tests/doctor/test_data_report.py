"""The report says of a dataset what training would find in it."""

import io
import json
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from npt.base.source import load_tokenizer
from npt.batch import IGNORE_INDEX, Sample
from npt.config import DataConfig
from npt.data import templates
from npt.data.encoding import RecordCounts
from npt.data.first_look import Copies
from npt.data.samples import cut
from npt.data.source import open_source
from npt.data.templates import render_template
from npt.doctor.data import CLOSE, OPEN, DataReport, examine, print_report, show
from npt.errors import DataError
from npt.files import to_json

VOCAB = 2048
END = "{% endfor %}" * 2


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny")


def write(path: Path, *records: object) -> DataConfig:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return DataConfig(dataset_name=str(path), max_length=16)


def problems(report: DataReport) -> str:
    return "\n".join(map(str, report.problems))


def printed(report: DataReport, encoding: str = "utf-8") -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    console = Console(file=stream, width=120, markup=False, highlight=False)
    print_report(report, console)
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)


def test_the_counts_are_those_of_cutting(tmp_path, tokenizer):
    pairs = [("def f(x):" * (1 + i), "return x\n" * (i % 9)) for i in range(40)]
    config = write(
        tmp_path / "data.jsonl",
        *({"prompt": prompt, "completion": completion} for prompt, completion in pairs),
        {"prompt": "p", "completion": "long " * 40},
        {"text": ""},
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, -100]},
        {"input_ids": [5, 6], "labels": [-100, -100]},
    )
    counts = RecordCounts()
    samples = list(cut(open_source(config), tokenizer, config, counts))
    report = examine(config, tokenizer, VOCAB)
    assert report.counts == counts and report.complete and not report.problems
    assert counts.skipped == Counter({"empty completion": 5, "empty text": 1, "no target": 1})
    assert counts.cut_prompts > 0 < counts.cut_completions
    lengths = sorted(len(s.input_ids) for s in samples)
    assert (report.shortest, report.longest) == (lengths[0], lengths[-1])
    labels = [label for s in samples for label in s.labels or s.input_ids]
    assert report.targets == sum(label != IGNORE_INDEX for label in labels)
    assert report.heldout == sum(s.heldout for s in samples)
    ids = [i for s in samples for i in s.input_ids]
    assert (report.id_min, report.id_max, report.outside) == (min(ids), max(ids), 0)


def test_the_first_records_alone_can_be_looked_at(tmp_path, tokenizer):
    config = write(tmp_path / "data.jsonl", *({"text": "x = 1\n" * i} for i in range(1, 80)))
    part = examine(config, tokenizer, VOCAB, max_records=50)
    assert part.counts.records == 50 and not part.complete
    assert ", first 50 records" in printed(part)
    whole = examine(config, tokenizer, VOCAB, max_records=79)
    assert whole.counts.records == 79 and whole.complete


def test_records_that_cannot_be_encoded_are_located(tmp_path, tokenizer):
    path = tmp_path / "data.jsonl"
    path.write_bytes(
        b'{"text": "fine"}\n{"id": "mine", "text": 5}\n{"body": "x"}\n{\n{"input_ids": [1, 2],'
        b' "labels": [1]}\n{"text": "half a pair \\ud800"}\n{"text": "fine too"}\n'
    )
    report = examine(DataConfig(dataset_name=str(path)), tokenizer, VOCAB)
    for words, start in zip(
        report.broken,
        (
            ": record mine has an int as 'text'",
            ": record data.jsonl:3 has no column 'text' (columns: body",
            ", line 4, column 2: not JSON",
            ": record data.jsonl:5 has 2 input_ids, but labels has length 1",
            ": record data.jsonl:6: 'text' is damaged",
        ),
        strict=True,
    ):
        assert words.startswith(f"{path}{start}")
    assert (report.counts.records, report.counts.samples, report.broken_total) == (2, 2, 5)
    assert "error: faults in the data: 5; fix or remove" in printed(report)


def test_faults_of_one_kind_are_one_line_and_hide_no_other(tmp_path, tokenizer):
    path = tmp_path / "data.jsonl"
    records = [json.dumps({"input_ids": [5] * (i + 2), "labels": [1]}) for i in range(200)]
    path.write_text("{\n" * 30 + "\n".join([*records, '{"text": 3}']))
    report = examine(DataConfig(dataset_name=str(path)), tokenizer, VOCAB)
    assert report.broken_total == 231
    broken_json, lengths, kind = report.broken
    assert broken_json.startswith(f"{path}, line 1, column 2: not JSON")
    assert broken_json.endswith("(30 such faults: line 1, line 2, line 3, line 4, line 5, ...)")
    assert lengths.startswith(f"{path}: record data.jsonl:31 has 2 input_ids, but labels has")
    assert "(200 such faults: data.jsonl:31, data.jsonl:32, data.jsonl:33, " in lengths
    assert kind.endswith(
        "record data.jsonl:231 has an int as 'text' (columns: text); set --text_column"
    )


def test_kinds_of_faults_beyond_those_named_are_counted(tmp_path, tokenizer):
    columns = "abcdefghijklmnopqrstuvwxyz"
    config = write(tmp_path / "data.jsonl", *({column: 1} for column in columns))
    text = printed(examine(config, tokenizer, VOCAB))
    assert "(columns: t)" in text and "(columns: u)" not in text and "and 6 more" in text


def test_copies_and_columns_not_used_are_said_and_stop_nothing(tmp_path, tokenizer):
    record = {"prompt": "q", "completion": "a", "weight": 1}
    report = examine(write(tmp_path / "data.jsonl", *[record] * 40), tokenizer, VOCAB)
    assert report.copies == 1 - 1 / 40 and not report.problems
    copies, heldout = report.warnings
    assert copies.startswith("97.5% of the samples are copies of others; remove them")
    assert heldout.startswith("no sample is held out")
    text = printed(report)
    assert "columns not used   'weight' in 40 records" in text
    assert "copies             97.5% of the samples" in text
    assert f"warning: {copies}" in text and "no problem found" not in text
    distinct = ({"text": f"x = {i}"} for i in range(100))
    assert not examine(write(tmp_path / "other.jsonl", *distinct), tokenizer, VOCAB).warnings


def test_copies_among_more_samples_than_are_kept_are_estimated():
    copies = Copies(kept=1024)
    for i in range(20_000):
        copies.add(Sample("", (i, i)))
        if i % 4 == 0:
            copies.add(Sample("", (i, i)))
    assert copies.share == pytest.approx(0.2, abs=0.05)


def test_a_template_that_does_not_end_ends_the_check(tmp_path, monkeypatch):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    config = write(tmp_path / "data.jsonl", *[{"messages": talk}] * 200)
    endless = load_tokenizer("tiny")
    render_template("", conversations=[[]])  # the process is there
    monkeypatch.setattr(templates, "RENDER_SECONDS", 0.3)
    endless.chat_template = "{% for i in range(99999) %}{% for j in range(99999) %}" + END
    with pytest.raises(DataError, match=r"record data\.jsonl:1: the chat template did not finish"):
        examine(config, endless, VOCAB)


@pytest.mark.parametrize(
    ("ids", "labels", "outside"),
    [
        ([5, VOCAB, 7], None, 1),
        ([5, -1, 99_999], None, 2),
        ([5, 6, 7], [5, VOCAB, -100], 1),
        ([5, 9999, 7], [-100, 9999, 7], 1),
    ],
)
def test_ids_outside_the_vocabulary_are_counted_and_one_named(
    tmp_path, tokenizer, ids, labels, outside
):
    bad = {"id": "bad one", "input_ids": ids} | ({} if labels is None else {"labels": labels})
    report = examine(write(tmp_path / "data.jsonl", {"text": "fine"}, bad, bad), tokenizer, VOCAB)
    assert (report.outside, report.outside_first) == (2 * outside, "bad one@0")
    assert "outside the vocabulary [0, 2048), the first in sample bad one@0" in problems(report)


def test_data_without_a_sample_are_an_error(tmp_path, tokenizer):
    report = examine(
        write(tmp_path / "data.jsonl", {"text": ""}, {"input_ids": [5]}), tokenizer, VOCAB
    )
    assert "no sample has two tokens or more" in problems(report)
    assert (report.shortest, report.longest, report.id_min) == (0, 0, None)
    assert "no sample has two tokens or more" in printed(report)


@pytest.mark.parametrize(
    ("record", "encoding", "words"),
    [
        # the mask is seen without colour
        ({"prompt": "def f", "completion": "(x):\n"}, "utf-8", f"{OPEN}<s>def f{CLOSE}(x):\\n</s>"),
        # what a terminal would obey is escaped, and what a console lacks
        ({"text": "a\x1b[31m\r\x00é\n[red]"}, "utf-8", "<s>a\\x1b[31m\\r\\x00é\\n[red]</s>"),
        ({"prompt": "é€", "completion": "x"}, "ascii", "\\u27e6<s>"),
        ({"prompt": "é€", "completion": "x"}, "latin-1", "\\u27e6<s>"),
    ],
)
def test_a_sample_is_printed_on_any_console(tmp_path, tokenizer, record, encoding, words):
    write(tmp_path / "data.jsonl", record)
    config = DataConfig(dataset_name=str(tmp_path / "data.jsonl"), max_length=99)
    assert words in printed(examine(config, tokenizer, VOCAB), encoding)


def test_a_long_sample_loses_its_middle_and_keeps_its_masks_edge(tokenizer):
    ids = tokenizer("one two three four five six seven " * 40)["input_ids"]
    labels = (IGNORE_INDEX,) * 100 + tuple(ids[100:])
    text = show(Sample("x", tuple(ids), labels), tokenizer, VOCAB)
    assert text.startswith(f"x, {len(ids):,} tokens: {OPEN}") and text.count(" tokens … ") == 2
    masked, target = text.removeprefix(f"x, {len(ids):,} tokens: {OPEN}").split(CLOSE)
    assert " … 52 tokens … " in masked and masked.endswith(tokenizer.decode(ids[76:100]))
    assert target.startswith(tokenizer.decode(ids[100:124]))


def test_ids_outside_the_vocabulary_are_not_shown(tokenizer):
    assert show(Sample("x", (0, -3, 99_999, 1)), tokenizer, VOCAB) == "x, 4 tokens: <s></s>"


def test_the_report_is_json(tmp_path, tokenizer):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "p", "completion": "c"}\n{"text": ""}\n{\n')
    values = json.loads(
        to_json(examine(DataConfig(dataset_name=str(path)), tokenizer, VOCAB).as_dict())
    )
    assert (values["records"], values["samples"], values["skipped"]) == (2, 1, {"empty text": 1})
    (words,) = values["broken"]
    assert words.startswith(f"{path}, line 3, column 2: not JSON (Expecting property name")
    assert OPEN in values["shown"][0]
    assert len(values["problems"]) == 1 and values["trainable"] is False
