"""The post-mortem of an NPT run: it knows its base and settings, so `npt replay` needs no more than
its folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.attach import attach
from npt.adapters.converted import attached_config
from npt.base.identity import base_hash
from npt.base.load import load_base, load_teacher
from npt.base.recipe import ENTRY, Recipe
from npt.config import ATTENTIONS, NPTConfig, TrainConfig
from npt.data.batch import ROW_TENSORS, Batch, batch_from_tensors
from npt.distill.local import BatchSums
from npt.distill.step import MicroBatchSplitter, summed
from npt.distill.strategies import drive
from npt.errors import BundleError, ConfigError, ModelError
from npt.forensics.bundle import (
    Postmortem,
    StoredMicroBatch,
    StudentPart,
    read_postmortem,
    well_formed,
)
from npt.forensics.replay import Replay, replayed
from npt.guard.forensics import KEPT
from npt.guard.outcome import Refusal
from npt.manifest import POSTMORTEM
from npt.random_state import kept_random_state, micro_batch_draws, random_state


def student_part(
    model: PreTrainedModel,
    settings: Mapping[str, Any],
    hash_of_base: str,
    samples_at_once: int,
    window: Sequence[Batch],
    refused: Sequence[Refusal],
    accepted: Sequence[Batch],
) -> StudentPart:
    """Return what a student's post-mortem has of its own.

    Args:
        model: with adapters attached.
        settings: of the run's `run.json`, as they are in this stage.
        hash_of_base: when the run began.
        samples_at_once: that were computed of a micro-batch.
        window: the micro-batches that ended the run, as collated.
        refused: among them.
        accepted: the micro-batches of the last window without a refusal.
    """
    recipe = Recipe.of(model)
    entry = {
        "base": model.config._name_or_path,
        "base_hash": hash_of_base,
        ENTRY: None if recipe is None else recipe.as_record(),
        "adapter": asdict(attached_config(model)),
        "settings": settings,
        "samples_at_once": samples_at_once,
        "matmul_precision": torch.get_float32_matmul_precision(),
    }

    def stored(batch: Batch, refusal: Refusal | None = None) -> StoredMicroBatch:
        with micro_batch_draws(settings["seed"], batch.sample_ids, batch.offset):
            state = random_state()
        return StoredMicroBatch(batch.row_tensors, batch.sample_ids, batch.tokens, refusal, state)

    by_place = {refusal.micro_batch: refusal for refusal in refused}
    return StudentPart(
        [stored(batch, by_place.get(i, by_place.get(None))) for i, batch in enumerate(window)],
        [stored(batch) for batch in accepted[:KEPT]],
        entry,
    )


@dataclass(frozen=True)
class StudentPostmortem:
    """A student's post-mortem, read and checked; its base is not loaded yet.

    Attributes:
        postmortem: all that it has in common with others.
        base: the name of its base.
        base_hash: of the base when the run began.
        recipe: how its base was loaded.
        adapter: the form of its adapters.
        config: of the run.
        samples_at_once: that were computed of a micro-batch.
        matmul_precision: of fp32 products.
    """

    postmortem: Postmortem
    base: str
    base_hash: str
    recipe: Recipe
    adapter: NPTConfig
    config: TrainConfig
    samples_at_once: int
    matmul_precision: str

    @property
    def settings(self) -> Mapping[str, Any]:
        settings: Mapping[str, Any] = self.postmortem.record["student"]["settings"]
        return settings

    def load(
        self, name: str | None = None, device: str | torch.device | None = None
    ) -> tuple[PreTrainedModel, PreTrainedModel | None]:
        """Return the base with adapters attached, and the teacher, if it is a model of its own.

        Args:
            name: of the base; default the recorded one.
            device: default that of the run, if there is such a one: statistics of 4-bit weights are
                rounded otherwise on another.

        Raises:
            BundleError: a model that is not the recorded one, or cannot be loaded.
            ConfigError: there is no such device.
        """
        folder, name = self.postmortem.folder, self.base if name is None else name
        recorded = self.postmortem.record["device"]
        if device is None and recorded == "cpu":
            device = "cpu"
        try:
            device = None if device is None else torch.device(device)
        except RuntimeError as error:
            raise ConfigError(f"--device is {device!r}; name one such as cpu or cuda:0") from error
        teacher, precision = None, self.settings.get("teacher_precision")
        attention = self._attention("attn_implementation")
        try:
            model, _ = load_base(
                name, device=device, attn_implementation=attention, **self.recipe.arguments
            )
            if precision is not None:
                attention = self._attention("teacher_attention", "attn_implementation")
                teacher = load_teacher(
                    name, precision, device=model.device, attn_implementation=attention
                )
            hashes = {"base": (self.base_hash, base_hash(model))}
            if teacher is not None:
                hashes["teacher"] = str(self.settings.get("teacher")), base_hash(teacher)
            attach(model, self.adapter)
        except (ConfigError, ModelError) as error:
            raise BundleError(
                f"{folder} was recorded on a model that cannot be loaded: {error}; pass the run's"
                " own with --model_name"
            ) from error
        for kind, (then, now) in hashes.items():
            if then != now:
                raise BundleError(
                    f"{folder} was recorded on {kind} {then[:12]} ({self.base!r} on {recorded}),"
                    f" {name!r} on {model.device} is {now[:12]}; pass the run's own --model_name,"
                    " and its kind of --device, on which statistics of 4-bit weights depend"
                )
        return model.eval(), teacher

    def _attention(self, *names: str) -> str:
        """Return the attention recorded under the first of these settings; the default if none is
        recorded, or one that `load_base` does not know.
        """
        recorded = next((self.settings[name] for name in names if name in self.settings), None)
        return recorded if recorded in ATTENTIONS else "sdpa"


def read_student(folder: str | Path) -> StudentPostmortem:
    """Read and check everything that can be checked without the base.

    Raises:
        BundleError: a file is missing, unreadable, malformed, or of another version or trainer.
        CheckpointError: a file is not the one that was written.
    """
    postmortem = read_postmortem(folder)
    path, entry = postmortem.folder / POSTMORTEM, postmortem.record["student"]
    if entry is None:
        raise BundleError(
            f"{path} is of a guarded loop, whose model is yours; in Python:"
            f" print(npt.guard.replay({str(postmortem.folder)!r}, model))"
        )
    for micro_batch in (*postmortem.micro_batches, *postmortem.accepted):
        _check_rows(path, micro_batch)
    with well_formed(path):
        recipe = Recipe.of_record(entry)
        if recipe is None:
            raise ValueError("npt.load_base cannot load a base like this one")
        if entry["matmul_precision"] not in ("highest", "high", "medium"):
            raise ValueError(f"matmul_precision is {entry['matmul_precision']}")
        names = [setting.name for setting in fields(TrainConfig)]
        try:
            return StudentPostmortem(
                postmortem,
                str(entry["base"]),
                str(entry["base_hash"]),
                recipe,
                NPTConfig(**entry["adapter"]),
                TrainConfig(**{name: entry["settings"][name] for name in names}),
                max(1, int(entry["samples_at_once"])),
                entry["matmul_precision"],
            )
        except ConfigError as error:
            raise ValueError(str(error)) from error


def _check_rows(path: Path, micro_batch: StoredMicroBatch) -> None:
    """Check names, types and shapes of a batch's tensors."""
    rows = micro_batch.inputs if isinstance(micro_batch.inputs, dict) else {}
    kinds = {(t.dtype, t.shape) if isinstance(t, Tensor) else None for t in rows.values()}
    named = {*rows, "documents"} == set(ROW_TENSORS)
    size = len(micro_batch.sample_ids)
    if (
        not named
        or len(kinds) != 1
        or not all(
            kind is not None and kind[0] == torch.int64 and len(kind[1]) == 2 and kind[1][0] == size
            for kind in kinds
        )
    ):
        raise BundleError(
            f"{path}: a micro-batch does not hold {', '.join(ROW_TENSORS)} as int64 [B, T] with B"
            " sample ids; copy it again"
        )


