"""Checkpoints: everything that training needs to go on as if it had never stopped.

    step-00000500/
      adapter/            the adapter, usable on its own
      state.safetensors   moments, step counts, random state of every rank, what the spike guard
      remembers
      state.json          counters, position in the data, settings, the base's hash
      manifest.json       sha256 and size of every other file, and of itself; written last

One writer. The folder is filled beside its place, synced, and renamed into it, so it is there as a
whole or not at all; what a disk does to it later shows in the sums. safetensors and JSON only:
nothing here can run code. A checkpoint may come from somebody else, whose sums are right whatever
it holds: all of it is compared with what the run needs before anything is changed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.attach import adapter_shapes, attached_config
from npt.adapters.files.adapter_files import base_mismatch, read_adapter, save_adapter
from npt.adapters.files.run_layout import ADAPTER, checkpoints
from npt.base.identity import BaseIdentity
from npt.data.loader import Position
from npt.errors import CheckpointError
from npt.evaluation.evaluate import Fidelity
from npt.files import new_folder, write_json
from npt.random_state import read_random_state
from npt.step.gradient_window import GradientWindow
from npt.step.spikes import HISTORY
from npt.step.window_result import Snapshot
from npt.stored import (
    Header,
    check_entries,
    check_names,
    described,
    read_headers,
    read_json,
    read_tensors,
    shown,
)

FORMAT = 1
TENSORS, RECORD, MANIFEST = "state.safetensors", "state.json", "manifest.json"
OPTIMIZER_TENSORS = ("step", "exp_avg", "exp_avg_sq")

_SPIKES = ("spikes.losses", "spikes.norms")
_NUMBER = (int, float)
_COUNTERS = ("step", "tokens", "micro_batches", "in_a_row", "epoch", "diagnoses")
_ENTRIES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(_COUNTERS, (int,)),
    "last_evaluation": (int, type(None)),
    "refused_by_kind": (dict,),
    "refused_by_epoch": (dict,),
    "best_kl": (*_NUMBER, type(None)),
    "strategy": (str,),
    "counted_from": (dict,),
    "position": (dict,),
    "settings": (dict,),
    "data": (dict,),
    "initial": (dict,),
    "base_hash": (str,),
}


@dataclass(frozen=True)
class State:
    """What a checkpoint puts back, found to fit the model: nothing can go wrong half-way any more.

    kept: adapters and optimizer state. spikes: what the spike guard remembered, if there was one.
    random_states: by rank.
    """

    step: int
    kept: Snapshot
    spikes: tuple[Sequence[float], Sequence[float]] | None
    random_states: Mapping[int, Mapping[str, Tensor]]

    def restore(self, transaction: GradientWindow[Any]) -> None:
        """Put adapters, moments, spike guard and step count back into a transaction over the same
        parameters, without an open window.
        """
        kept: Snapshot = {}
        for name, parameter in zip(
            transaction.update.names, transaction.update.parameters, strict=True
        ):
            value, moments = self.kept[name]
            places = transaction.update.optimizer.state[parameter]
            kept[name] = (
                value,
                {key: moment.to(places[key].device, copy=True) for key, moment in moments.items()},
            )
        transaction.update.restore(kept)
        transaction.resume_at(self.step)
        if transaction.spikes is not None and self.spikes is not None:
            transaction.spikes.recall(*self.spikes)


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. record: `state.json`, of the form that is written. headers: of
    `state.safetensors`.
    """

    folder: Path
    record: Mapping[str, Any]
    headers: Mapping[str, Header]

    @property
    def step(self) -> int:
        return int(self.record["step"])

    @property
    def position(self) -> Position:
        """Where the run stood in its data."""
        return Position.from_dict(self.record["position"])

    @property
    def initial(self) -> Fidelity:
        """Figures of the student before training."""
        return Fidelity.from_dict(self.record["initial"])

    def base_mismatch(self, base: BaseIdentity) -> str | None:
        """Return in what the checkpoint's base differs from this one, or None."""
        return base_mismatch(self.folder / ADAPTER, base)

    def state(
        self, model: PreTrainedModel, base: BaseIdentity, *, check_base: bool = True
    ) -> State:
        """Everything that is put back, once it is found to fit; the model is not changed.

        Args:
            model: with adapters of the checkpoint's form attached.
            base: of the model.
            check_base: False takes a checkpoint of any base that its shapes fit.

        Raises:
            CheckpointError: a tensor of the state is missing, extra, misshapen, of another dtype or
                not finite.
            AdapterFileError: the adapter does not fit, or the base is another one.
        """
        path = self.folder / TENSORS
        _, adapters = read_adapter(model, self.folder / ADAPTER, base=base, check_base=check_base)
        shapes = adapter_shapes(model, attached_config(model))
        wanted: dict[str, tuple[int, ...]] = {
            f"optimizer.{name}.{key}": () if key == "step" else shape
            for name, shape in shapes.items()
            for key in OPTIMIZER_TENSORS
        }
        check_names(
            path,
            [name for name in self.headers if not name.startswith(("rng.", "spikes."))],
            wanted,
            CheckpointError,
        )
        for name, shape in wanted.items():
            if self.headers[name] != ("F32", shape):
                raise CheckpointError(
                    f"{path}: {name} is {described(self.headers[name])}, the run needs F32"
                    f" {list(shape)}"
                )
        spikes = self._spikes(path)
        random_states = {
            rank: read_random_state(path, f"rng.{rank}.", self.headers, CheckpointError)
            for rank in self._ranks(path)
        }
        tensors = read_tensors(path, wanted, CheckpointError)
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(
                    f"{path}: {name} holds a non-finite value; use another checkpoint"
                )
        kept: Snapshot = {
            name: (
                adapters[name],
                {key: tensors[f"optimizer.{name}.{key}"] for key in OPTIMIZER_TENSORS},
            )
            for name in shapes
        }
        return State(self.step, kept, spikes, random_states)

    def _ranks(self, path: Path) -> list[int]:
        """The ranks of which there is a random state: all from 0 on."""
        found = {name.split(".")[1] for name in self.headers if name.startswith("rng.")}
        ranks = [str(rank) for rank in range(len(found))]
        if found != set(ranks) or not ranks:
            raise CheckpointError(
                f"{path} holds random states of the ranks {shown(sorted(found))}, expected those"
                " from 0 on"
            )
        return [int(rank) for rank in ranks]

    def _spikes(self, path: Path) -> tuple[list[float], list[float]] | None:
        names = [name for name in self.headers if name.startswith("spikes.")]
        if not names:
            return None
        check_names(path, names, _SPIKES, CheckpointError)
        for name in _SPIKES:
            dtype, shape = self.headers[name]
            if dtype != "F64" or len(shape) != 1 or shape[0] > HISTORY:
                raise CheckpointError(
                    f"{path}: {name} is {described(self.headers[name])}, expected F64 [{HISTORY}]"
                    " at most"
                )
        losses, norms = (
            tensor.tolist() for tensor in read_tensors(path, _SPIKES, CheckpointError).values()
        )
        if not all(map(math.isfinite, [*losses, *norms])):
            raise CheckpointError(
                f"{path}: what the spike guard remembered is not finite; use another checkpoint"
            )
        return losses, norms


