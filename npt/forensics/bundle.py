"""The post-mortem bundle of a run that stopped, in one format for every trainer and model.

    step-00000123/
      window.safetensors    the last refused micro-batches, some accepted ones, random states
      weights.safetensors   the trained parameters from before the window
      moments.safetensors   their optimizer state
      postmortem.json       refusals, findings, settings, versions; for an NPT run, its student
      manifest.json         sha256 and size of every file

A bundle is written as a whole or not at all, and holds only safetensors and JSON. It may come from
somebody else, so anything malformed raises an error of one line.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from npt.errors import BundleError, ConfigError, NPTError, is_out_of_memory
from npt.files import new_folder, write_json
from npt.guard.forensics import StoredMicroBatch
from npt.guard.outcome import Outcome, Refusal
from npt.guard.settings import GuardSettings
from npt.guard.update import GuardedUpdate
from npt.guard.watching import Forensics
from npt.guard.window import GradientWindow
from npt.manifest import POSTMORTEM, verify_checkpoint, write_manifest
from npt.stored import check_entries, read_headers, read_json, read_tensors, require_file, shown
from npt.versions import versions

VERSION = 4
WINDOW = "window.safetensors"
WEIGHTS = "weights.safetensors"
MOMENTS = "moments.safetensors"

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
_MALFORMED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Postmortem:
    """A post-mortem bundle, read onto the host.

    Attributes:
        folder: its folder.
        micro_batches: the last refused ones; for an NPT run, the whole window.
        accepted: some micro-batches that counted in earlier steps.
        weights: by name, for `model.load_state_dict(weights, strict=False)`.
        moments: optimizer state by `exp_avg of NAME` and so on, tensors and plain numbers.
        limits: the spike guard's limits of loss and gradient norm.
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
        """The number of applied steps when training stopped."""
        return int(self.record["step"])

    @property
    def recorded(self) -> dict[tuple[str, int | None], Refusal]:
        """Refusals of `micro_batches` by kind and index; the index is None for a whole window."""
        refusals: dict[tuple[str, int | None], Refusal] = {}
        for index, stored in enumerate(self.micro_batches):
            if refusal := stored.refusal:
                place = None if refusal.micro_batch is None else index
                refusals[refusal.kind, place] = refusal
        return refusals


class StoppedGuard(Protocol):
    """The parts of a guard that its post-mortem describes."""

    settings: GuardSettings
    window: GradientWindow
    update: GuardedUpdate
    forensics: Forensics
    refusals: deque[tuple[int, Refusal]]
    history: deque[dict[str, object]]


