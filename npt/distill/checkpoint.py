"""Checkpoints: everything that training needs to go on as if it had never stopped.

    step-00000500/
      adapter/            the adapter, usable on its own
      state.safetensors   moments, step counts, random state of every rank, what the spike guard remembers
      state.json          counters, position in the data, settings, the base's hash
      manifest.json       sha256 and size of every other file, and of itself; written last

One writer. The folder is filled beside its place, synced, and renamed into it, so it is there as a whole or not at all; what
a disk does to it later shows in the sums. safetensors and JSON only: nothing here can run code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from npt.adapters.attach import adapter_parameters
from npt.adapters.io import load_adapter, save_adapter
from npt.distill.transaction import Kept, Transaction
from npt.errors import CheckpointError
from npt.files import new_folder, write_json
from npt.stored import read_headers, read_json, read_tensors, shown

FORMAT = 1
ADAPTER, TENSORS, RECORD, MANIFEST = "adapter", "state.safetensors", "state.json", "manifest.json"
BROKEN = ".broken"
"""What the name of a checkpoint ends in that did not verify: it is kept for its owner and never picked again."""

_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. record: `state.json`. tensors: `state.safetensors`, on the host."""

    folder: Path
    record: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def step(self) -> int:
        return int(self.record["step"])

    def restore(self, model: LlamaForCausalLM, transaction: Transaction[Any], base_hash: str) -> None:
        """Put adapters, optimizer, spike guard and step count back.

        Args:
            model: with adapters of the checkpoint's form attached.
            transaction: over these adapters, with no window open.
            base_hash: of the model.

        Raises:
            CheckpointError: a tensor is missing, extra, misshapen or not fp32.
            AdapterFileError: the adapter does not fit, or the base is another one.
        """
        parameters = adapter_parameters(model)
        wanted: dict[str, tuple[int, ...]] = {}
        for name, parameter in parameters.items():
            for key, value in transaction.optimizer.state[parameter].items():
                wanted[f"optimizer.{name}.{key}"] = tuple(value.shape)
        found = {name: tensor for name, tensor in self.tensors.items() if name.startswith("optimizer.")}
        for kind, names in (("lacks", set(wanted) - set(found)), ("has the extra", set(found) - set(wanted))):
            if names:
                raise CheckpointError(
                    f"{self.folder / TENSORS} {kind} tensor {shown(min(names))} ({len(names)} such); use another checkpoint"
                )
        for name, shape in wanted.items():
            if tuple(found[name].shape) != shape or found[name].dtype != torch.float32:
                raise CheckpointError(
                    f"{self.folder / TENSORS}: {name} is {found[name].dtype} {list(found[name].shape)}, the run needs float32 {list(shape)}"
                )
        load_adapter(model, self.folder / ADAPTER, base_hash=base_hash)
        kept: Kept = {
            name: (
                parameter.detach().clone(),
                {
                    key: found[f"optimizer.{name}.{key}"].to(value.device, copy=True)
                    for key, value in transaction.optimizer.state[parameter].items()
                },
            )
            for name, parameter in parameters.items()
        }
        transaction.restore(kept)
        transaction.resume_at(self.step)
        if transaction.spikes is not None and "spikes.losses" in self.tensors:
            transaction.spikes.recall(self.tensors["spikes.losses"].tolist(), self.tensors["spikes.norms"].tolist())

    def random_state(self, rank: int) -> dict[str, Tensor]:
        """Of one rank, by `cpu`, `cuda.0` and so on; empty for a rank that the run did not have."""
        prefix = f"rng.{rank}."
        return {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}


