"""Which data a run is trained on, told from a few records: a position in other data means
nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from npt.data.source import Record
from npt.errors import CheckpointError
from npt.stored import shown

SAMPLED = 16
"""Records of a sequence that are hashed, spread evenly over it."""


def data_fingerprint(records: Iterable[Record] | None) -> dict[str, Any]:
    """Return the number of records and a hash over some of them.

    Of a stream only the first record is read, of a generator, which can be read once only, none. It
    finds the wrong file, not every edited record.

    Returns:
        For JSON: `records`, None of a stream, and `sha256`, None if nothing is known.
    """
    if records is None:
        return {"records": 0, "sha256": None}
    size: int | None = None
    if hasattr(records, "__len__") and hasattr(records, "__getitem__"):
        sequence: Any = records
        size = len(sequence)
        indices = {index * (size - 1) // (SAMPLED - 1) for index in range(SAMPLED)} if size else ()
        sampled: list[Any] = [sequence[index] for index in sorted(indices)]
    elif iter(records) is records:
        return {"records": None, "sha256": None}
    else:
        sampled = list(itertools.islice(records, 1))
    digest = hashlib.sha256()
    for record in sampled:
        digest.update(json.dumps(record, sort_keys=True, default=_plain).encode() + b"\n")
    return {"records": size, "sha256": digest.hexdigest()}


def check_same_data(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to resume with other data than a checkpoint's run had.

    Args:
        recorded, now: `data_fingerprint` by the name of the data; what is unknown in either is not
            compared.

    Raises:
        CheckpointError: with both.
    """
    for name, ours in now.items():
        theirs = recorded.get(name)
        if isinstance(theirs, Mapping) and any(
            None not in (theirs.get(key), ours[key]) and theirs.get(key) != ours[key]
            for key in ("records", "sha256")
        ):
            raise CheckpointError(
                f"the checkpoint was trained on {name} of {_described(theirs)}, this run has"
                f" {_described(ours)}; resume with the same, or start a new run"
            )


def _described(fingerprint: Mapping[str, Any]) -> str:
    records = fingerprint.get("records")
    count = "an unknown number of" if records is None else str(records)
    return f"{count} records (sha256 {shown(str(fingerprint.get('sha256'))[:12])[1:-1]})"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)