def batch_of(rows: Mapping[str, Tensor]) -> Batch:
    """Return the batch whose tensors were stored."""
    batch = batch_from_tensors(rows["input_ids"], rows["attention_mask"])
    return batch.with_rows(rows, batch.sample_ids)


def replay_student(
    folder: str | Path, *, model_name: str | None = None, device: str | torch.device | None = None
) -> Replay:
    """Load a run's base, check that it is the same, and replay its post-mortem, as
    `npt.guard.replay` does. Precision of torch's products and random state are the run's within it
    only.

    Args:
        folder: of the post-mortem.
        model_name: of the base; default the recorded name.
        device: default the recorded kind.

    Raises:
        BundleError: the post-mortem or its base cannot be used.
        ConfigError: there is no such device.
    """
    student = read_student(folder)
    precision = torch.get_float32_matmul_precision()
    with kept_random_state():
        try:
            torch.set_float32_matmul_precision(student.matmul_precision)
            model, teacher = student.load(model_name, device)
            return replayed(student.postmortem, model, loss_of(student, teacher))
        finally:
            torch.set_float32_matmul_precision(precision)


def loss_of(student: StudentPostmortem, teacher: PreTrainedModel | None = None) -> Any:
    """Return what computes a micro-batch as the run did: in parts of its size, on which an overflow
    may depend.
    """
    strategy = partial(drive, teacher=teacher)
    splitter = MicroBatchSplitter(student.samples_at_once)

    def loss(model: PreTrainedModel, rows: Mapping[str, Tensor]) -> BatchSums:
        return summed(model, strategy, batch_of(rows), student.config, splitter)

    return loss
