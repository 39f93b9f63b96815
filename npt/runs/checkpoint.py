"""Checkpoints: everything that training needs to resume as if it had never stopped.

    step-00000500/
      adapter/            the adapter, usable on its own
      state.safetensors   optimizer state, random state, spike guard's history
      state.json          counters, position in the data, settings, the base's hash
      manifest.json       sha256 and size of every file; written last

A checkpoint is written as a whole or not at all. It holds only safetensors and JSON, so it cannot
run code. Because it may come from somebody else, it is checked in full before anything changes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_parameters, adapter_tensors
from npt.adapters.files.adapter_files import check_savable, read_adapter, write_adapter
from npt.adapters.files.run_layout import ADAPTER, checkpoints
from npt.base.identity import BaseIdentity
from npt.errors import CheckpointError, first_line
from npt.files import new_folder, write_json
from npt.guard.spikes import HISTORY
from npt.guard.update import GuardedUpdate
from npt.guard.window import GradientWindow
from npt.manifest import POSTMORTEM, verify_checkpoint, write_manifest
from npt.random_state import random_state, set_random_state
from npt.runs.progress import RunProgress
from npt.stored import (
    Header,
    check_entries,
    check_tensors,
    described,
    non_finite,
    read_headers,
    read_json,
    read_tensors,
    shown,
)

if TYPE_CHECKING:
    from npt.evaluation.evaluate import Fidelity

FORMAT = 1
TENSORS = "state.safetensors"
RECORD = "state.json"

OPTIMIZER_TENSORS = ("step", "exp_avg", "exp_avg_sq")

_RANDOM = "rng.0."
_SPIKES = ("spikes.losses", "spikes.norms")
_NUMBER_OR_NULL = (int, float, type(None))
_COUNTERS = ("step", "tokens", "micro_batches", "in_a_row", "diagnoses")
_COUNTS = (*_COUNTERS, "refused_by_kind", "counted_from", "position")
_ENTRIES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(_COUNTERS, (int,)),
    "base_hash": (str,),
    "last_evaluation": (int, type(None)),
    "best_kl": _NUMBER_OR_NULL,
    "samples_at_once": (list,),
    **dict.fromkeys(("refused_by_kind", "refused_by_epoch", "counted_from"), (dict,)),
    **dict.fromkeys(("position", "settings", "data", "initial"), (dict,)),
}


@dataclass(frozen=True)
class State:
    """A checkpoint's content, checked against the model so that restoring cannot fail halfway.

    Attributes:
        tensors: those of the adapters and of the optimizer, by name.
        spikes: losses and norms that the spike guard remembers.
        random_state: the random state by device, of process 0.
    """

    step: int
    tensors: Mapping[str, Tensor]
    spikes: tuple[Sequence[float], Sequence[float]]
    random_state: Mapping[str, Tensor]

    def restore(self, model: PreTrainedModel, window: GradientWindow) -> None:
        """Restore adapters into a model, moments, spike guard and step count into its empty window,
        and the random state.
        """
        live = {**adapter_tensors(model), **_moments(window.update)}
        with torch.no_grad():
            for name, value in self.tensors.items():
                live[name].copy_(value)
        window.resume_at(self.step)
        if window.spikes is not None:
            window.spikes.recall(*self.spikes)
        set_random_state(self.random_state)


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        record: content of `state.json`.
        headers: dtypes and shapes in `state.safetensors`.
    """

    folder: Path
    record: Mapping[str, Any]
    headers: Mapping[str, Header]

    @property
    def step(self) -> int:
        return int(self.record["step"])

    @property
    def progress(self) -> RunProgress:
        return RunProgress.from_record(self.record)

    @property
    def initial(self) -> Fidelity:
        """The student's figures before training."""
        from npt.evaluation.evaluate import Fidelity

        return Fidelity.from_dict(self.record["initial"])

    def state(self, model: PreTrainedModel, base: BaseIdentity) -> State:
        """Return everything to restore, checked against a model with adapters of the same form. The
        model does not change.

        Raises:
            CheckpointError: the state does not fit the adapters.
            AdapterFileError: the adapter does not fit the model, or the base differs.
        """
        path = self.folder / TENSORS
        _, adapters = read_adapter(model, self.folder / ADAPTER, base=base)
        shapes: dict[str, tuple[int, ...]] = {}
        for name in adapter_parameters(model):
            for key in OPTIMIZER_TENSORS:
                # a step is a scalar, a moment has its parameter's shape
                shape = () if key == "step" else tuple(adapters[name].shape)
                shapes[f"optimizer.{name}.{key}"] = shape
        others = ("rng.", "spikes.")
        headers = {n: h for n, h in self.headers.items() if not n.startswith(others)}
        check_tensors(path, headers, shapes, CheckpointError)
        tensors = {**adapters, **_read(path, shapes)}
        return State(self.step, tensors, self._spikes(), self._random_state())

    def _random_state(self) -> dict[str, Tensor]:
        path = self.folder / TENSORS
        states = {}
        names = {_RANDOM + "cpu", *(name for name in self.headers if name.startswith("rng."))}
        for name, state in read_tensors(path, names, CheckpointError).items():
            match = re.fullmatch(r"rng\.0\.((cpu)|cuda\.\d{1,3})", name)
            try:
                if match is None:
                    raise ValueError("no such device")
                # without CUDA nothing sets a state of CUDA, and nothing can check it
                if match[2] or torch.cuda.is_initialized():
                    torch.Generator(match[2] or "cuda").set_state(state)
            except (RuntimeError, TypeError, ValueError) as problem:
                raise CheckpointError(
                    f"{path}: the tensor {shown(name)} is not a random state"
                    f" ({first_line(problem)}); restore it from the original"
                ) from problem
            states[match[1]] = state
        return states

    def _spikes(self) -> tuple[list[float], list[float]]:
        path = self.folder / TENSORS
        headers = {name: h for name, h in self.headers.items() if name.startswith("spikes.")}
        if not headers:
            return [], []
        _, shape = next(iter(headers.values()))
        count = math.prod(shape)
        check_tensors(path, headers, dict.fromkeys(_SPIKES, (count,)), CheckpointError, "F64")
        if count > HISTORY:
            has = described(headers[_SPIKES[0]])
            raise CheckpointError(
                f"{path}: {_SPIKES[0]} is {has}, expected F64 [{HISTORY}] at most"
            )
        losses, norms = _read(path, _SPIKES).values()
        return losses.tolist(), norms.tolist()


