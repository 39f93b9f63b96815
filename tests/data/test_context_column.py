"""A context for the teacher alone: its tokens, what is cut, and which samples are held out."""

import json
from typing import Any

import pytest
import torch

from npt.base.source import load_tokenizer
from npt.batch import Sample, collate, find_fault
from npt.config import DataConfig, TrainConfig
from npt.data.encoding import RecordCounts, lost
from npt.data.first_look import Copies
from npt.data.samples import cut, within
from npt.distill.step import MicroBatchSplitter
from npt.errors import ConfigError, DataError
from npt.train.resolve import resolve
from npt.train.sources import fitting_columns

BOS, EOS = 0, 1  # of the tokenizer fixture, for which a is 100, b 101, and so on
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if"
    " add_generation_prompt %}<assistant>{% endif %}"
)
BY_DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}<system>You are a helpful assistant.\n{% endif %}"
    + CHAT
)
"""As several chat models do: without a system message the template writes its own."""


def config(**settings: Any) -> DataConfig:
    return DataConfig(**{"max_length": 16, "context_column": "context", **settings})


def pair(context: str, prompt: str, completion: str, **more: Any) -> dict[str, Any]:
    return {"context": context, "prompt": prompt, "completion": completion, **more}


def one(record: dict[str, Any], tokenizer: Any, **settings: Any) -> Sample:
    (sample,) = cut([record], tokenizer, config(**settings))
    return sample


def taught(sample: Sample) -> Sample:
    assert sample.taught is not None
    return sample.taught


def test_the_context_follows_the_start_tokens_of_the_teacher_alone(tokenizer) -> None:
    sample = one(pair("xy", "ab", "cd"), tokenizer)
    assert sample.input_ids == (BOS, 100, 101, 102, 103, EOS)
    assert sample.labels == (-100, -100, -100, 102, 103, EOS)
    assert taught(sample).input_ids == (BOS, 123, 124, 100, 101, 102, 103, EOS)
    assert taught(sample).labels == (*[-100] * 5, 102, 103, EOS)


def test_of_a_text_all_tokens_but_the_students_first_are_compared(tokenizer) -> None:
    sample = one({"context": "xy", "text": "abc"}, tokenizer)
    assert sample == Sample("0@0", (BOS, 100, 101, 102, EOS), None, taught=sample.taught)
    assert taught(sample).input_ids == (BOS, 123, 124, 100, 101, 102, EOS)
    assert taught(sample).labels == (-100, -100, -100, 100, 101, 102, EOS)


def test_without_start_tokens_the_students_first_token_is_no_target(tokenizer) -> None:
    def bare(texts: list[str], **_: Any) -> Any:
        return tokenizer(texts, add_special_tokens=False)

    bare.eos_token_id = EOS  # type: ignore[attr-defined]
    batch = collate([one({"context": "xy", "text": "abc"}, bare)])
    assert batch.scored == batch.taught.scored == len(batch.input_ids[0]) - 1


def test_a_second_source_need_not_have_contexts() -> None:
    plain = [{"prompt": "ab", "completion": "cd"}]
    assert fitting_columns(config(), plain).context_column is None
    assert fitting_columns(config(), [pair("x", "ab", "cd")]).context_column == "context"


def test_a_text_column_may_hold_the_context_of_prompts(tokenizer) -> None:
    columns = {"prompt_column": "q", "completion_column": "a", "context_column": "text"}
    sample = one({"text": "xy", "q": "ab", "a": "cd"}, tokenizer, **columns)
    assert taught(sample).input_ids == (BOS, 123, 124, 100, 101, 102, 103, EOS)


def test_a_blank_context_is_none(tokenizer) -> None:
    assert one(pair(" \n", "ab", "cd"), tokenizer).taught is None