def write_postmortem(
    folder: str | Path,
    guard: StoppedGuard,
    outcome: Outcome,
    reason: str,
    step: int,
    *,
    refused: Sequence[StoredMicroBatch] | None = None,
    accepted: Sequence[StoredMicroBatch] | None = None,
    student: Mapping[str, Any] | None = None,
) -> Path:
    """Write `step-XXXXXXXX` into the folder; processes other than 0 append their number. Tensors
    that cannot be read, as after a CUDA error, are left out and named in the reason.

    Args:
        outcome: the outcome of the last refused window.
        reason: why the run stopped.
        step: the number of applied steps in the stored state.
        refused, accepted: micro-batches; default: those that the guard kept.
        student: what is needed to load an NPT run's student again.
    """
    process = guard.window.processes.index
    number = f"-process-{process}" if process else ""
    folder = Path(folder).absolute() / f"step-{step:08d}{number}"
    if refused is None:
        refused = guard.forensics.refused
    if accepted is None:
        accepted = guard.forensics.accepted
    # after a CUDA error nothing on the device can be read; what is on the host remains
    lost: list[str] = []
    state = _read("weights and moments", lambda: outcome.snapshot or guard.update.snapshot(), lost)
    window: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}  # of the moments
    for name, (weight, kept) in (state or {}).items():
        weights[name] = weight
        for key, value in kept.items():
            if isinstance(value, Tensor):
                moments[f"{key} of {name}"] = value
            else:
                numbers[f"{key} of {name}"] = _plain(value)
    # classes of exceptions, by name: a replay refuses the same ones
    settings = _plain_values(vars(guard.settings))
    settings["refuse"] = [kind.__name__ for kind in guard.settings.refuse]
    record = {
        "version": VERSION,
        "reason": reason,
        "step": step,
        "device": str(guard.update.parameters[0].device),
        "refusals": [{"window": index, **r.as_dict()} for index, r in guard.refusals],
        "micro_batches": _entries("refused", refused, window),
        "accepted": _entries("accepted", accepted, window),
        "findings": [finding.as_dict() for finding in guard.forensics.findings],
        "history": list(guard.history),
        "moments": numbers,
        "optimizer": type(guard.update.optimizer).__name__,
        "groups": _read("rates", lambda: [*map(_plain_values, guard.update.groups())], lost) or [],
        "spike_limits": None if guard.window.spikes is None else list(outcome.limits),
        "settings": settings,
        "versions": versions(),
        "student": student,
    }
    files = {WINDOW: window, MOMENTS: moments, WEIGHTS: weights}
    # before the record is written, which names what is lost on the way
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
    """Read a post-mortem bundle onto the host.

    Raises:
        BundleError: the folder is no bundle, of another version, or malformed.
        CheckpointError: a file is damaged.
    """
    folder = Path(folder)
    path = folder / POSTMORTEM
    require_file(path, "pass a complete folder postmortem/step-XXXXXXXX", BundleError)
    record = read_json(path, BundleError)
    version = record.get("version")
    if version != VERSION:
        written = record.get("versions")
        writer = f" ({shown(written.get('npt'))})" if isinstance(written, dict) else ""
        has = "no format version" if version is None else f"format version {shown(version)}"
        raise BundleError(
            f"{path} has {has}, but this npt reads {VERSION}; replay it with the npt that wrote"
            f" it{writer}"
        )
    check_entries(path, "", record, _ENTRIES, BundleError)
    # before any tensor is read: safetensors detects no flipped bit
    verify_checkpoint(folder)
    window = _tensors(folder / WINDOW)
    weights = _tensors(folder / WEIGHTS)
    with well_formed(path):
        refused = tuple(_micro_batch(entry, window) for entry in record["micro_batches"])
        accepted = tuple(_micro_batch(entry, window) for entry in record["accepted"])
        limits = record["spike_limits"]
        if limits is not None:
            loss, norm = map(_limit, limits)
            limits = loss, norm
    if not refused:
        raise BundleError(f"{path} has no refused micro-batch; restore it from the original")
    moments = {**record["moments"], **_tensors(folder / MOMENTS)}
    return Postmortem(folder, refused, accepted, weights, moments, limits, record)


def _limit(limit: Any) -> float:
    # an infinite limit is null in JSON
    return math.inf if limit is None else float(limit)


@contextmanager
def well_formed(path: Path) -> Iterator[None]:
    """Raise BundleError if the record at `path`, or a tensor beside it, proves to be malformed."""
    try:
        yield
    except _MALFORMED as error:
        said = isinstance(error, NPTError) and not isinstance(error, ConfigError)
        if said or is_out_of_memory(error):
            raise
        raise BundleError(
            f"{path} is damaged: {type(error).__name__}: {shown(str(error))}; restore it from the"
            " original"
        ) from error


def _entries(
    kind: str, micro_batches: Sequence[StoredMicroBatch], tensors: dict[str, Tensor]
) -> list[dict[str, Any]]:
    entries = []
    for number, stored in enumerate(micro_batches):
        autocast = {k: str(d).removeprefix("torch.") for k, d in stored.autocast.items()}
        name = f"{kind}.{number}"
        inputs = _described(stored.inputs, name, tensors)
        random = _described(stored.random, f"random.{name}", tensors)
        refusal = None if stored.refusal is None else stored.refusal.as_dict()
        entry = {
            "inputs": inputs,
            "sample_ids": list(stored.sample_ids),
            "tokens": _plain(stored.tokens),
            "refusal": refusal,
            "random": random,
            "autocast": autocast,
        }
        entries.append(entry)
    return entries


def _micro_batch(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> StoredMicroBatch:
    refusal = entry["refusal"]
    dtypes = {"float16": torch.float16, "bfloat16": torch.bfloat16}
    return StoredMicroBatch(
        inputs=_restored(entry["inputs"], tensors),
        sample_ids=tuple(map(str, entry["sample_ids"])),
        tokens=int(entry["tokens"]),
        refusal=None if refusal is None else Refusal.from_dict(refusal),
        random=_restored(entry["random"], tensors),
        autocast={k: dtypes[name] for k, name in entry["autocast"].items() if name in dtypes},
    )


def _described(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return nested inputs for JSON; tensors move to `tensors`, and their names replace them."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {str(key): _described(v, f"{name}.{key}", tensors) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_described(v, f"{name}.{index}", tensors) for index, v in enumerate(value)]
    return _plain(value)


def _restored(value: Any, tensors: Mapping[str, Tensor]) -> Any:
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
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return str(value)
    return value
