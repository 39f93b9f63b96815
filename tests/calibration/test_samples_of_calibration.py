"""The text of a calibration: drawn from all that is read."""

from itertools import count

from npt.batch import Sample
from npt.calibration.samples import READ_AHEAD, read_samples


def documents(sizes: list[int], length: int = 10) -> list[Sample]:
    """Samples of `length` tokens, so many of each document."""
    return [
        Sample(f"text-{number}@{10 * at}", (3 + number % 50, *range(4, 3 + length)))
        for number, size in enumerate(sizes)
        for at in range(size)
    ]


def names(found: set[str]) -> set[str]:
    return {name.partition("@")[0] for name in found}


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