def write_checkpoint(
    folder: Path,
    model: PreTrainedModel,
    transaction: GradientWindow[Any],
    record: Mapping[str, Any],
    base: BaseIdentity,
    random_states: Mapping[int, Mapping[str, Tensor]],
) -> None:
    """Write a checkpoint as a whole.

    Args:
        folder: its place.
        model: whose adapters are saved; they have to be finite.
        transaction: with no window in flight.
        record: what `state.json` is to hold: `step`, counters, position, settings.
        base: of the model.
        random_states: by rank.

    Raises:
        OSError: it could not be written; nothing is there then.
        AdapterFileError: an adapter is not finite.
    """
    tensors = {
        f"rng.{rank}.{name}": state
        for rank, states in random_states.items()
        for name, state in states.items()
    }
    for name, (_, moments) in transaction.update.snapshot().items():
        tensors |= {
            f"optimizer.{name}.{key}": value.cpu().contiguous()
            for key, value in moments.items()
            if isinstance(value, Tensor)
        }
    if transaction.spikes is not None:
        values = transaction.spikes.remembered()
        tensors |= {
            name: torch.tensor(logarithms, dtype=torch.float64)
            for name, logarithms in zip(_SPIKES, values, strict=True)
        }
    with new_folder(folder) as temporary:
        save_adapter(model, temporary / ADAPTER, base=base)
        save_file(tensors, temporary / TENSORS)
        write_json(temporary / RECORD, {"format": FORMAT, **record})
        write_manifest(temporary)


def write_manifest(folder: Path) -> None:
    """Sums of every file below the folder."""
    files = {name: _sums(path) for name, path in _files(folder).items()}
    (folder / MANIFEST).write_text(_manifest_text(files), encoding="utf-8")


