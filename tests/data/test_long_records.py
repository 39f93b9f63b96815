"""One long record costs what its tokens cost: no call of the tokenizer is given all of it."""

import subprocess
import sys
from typing import Any

import pytest
from sentencepieces import PLAIN, PREFIXING, tokenizer_of

import npt
from npt.base.source import load_tokenizer
from npt.data import continuation, encoding
from npt.data.samples import cut

AT_ONCE = 200
LINES = "".join(f"x_{i} = {i * i}  # a line\n" for i in range(60))
INDENTED = "".join(f"def f_{i}(x):\n\n    return   x, {i}\n\n\n" for i in range(40))


class Counting:
    """A tokenizer that notes how many characters it is given at once."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self.given = tokenizer, [0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, texts: list[str], **how: Any) -> Any:
        self.given += map(len, texts)
        return self._tokenizer(texts, **how)


def cut_early(monkeypatch) -> None:
    for module in (continuation, encoding):
        monkeypatch.setattr(module, "TEXT_AT_ONCE", AT_ONCE)


def tokens(record: dict[str, Any], tokenizer: Any) -> list[int]:
    samples = cut([record], tokenizer, npt.DataConfig(max_length=8192))
    return [i for sample in samples for i in sample.input_ids]


@pytest.mark.parametrize("text", [LINES, INDENTED, "word " * 500], ids=["lines", "code", "words"])
@pytest.mark.parametrize("name", ["tiny", *PREFIXING, *PLAIN])
@pytest.mark.parametrize("form", ["text", "prompt", "completion"])
def test_a_long_text_has_the_tokens_that_it_has_whole(monkeypatch, form, name, text):
    tokenizer = load_tokenizer("tiny") if name == "tiny" else tokenizer_of(name)
    record = {"text": text} if form == "text" else {"prompt": "Write.\n", "completion": "Done."}
    record[form] = text
    whole = tokens(record, tokenizer)
    cut_early(monkeypatch)
    counting = Counting(tokenizer)
    assert tokens(record, counting) == whole
    # where a text continues another, both are tokenised together
    assert 0 < max(counting.given) <= 2 * AT_ONCE


@pytest.mark.parametrize("text", ["x" * 2500, "\n" * 900, "é" * 999])
def test_a_text_without_a_place_to_cut_is_cut_anywhere(monkeypatch, text):
    cut_early(monkeypatch)
    counting = Counting(load_tokenizer("tiny"))
    ids = tokens({"text": text}, counting)
    assert counting.decode(ids, skip_special_tokens=True) == text
    assert 0 < max(counting.given) <= AT_ONCE


PROGRAM = """
import resource
import npt
from npt.base.source import load_tokenizer
from npt.data.samples import cut
tokenizer, text = load_tokenizer("tiny"), "def f(x, y):\\n    return x + y  # a line\\n" * 150_000
list(cut([{"text": "warm"}], tokenizer, npt.DataConfig()))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = sum(len(s.input_ids) for s in cut([{"text": text}], tokenizer, npt.DataConfig()))
print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_the_memory_of_a_long_record_is_that_of_its_tokens():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=280
    )
    count, kibibytes = map(int, done.stdout.split())
    # the places of a number in two lists and in a sample, and the tokenizer's 200 bytes a character
    # for one piece at a time (all 6 million characters at once took 1.2 GB)
    assert count > 2_000_000
    assert kibibytes * 1024 < 32 * count + 300 * continuation.TEXT_AT_ONCE