def _read(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    tensors = read_tensors(path, names, CheckpointError)
    bad = non_finite(tensors)
    if bad is not None:
        raise CheckpointError(f"{path}: {bad} has a non-finite value; use another checkpoint")
    return tensors


def _moments(update: GuardedUpdate) -> dict[str, Tensor]:
    """Return the optimizer's tensors by their names in the file."""
    moments = {}
    for name, parameter in zip(update.names, update.parameters, strict=True):
        for key in OPTIMIZER_TENSORS:
            moments[f"optimizer.{name}.{key}"] = update.optimizer.state[parameter][key]
    return moments


def write_checkpoint(
    folder: Path,
    model: PreTrainedModel,
    window: GradientWindow,
    record: Mapping[str, Any],
    base: BaseIdentity,
) -> None:
    """Write a checkpoint, whole or not at all (OSError); AdapterFileError if the adapter is not
    finite.

    Args:
        window: a window without outcomes in flight.
        record: content of `state.json`.
    """
    check_savable(adapter_tensors(model), folder)
    tensors = {}
    for name, moment in _moments(window.update).items():
        tensors[name] = moment.cpu().contiguous()  # safetensors takes no other
    # process 0 writes for all: micro-batches are seeded individually, other draws agree
    for device, state in random_state().items():
        tensors[_RANDOM + device] = state
    if window.spikes is not None:
        for name, logarithms in zip(_SPIKES, window.spikes.remembered(), strict=True):
            tensors[name] = torch.tensor(logarithms, dtype=torch.float64)
    with new_folder(folder) as temporary:
        (temporary / ADAPTER).mkdir()
        write_adapter(model, temporary / ADAPTER, base)
        save_file(tensors, temporary / TENSORS)
        write_json(temporary / RECORD, {"format": FORMAT, **record})
        write_manifest(temporary)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Verify a checkpoint and its record without reading tensors, or raise CheckpointError."""
    if (folder / POSTMORTEM).exists():
        raise CheckpointError(
            f"{folder} is a post-mortem, not a checkpoint; to replay it, run npt replay {folder}"
        )
    verify_checkpoint(folder)
    path = folder / RECORD
    record = read_json(path, CheckpointError)
    if record.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {shown(record.get('format'))}, but this npt reads {FORMAT}; resume"
            " with the npt that wrote it"
        )
    _check_counts(path, record)
    # no tensors yet: what they must be depends on the model
    checkpoint = Checkpoint(folder, record, read_headers(folder / TENSORS, CheckpointError))
    try:
        _check_figures(checkpoint)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged (position, figures or counts): {shown(str(error))}; restore it from"
            " the original or use another checkpoint"
        ) from error
    return checkpoint


def _check_counts(path: Path, record: Mapping[str, Any]) -> None:
    """Raise CheckpointError for an entry that is missing, or of the wrong type, or no count."""
    check_entries(path, "", record, _ENTRIES, CheckpointError, exact=False)
    counted_from = {"steps": (int,), "micro_batches": (int,)}
    check_entries(path, "counted_from.", record["counted_from"], counted_from, CheckpointError)
    for name, (is_right, expected) in _VALUES.items():
        if not is_right(record[name]):
            raise CheckpointError(f"{path}: {name} is {shown(record[name])}, expected {expected}")


def _check_figures(checkpoint: Checkpoint) -> None:
    """Raise an error of Python's for a position or figures that later code could not read."""
    known = checkpoint.progress.position.as_dict()
    position = checkpoint.record["position"]
    if known != position:
        raise ValueError(f"unknown entries of the position {sorted(position.keys() - known)}")
    figures = checkpoint.initial
    models = [model.as_dict() for model in (figures.teacher, figures.floor, figures.student)]
    for value in _leaves([models, figures.layers]):
        if not isinstance(value, _NUMBER_OR_NULL):
            raise ValueError("a figure is not a number")
    for layer in figures.layers.values():
        layer["nmse_student"]


def newest_good(folder: Path) -> tuple[Checkpoint | None, dict[Path, str]]:
    """Return the newest checkpoint that verifies, and the faults of newer ones; CheckpointError if
    it has another version's format.
    """
    broken: dict[Path, str] = {}
    for path in reversed(checkpoints(folder)):
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            broken[path] = str(error)
        else:
            return read_checkpoint(path), broken
    return None, broken


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _are_counts(value: Any) -> bool:
    return all(map(_is_count, _leaves(value)))


def _are_samples(of_processes: list[Any]) -> bool:
    return 0 not in of_processes and all(n is None or _is_count(n) for n in of_processes)


def _are_by_epoch(counts: dict[str, Any]) -> bool:
    return all(map(str.isdecimal, counts)) and all(map(_is_count, counts.values()))


_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_COUNTS, (_are_counts, "counts")),
    "samples_at_once": (_are_samples, "a count or null for each process"),
    "refused_by_epoch": (_are_by_epoch, "counts by epoch"),
}
"""What the types of the record's entries leave open."""