def verify_checkpoint(folder: Path) -> None:
    """Check every bit of a checkpoint against its manifest, and the manifest against itself.

    Raises:
        CheckpointError: which file, and both sums where it is one of sums.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no {MANIFEST}; it was not written to its end")
    manifest = read_json(path, CheckpointError)
    files = manifest.get("files")
    try:
        text, content = _manifest_text(files if isinstance(files, dict) else {}), path.read_bytes()
        if content != text.encode():
            own = _short(manifest.get("sha256"))
            raise CheckpointError(
                f"{path} does not add up: it says sha256 {own} of its entries, they have"
                f" {_own_sum(files)[:12]}"
            )
        found = _files(folder)
        assert isinstance(files, dict)
        for kind, names in (
            ("lacks", set(files) - set(found)),
            ("holds the extra file", set(found) - set(files)),
        ):
            if names:
                raise CheckpointError(f"{folder} {kind} {shown(min(names))} ({len(names)} such)")
        for name, sums in files.items():
            now = _sums(found[name])
            if now != sums:
                said = sums if isinstance(sums, dict) else {}
                raise CheckpointError(
                    f"{found[name]}: sha256 {now['sha256'][:12]} of {now['bytes']} bytes, the"
                    f" manifest says {_short(said.get('sha256'))} of {shown(said.get('bytes'))}"
                )
    except (OSError, RecursionError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error


def read_checkpoint(folder: Path) -> Checkpoint:
    """Verify a checkpoint and check the form of what it holds beside the adapter; no tensor is read
    yet.

    Raises:
        CheckpointError: it does not verify, or is not of the form that is written.
    """
    verify_checkpoint(folder)
    path = folder / RECORD
    record = read_json(path, CheckpointError)
    if record.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is of format {shown(record.get('format'))}, this version reads {FORMAT};"
            " resume with the npt that wrote it"
        )
    check_entries(path, "", record, _ENTRIES, CheckpointError, exact=False)
    for name in _COUNTERS:
        if not 0 <= record[name] < 2**62:
            raise CheckpointError(f"{path}: {name} is {shown(record[name])}, expected a count")
    check_entries(
        path,
        "counted_from.",
        record["counted_from"],
        {"steps": (int,), "micro_batches": (int,)},
        CheckpointError,
    )
    for name in ("refused_by_kind", "refused_by_epoch", "counted_from"):
        if not all(_is_count(value) for value in record[name].values()):
            raise CheckpointError(f"{path}: {name} is {shown(record[name])}, expected counts")
    at_once = record.get("samples_at_once", [])  # earlier versions did not know of it
    if not isinstance(at_once, list) or not all(
        samples is None or (_is_count(samples) and samples > 0) for samples in at_once
    ):
        raise CheckpointError(
            f"{path}: samples_at_once is {shown(at_once)}, expected a count or nothing for each"
            " rank"
        )
    try:
        [int(epoch) for epoch in record["refused_by_epoch"]]
        _check_position(record["position"])
        _check_figures(record["initial"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = shown(str(error))
        raise CheckpointError(
            f"{path} holds a position, figures or counts that are none: {what}; use another"
            " checkpoint"
        ) from error
    return Checkpoint(folder, record, read_headers(folder / TENSORS, CheckpointError))


def newest_good(folder: Path) -> tuple[Checkpoint | None, dict[Path, str]]:
    """The newest checkpoint below `folder` that verifies, and what is wrong with those behind it
    that do not.

    Raises:
        CheckpointError: the newest one that verifies is not of the form that this version writes.
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


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _check_position(values: Mapping[str, Any]) -> None:
    position = Position.from_dict(dict(values))
    if position.as_dict() != values:
        raise ValueError(f"position {values}")
    numbers = [
        *values["place"],
        *values["replay_place"],
        position.epoch,
        values["replay_epoch"],
        position.drawn,
        position.begun,
    ]
    numbers += [number for epoch, place in position.others for number in (epoch, *place)]
    if not all(map(_is_count, numbers)):
        raise ValueError(f"position {numbers}")


def _check_figures(values: Mapping[str, Any]) -> None:
    figures = Fidelity.from_dict(values)
    numbers = [
        *figures.teacher.as_dict().values(),
        *figures.floor.as_dict().values(),
        *figures.student.as_dict().values(),
    ]
    for layer in figures.layers.values():
        numbers += [layer["nmse_student"], *layer.values()]
    odd = [value for value in numbers if not isinstance(value, _NUMBER) and value is not None]
    if odd:
        raise ValueError(f"a figure is {odd[0]!r}")


def _files(folder: Path) -> dict[str, Path]:
    """Every file below the folder but the manifest, by its path from there.

    Raises:
        CheckpointError: something is no plain file, a link that leads elsewhere for one.
    """
    found: dict[str, Path] = {}
    for place, folders, names in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *names)):
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                found[path.relative_to(folder).as_posix()] = path
            elif not stat.S_ISDIR(mode):
                raise CheckpointError(
                    f"{path} is a {'link' if stat.S_ISLNK(mode) else 'special file'}; a checkpoint"
                    " holds plain files only"
                )
    found.pop(MANIFEST, None)
    return dict(sorted(found.items()))


def _sums(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        return {
            "sha256": hashlib.file_digest(stream, "sha256").hexdigest(),
            "bytes": path.stat().st_size,
        }


def _short(value: Any) -> str:
    """The beginning of a sum as a file has it, which may be anything."""
    return shown(value[:12])[1:-1] if isinstance(value, str) else shown(value)


def _own_sum(files: Any) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _manifest_text(files: Mapping[str, Any]) -> str:
    return json.dumps({"files": files, "sha256": _own_sum(files)}, indent=2, sort_keys=True) + "\n"