@pytest.mark.parametrize("length", [9, 12, 30])
def test_the_context_loses_its_start_and_no_target(tokenizer, length) -> None:
    counts = RecordCounts()
    record = pair("uvwxyz", "abc", "de")
    (sample,) = cut([record], tokenizer, config(max_length=length), counts)
    row = taught(sample).input_ids
    kept = min(6, length - 7)
    assert row == (BOS, *range(126 - kept, 126), *sample.input_ids[1:]) and len(row) <= length
    assert counts.cut_contexts == (kept < 6)
    assert lost(counts) == ("1 contexts cut to --max_length" if kept < 6 else "")


@pytest.mark.parametrize("length", [5, 6, 7])
def test_a_record_without_room_for_a_context_is_counted_and_left_out(tokenizer, length) -> None:
    counts = RecordCounts()
    assert not list(cut([pair("xy", "abc", "de")], tokenizer, config(max_length=length), counts))
    assert "1 skipped (no room for the context)" in lost(counts)


def test_a_long_text_leaves_its_context_room_in_every_sample(tokenizer) -> None:
    text = "".join(map(chr, range(97, 122)))
    first, *others = cut([{"context": "xyz", "text": text}], tokenizer, config())
    assert taught(first).input_ids[:5] == (BOS, 123, 124, 125, 100)
    ids = list(first.input_ids)
    for sample in others:
        row = taught(sample).input_ids
        assert row == (BOS, 123, 124, 125, *sample.input_ids) and len(row) <= 16
        ids += sample.input_ids
    assert ids == [BOS, *(3 + ord(c) for c in text), EOS]
    # a context longer than half of a sample gets that half
    long = list(cut([{"context": "x" * 40, "text": text}], tokenizer, config()))
    assert {len(taught(sample).input_ids) for sample in long[:-1]} == {16}


@pytest.mark.parametrize("template", [CHAT, BY_DEFAULT])
def test_the_context_of_a_conversation_is_its_system_message(template) -> None:
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = template
    asked = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
    sample = one({"context": "Be brief.", "messages": asked}, tokenizer, max_length=64)
    own = "<system>You are a helpful assistant.\n" if template == BY_DEFAULT else ""
    rest = "<user>hello\n<assistant>good day\n"
    assert tokenizer.decode(sample.input_ids) == own + rest
    assert tokenizer.decode(taught(sample).input_ids) == "<system>Be brief.\n" + rest
    targets = [label for label in sample.labels or () if label != -100]
    assert targets == [label for label in taught(sample).labels or () if label != -100]
    assert tokenizer.decode(targets) == "good day\n"


def test_what_cannot_have_a_context_is_refused() -> None:
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = CHAT
    asked = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
    told = [{"role": "system", "content": "Be kind."}, *asked]
    records: list[tuple[dict[str, Any], str]] = [
        ({"prompt": "a", "completion": "b"}, "has no column 'context'"),
        ({"context": None, "text": "ab"}, "has null as 'context'"),
        ({"context": "x", "input_ids": [5, 6]}, "input_ids, which --context_column does not"),
        ({"context": "x", "messages": told}, "has a system message, and a context"),
    ]
    for record, message in records:
        with pytest.raises(DataError, match=message):
            one(record, tokenizer)
    tokenizer.chat_template = CHAT.replace("<{{", "{% if m['role'] != 'system' %}<{{").replace(
        "\n{% endfor", "\n{% endif %}{% endfor"
    )
    with pytest.raises(DataError, match="does not write a system message before the same answer"):
        one({"context": "x", "messages": asked}, tokenizer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"packing": True}, "--packing does not support --context_column context"),
        ({"text_column": "context"}, "--context_column context is the column of another text"),
        ({"prompt_column": "context"}, "--context_column context is the column of another text"),
    ],
)
def test_settings_that_cannot_have_a_context_are_refused(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**settings)


LOGITS_ALONE: dict[str, Any] = {
    "strategy": "end_to_end",
    "logit_kl_weight": 1.0,
    "hidden_weight": 0.0,
}