def write_checkpoint(
    folder: Path,
    model: LlamaForCausalLM,
    transaction: Transaction[Any],
    record: Mapping[str, Any],
    base_hash: str,
    random_states: Mapping[int, Mapping[str, Tensor]],
) -> None:
    """Write a checkpoint as a whole.

    Args:
        folder: its place.
        model: whose adapters are saved; they have to be finite.
        transaction: with no window in flight.
        record: what `state.json` is to hold: `step`, counters, position, settings.
        base_hash: of the model.
        random_states: by rank.

    Raises:
        OSError: it could not be written; nothing is there then.
        AdapterFileError: an adapter is not finite.
    """
    tensors = {f"rng.{rank}.{name}": state for rank, states in random_states.items() for name, state in states.items()}
    for name, (_, moments) in transaction.snapshot().items():
        tensors |= {f"optimizer.{name}.{key}": value.cpu().contiguous() for key, value in moments.items() if isinstance(value, Tensor)}
    if transaction.spikes is not None:
        losses, norms = transaction.spikes.remembered()
        tensors |= {"spikes.losses": torch.tensor(losses, dtype=torch.float64), "spikes.norms": torch.tensor(norms, dtype=torch.float64)}
    with new_folder(folder) as temporary:
        save_adapter(model, temporary / ADAPTER, base_hash=base_hash)
        save_file(tensors, temporary / TENSORS)
        write_json(temporary / RECORD, {"format": FORMAT, **record})
        write_manifest(temporary)


def random_state() -> dict[str, Tensor]:
    """Of this process: the CPU's, and every CUDA device's."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def set_random_state(states: Mapping[str, Tensor]) -> None:
    """Of this process; of devices that it does not have nothing is set."""
    for name, state in states.items():
        if name == "cpu":
            torch.set_rng_state(state)
        elif int(name.removeprefix("cuda.")) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, int(name.removeprefix("cuda.")))


def write_manifest(folder: Path) -> None:
    """Sums of every file below the folder."""
    files = {path.relative_to(folder).as_posix(): _sums(path) for path in _files(folder)}
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
    if not isinstance(files, dict) or path.read_bytes() != _manifest_text(files).encode():
        raise CheckpointError(f"{path} does not add up to its own sum; it was changed or damaged")
    found = {p.relative_to(folder).as_posix(): p for p in _files(folder)}
    for kind, names in (("lacks", set(files) - set(found)), ("holds the extra file", set(found) - set(files))):
        if names:
            raise CheckpointError(f"{folder} {kind} {min(names)} ({len(names)} such)")
    for name, sums in files.items():
        now = _sums(found[name])
        if now != sums:
            raise CheckpointError(
                f"{found[name]}: sha256 {now['sha256'][:12]} of {now['bytes']} bytes, the manifest says {str(sums.get('sha256'))[:12]} of "
                f"{sums.get('bytes')}"
            )


def read_checkpoint(folder: Path) -> Checkpoint:
    """Verify a checkpoint and read what it holds beside the adapter.

    Raises:
        CheckpointError: it does not verify, or is not of the form that is written.
    """
    verify_checkpoint(folder)
    record = read_json(folder / RECORD, CheckpointError)
    if record.get("format") != FORMAT:
        raise CheckpointError(f"{folder / RECORD} is of format {shown(record.get('format'))}, this version reads {FORMAT}")
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**62:
        raise CheckpointError(f"{folder / RECORD}: step is {shown(step)}, expected a whole number")
    names = read_headers(folder / TENSORS, CheckpointError)
    return Checkpoint(folder, record, read_tensors(folder / TENSORS, names, CheckpointError))


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoint folders below `folder`, oldest first; half-written and broken ones are none."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    return [path for _, path in sorted(found)]


def newest_good(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint below `folder` that verifies, and what was wrong with those that do not.

    They are renamed, so that nobody picks them again and their owner can look at them.
    """
    problems: list[str] = []
    for path in reversed(checkpoints(folder)):
        try:
            return read_checkpoint(path), problems
        except CheckpointError as error:
            aside = path.with_name(path.name + BROKEN)
            number = 1
            while aside.exists():
                number += 1
                aside = path.with_name(f"{path.name}{BROKEN}-{number}")
            os.replace(path, aside)
            problems.append(f"{error}; set aside as {aside.name}")
    return None, problems


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)


def _sums(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        return {"sha256": hashlib.file_digest(stream, "sha256").hexdigest(), "bytes": path.stat().st_size}


def _manifest_text(files: Mapping[str, Any]) -> str:
    own = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return json.dumps({"files": files, "sha256": own}, indent=2, sort_keys=True) + "\n"
