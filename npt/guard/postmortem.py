"""The post-mortem of a guarded run that gives up: micro-batches, weights and moments, reasons.

    step-00000123/
      window.safetensors    the last refused micro-batches as they were, and their random state
      weights.safetensors   the trained parameters from before the window (undo="none": after it)
      moments.safetensors   what the optimizer keeps for them
      postmortem.json       refusals, findings, settings, versions
      manifest.json         sha256 and size of the other files

It appears as a whole or not at all, and holds safetensors and JSON only. `npt.guard.replay` traces
its micro-batches in the model that was trained. A run of NPT's own trainer writes another, which
has its base and settings too and can be replayed by itself (`npt.postmortem`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from npt.errors import BundleError
from npt.files import new_folder, write_json
from npt.guard.forensics import Finding, Kept
from npt.guard.outcome import Refusal, Snapshot
from npt.guard.settings import GuardSettings
from npt.manifest import POSTMORTEM, verify_checkpoint, write_manifest
from npt.stored import check_entries, read_headers, read_json, read_tensors, require_file
from npt.versions import versions

VERSION = "guard-1"
WINDOW, WEIGHTS, MOMENTS = "window.safetensors", "weights.safetensors", "moments.safetensors"

_ENTRIES: dict[str, tuple[type, ...]] = {
    "version": (str,),
    "reason": (str,),
    "step": (int,),
    "process": (int,),
    "refusals": (list,),
    "micro_batches": (list,),
    "findings": (list,),
    "moments": (dict,),
    "groups": (list,),
    "settings": (dict,),
    "versions": (dict,),
}


@dataclass(frozen=True)
class Situation:
    """A guarded run that gives up.

    step: applied steps. refusals: with their windows, the oldest first. suspects: micro-batches
    that were refused last, on this process. state: from before the window. groups: the settings of
    the optimizer's parameter groups.
    """

    reason: str
    step: int
    process: int
    refusals: Sequence[tuple[int, Refusal]]
    suspects: Sequence[tuple[Refusal, Kept]]
    findings: Sequence[Finding]
    state: Snapshot
    groups: Sequence[Mapping[str, Any]]
    settings: GuardSettings


@dataclass(frozen=True)
class Postmortem:
    """A post-mortem that was read.

    micro_batches: by the paths of their entries, such as `input_ids`, tensors and plain values.
    random: the state that each was computed from. weights: by name, for
    `model.load_state_dict(weights, strict=False)`. moments: by `exp_avg of NAME` and so on. said:
    the content of `postmortem.json`.
    """

    folder: Path
    micro_batches: tuple[dict[str, Any], ...]
    random: tuple[dict[str, Tensor], ...]
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    said: Mapping[str, Any] = field(repr=False)


def tried_postmortem(folder: Path | str, situation: Situation) -> str:
    """Write it, and return its place, or why it could not be written: the error that it is about
    matters more.
    """
    try:
        return f"post-mortem: {write_postmortem(Path(folder), situation)}"
    except Exception as error:
        return f"the post-mortem could not be written: {type(error).__name__}: {error}"


def write_postmortem(folder: Path, situation: Situation) -> Path:
    """Write `step-XXXXXXXX` below the folder, of other processes than the first with their number.

    Raises:
        OSError, SafetensorError: it could not be written.
    """
    process = f"-process-{situation.process}" if situation.process else ""
    folder = Path(folder).absolute() / f"step-{situation.step:08d}{process}"
    window: dict[str, Tensor] = {}
    entries = []
    for number, (refusal, kept) in enumerate(situation.suspects):
        values = {}
        inputs = kept.batch if kept.inputs is None else kept.inputs
        for path, leaf in _leaves(inputs):
            if isinstance(leaf, Tensor):
                window[f"{number}.{path}"] = leaf
            else:
                values[path] = _plain(leaf)
        window |= {f"random.{number}.{device}": state for device, state in kept.random.items()}
        entries.append({"refusal": refusal.as_dict(), "values": values})
    weights = {name: value for name, (value, _) in situation.state.items()}
    moments: dict[str, dict[str, Any]] = {"tensors": {}, "values": {}}
    for name, (_, state) in situation.state.items():
        for key, value in state.items():
            kind = "tensors" if isinstance(value, Tensor) else "values"
            moments[kind][f"{key} of {name}"] = value
    settings = asdict(situation.settings)
    settings["refuse"] = [kind.__name__ for kind in settings["refuse"]]
    said = {
        "version": VERSION,
        "reason": situation.reason,
        "step": situation.step,
        "process": situation.process,
        "refusals": [{"window": index, **r.as_dict()} for index, r in situation.refusals],
        "micro_batches": entries,
        "findings": [
            {
                "refusal": f.refusal.as_dict(),
                "verdict": None if f.verdict is None else f.verdict.as_dict(),
                "why": f.why,
            }
            for f in situation.findings
        ],
        "moments": {name: _plain(value) for name, value in moments["values"].items()},
        "groups": [{key: _plain(value) for key, value in g.items()} for g in situation.groups],
        "settings": {name: _plain(value) for name, value in settings.items()},
        "versions": versions(),
    }
    with new_folder(folder) as temporary:
        for name, tensors in ((WINDOW, window), (WEIGHTS, weights), (MOMENTS, moments["tensors"])):
            save_file({key: _stored(tensor) for key, tensor in tensors.items()}, temporary / name)
        write_manifest(temporary)
        write_json(temporary / POSTMORTEM, said)
    return folder


def read_postmortem(folder: str | Path) -> Postmortem:
    """Read a guard's post-mortem, on the host.

    Raises:
        BundleError: it is none, or is malformed.
        CheckpointError: a file is not the one that was written.
    """
    folder = Path(folder)
    path = folder / POSTMORTEM
    require_file(path, "name a folder postmortem/step-XXXXXXXX", BundleError)
    said = read_json(path, BundleError)
    if said.get("version") != VERSION:
        raise BundleError(f"{path} is no guard's of version {VERSION}; `npt replay` may read it")
    check_entries(path, "", said, _ENTRIES, BundleError)
    verify_checkpoint(folder)
    window, weights, moments = (
        read_tensors(file, read_headers(file, BundleError), BundleError)
        for file in (folder / WINDOW, folder / WEIGHTS, folder / MOMENTS)
    )
    micro_batches, random = [], []
    for number, entry in enumerate(said["micro_batches"]):
        values = {"refusal": (dict,), "values": (dict,)}
        entry = entry if isinstance(entry, dict) else {}
        check_entries(path, f"micro_batches.{number}.", entry, values, BundleError)
        micro_batches.append({**entry["values"], **_below(f"{number}.", window)})
        random.append(_below(f"random.{number}.", window))
    return Postmortem(folder, tuple(micro_batches), tuple(random), weights, moments, said)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
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
        yield from _leaves(item, f"{path}.{key}" if path else str(key))


def _plain(value: Any) -> Any:
    """Return what JSON has a word for, else its text."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return str(value)
    return value


def _stored(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
