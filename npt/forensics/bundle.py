"""The post-mortem of a run that gives up, whatever model it trains: one format for every trainer.

    step-00000123/
      window.safetensors    the micro-batches refused last, some accepted ones, their random states
      weights.safetensors   the trained parameters from before the window (undo="none": after it)
      moments.safetensors   what the optimizer keeps for them
      postmortem.json       refusals, findings, settings, versions
      manifest.json         sha256 and size of every file

An NPT student's has `adapter/` in place of the weights, and knows its base and settings. A bundle
appears as a whole or not at all, holds safetensors and JSON only, and may come from somebody else:
everything in it is checked before it is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from npt.errors import BundleError
from npt.files import new_folder, write_json
from npt.guard.forensics import Kept
from npt.guard.outcome import Outcome, Refusal
from npt.manifest import POSTMORTEM, verify_checkpoint, write_manifest
from npt.stored import check_entries, read_headers, read_json, read_tensors, require_file, shown
from npt.versions import versions

if TYPE_CHECKING:
    from npt.guard.guard import Guard

VERSION = 3
WINDOW, WEIGHTS, MOMENTS = "window.safetensors", "weights.safetensors", "moments.safetensors"

_OBJECT_OR_NULL = (dict, type(None))
_ENTRIES: dict[str, tuple[type, ...]] = {
    "version": (int,),
    "reason": (str,),
    "step": (int,),
    "process": (int,),
    "device": (str,),
    "refusals": (list,),
    "micro_batches": (list,),
    "accepted": (list,),
    "findings": (list,),
    "history": (list,),
    "moments": (dict,),
    "optimizer": (str,),
    "groups": (list,),
    "spike_limits": (list, type(None)),
    "settings": (dict,),
    "versions": (dict,),
    "student": _OBJECT_OR_NULL,
}
_MICRO_BATCH: dict[str, tuple[type, ...]] = {
    "sample_ids": (list,),
    "tokens": (int, float),
    "offset": (int,),
    "refusal": _OBJECT_OR_NULL,
    "values": (dict,),
    "autocast": (dict,),
}
_REFUSAL: dict[str, tuple[type, ...]] = {
    "kind": (str,),
    "detail": (str,),
    "micro_batch": (int, type(None)),
    "sample_ids": (list,),
    "rank": (int,),
}
_FINDING: dict[str, tuple[type, ...]] = {
    "refusal": (dict,),
    "verdict": _OBJECT_OR_NULL,
    "why": (str,),
}


@dataclass(frozen=True)
class StoredMicroBatch:
    """A micro-batch as it was computed.

    Attributes:
        inputs: tensors and plain values, nested.
        sample_ids: of its rows.
        tokens: what it weighs in its window.
        offset: of its samples in the data, for seeded draws.
        refusal: why it was refused, itself or with its whole window; None if it was accepted.
        random: the state that it was computed from; empty if its draws are seeded.
        autocast: by device type, the dtype of an autocast that was on.
    """

    inputs: Any
    sample_ids: tuple[str, ...] = ()
    tokens: float = 1
    offset: int = 0
    refusal: Refusal | None = None
    random: Mapping[str, Tensor] = field(default_factory=dict)
    autocast: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_kept(cls, kept: Kept, refusal: Refusal | None = None) -> StoredMicroBatch:
        """Return what a guard kept of a micro-batch."""
        inputs = kept.batch if kept.inputs is None else kept.inputs
        autocast = kept.calls[0].autocast if kept.calls else {}
        dtypes = {kind: str(dtype).removeprefix("torch.") for kind, dtype in autocast.items()}
        return cls(inputs, kept.ids, kept.tokens, 0, refusal, kept.random, dtypes)


@dataclass(frozen=True)
class Postmortem:
    """A post-mortem that was read, on the host.

    Attributes:
        folder: its own.
        micro_batches: that were refused last.
        accepted: of the last window without a refusal.
        weights: by name, for `model.load_state_dict(weights, strict=False)`; a student's are in
            `adapter/`, and none are here.
        moments: by `exp_avg of NAME` and so on, also those that are plain numbers.
        limits: of loss and gradient norm, the spike guard's.
        record: the content of `postmortem.json`.
    """

    folder: Path
    micro_batches: tuple[StoredMicroBatch, ...]
    accepted: tuple[StoredMicroBatch, ...]
    weights: dict[str, Tensor]
    moments: dict[str, Any]
    limits: tuple[float, float] | None
    record: Mapping[str, Any] = field(repr=False)

    @property
    def step(self) -> int:
        """The step at which training stopped."""
        return int(self.record["step"])

    @property
    def recorded(self) -> tuple[tuple[Refusal, int | None], ...]:
        """The refusals of the stored micro-batches, with their index here; None of a window."""
        refusals = {}
        for index, micro_batch in enumerate(self.micro_batches):
            if (refusal := micro_batch.refusal) is not None:
                place = None if refusal.micro_batch is None else index
                refusals[refusal.kind, place] = refusal
        return tuple((refusal, place) for (_, place), refusal in refusals.items())


@dataclass(frozen=True)
class StudentPart:
    """The parts that only the post-mortem of an NPT student has.

    Attributes:
        micro_batches: of the window that was refused last.
        accepted: of the last window without a refusal.
        entry: what it takes to load the student again.
        write_weights: writes weights by name into a folder.
    """

    micro_batches: Sequence[StoredMicroBatch]
    accepted: Sequence[StoredMicroBatch]
    entry: Mapping[str, Any]
    write_weights: Callable[[Path, Mapping[str, Tensor]], None]


def write_postmortem(
    folder: str | Path,
    guard: Guard,
    outcome: Outcome,
    reason: str,
    step: int,
    student: StudentPart | None = None,
) -> Path:
    """Write `step-XXXXXXXX` below the folder, of other processes than the first with their number.

    Args:
        folder: is made if it is not there.
        guard: of the run.
        outcome: of the window that was refused last.
        reason: why the run ends.
        step: applied ones of the state that is stored.
        student: of an NPT run.

    Raises:
        OSError, SafetensorError: it could not be written.
    """
    process, settings = guard.window.processes.index, guard.settings
    number = f"-process-{process}" if process else ""
    folder = Path(folder).absolute() / f"step-{step:08d}{number}"
    window: dict[str, Tensor] = {}
    if student is None:
        refused = [StoredMicroBatch.of_kept(kept, r) for r, kept in guard.forensics.suspects]
        accepted = [StoredMicroBatch.of_kept(kept) for kept in guard.forensics.accepted]
    else:
        refused, accepted = list(student.micro_batches), list(student.accepted)
    state = outcome.snapshot or guard.update.snapshot()
    moments = {
        f"{key} of {name}": v for name, (_, kept) in state.items() for key, v in kept.items()
    }
    tensors = {name: value for name, value in moments.items() if isinstance(value, Tensor)}
    record = {
        "version": VERSION,
        "reason": reason,
        "step": step,
        "process": process,
        "device": str(guard.update.parameters[0].device),
        "refusals": [{"window": index, **r.as_dict()} for index, r in guard.refusals],
        "micro_batches": _entries("", refused, window),
        "accepted": _entries("accepted.", accepted, window),
        "findings": [
            {
                "refusal": f.refusal.as_dict(),
                "verdict": None if f.verdict is None else f.verdict.as_dict(),
                "why": f.why,
            }
            for f in guard.findings
        ],
        "history": [asdict(entry) for entry in guard.window.history],
        "moments": _plain_values({n: v for n, v in moments.items() if n not in tensors}),
        "optimizer": type(guard.update.optimizer).__name__,
        "groups": [_plain_values(group) for group in guard.update.groups()],
        "spike_limits": None if guard.window.spikes is None else list(outcome.limits),
        "settings": _plain_values(vars(settings))
        | {"refuse": [kind.__name__ for kind in settings.refuse]},
        "versions": versions(),
        "student": None if student is None else student.entry,
    }
    weights = {name: value for name, (value, _) in state.items()}
    with new_folder(folder) as temporary:
        _save(window, temporary / WINDOW)
        _save(tensors, temporary / MOMENTS)
        if student is None:
            _save(weights, temporary / WEIGHTS)
        else:
            student.write_weights(temporary, weights)
        write_json(temporary / POSTMORTEM, record)
        write_manifest(temporary)
    return folder


def read_postmortem(folder: str | Path) -> Postmortem:
    """Read a post-mortem, on the host.

    Raises:
        BundleError: it is none, of another version, or malformed.
        CheckpointError: a file is not the one that was written.
    """
    folder = Path(folder)
    path = folder / POSTMORTEM
    require_file(path, "name a complete folder postmortem/step-XXXXXXXX", BundleError)
    record = read_json(path, BundleError)
    _check_version(path, record)
    check_entries(path, "", record, _ENTRIES, BundleError)
    for entry in record["refusals"]:
        _check_refusal(path, "refusals.", _object(entry), "window")
    for entry in record["findings"]:
        check_entries(path, "findings.", _object(entry), _FINDING, BundleError)
        _check_refusal(path, "findings.refusal.", entry["refusal"])
    if not 0 <= record["step"] < 2**63:
        raise BundleError(f"{path}: step is {record['step']}, expected a count; {_DAMAGED}")
    verify_checkpoint(folder)
    window = _tensors(folder / WINDOW)
    micro_batches = _micro_batches(path, "micro_batches", "", record, window)
    if not micro_batches:
        raise BundleError(f"{path}: micro_batches names no micro-batch; {_DAMAGED}")
    accepted = _micro_batches(path, "accepted", "accepted.", record, window)
    weights = _tensors(folder / WEIGHTS) if record["student"] is None else {}
    moments = {**record["moments"], **_tensors(folder / MOMENTS)}
    limits = _limits(path, record["spike_limits"])
    return Postmortem(folder, micro_batches, accepted, weights, moments, limits, record)


_DEEPEST = 32
_DAMAGED = "the bundle is broken or was changed, copy it again"


def _check_version(path: Path, record: Mapping[str, Any]) -> None:
    """Refuse what another version wrote; the first one called its number `format`."""
    version = record.get("version", record.get("format"))
    if version != VERSION:
        stored = record.get("versions")
        writer = stored.get("npt") if isinstance(stored, dict) else None
        named = f"npt {shown(writer)}" if writer is not None else "the npt that wrote it"
        raise BundleError(
            f"{path} is of version {shown(version)}, this npt reads {VERSION}; replay it with"
            f" {named}"
        )


def _entries(
    prefix: str, micro_batches: Sequence[StoredMicroBatch], tensors: dict[str, Tensor]
) -> list[dict[str, Any]]:
    """Return the entries of micro-batches; their tensors are added to `tensors`."""
    entries = []
    for number, stored in enumerate(micro_batches):
        values = {}
        for path, leaf in leaves(stored.inputs):
            if isinstance(leaf, Tensor):
                tensors[f"{prefix}{number}.{path}"] = leaf
            else:
                values[path] = _plain(leaf)
        for device, state in stored.random.items():
            tensors[f"random.{prefix}{number}.{device}"] = state
        entries.append(
            {
                "sample_ids": list(stored.sample_ids),
                "tokens": _plain(stored.tokens),
                "offset": stored.offset,
                "refusal": None if stored.refusal is None else stored.refusal.as_dict(),
                "values": values,
                "autocast": dict(stored.autocast),
            }
        )
    return entries


def _micro_batches(
    path: Path, key: str, prefix: str, record: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[StoredMicroBatch, ...]:
    micro_batches = []
    for number, entry in enumerate(map(_object, record[key])):
        name = f"{key}.{number}."
        check_entries(path, name, entry, _MICRO_BATCH, BundleError)
        ids, tokens, refusal = entry["sample_ids"], entry["tokens"], entry["refusal"]
        if not all(isinstance(each, str) for each in ids):
            raise BundleError(f"{path}: {name}sample_ids is {shown(ids)}, expected names")
        if not (math.isfinite(tokens) and 0 <= tokens < 2**63 and 0 <= entry["offset"] < 2**63):
            raise BundleError(
                f"{path}: {name}tokens and offset are {shown((tokens, entry['offset']))}, expected"
                f" numbers from 0 on; {_DAMAGED}"
            )
        if refusal is not None:
            _check_refusal(path, f"{name}refusal.", refusal)
            refusal = Refusal.from_dict(refusal)
        flat = {**entry["values"], **_below(f"{prefix}{number}.", tensors)}
        if any(name.count(".") > _DEEPEST for name in flat):
            raise BundleError(f"{path}: {name}values is nested too deeply; {_DAMAGED}")
        random = _below(f"random.{prefix}{number}.", tensors)
        autocast = {
            kind: dtype
            for kind, dtype in entry["autocast"].items()
            if kind in ("cpu", "cuda") and dtype in ("float16", "bfloat16")
        }
        micro_batches.append(
            StoredMicroBatch(
                nested(flat), tuple(ids), tokens, entry["offset"], refusal, random, autocast
            )
        )
    return tuple(micro_batches)


def _object(entry: Any) -> dict[str, Any]:
    return entry if isinstance(entry, dict) else {}


def _check_refusal(path: Path, prefix: str, entry: Mapping[str, Any], *more: str) -> None:
    entries = {name: value for name, value in entry.items() if name not in ("rows", *more)}
    check_entries(path, prefix, entries, _REFUSAL, BundleError)


def _limits(path: Path, limits: Sequence[Any] | None) -> tuple[float, float] | None:
    """Return the limits of loss and gradient norm; JSON writes an infinite one as null."""
    if limits is None:
        return None
    numbers = [math.inf if limit is None else limit for limit in limits]
    if len(numbers) != 2 or not all(type(n) in (int, float) and n >= 0 for n in numbers):
        raise BundleError(f"{path}: spike_limits is {shown(limits)}, expected two; {_DAMAGED}")
    return float(numbers[0]), float(numbers[1])


def nested(flat: Mapping[str, Any]) -> Any:
    """Return inputs by name, or in their order, from values by their paths."""
    parts = {path: value for path, value in flat.items() if "." not in path}
    deeper: dict[str, dict[str, Any]] = {}
    for path, value in flat.items():
        first, _, rest = path.partition(".")
        if rest:
            deeper.setdefault(first, {})[rest] = value
    parts |= {name: nested(part) for name, part in deeper.items()}
    if not parts or not all(name.isdecimal() for name in parts):
        return parts
    return tuple(parts[name] for name in sorted(parts, key=int))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield tensors and other values of nested inputs, by their paths."""
    items: Any = None
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple) and any(isinstance(v, Tensor | Mapping) for v in value):
        items = enumerate(value)
    if items is None:
        if path or value is not None:
            yield path or "input", value
        return
    for key, item in items:
        yield from leaves(item, f"{path}.{key}" if path else str(key))


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}


def _tensors(file: Path) -> dict[str, Tensor]:
    return read_tensors(file, read_headers(file, BundleError), BundleError)


def _save(tensors: Mapping[str, Tensor], file: Path) -> None:
    contiguous = torch.contiguous_format
    save_file(
        {
            name: tensor.detach().to("cpu", copy=True, memory_format=contiguous)
            for name, tensor in tensors.items()
        },
        file,
    )


def _plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    """Return what JSON has a word for, else its text."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return str(value)
    return value
