"""Records that come as token ids, perhaps with labels and a mask."""

from __future__ import annotations

import numbers
from typing import Any

from npt.data.source import Record
from npt.errors import DataError

IDS = ("input_ids", "labels", "attention_mask")
_INT64_MAX = 2**63 - 1


def read_ids(name: str, record: Record) -> tuple[list[int], list[int] | None]:
    """Return a record's token ids, and its labels if it has any, without padding."""
    ids = _integers(name, "input_ids", record["input_ids"])
    labels, mask = (
        None if record.get(key) is None else _integers(name, key, record[key]) for key in IDS[1:]
    )
    for what, values in (("an attention_mask", mask), ("labels", labels)):
        if values is not None and len(values) != len(ids):
            raise DataError(
                f"record {name} has {len(ids)} input_ids but {what} of {len(values)}; the two"
                " belong together"
            )
    if mask is None:
        return ids, labels
    other = next((value for value in mask if value not in (0, 1)), None)
    if other is not None:
        raise DataError(
            f"record {name} has {other} in its attention_mask, expected 0 (padding) or 1 (a token);"
            " give packed documents as records of their own"
        )
    real = [i for i, value in enumerate(mask) if value]
    return [ids[i] for i in real], labels and [labels[i] for i in real]


def _integers(name: str, key: str, values: Any) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else values  # an array or a tensor
    whole = isinstance(values, list | tuple) and all(
        isinstance(i, numbers.Integral) and not isinstance(i, bool) for i in values
    )
    if not whole or any(abs(i) > _INT64_MAX for i in values):
        raise DataError(
            f"record {name} has {key} that are no list of 64-bit integers: {str(values)[:60]}"
        )
    return [int(i) for i in values]
