"""What is collected is what a slow look at every token finds, and can be trained on exactly."""

import itertools
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from sentencepieces import speaker_of, tokenizer_of

import npt
from npt.adapters.converted import adapter_mode, adapter_parameters
from npt.adapters.files.adapter_files import adapter_hash
from npt.config import DataConfig
from npt.data.encoding import COLLECTED, IDS, RecordCounts
from npt.data.samples import cut
from npt.data.source import open_source
from npt.errors import ConfigError, DataError, NumericalError
from npt.tools.collect.collect import collect

NEW = 5
CONFIG = DataConfig(max_length=40)
PROMPTS = (
    "import os|class Stack:\n|def f(x):\n    return|for i in|x = [|if __name__ ==|    self."
    "|raise Value|# The"
)
RECORDS = [{"id": f"p{i}", "prompt": text} for i, text in enumerate(PROMPTS.split("|"))]


@pytest.fixture(scope="module")
def base(load_model) -> Any:
    return load_model()


@pytest.fixture
def tokenizer(tokenizer):
    """One that decodes to characters which it does not encode back to the same ids."""

    def decode(ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(64 + i) for i in ids if not (skip_special_tokens and i < 3))

    tokenizer.decode = decode
    return tokenizer


@pytest.fixture
def student(base):
    """A 4-bit model with a fresh adapter, which leaves its teacher often."""
    npt.attach(base, npt.NPTConfig(rank=4))
    yield base
    npt.detach(base)


@pytest.fixture
def close(base):
    """The same with the attention residual kept and next to no modulation: it agrees."""
    npt.attach(base, npt.NPTConfig(rank=4, residual="keep", additive_scale=1e-6))
    yield base
    npt.detach(base)


def gather(model, tokenizer, path: Path, records: Any = RECORDS, **settings: Any):
    usual = {"max_new_tokens": NEW, "batch_size": 2, "num_prompts": None, "data_config": CONFIG}
    return collect(model, tokenizer, records, path, **{**usual, **settings})


@pytest.fixture(scope="module")
def _gathered() -> dict[str, Path]:
    return {}


@pytest.fixture
def whole(student, tokenizer, tmp_path_factory, _gathered) -> Path:
    """The output of one call on RECORDS, made once: no test writes to it or changes the student."""
    if "whole" not in _gathered:
        path = tmp_path_factory.mktemp("whole") / "whole.jsonl"
        gather(student, tokenizer, path)
        _gathered["whole"] = path
    return _gathered["whole"]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def logits(model, ids: list[int], mode: str) -> torch.Tensor:
    """[T, V] in fp64, of one row alone, without a cache."""
    with torch.no_grad(), adapter_mode(model, mode):
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()


def written(model, ids: list[int], count: int, mode: str) -> list[int]:
    """Greedy tokens one at a time, the row anew for each."""
    added: list[int] = []
    while len(added) < count and 1 not in added:
        added.append(int(logits(model, ids + added, mode)[-1].argmax()))
    return added


# --- what is found
# --------------------------------------------------------------------------------------------------


