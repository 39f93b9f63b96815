"""The post-mortem of an NPT run, from which `npt replay` loads the base and the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.attach import attach
from npt.adapters.converted import adapter_parameters, adapter_tensors, attached_config
from npt.base.attention import set_deterministic
from npt.base.identity import base_hash
from npt.base.load import load_base, load_teacher
from npt.base.precision import fp32_products, matmul_precision
from npt.base.recipe import ENTRY, Recipe
from npt.batch import ROW_TENSORS, Batch
from npt.config import ATTENTIONS, NPTConfig, TrainConfig
from npt.distill.local import BatchSums
from npt.distill.logit_losses import sampling_words
from npt.distill.step import MicroBatchSplitter, summed
from npt.distill.strategies import drive
from npt.errors import BundleError, ConfigError, ModelError
from npt.forensics.bundle import Postmortem, read_postmortem, well_formed
from npt.forensics.replay import Replay, replayed
from npt.guard.forensics import StoredMicroBatch
from npt.guard.outcome import Refusal
from npt.manifest import POSTMORTEM
from npt.random_state import kept_random_state, micro_batch_draws, random_state
from npt.stored import check_entries

_STUDENT: dict[str, tuple[type, ...]] = {
    "base": (str,),
    "base_hash": (str,),
    ENTRY: (dict, type(None)),
    "adapter": (dict,),
    "settings": (dict,),
    "samples_at_once": (int,),
    "matmul_precision": (str,),
    "fixed": (dict,),
}
TEACHER = "teacher"
"""Name of the rows that the teacher reads, among those of a micro-batch."""


def stored_batches(
    batches: Sequence[Batch], seed: int, refused: Sequence[Refusal] = ()
) -> list[StoredMicroBatch]:
    """Return a window's micro-batches, in order and with their refusals, for a post-mortem."""
    by_place = {refusal.micro_batch: refusal for refusal in refused}
    stored = []
    for place, batch in enumerate(batches):
        refusal = by_place.get(place, by_place.get(None))
        state: Mapping[str, Tensor] = {}
        draws = micro_batch_draws(seed, batch.sample_ids, batch.offset)
        with suppress(torch.AcceleratorError), draws:  # the GPU may be lost; the seed remains
            state = random_state()
        rows: dict[str, Any] = {**batch.row_tensors}
        if batch.teacher is not None:
            rows[TEACHER] = batch.teacher.row_tensors
        stored.append(StoredMicroBatch(rows, batch.sample_ids, batch.tokens, refusal, state))
    return stored


def student_entry(
    model: PreTrainedModel, settings: Mapping[str, Any], hash_of_base: str, samples_at_once: int
) -> dict[str, Any]:
    """Return what is needed to load a student again and compute it in the same parts."""
    recipe = Recipe.of(model)
    return {
        "base": model.config._name_or_path,
        "base_hash": hash_of_base,
        ENTRY: None if recipe is None else asdict(recipe),
        "adapter": asdict(attached_config(model)),
        "settings": settings,
        "samples_at_once": samples_at_once,
        "matmul_precision": matmul_precision(),
        # what the weights of a bundle lack, because it is not trained
        "fixed": {
            name: tensor.tolist()
            for name, tensor in adapter_tensors(model).items()
            if name not in adapter_parameters(model)
        },
    }


@dataclass(frozen=True)
class StudentPostmortem:
    """A student's post-mortem, read and checked, without its base.

    Attributes:
        entry: what `student_entry` returned.
        recipe: how the base was loaded.
    """

    postmortem: Postmortem
    entry: Mapping[str, Any]
    recipe: Recipe
    adapter: NPTConfig
    config: TrainConfig

    def load(self, name: str | None = None) -> tuple[PreTrainedModel, PreTrainedModel | None]:
        """Return the base, by its recorded name or this one, with adapters, and a separate teacher.

        BundleError if a model cannot be loaded, or is not the recorded one.
        """
        folder = self.postmortem.folder
        settings = self.entry["settings"]
        base = self.entry["base"]
        recorded = self.postmortem.record["device"]
        if name is None:
            name = base
        # statistics of 4-bit weights are rounded differently on CPU and GPU
        device = "cpu" if recorded == "cpu" else None
        attention = settings.get("attn_implementation")
        if attention not in ATTENTIONS:
            attention = "sdpa"
        teacher = None
        precision = settings.get("teacher_precision")
        try:
            model, _ = load_base(
                name, device=device, attn_implementation=attention, **self.recipe.arguments
            )
            # then and now: a model of the same name may have changed
            hashes = {"base": (self.entry["base_hash"], base_hash(model))}
            if precision is not None:
                attention = settings.get("teacher_attention", attention)
                teacher = load_teacher(
                    name, precision, device=model.device, attn_implementation=attention
                )
                hashes["teacher"] = settings.get("teacher"), base_hash(teacher)
        except (ConfigError, ModelError) as error:
            raise BundleError(
                f"{folder} was recorded with a model that cannot be loaded: {error}; pass the run's"
                " model with --model_name"
            ) from error
        for kind, (then, now) in hashes.items():
            if then != now:
                raise BundleError(
                    f"{folder} was recorded with {kind} {str(then)[:12]} ({base!r} on {recorded}),"
                    f" but {name!r} on {model.device} is {now[:12]}; pass the run's --model_name,"
                    " on the same kind of device (4-bit weights round differently)"
                )
        attach(model, self.adapter)
        tensors = adapter_tensors(model)
        for fixed, values in self.entry["fixed"].items():
            tensors[fixed].copy_(torch.tensor(values))
        set_deterministic(model, self.config.deterministic)
        return model.eval(), teacher


