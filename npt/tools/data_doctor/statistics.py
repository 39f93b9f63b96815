"""Statistics of a stream of samples in constant memory."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Generic, TypeVar

SKETCH = 1 << 16  # distinct hashes that are kept to find copies

T = TypeVar("T")


class Lengths:
    """A histogram of lengths."""

    def __init__(self) -> None:
        self._histogram: Counter[int] = Counter()

    def add(self, length: int) -> None:
        self._histogram[length] += 1

    def at(self, share: float) -> int:
        """Return the length that a share of all do not exceed, 0.5 for the lower median; 0 if there
        are none.
        """
        passed, total = 0, self._histogram.total()
        for length in sorted(self._histogram):
            passed += self._histogram[length]
            if passed >= share * total:
                return length
        return 0

    def padding(self, batch_size: int) -> float:
        """Return the expected share of padding in a batch drawn without replacement, padded to its
        longest: P(longest <= l) is the chance that all are among the samples not longer than l.
        """
        total = self._histogram.total()
        if not total:
            return 0.0
        longest = below = 0.0
        passed = tokens = 0
        for length, count in sorted(self._histogram.items()):
            passed, tokens = passed + count, tokens + length * count
            up_to = 1.0
            for i in range(min(batch_size, total)):
                up_to *= max(0, passed - i) / (total - i)
            longest += length * (up_to - below)
            below = up_to
        return max(0.0, 1 - tokens / total / longest)


class Copies:
    """The share of samples that repeat another one. When too many distinct hashes are kept, half of
    them by a further bit are dropped for good (distinct sampling: Gibbons, VLDB 2001): a random
    part of the distinct samples is left, with all their copies.
    """

    def __init__(self, limit: int = SKETCH):
        self._limit, self._mask = limit, 0
        self._counts: Counter[int] = Counter()

    def add(self, ids: Iterable[int]) -> None:
        digest = hashlib.blake2b(array("q", ids).tobytes(), digest_size=8).digest()
        key = int.from_bytes(digest, "big")
        if key & self._mask:
            return
        self._counts[key] += 1
        while len(self._counts) > self._limit:
            self._mask = self._mask << 1 | 1
            self._counts = Counter({k: n for k, n in self._counts.items() if not k & self._mask})

    @property
    def exact(self) -> bool:
        """True if the share is counted, not estimated."""
        return self._mask == 0

    @property
    def share(self) -> float:
        total = self._counts.total()
        return 1 - len(self._counts) / total if total else 0.0


class Reservoir(Generic[T]):
    """A uniform draw of `size` things (Vitter's algorithm R), in the order they came in."""

    def __init__(self, size: int, seed: int):
        self._size, self._random = size, random.Random(seed)
        self._kept: list[tuple[int, T]] = []
        self._seen = 0

    def add(self, thing: T) -> None:
        self._seen += 1
        if len(self._kept) < self._size:
            self._kept.append((self._seen, thing))
        elif (place := self._random.randrange(self._seen)) < self._size:
            self._kept[place] = (self._seen, thing)

    @property
    def kept(self) -> list[T]:
        return [thing for _, thing in sorted(self._kept, key=lambda pair: pair[0])]