@pytest.mark.parametrize(
    "changed",
    [
        {"strategy": "local", "logit_kl_weight": 0.0, "hidden_weight": 1.0},
        {"hidden_weight": 1.0},
        {"logit_loss": "cross_entropy"},
    ],
)
def test_losses_that_need_more_than_the_teachers_logits_are_refused(changed) -> None:
    config().check_objective(TrainConfig(**LOGITS_ALONE))
    training = TrainConfig(**{**LOGITS_ALONE, **changed})
    DataConfig().check_objective(training)
    message = "--strategy end_to_end, --logit_kl_weight above 0"
    with pytest.raises(ConfigError, match=message):
        config().check_objective(training)
    with pytest.raises(ConfigError, match=message):
        resolve({"context_column": "context", **LOGITS_ALONE, **changed})


def test_the_context_decides_with_the_rest_whether_a_sample_is_held_out(tokenizer) -> None:
    records = [pair(f"context {i}", "ab", "cd") for i in range(200)]
    told = list(cut(records, tokenizer, config(max_length=32)))
    assert 0 < sum(sample.heldout for sample in told) < 30
    plain = list(cut(records, tokenizer, DataConfig(max_length=32)))
    assert [Sample(p.id, p.input_ids, p.labels) for p in plain] == plain
    assert len({sample.heldout for sample in plain}) == 1


def test_samples_after_other_contexts_are_no_copies(tokenizer) -> None:
    copies = Copies()
    for context in ("one", "two", "two"):
        copies.add(one(pair(context, "ab", "cd"), tokenizer))
    assert copies.share == pytest.approx(1 / 3)


def samples_of(tokenizer: Any) -> list[Sample]:
    contexts = ("uvwxyz", "", "xy")
    records = [pair(c, "ab" * i, "cde"[:i]) for i, c in enumerate(contexts, 1)]
    return list(cut(records, tokenizer, config()))


def test_the_teachers_rows_are_padded_on_their_own_and_targets_line_up(tokenizer) -> None:
    batch = collate(samples_of(tokenizer))
    teacher = batch.teacher
    assert teacher is not None and teacher.teacher is None and batch.taught is teacher
    assert batch.input_ids.shape == (3, 11) and teacher.input_ids.shape == (3, 13)
    assert batch.scored == teacher.scored == 2 + 3 + 4
    following = [b.input_ids.flatten()[b.scored_index + 1] for b in (batch, teacher)]
    assert torch.equal(*following)
    moved = batch.to(torch.device("meta")).taught
    assert moved.input_ids.is_meta and moved.scored_index.is_meta and moved.scored == 9


def test_a_batch_is_split_with_its_teachers_rows(tokenizer) -> None:
    samples = samples_of(tokenizer)
    parts = MicroBatchSplitter(1).parts(collate(samples))
    for part, sample in zip(parts, samples, strict=True):
        row = sample.taught or sample
        assert part.taught.input_ids.tolist() == [list(row.input_ids)]
        assert part.taught.labels.tolist() == [list(row.labels or ())]


def test_ids_of_a_context_outside_the_vocabulary_are_found(tokenizer) -> None:
    (sample, *_) = samples_of(tokenizer)
    vocabulary = max(sample.input_ids) + 1
    assert not list(within([sample], vocabulary)) and list(within([sample], 128))
    fault = find_fault(collate([sample]), vocabulary)
    assert fault is not None and fault.endswith("of sample 0@0 after its context")


def test_the_doctor_shows_what_the_teacher_reads(tmp_path) -> None:
    from npt.doctor.data import examine

    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(pair("Be brief. ", "hello", "good day")) + "\n")
    report = examine(config(dataset_name=str(file), max_length=64), load_tokenizer("tiny"), 2048)
    assert not report.problems and not report.counts.unused
    assert "Be brief. hello" in report.shown[0]
