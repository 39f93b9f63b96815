"""A sample: the tokens of one row of a batch, and what of them is a target."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

IGNORE_INDEX = -100
"""The label of a token that nothing is to predict."""

_HELDOUT_ONE_IN = 20


@dataclass(frozen=True)
class Sample:
    """One row of a batch, or several packed into one.

    id: names its origin: the record, and the token it starts at. labels: of each token, -100 where
    it is no target; None where all are. lengths: of the documents packed into it, in order; None
    for one document.
    """

    id: str
    input_ids: tuple[int, ...]
    labels: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None

    @property
    def heldout(self) -> bool:
        """One sample in twenty, by a hash of its tokens: the same on every machine, and for every
        copy of a sample.
        """
        digest = hashlib.sha256(",".join(map(str, self.input_ids)).encode()).digest()
        return int.from_bytes(digest[:4], "big") % _HELDOUT_ONE_IN == 0
