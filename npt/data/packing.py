"""Packing: put several short documents into one row, to reduce padding.

Attention stays within a document and positions restart at each (`Batch.documents`), so a token's
state is the same as in an unpacked row. A packed document's first token is not a target.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from npt.batch import IGNORE_INDEX, Sample


def pack(samples: Sequence[Sample], max_length: int) -> list[Sample]:
    """Join samples into rows of at most `max_length` tokens, which none exceeds: best fit, longest
    first."""
    assert all(0 < len(s.input_ids) <= max_length for s in samples)
    rows: list[list[Sample]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for sample in sorted(samples, key=lambda s: -len(s.input_ids)):
        size = len(sample.input_ids)
        fitting = bisect.bisect_left(room, (size, 0))
        if fitting == len(room):
            free = max_length
            row = len(rows)
            rows.append([])
        else:
            free, row = room.pop(fitting)
        rows[row].append(sample)
        bisect.insort(room, (free - size, row))
    return list(map(_joined, rows))


def _joined(row: Sequence[Sample]) -> Sample:
    labels: list[int] = []
    for sample in row:
        labels += (IGNORE_INDEX, *sample.targets[1:])
    return Sample(
        id="+".join(s.id for s in row),
        input_ids=tuple(i for s in row for i in s.input_ids),
        labels=tuple(labels),
        lengths=tuple(len(s.input_ids) for s in row),
    )
