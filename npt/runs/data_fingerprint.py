"""Which data a run is trained on, told from a few records: a position in other data means nothing."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from npt.data.source import Record
from npt.errors import CheckpointError
from npt.stored import shown

LOOKED_AT = 16
"""Records of a sequence, spread evenly over it."""


def data_identity(records: Iterable[Record] | None) -> dict[str, Any]:
    """What tells one data set from another without reading it: the number of records, and a sum
    over some of them.

    Of a stream it is the first record. Of a generator, which can be read once only, nothing is
    known. What is never looked at may differ all the same: this finds the wrong file, not the
    edited record.

    Returns:
        For JSON: `records`, None of a stream, and `sha256`, None where nothing is known.
    """
    if records is None:
        return {"records": 0, "sha256": None}
    looked_at: list[Any]
    size = None
    if hasattr(records, "__len__") and hasattr(records, "__getitem__"):
        sequence: Any = records
        size = len(sequence)
        indices = (
            sorted({index * (size - 1) // (LOOKED_AT - 1) for index in range(LOOKED_AT)})
            if size
            else []
        )
        looked_at = [sequence[index] for index in indices]
    elif iter(records) is records:
        return {"records": None, "sha256": None}
    else:
        looked_at = list(itertools.islice(records, 1))
    digest = hashlib.sha256()
    for record in looked_at:
        digest.update(json.dumps(record, sort_keys=True, default=_plain).encode() + b"\n")
    return {"records": size, "sha256": digest.hexdigest()}


def check_same_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with other data than a checkpoint's run had.

    Args:
        before, now: from `data_identity` by what the data are called; what is not known of either
            is not compared.

    Raises:
        CheckpointError: with both.
    """
    for name, other in now.items():
        one = before.get(name)
        if not isinstance(one, Mapping):
            continue
        if any(
            None not in (one.get(key), other[key]) and one.get(key) != other[key]
            for key in ("records", "sha256")
        ):
            raise CheckpointError(
                f"the checkpoint was trained on {name} of {_said(one)}, this run has"
                f" {_said(other)}; resume with the same, or start a new run"
            )


def _said(identity: Mapping[str, Any]) -> str:
    count = "an unknown number of" if identity.get("records") is None else str(identity["records"])
    return f"{count} records (sha256 {shown(str(identity.get('sha256'))[:12])[1:-1]})"


def _plain(value: Any) -> Any:
    return (
        dict(value)
        if isinstance(value, Mapping)
        else value.tolist()
        if hasattr(value, "tolist")
        else str(value)
    )