def read_student(folder: str | Path) -> StudentPostmortem:
    """Read a student's post-mortem, and check all that can be checked without its base.

    Raises:
        BundleError: it is malformed, or from a guarded loop.
        CheckpointError: a file is damaged.
    """
    postmortem = read_postmortem(folder)
    path = postmortem.folder / POSTMORTEM
    entry = postmortem.record["student"]
    if entry is None:
        raise BundleError(
            f"{path} is from your own guarded loop; replay it in Python:"
            f" print(npt.guard.replay({str(postmortem.folder)!r}, model))"
        )
    check_entries(path, "student.", entry, _STUDENT, BundleError)
    if not postmortem.weights:
        raise BundleError(f"{path} has no weights: {postmortem.record['reason']}")
    with well_formed(path):
        for micro_batch in (*postmortem.micro_batches, *postmortem.accepted):
            _check_rows(micro_batch.inputs, len(micro_batch.sample_ids))
        recipe = Recipe.of_record(entry)
        if recipe is None:
            raise ValueError("npt.load_base cannot load a base like this one")
        settings = {f.name: entry["settings"][f.name] for f in fields(TrainConfig)}
        adapter = NPTConfig(**entry["adapter"])
        return StudentPostmortem(postmortem, entry, recipe, adapter, TrainConfig(**settings))


def _check_rows(inputs: Mapping[str, Any], size: int) -> None:
    rows = dict(inputs)
    teacher = rows.pop(TEACHER, None)
    kinds = {(tensor.dtype, tensor.shape) for tensor in rows.values()}
    expected = (torch.int64, (size, rows["input_ids"].shape[-1]))
    present = {*rows, "documents"}  # which only packed rows have
    if present != set(ROW_TENSORS) or kinds != {expected}:
        names = ", ".join(ROW_TENSORS)
        raise ValueError(f"a micro-batch of {size} samples does not hold {names} as int64 [B, T]")
    if teacher is not None:
        _check_rows(teacher, size)


def batch_of(rows: Mapping[str, Any]) -> Batch:
    tensors = dict(rows)
    if TEACHER in tensors:
        tensors[TEACHER] = batch_of(tensors[TEACHER])
    return Batch(**tensors, sample_ids=tuple(map(str, range(len(rows["input_ids"])))))


def replay_student(folder: str | Path, *, model_name: str | None = None) -> Replay:
    """Replay an NPT run's post-mortem like `npt.guard.replay`, after loading and checking its base,
    by its recorded name or `model_name`. Matmul precision and random state are restored afterwards.

    Raises:
        BundleError: the post-mortem or its base cannot be used.
        CheckpointError: a file is damaged.
    """
    student = read_student(folder)
    path = student.postmortem.folder / POSTMORTEM
    with well_formed(path), kept_random_state(), fp32_products(student.entry["matmul_precision"]):
        model, teacher = student.load(model_name)
        return replayed(student.postmortem, model, loss_of(student, teacher))


def loss_of(student: StudentPostmortem, teacher: PreTrainedModel | None = None) -> Any:
    """Return a loss computed in the run's parts, since an overflow may depend on their size."""
    strategy = partial(drive, teacher=teacher)
    splitter = MicroBatchSplitter(max(1, student.entry["samples_at_once"]))

    close = student.entry["settings"].get("close") is True  # not in an earlier version's

    def loss(model: PreTrainedModel, rows: Mapping[str, Any]) -> BatchSums:
        with sampling_words(close):
            return summed(model, strategy, batch_of(rows), student.config, splitter)

    return loss
