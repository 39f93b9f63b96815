"""The post-mortem of a run that gives up, whatever model it trains: one format for every trainer.

    step-00000123/
      window.safetensors    the micro-batches refused last, some accepted ones, their random states
      weights.safetensors   the trained parameters from before the window
      moments.safetensors   what the optimizer keeps for them
      postmortem.json       refusals, findings, settings, versions; of an NPT run its student
      manifest.json         sha256 and size of every file

A bundle appears as a whole or not at all, holds safetensors and JSON only, and may come from
somebody else: what is not of this form is refused in one line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from npt.errors import BundleError, ConfigError
from npt.files import new_folder, write_json
from npt.guard.forensics import StoredMicroBatch
from npt.guard.outcome import Outcome, Refusal
from npt.manifest import POSTMORTEM, verify_checkpoint, write_manifest
from npt.stored import check_entries, read_headers, read_json, read_tensors, require_file, shown
from npt.versions import versions

if TYPE_CHECKING:
    from npt.guard.guard import Guard

VERSION = 4
WINDOW, WEIGHTS, MOMENTS = "window.safetensors", "weights.safetensors", "moments.safetensors"

_ENTRIES: dict[str, tuple[type, ...]] = {
    "version": (int,),
    "reason": (str,),
    "step": (int,),
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
    "student": (dict, type(None)),
}

_TENSOR = "tensor"
_MALFORMED = (
    *(ArithmeticError, AttributeError, ConfigError, LookupError),
    *(RecursionError, TypeError, ValueError),
)


@dataclass(frozen=True)
class Postmortem:
    """A post-mortem that was read, on the host.

    Attributes:
        folder: its own.
        micro_batches: that were refused last; of an NPT run the whole window.
        accepted: some that were stepped on.
        weights: by name, for `model.load_state_dict(weights, strict=False)`.
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
    def recorded(self) -> dict[tuple[str, int | None], Refusal]:
        """The refusals of the stored micro-batches, by kind and index here; None of a window."""
        refusals = [(i, m.refusal) for i, m in enumerate(self.micro_batches) if m.refusal]
        return {(r.kind, None if r.micro_batch is None else i): r for i, r in refusals}


def write_postmortem(
    folder: str | Path,
    guard: Guard,
    outcome: Outcome,
    reason: str,
    step: int,
    *,
    refused: Sequence[StoredMicroBatch] | None = None,
    accepted: Sequence[StoredMicroBatch] | None = None,
    student: Mapping[str, Any] | None = None,
) -> Path:
    """Write `step-XXXXXXXX` below the folder, of other processes than the first with their number.
    What cannot be read from its device, as after a CUDA error, is left out; the reason says so.

    Args:
        outcome: of the window that was refused last.
        step: applied ones of the state that is stored.
        refused, accepted: micro-batches; default those that the guard has kept.
        student: what it takes to load the student of an NPT run again.
    """
    process, settings = guard.window.processes.index, guard.settings
    number = f"-process-{process}" if process else ""
    folder = Path(folder).absolute() / f"step-{step:08d}{number}"
    window: dict[str, Tensor] = {}
    refused = guard.forensics.refused if refused is None else refused
    accepted = guard.forensics.accepted if accepted is None else accepted
    lost: list[str] = []
    state = _read("weights and moments", lambda: outcome.snapshot or guard.update.snapshot(), lost)
    state = state or {}
    moments = {
        f"{key} of {name}": v for name, (_, kept) in state.items() for key, v in kept.items()
    }
    tensors = {name: value for name, value in moments.items() if isinstance(value, Tensor)}
    record = {
        "version": VERSION,
        "reason": reason,
        "step": step,
        "device": str(guard.update.parameters[0].device),
        "refusals": [{"window": index, **r.as_dict()} for index, r in guard.refusals],
        "micro_batches": _entries("refused", refused, window),
        "accepted": _entries("accepted", accepted, window),
        "findings": [finding.as_dict() for finding in guard.findings],
        "history": list(guard.history),
        "moments": _plain_values({n: v for n, v in moments.items() if n not in tensors}),
        "optimizer": type(guard.update.optimizer).__name__,
        "groups": _read("rates", lambda: [*map(_plain_values, guard.update.groups())], lost) or [],
        "spike_limits": None if guard.window.spikes is None else list(outcome.limits),
        "settings": _plain_values(vars(settings))
        | {"refuse": [kind.__name__ for kind in settings.refuse]},
        "versions": versions(),
        "student": student,
    }
    weights = {name: value for name, (value, _) in state.items()}
    files = {WINDOW: window, MOMENTS: tensors, WEIGHTS: weights}
    stored = {file: _on_host(tensors, lost) for file, tensors in files.items()}
    if lost:
        record["reason"] = f"{reason}; lost with the device: {', '.join(dict.fromkeys(lost))}"
    with new_folder(folder) as temporary:
        for file, on_host in stored.items():
            save_file(on_host, temporary / file)
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
    # the first version called its number `format`
    if (version := record.get("version", record.get("format"))) != VERSION:
        stored = record.get("versions")
        writer = stored.get("npt") if isinstance(stored, dict) else None
        raise BundleError(
            f"{path} is of version {shown(version)}, this npt reads {VERSION}; replay it with the"
            f" npt that wrote it ({shown(writer)})"
        )
    check_entries(path, "", record, _ENTRIES, BundleError)
    verify_checkpoint(folder)
    window, moments, weights = (_tensors(folder / file) for file in (WINDOW, MOMENTS, WEIGHTS))
    with well_formed(path):
        refused = tuple(_micro_batch(entry, window) for entry in record["micro_batches"])
        accepted = tuple(_micro_batch(entry, window) for entry in record["accepted"])
        limits = record["spike_limits"]
        if limits is not None:  # JSON writes an infinite one as null
            loss, norm = (math.inf if limit is None else float(limit) for limit in limits)
            limits = loss, norm
    if not refused:
        raise BundleError(f"{path}: micro_batches names no micro-batch; copy it again")
    return Postmortem(
        folder, refused, accepted, weights, {**record["moments"], **moments}, limits, record
    )


