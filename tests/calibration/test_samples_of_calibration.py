"""The text of a calibration: drawn from all that is read, documents held out whole."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from npt.calibration.samples import HELDOUT_ONE_IN, READ_AHEAD, Parts, read_samples, split
from npt.data.batch import Sample


def documents(sizes: list[int], length: int = 10) -> list[Sample]:
    """Samples of `length` tokens, so many of each document."""
    return [
        Sample(f"text-{number}@{10 * at}", (3 + number % 50, *range(4, 3 + length)))
        for number, size in enumerate(sizes)
        for at in range(size)
    ]


def ids(parts: Parts) -> tuple[set[str], set[str]]:
    """The fitted and the held-out samples."""
    fitted, held, left = set(), set(), parts.tokens - parts.heldout
    for batch in parts.batches:
        (fitted if left > 0 else held).update(batch.sample_ids)
        left -= batch.tokens
    return fitted, held


def names(found: set[str]) -> set[str]:
    return {name.partition("@")[0] for name in found}


@given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=30), batch=st.integers(1, 5))
def test_parts_share_no_sample_and_documents_if_possible(sizes, batch) -> None:
    samples = documents(sizes)
    parts = split(samples, batch, 0)
    fitted, held = ids(parts)
    assert fitted and held and not fitted & held
    assert len(fitted) + len(held) == len(samples)
    wanted = len(samples) / HELDOUT_ONE_IN
    assert len(held) == 1 or wanted / 2 - 1 <= len(held) <= wanted
    if names(fitted) & names(held):  # no documents so small come to half of an eighth
        assert len(held) == max(1, len(samples) // HELDOUT_ONE_IN)


def test_one_small_note_does_not_decide_for_a_long_book() -> None:
    samples = [*documents([100]), Sample("note@0", (3, 4, 5))]
    parts = split(samples, 4, 0)
    assert parts.heldout >= parts.tokens // HELDOUT_ONE_IN - 10


def test_one_long_document_is_split_by_samples() -> None:
    fitted, held = ids(split(documents([24]), 4, 0))
    assert len(held) == 3 and len(fitted) == 21


def test_tokens_are_drawn_from_more_texts_than_they_fill() -> None:
    samples = documents([4] * 40)
    read = read_samples(samples, None, 10, 160, 128)
    assert sum(len(sample.input_ids) for sample in read) == 160
    # in the data's order they would be four texts
    assert len(names({sample.id for sample in read})) > 8
    assert read == read_samples(samples, None, 10, 160, 128)
    assert read != read_samples(samples, None, 10, 160, 128, seed=1)


def test_no_more_is_read_than_eight_times_the_tokens() -> None:
    taken = count()

    def endless():
        for number in count():
            next(taken)
            yield Sample(f"text-{number}@0", tuple(range(3, 13)))

    read_samples(endless(), None, 10, 100, 128)
    assert next(taken) == READ_AHEAD * 10
