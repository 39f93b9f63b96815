"""One long record costs what its tokens cost: no call of the tokenizer is given all of it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from sentencepieces import PLAIN, PREFIXING, tokenizer_of

import npt
from npt.base.load import load_tokenizer
from npt.data import encoding
from npt.data.samples import cut

LINES = "".join(f"x_{i} = {i * i}  # a line\n" for i in range(60))


class Counting:
    """A tokenizer that notes how many characters it is given at once."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self.given = tokenizer, [0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, texts: list[str], **how: Any) -> Any:
        self.given.append(sum(map(len, texts)))
        return self._tokenizer(texts, **how)


def tokens(record: dict[str, Any], tokenizer: Any, length: int = 8192) -> list[int]:
    samples = cut([record], tokenizer, npt.DataConfig(max_length=length))
    return [i for sample in samples for i in sample.input_ids]


@pytest.fixture
def few(monkeypatch) -> int:
    monkeypatch.setattr(encoding, "TEXT_AT_ONCE", 200)
    return 200


@pytest.mark.parametrize("name", ["tiny", *PREFIXING, *PLAIN])
@pytest.mark.parametrize("form", ["text", "prompt", "completion"])
def test_a_long_text_has_the_tokens_that_it_has_whole(monkeypatch, name, form) -> None:
    tokenizer = load_tokenizer("tiny") if name == "tiny" else tokenizer_of(name)
    record = {"prompt": "Write.\n", "completion": "Done.", form: LINES}
    if form == "text":
        record = {"text": LINES}
    whole = tokens(record, tokenizer)
    monkeypatch.setattr(encoding, "TEXT_AT_ONCE", 200)
    counting = Counting(tokenizer)
    assert tokens(record, counting) == whole
    # a border is looked for by tokenising a mark, or the text before, together with the text
    assert 0 < max(counting.given) <= 200 + len("Write.\n")


@pytest.mark.parametrize("text", ["word " * 500, "x" * 2500, "\n" * 900, "é" * 999])
def test_a_text_without_lines_is_cut_at_spaces_or_anywhere(few, text) -> None:
    counting = Counting(load_tokenizer("tiny"))
    ids = tokens({"text": text}, counting)
    assert counting.decode(ids, skip_special_tokens=True) == text
    assert 0 < max(counting.given) <= few


def test_many_records_are_not_tokenised_at_once_either(few) -> None:
    counting = Counting(load_tokenizer("tiny"))
    records = [{"text": LINES[:150]}, {"text": "a"}, {"text": LINES}, {"text": "b"}] * 8
    found = [s.input_ids for s in cut(records, counting, npt.DataConfig(max_length=8192))]
    alone = [tuple(tokens(record, load_tokenizer("tiny"))) for record in records]
    assert found == alone and max(counting.given) <= few


PROGRAM = """
import resource
import npt
from npt.base.load import load_tokenizer
from npt.data.samples import cut
tokenizer, text = load_tokenizer("tiny"), "def f(x, y):\\n    return x + y  # a line\\n" * 150_000
list(cut([{"text": "warm"}], tokenizer, npt.DataConfig()))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = sum(len(s.input_ids) for s in cut([{"text": text}], tokenizer, npt.DataConfig()))
print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_the_memory_of_a_long_record_is_that_of_its_tokens() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=280
    )
    count, kibibytes = map(int, done.stdout.split())
    # 36 bytes of a number and its place in a list, 8 of the one in a sample; a piece at a time of
    # the tokenizer's some 200 bytes a character (6 million of them were 1.2 GB)
    assert count > 2_000_000 and kibibytes * 1024 < 60 * count + 300 * encoding.TEXT_AT_ONCE