def test_every_record_is_what_a_slow_look_finds(student, tokenizer, tmp_path) -> None:
    result = gather(student, tokenizer, tmp_path / "failures.jsonl", batch_size=4)
    found = {record["id"]: record for record in lines(tmp_path / "failures.jsonl")}
    hashes = (npt.base_hash(student), adapter_hash(student))
    tokens, sums = 0, dict.fromkeys(("kl", "acceptance", "top1"), 0.0)
    for prompt in RECORDS:
        ids = tokenizer(prompt["prompt"])["input_ids"]
        teacher = written(student, ids, NEW, "teacher")
        log_p, log_q = (
            logits(student, ids + teacher, mode)[len(ids) - 1 : -1].log_softmax(-1)
            for mode in ("teacher", "student")
        )
        own = log_q.argmax(-1).tolist()
        agreed = [a == b for a, b in zip(own, teacher, strict=True)]
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        acceptance = torch.minimum(log_p, log_q).exp().sum(-1)
        tokens += len(teacher)
        for name, value in (("kl", kl), ("acceptance", acceptance), ("top1", torch.tensor(agreed))):
            sums[name] += float(value.sum())
        record = found.pop(f"{prompt['id']}@0", None)
        assert (record is None) == all(agreed)
        if record is None:
            continue
        at = agreed.index(False)
        rest = written(student, ids + teacher[:at], NEW - at, "student")
        texts = (teacher, [*teacher[:at], *rest])
        assert (record["position"], record["tokens"]) == (at, len(teacher))
        assert (record["teacher_token"], record["student_token"]) == (teacher[at], own[at])
        assert [record["completion"], record["student"]] == [
            tokenizer.decode(text, skip_special_tokens=True) for text in texts
        ]
        assert rest[0] == own[at] and (record["base_hash"], record["adapter_hash"]) == hashes
        # fp32 logits of padded rows against fp64 softmax of unpadded ones.
        expected = {"kl": kl.mean(), "kl_at": kl[at]}
        expected |= {"acceptance": acceptance.mean(), "acceptance_at": acceptance[at]}
        for name, value in expected.items():
            assert record[name] == pytest.approx(float(value), rel=1e-3, abs=1e-5)
    assert found == {}
    figures = result.as_dict()
    assert (figures["prompts"], figures["tokens"]) == (9, tokens)
    assert figures["disagreements"] == len(lines(tmp_path / "failures.jsonl")) > 0
    for name, value in sums.items():
        assert figures[name] == pytest.approx(value / tokens, rel=1e-3)
    assert figures["kl"] > 0.1  # the comparison is of something


def test_a_student_that_agrees_is_counted_and_not_written(close, tokenizer, tmp_path) -> None:
    result = gather(close, tokenizer, tmp_path / "failures.jsonl")
    assert (tmp_path / "failures.jsonl").read_bytes() == b""
    figures = result.as_dict()
    assert (figures["prompts"], figures["disagreements"], figures["top1"]) == (9, 0, 1.0)
    assert figures["kl"] < 1e-9 and figures["acceptance"] == pytest.approx(1, rel=1e-6)


def test_the_model_stays_as_it_was(student, tokenizer, tmp_path) -> None:
    student.train()
    student.model.layers[3].npt.mode = "floor"
    before = {name: p.clone() for name, p in adapter_parameters(student).items()}
    random_state = torch.get_rng_state()
    gather(student, tokenizer, tmp_path / "failures.jsonl", RECORDS[:2])
    assert student.training and student.model.layers[3].npt.mode == "floor"
    assert all(
        torch.equal(p, before[name]) and p.grad is None
        for name, p in adapter_parameters(student).items()
    )
    assert torch.equal(torch.get_rng_state(), random_state)
    student.eval()


@pytest.mark.parametrize("kind", ["llama 2", "metaspace, first", "byte level"])
def test_prompt_and_completion_read_as_the_text_of_their_tokens(kind, tmp_path) -> None:
    """Their spaces among it, where a tokenizer takes one from the beginning of all that it
    decodes.
    """
    words = tokenizer_of(kind)
    model = speaker_of(kind)
    npt.attach(model, npt.NPTConfig(rank=4, layers="all"))
    gather(
        model,
        words,
        tmp_path / "found.jsonl",
        [{"prompt": text} for text in ("The question", "the answer is", "import os")],
    )
    found = lines(tmp_path / "found.jsonl")
    assert found
    for record in found:
        assert record["completion"][0] == record["student"][0] == " "
        assert record["prompt"] + record["completion"] == words.decode(
            record["input_ids"], skip_special_tokens=True
        )


# --- training on it
# --------------------------------------------------------------------------------------------------


