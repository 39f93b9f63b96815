"""What is seen of a dataset in passing, before a run and by `npt doctor`: columns that are not
used, samples that repeat another one, and whether any sample is held out.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from npt.batch import Sample
from npt.data.encoding import RecordCounts

_KEPT = 1 << 16
COPIES_WORTH_SAYING = 0.05


class Copies:
    """The share of samples that repeat another one, in bounded memory.

    Samples are counted by a hash of their ids. When too many distinct hashes are kept, those with
    a further bit set are dropped, and left out from then on. What is kept is a random part of the
    distinct samples with all their copies (distinct sampling: Gibbons, VLDB 2001).
    """

    def __init__(self, kept: int = _KEPT):
        self._kept = kept
        self._mask = 0
        self._counts: Counter[int] = Counter()

    def add(self, sample: Sample) -> None:
        """Count a sample. Ids with other labels, or after another context, are another sample."""
        sample = sample.taught or sample
        ids = array("q", sample.input_ids)
        ids.extend(sample.labels or ())
        digest = hashlib.blake2b(ids.tobytes(), digest_size=8).digest()
        key = int.from_bytes(digest, "big")
        if key & self._mask:
            return
        self._counts[key] += 1
        while len(self._counts) > self._kept:
            self._mask = self._mask << 1 | 1
            kept = {k: count for k, count in self._counts.items() if not k & self._mask}
            self._counts = Counter(kept)

    @property
    def share(self) -> float:
        """The share of samples that could be removed, and each would still be there once."""
        total = self._counts.total()
        return 1 - len(self._counts) / total if total else 0.0


@dataclass
class FirstLook:
    """Counts of the records and samples that were seen, and their copies."""

    counts: RecordCounts = field(default_factory=RecordCounts)
    copies: Copies = field(default_factory=Copies)

    def at(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yield samples and count their copies."""
        for sample in samples:
            self.copies.add(sample)
            yield sample


def data_warnings(copies: float, any_held_out: bool) -> Iterator[str]:
    """Yield warnings of a share of copies, and of data without a held-out sample."""
    if copies > COPIES_WORTH_SAYING:
        yield f"{copies:.1%} of the samples are copies of others; remove them, or each counts again"
    if not any_held_out:
        yield (
            "no sample is held out (one in twenty is, by a hash of its content), so evaluations use"
            " training samples; add data"
        )