@contextmanager
def well_formed(path: Path) -> Iterator[None]:
    """Refuse what is made of a record whose entries are not those that are written."""
    try:
        yield
    except _MALFORMED as error:
        raise BundleError(
            f"{path} has an entry that cannot be: {type(error).__name__}: {shown(str(error))};"
            " copy it again"
        ) from error


def _entries(
    kind: str, micro_batches: Sequence[StoredMicroBatch], tensors: dict[str, Tensor]
) -> list[dict[str, Any]]:
    return [
        {
            "inputs": _described(stored.inputs, f"{kind}.{number}", tensors),
            "sample_ids": list(stored.sample_ids),
            "tokens": _plain(stored.tokens),
            "refusal": None if stored.refusal is None else stored.refusal.as_dict(),
            "random": _described(stored.random, f"random.{kind}.{number}", tensors),
            "autocast": {k: str(d).removeprefix("torch.") for k, d in stored.autocast.items()},
        }
        for number, stored in enumerate(micro_batches)
    ]


def _micro_batch(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> StoredMicroBatch:
    refusal, dtypes = entry["refusal"], {"float16": torch.float16, "bfloat16": torch.bfloat16}
    return StoredMicroBatch(
        _restored(entry["inputs"], tensors),
        tuple(map(str, entry["sample_ids"])),
        int(entry["tokens"]),
        None if refusal is None else Refusal.from_dict(refusal),
        _restored(entry["random"], tensors),
        {k: dtypes[name] for k, name in entry["autocast"].items() if name in dtypes},
    )


def _described(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return nested inputs for JSON: tensors are added to `tensors`, and named in their place."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {str(key): _described(v, f"{name}.{key}", tensors) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_described(v, f"{name}.{index}", tensors) for index, v in enumerate(value)]
    return _plain(value)


def _restored(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `_described` was given; tuples have become lists."""
    if isinstance(value, list):
        return [_restored(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_TENSOR}:
        return tensors[value[_TENSOR]]
    return {key: _restored(item, tensors) for key, item in value.items()}


def _tensors(file: Path) -> dict[str, Tensor]:
    return read_tensors(file, read_headers(file, BundleError), BundleError)


def _on_host(tensors: Mapping[str, Tensor], lost: list[str]) -> dict[str, Tensor]:
    move = partial(Tensor.to, device="cpu", copy=True, memory_format=torch.contiguous_format)
    read = {n: _read("tensors", partial(move, t.detach()), lost) for n, t in tensors.items()}
    return {name: tensor for name, tensor in read.items() if tensor is not None}


def _read(what: str, read: Callable[[], Any], lost: list[str]) -> Any:
    try:
        return read()
    except RuntimeError:
        lost.append(what)
        return None


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