def test_what_is_trained_on_are_the_teachers_tokens_and_no_others(
    student, tokenizer, tmp_path
) -> None:
    records = [*RECORDS, {"id": "ids", "input_ids": [70, 80, 90, 100]}]
    gather(student, tokenizer, tmp_path / "failures.jsonl", records)
    counts = RecordCounts()
    config = DataConfig(dataset_name=str(tmp_path / "failures.jsonl"), max_length=CONFIG.max_length)
    samples = {s.id: s for s in cut(open_source(config), tokenizer, config, counts)}
    assert counts.samples == counts.records == len(samples) > 0
    for record in records:
        ids = record.get("input_ids") or tokenizer(record["prompt"])["input_ids"]
        teacher = written(student, ids, NEW, "teacher")
        sample = samples.pop(f"{record['id']}@0@0", None)
        if sample is not None:
            assert sample.input_ids == (*ids, *teacher)
            assert sample.labels == (*[-100] * len(ids), *teacher)
    assert samples == {}
    found = lines(tmp_path / "failures.jsonl")
    assert {key for record in found for key in record} - {"id", *IDS} == set(COLLECTED)
    texts = [{name: record[name] for name in ("prompt", "completion")} for record in found]
    assert {s.input_ids for s in cut(texts, tokenizer, config)}.isdisjoint(
        s.input_ids for s in cut(open_source(config), tokenizer, config)
    )


@pytest.mark.usefixtures("obeyed_signals")
def test_a_signal_ends_it_after_the_batch(student, tokenizer, whole, tmp_path) -> None:
    path, number = tmp_path / "part.jsonl", signal.SIGINT
    result = gather(student, tokenizer, path, report=lambda _: os.kill(os.getpid(), number))
    assert (result.signal, result.exit_status, result.prompts) == (number, 128 + number, 2)
    assert whole.read_bytes().startswith(path.read_bytes())
    with pytest.raises(ConfigError, match="begun with other prompts"):
        gather(student, tokenizer, path, RECORDS[::-1])
    seen = []
    result = gather(student, tokenizer, path, report=seen.append)
    assert (result.signal, result.resumed, result.prompts) == (None, 2, 9) and seen[0] == 4
    assert path.read_bytes() == whole.read_bytes() and list(tmp_path.iterdir()) == [path]
    assert result.kl == pytest.approx(gather(student, tokenizer, tmp_path / "new.jsonl").kl)


def test_records_are_on_disk_after_every_batch(student, tokenizer, whole, tmp_path) -> None:
    path, seen = tmp_path / "part.jsonl", []
    look = lambda _: seen.append(path.read_bytes())  # noqa: E731
    assert gather(student, tokenizer, path, num_prompts=6, report=look).prompts == 6
    assert len(seen) == 3 and path.read_bytes() == seen[-1]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(seen))
    assert whole.read_bytes().startswith(seen[-1])


# --- what is refused
# --------------------------------------------------------------------------------------------------


def test_a_refused_call_leaves_no_file(student, tokenizer, tmp_path) -> None:
    path = tmp_path / "failures.jsonl"
    for settings, error, told in (
        ({"max_new_tokens": 39}, ConfigError, "leave room in --max_length 40"),
        ({"max_new_tokens": 0}, ConfigError, "at least 1"),
        ({"data_config": DataConfig(max_length=2000)}, ConfigError, "128 positions"),
        ({"records": []}, DataError, "no sample"),
        ({"records": iter([])}, DataError, "no prompt"),
        ({"records": [{"prompt": 3}]}, DataError, "'prompt'"),
    ):
        with pytest.raises(error, match=told):
            gather(student, tokenizer, path, **settings)
    assert list(tmp_path.iterdir()) == []
    path.write_text("mine")
    with pytest.raises(ConfigError, match=r"failures\.jsonl exists"):
        gather(student, tokenizer, path)
    with pytest.raises(ConfigError, match="exists and is not a file"):
        gather(student, tokenizer, tmp_path)
    assert path.read_text() == "mine"


def test_a_poisoned_student_is_refused_by_the_prompt_that_shows_it(
    student, tokenizer, tmp_path
) -> None:
    with torch.no_grad():
        next(iter(adapter_parameters(student).values()))[0, 0] = math.nan
    with pytest.raises(NumericalError, match=r"the student's logits after p\d@0 are not finite"):
        gather(student, tokenizer, tmp_path / "failures.jsonl")
    assert (tmp_path / "failures.jsonl").read_bytes() == b""
