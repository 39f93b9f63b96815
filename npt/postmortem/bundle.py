"""Read a post-mortem: a checkpoint, `window.safetensors` and `postmortem.json`.

It may come from somebody else: everything is checked before anything is made of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from npt.adapters.files.adapter_files import StoredAdapter, find_adapter
from npt.adapters.files.run_layout import ADAPTER
from npt.config import QUANT_TYPES, TrainConfig
from npt.data.batch import ROW_TENSORS, Batch, batch_from_tensors
from npt.errors import BundleError, ConfigError
from npt.guard.outcome import Refusal, Snapshot
from npt.guard.postmortem import VERSION as GUARD_VERSION
from npt.manifest import POSTMORTEM
from npt.postmortem.write import VERSION, WINDOW
from npt.runs.checkpoint import Checkpoint, read_state
from npt.stored import (
    check_entries,
    check_names,
    described,
    read_headers,
    read_json,
    read_tensors,
    require_file,
    shown,
)

_OPTIONAL = {f.name for f in fields(Batch) if f.default is None}
_TEXT_OR_NULL = (str, type(None))
_ENTRIES: dict[str, tuple[type, ...]] = {
    "version": (int,),
    "reason": (str,),
    "refusals": (list,),
    "sample_ids": (list,),
    "accepted_sample_ids": (list,),
    "offsets": (list,),
    "accepted_offsets": (list,),
    "history": (list,),
    "schedule": (dict,),
    "spike_limits": (list, type(None)),
    "settings": (dict,),
    "base": (dict,),
    "device": (str,),
    "base_hash_at_stop": _TEXT_OR_NULL,
    "precision": (dict, str, type(None)),
    "findings": (dict,),
    "samples_at_once": (int,),
    "micro_batch": (int, type(None)),
    "record": (dict, type(None)),
    "verdict": (dict, type(None)),
    "failures": (dict,),
}
_FINDINGS = dict.fromkeys(("adapters", "moments", "base"), _TEXT_OR_NULL)
_REFUSAL: dict[str, tuple[type, ...]] = {
    "kind": (str,),
    "detail": (str,),
    "micro_batch": (int, type(None)),
    "sample_ids": (list,),
    "rank": (int,),
}
_BASE: dict[str, tuple[Any, ...]] = {
    "quantization": (None, *QUANT_TYPES, "mixed"),
    "dtype": ("float32", "float16", "bfloat16"),
    "matmul_precision": ("highest", "high", "medium"),
}


@dataclass(frozen=True)
class RecordedBase:
    """The base of a run. dtype: of its computation; of a packed base, of its products."""

    name: str
    hash: str
    quantization: str | None
    dtype: str
    matmul_precision: str


@dataclass(frozen=True)
class Bundle:
    """A post-mortem whose form has been checked; adapters and moments are still on disk.

    step: applied steps before the window. window: the micro-batches that ended the run. accepted:
    those of the last window without a refusal. rate: learning rate of the window's step. limits: of
    the spike guard, if any. random_state: by `cpu`, `cuda.0` and so on. said: `postmortem.json`.
    """

    folder: Path
    step: int
    checkpoint: Checkpoint
    adapter: StoredAdapter
    refusals: tuple[Refusal, ...]
    window: tuple[Batch, ...]
    accepted: tuple[Batch, ...]
    train_config: TrainConfig
    rate: float
    samples_at_once: int
    limits: tuple[float, float] | None
    base: RecordedBase
    reason: str
    device: str
    random_state: Mapping[str, Tensor]
    said: Mapping[str, Any]

    def snapshot(self, model: Any) -> Snapshot:
        """Return adapters and moments, also non-finite ones, for a model with adapters attached."""
        return self.checkpoint.snapshot(model, finite=False)


def read_bundle(folder: str | Path) -> Bundle:
    """Read and check everything that can be checked without the base.

    Raises:
        BundleError: a file is missing, unreadable, malformed, or of another version.
        CheckpointError, AdapterFileError: likewise, of the checkpoint in it.
    """
    folder = Path(folder)
    path = folder / POSTMORTEM
    require_file(path, "name a complete folder RUN/postmortem/step-XXXXXXXX", BundleError)
    said = read_json(path, BundleError)
    _check_version(path, said)
    checkpoint = read_state(folder)
    check_entries(path, "", said, _ENTRIES, BundleError)
    check_entries(path, "findings.", said["findings"], _FINDINGS, BundleError)
    window, accepted = _windows(path, folder / WINDOW, said)
    (at_once,) = _numbers(path, "samples_at_once", [said["samples_at_once"]], 1)
    (rate,) = _numbers(path, "schedule.next_rate", [said["schedule"].get("next_rate")], 1)
    adapter = find_adapter(folder / ADAPTER)
    return Bundle(
        folder=folder,
        step=checkpoint.step,
        checkpoint=checkpoint,
        adapter=adapter,
        refusals=tuple(_refusal(path, entry) for entry in said["refusals"]),
        window=window,
        accepted=accepted,
        train_config=_train_config(path, said["settings"]),
        rate=float(rate),
        samples_at_once=max(1, int(at_once)),
        limits=_limits(path, said["spike_limits"]),
        base=_base(path, said["base"], adapter, checkpoint),
        reason=said["reason"],
        device=said["device"],
        random_state=checkpoint.random_states()[0],
        said=said,
    )


def _check_version(path: Path, said: Mapping[str, Any]) -> None:
    """Refuse what another version wrote; the first one called its number `format`."""
    version = said.get("version", said.get("format"))
    if version == GUARD_VERSION:
        raise BundleError(
            f"{path} is of a guarded loop, whose model is yours; in Python:"
            f" print(*npt.guard.replay({str(path.parent)!r}, model), sep='\\n')"
        )
    if version != VERSION:
        versions = said.get("versions")
        writer = versions.get("npt") if isinstance(versions, dict) else None
        named = f"npt {shown(writer)}" if writer is not None else "the npt that wrote it"
        raise BundleError(
            f"{path} is of version {shown(version)}, this npt reads {VERSION}; replay it with"
            f" {named}"
        )


def _windows(
    path: Path, stored: Path, said: Mapping[str, Any]
) -> tuple[tuple[Batch, ...], tuple[Batch, ...]]:
    """Return the refused window and the accepted micro-batches."""
    if not said["sample_ids"]:
        _refuse(path, "sample_ids names no micro-batch")
    places: dict[str, tuple[tuple[str, ...], int]] = {}
    for stem, prefix in (("", ""), ("accepted_", "accepted.")):
        names = said[f"{stem}sample_ids"]
        for ids in names:
            if not isinstance(ids, list) or not ids or not all(isinstance(i, str) for i in ids):
                _refuse(path, f"sample ids are {shown(ids)}, expected a list of names")
        offsets = _numbers(path, f"{stem}offsets", said[f"{stem}offsets"], len(names))
        for index, (ids, offset) in enumerate(zip(names, offsets, strict=True)):
            places[f"{prefix}{index}"] = tuple(ids), int(offset)
    batches = list(_batches(stored, places))
    count = len(said["sample_ids"])
    return tuple(batches[:count]), tuple(batches[count:])


def _numbers(path: Path, key: str, values: Sequence[Any], count: int) -> Sequence[Any]:
    """Return so many finite numbers that are not negative."""
    if len(values) != count or not all(
        type(value) in (int, float) and math.isfinite(value) and 0 <= value < 2**63
        for value in values
    ):
        _refuse(path, f"{key} is {shown(values)}, expected {count} numbers from 0 on")
    return values


def _refusal(path: Path, entry: Any) -> Refusal:
    if not isinstance(entry, dict):
        _refuse(path, f"refusals has the entry {shown(entry)}, expected an object")
    check_entries(path, "refusals.", entry, _REFUSAL, BundleError)
    return Refusal.from_dict(entry)


def _train_config(path: Path, settings: Mapping[str, Any]) -> TrainConfig:
    names = [f.name for f in fields(TrainConfig)]
    absent = sorted(set(names) - set(settings))
    if absent:
        _refuse(path, f"the setting {absent[0]} is missing")
    try:
        return TrainConfig(**{name: settings[name] for name in names})
    except (ConfigError, TypeError) as error:
        raise BundleError(f"{path} has a setting that cannot work: {error}") from error


def _limits(path: Path, limits: Sequence[Any] | None) -> tuple[float, float] | None:
    """Return the limits of loss and gradient norm; JSON writes an infinite one as null."""
    if limits is None:
        return None
    finite = [0.0 if value is None else value for value in limits]
    _numbers(path, "spike_limits", finite, 2)
    loss, norm = (math.inf if value is None else float(value) for value in limits)
    return loss, norm


def _base(
    path: Path, entries: Mapping[str, Any], adapter: StoredAdapter, checkpoint: Checkpoint
) -> RecordedBase:
    for key, choices in _BASE.items():
        if entries.get(key) not in choices:
            expected = ", ".join(map(str, choices))
            _refuse(path, f"base.{key} is {shown(entries.get(key))}, expected one of {expected}")
    name = str(adapter.record.get("base_model_name_or_path"))
    base_hash = checkpoint.record["base_hash"]
    return RecordedBase(name, base_hash, **{key: entries[key] for key in _BASE})


def _batches(path: Path, places: Mapping[str, tuple[tuple[str, ...], int]]) -> Iterator[Batch]:
    """Yield the batch at every place, with the samples and the offset that are named."""
    headers = read_headers(path, BundleError)
    stored = {
        place: [n for n in ROW_TENSORS if n not in _OPTIONAL or f"{place}.{n}" in headers]
        for place in places
    }
    wanted = [f"{place}.{name}" for place, names in stored.items() for name in names]
    check_names(path, headers, wanted, BundleError)
    for place, (sample_ids, _) in places.items():
        shape = headers[f"{place}.input_ids"][1]
        for name in stored[place]:
            header = headers[f"{place}.{name}"]
            if header != ("I64", shape) or len(shape) != 2 or 0 in shape:
                expected = f"I64 [B, T] like input_ids {list(shape)}"
                _refuse(path, f"{place}.{name} is {described(header)}, expected {expected}")
        if shape[0] != len(sample_ids):
            named = f"but {len(sample_ids)} samples are named"
            _refuse(path, f"{place}.input_ids has {shape[0]} rows, {named}")
    tensors = read_tensors(path, wanted, BundleError)
    for place, (sample_ids, offset) in places.items():
        rows = {name: tensors[f"{place}.{name}"] for name in stored[place]}
        length = rows["input_ids"].shape[1]
        # token ids and labels are checked by `find_fault`, as in the run
        limits = {"attention_mask": 2, "position_ids": length, "documents": length}
        for name, limit in limits.items():
            if name in rows and bool(((rows[name] < 0) | (rows[name] >= limit)).any()):
                _refuse(path, f"{place}.{name} holds numbers outside [0, {limit})")
        batch = batch_from_tensors(rows["input_ids"], rows["attention_mask"], sample_ids)
        yield replace(batch.with_rows(rows, sample_ids), offset=offset)


def _refuse(path: Path, why: str) -> NoReturn:
    raise BundleError(f"{path}: {why}; the bundle is broken or was changed, copy it again")
