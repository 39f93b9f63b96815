"""The post-mortem of an NPT student: it knows its base and settings, so `npt replay` needs no more
than its folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.attach import attach
from npt.adapters.files.adapter_files import (
    StoredAdapter,
    find_adapter,
    read_adapter,
    write_adapter,
)
from npt.adapters.files.run_layout import ADAPTER
from npt.base.identity import PARTS, BaseIdentity, base_hash
from npt.base.load import load_base, load_teacher
from npt.base.precision import declared_dtype, quantization_of
from npt.config import ATTENTIONS, QUANT_TYPES, TrainConfig
from npt.data.batch import IGNORE_INDEX, ROW_TENSORS, Batch, batch_from_tensors, find_fault
from npt.distill.step import MicroBatchSplitter, add_batch, forward_backward, student_guard, summed
from npt.distill.strategies import drive
from npt.errors import BundleError, ConfigError, ModelError
from npt.forensics.bundle import Postmortem, StoredMicroBatch, StudentPart, read_postmortem
from npt.forensics.replay import ModelState, Replay, replayed
from npt.guard.forensics import ACCEPTED
from npt.guard.guard import Guard
from npt.guard.outcome import Refusal
from npt.manifest import POSTMORTEM
from npt.random_state import kept_random_state
from npt.runs.checkpoint import OPTIMIZER_TENSORS
from npt.stored import check_entries, shown
from npt.tracer.watchdogs import BadNumber, base_fault

_STUDENT: dict[str, tuple[type, ...]] = {
    "settings": (dict,),
    "base": (dict,),
    "samples_at_once": (int,),
    "rate": (int, float),
}
_BASE: dict[str, tuple[Any, ...]] = {
    "quantization": (None, *QUANT_TYPES, "mixed"),
    "dtype": ("float32", "float16", "bfloat16"),
    "matmul_precision": ("highest", "high", "medium"),
}
_HASHES: dict[str, tuple[type, ...]] = {"hash": (str,), "hash_at_stop": (str, type(None))}
_OPTIONAL = {f.name for f in fields(Batch) if f.default is None}


def student_part(
    model: PreTrainedModel,
    window: Sequence[Batch],
    refused: Sequence[Refusal],
    accepted: Sequence[Batch],
    entry: Mapping[str, Any],
    record: Mapping[str, Any],
) -> StudentPart:
    """Return what a student's post-mortem has of its own.

    Args:
        model: with adapters attached, no window in flight.
        window: the micro-batches that ended the run, as collated.
        refused: among them.
        accepted: the micro-batches of the last window without a refusal.
        entry: `settings` of this stage, `samples_at_once` of a micro-batch, and `rate` of the
            window's step.
        record: the content of `run.json`.
    """
    whole = next((r for r in refused if r.micro_batch is None), None)
    by_place = {r.micro_batch: r for r in refused if r.micro_batch is not None}
    parts = {name: record["base_parts"][name] for name in PARTS}
    identity = BaseIdentity(**parts, strict=record["base_hash"])
    try:
        hash_at_stop = base_hash(model)
    except Exception:  # the post-mortem is worth more than this
        hash_at_stop = None
    base = {
        "hash": record["base_hash"],
        "hash_at_stop": hash_at_stop,
        "quantization": quantization_of(model),
        "dtype": str(declared_dtype(model)).removeprefix("torch."),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }

    def write_weights(folder: Path, weights: Mapping[str, Tensor]) -> None:
        (folder / ADAPTER).mkdir()
        write_adapter(model, folder / ADAPTER, identity, tensors=weights)

    return StudentPart(
        [_stored(batch, by_place.get(place, whole)) for place, batch in enumerate(window)],
        [_stored(batch) for batch in accepted[:ACCEPTED]],
        {**entry, "base": base},
        write_weights,
    )


def _stored(batch: Batch, refusal: Refusal | None = None) -> StoredMicroBatch:
    return StoredMicroBatch(
        batch.row_tensors, batch.sample_ids, batch.tokens, batch.offset, refusal
    )


@dataclass(frozen=True)
class StudentPostmortem:
    """A student's post-mortem whose form has been checked; adapters are still on disk.

    Attributes:
        postmortem: all that it has in common with others.
        adapter: form and origin of its adapters.
        config: of the run.
        base: what its base was: `hash`, `quantization`, `dtype`, `matmul_precision`.
        samples_at_once: that were computed of a micro-batch.
        rate: learning rate of the window's step.
    """

    postmortem: Postmortem
    adapter: StoredAdapter
    config: TrainConfig
    base: Mapping[str, Any]
    samples_at_once: int
    rate: float

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.postmortem.record["student"]["settings"]

    @property
    def base_name(self) -> str:
        return str(self.adapter.record.get("base_model_name_or_path"))


def read_student(folder: str | Path) -> StudentPostmortem:
    """Read and check everything that can be checked without the base.

    Raises:
        BundleError: a file is missing, unreadable, malformed, or of another version or trainer.
        CheckpointError, AdapterFileError: a file is not the one that was written.
    """
    postmortem = read_postmortem(folder)
    path, entry = postmortem.folder / POSTMORTEM, postmortem.record["student"]
    if entry is None:
        raise BundleError(
            f"{path} is of a guarded loop, whose model is yours; in Python:"
            f" print(npt.guard.replay({str(postmortem.folder)!r}, model))"
        )
    check_entries(path, "student.", entry, _STUDENT, BundleError)
    base = entry["base"]
    check_entries(path, "student.base.", base, _HASHES, BundleError, exact=False)
    for key, choices in _BASE.items():
        if base.get(key) not in choices:
            expected = ", ".join(map(str, choices))
            _refuse(path, f"base.{key} is {shown(base.get(key))}, expected one of {expected}")
    at_once, rate = entry["samples_at_once"], entry["rate"]
    if not (0 < at_once < 2**31 and math.isfinite(rate) and rate >= 0):
        _refuse(path, f"samples_at_once and rate are {shown((at_once, rate))}, expected a count")
    for micro_batch in (*postmortem.micro_batches, *postmortem.accepted):
        _check_rows(path, micro_batch)
    adapter = find_adapter(postmortem.folder / ADAPTER)
    config = _train_config(path, entry["settings"])
    return StudentPostmortem(postmortem, adapter, config, base, at_once, float(rate))


def _train_config(path: Path, settings: Mapping[str, Any]) -> TrainConfig:
    names = [f.name for f in fields(TrainConfig)]
    absent = sorted(set(names) - set(settings))
    if absent:
        _refuse(path, f"the setting {absent[0]} is missing")
    try:
        return TrainConfig(**{name: settings[name] for name in names})
    except (ConfigError, TypeError) as error:
        raise BundleError(f"{path} has a setting that cannot work: {error}") from error


def _check_rows(path: Path, micro_batch: StoredMicroBatch) -> None:
    """Check the tensors of a batch; token ids and labels are judged by `find_fault`, as in the
    run.
    """
    rows = micro_batch.inputs if isinstance(micro_batch.inputs, dict) else {}
    wanted = {name for name in ROW_TENSORS if name not in _OPTIONAL or name in rows}
    if set(rows) != wanted:
        odd = sorted(set(rows) ^ wanted)[0]
        _refuse(
            path, f"a micro-batch {'holds' if odd in rows else 'lacks'} the tensor {shown(odd)}"
        )
    shape: tuple[int, ...] = tuple(getattr(rows["input_ids"], "shape", ()))
    for name, tensor in rows.items():
        held = isinstance(tensor, Tensor) and tensor.dtype == torch.int64
        if not held or tuple(tensor.shape) != shape or len(shape) != 2 or 0 in shape:
            _refuse(path, f"{name} of a micro-batch is not int64 [B, T] like input_ids")
    if len(micro_batch.sample_ids) != shape[0]:
        named = len(micro_batch.sample_ids)
        _refuse(path, f"a micro-batch has {shape[0]} rows, and {named} samples are named")
    limits = {"attention_mask": 2, "position_ids": shape[1], "documents": shape[1]}
    for name, limit in limits.items():
        if name in rows and bool(((rows[name] < 0) | (rows[name] >= limit)).any()):
            _refuse(path, f"{name} of a micro-batch holds numbers outside [0, {limit})")


def _refuse(path: Path, why: str) -> NoReturn:
    raise BundleError(f"{path}: {why}; the bundle is broken or was changed, copy it again")


class StudentState(ModelState):
    """A student on its base, in the state that a post-mortem's window found.

    Args:
        student: its post-mortem.
        model: the base, with adapters attached.
        teacher: a model of its own, if the run had one.
    """

    weights_name = "adapters"

    def __init__(
        self,
        student: StudentPostmortem,
        model: PreTrainedModel,
        teacher: PreTrainedModel | None = None,
    ):
        folder = student.postmortem.folder
        _, weights = read_adapter(model, folder / ADAPTER, check_base=False, finite=False)
        super().__init__(replace(student.postmortem, weights=weights), model.eval())
        self.student, self.teacher, self._model = student, teacher, model
        self._strategy = partial(drive, teacher=teacher)
        for name, parameter in self.parameters.items():
            for key in OPTIMIZER_TENSORS:
                moment = self.postmortem.moments.get(f"{key} of {name}")
                shape = () if key == "step" else tuple(parameter.shape)
                if not isinstance(moment, Tensor) or tuple(moment.shape) != shape:
                    raise BundleError(
                        f"{folder} holds no moment {key} of {name} of shape {list(shape)}; the"
                        " bundle is broken or was changed, copy it again"
                    )

    def guard(self) -> Guard:
        """Return a guard over AdamW as the run had it."""
        guard = student_guard(self._model, self.student.config, [self.student.rate])
        update = guard.update
        with torch.no_grad():
            for name, parameter in zip(update.names, update.parameters, strict=True):
                for key in OPTIMIZER_TENSORS:
                    moment = self.postmortem.moments[f"{key} of {name}"]
                    update.optimizer.state[parameter][key].copy_(moment)
        guard.window.resume_at(self.postmortem.step)
        return guard

    def add(self, guard: Guard, micro_batch: StoredMicroBatch) -> None:
        """Compute a micro-batch as the run did: its own random numbers, in parts of its size, on
        which an overflow may depend.
        """
        config, splitter = self.student.config, self._splitter()
        add_batch(
            guard,
            batch_of(micro_batch),
            lambda batch: summed(self._model, self._strategy, batch, config, splitter),
            self._model.config.vocab_size,
        )

    def compute(self, micro_batch: StoredMicroBatch) -> Any:
        """Return the sums of a micro-batch."""
        config, batch = self.student.config, batch_of(micro_batch)
        return forward_backward(self._model, self._strategy, batch, config, self._splitter())

    def fault(self, micro_batch: StoredMicroBatch) -> str | None:
        return find_fault(batch_of(micro_batch), self._model.config.vocab_size)

    def fresh(
        self, like: StoredMicroBatch, avoid: Sequence[StoredMicroBatch], seed: int
    ) -> StoredMicroBatch | None:
        """Return a micro-batch of random tokens, every valid one a target."""
        mask = like.inputs["attention_mask"].bool()
        labels = torch.where(mask, like.inputs["input_ids"], IGNORE_INDEX)
        return super().fresh(replace(like, inputs={**like.inputs, "labels": labels}), avoid, seed)

    def base_fault(self) -> BadNumber | None:
        """Return what is not finite in the base, 4-bit statistics included."""
        return base_fault(self._model)

    def heading(self) -> str:
        base = f"base {self.student.base_name} ({self.student.base['hash'][:12]})"
        return f"{base}, {super().heading()}"

    def base_changed(self) -> bool | None:
        """Return whether the base in the run's memory had changed when it stopped."""
        then = self.student.base["hash_at_stop"]
        return None if then is None else then != self.student.base["hash"]

    def _splitter(self) -> MicroBatchSplitter:
        return MicroBatchSplitter(self.student.samples_at_once)


def batch_of(micro_batch: StoredMicroBatch) -> Batch:
    """Return the batch that was stored, on the host."""
    rows, ids = micro_batch.inputs, micro_batch.sample_ids
    batch = batch_from_tensors(rows["input_ids"], rows["attention_mask"], ids)
    return replace(batch.with_rows(rows, ids), offset=micro_batch.offset)


def replay_student(
    folder: str | Path,
    *,
    model_name: str | None = None,
    device: str | torch.device | None = None,
    micro_batch: int | None = None,
) -> Replay:
    """Load a run's base, check that it is the same, and replay its post-mortem, as
    `npt.forensics.replay.replay` does. Precision of torch's products and random state are the
    run's within it only.

    Args:
        folder: of the post-mortem.
        model_name: of the base; default the recorded name.
        device: default the recorded kind: statistics of 4-bit weights are rounded otherwise on
            another.
        micro_batch: trace this one, refused or not, instead of the refused ones.

    Raises:
        BundleError: the post-mortem or its base cannot be used.
        ConfigError: there is no such micro-batch or device.
    """
    student = read_student(folder)
    last = len(student.postmortem.micro_batches) - 1
    if micro_batch is not None and not 0 <= micro_batch <= last:
        raise ConfigError(
            f"--micro_batch is {micro_batch}, the bundle has micro-batches 0 to {last}"
        )
    with restored(student, model_name=model_name, device=device) as state:
        return replayed(state, micro_batch)


@contextmanager
def restored(
    student: StudentPostmortem,
    *,
    model_name: str | None = None,
    device: str | torch.device | None = None,
) -> Iterator[StudentState]:
    """Load base and teacher, and yield the state that the window found; see `replay_student`."""
    precision = torch.get_float32_matmul_precision()
    with kept_random_state():
        try:
            torch.set_float32_matmul_precision(student.base["matmul_precision"])
            name = model_name if model_name is not None else student.base_name
            model = _load(student, name, device)
            yield StudentState(student, model, _load_teacher(student, name, model.device))
        finally:
            torch.set_float32_matmul_precision(precision)


def _load(
    student: StudentPostmortem, name: str, device: str | torch.device | None
) -> PreTrainedModel:
    base, recorded = student.base, f"{student.postmortem.folder} was recorded on"
    kind = student.postmortem.record["device"].split(":")[0]
    if device is None and kind == "cpu":
        device = "cpu"
    try:
        device = None if device is None else torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"--device is {device!r}; name one such as cpu or cuda:0") from error
    packed, recipe = base["quantization"] is not None, student.adapter.recipe
    try:
        model, _ = load_base(
            name,
            quantization=base["quantization"] if base["quantization"] in QUANT_TYPES else None,
            device=device,
            use_fp16=not packed and base["dtype"] == "float16",
            compute_dtype="bf16" if packed and base["dtype"] == "bfloat16" else "fp32",
            attn_implementation=_attention(student, "attn_implementation"),
            **({} if recipe is None else recipe.storage),
        )
    except ModelError as error:
        raise BundleError(
            f"{recorded} a base that cannot be loaded: {error}; pass the run's own --model_name"
        ) from error
    loaded = base_hash(model)
    if loaded != base["hash"]:
        here = next(model.parameters()).device.type
        elsewhere = f", on {kind} (statistics of 4-bit weights are rounded otherwise on {here})"
        raise BundleError(
            f"{recorded} base {base['hash'][:12]} ({student.base_name!r}), {name!r} is"
            f" {loaded[:12]}; pass the run's own model with"
            f" --model_name{elsewhere if here != kind else ''}"
        )
    try:
        attach(model, student.adapter.config)
    except ConfigError as error:
        raise BundleError(f"{student.postmortem.folder} does not fit its base: {error}") from error
    return model


def _attention(student: StudentPostmortem, *names: str) -> str:
    """Return the attention recorded under the first of these settings; the default if none is
    recorded, or one that `load_base` does not know.
    """
    recorded = next((student.settings[n] for n in names if n in student.settings), None)
    return recorded if recorded in ATTENTIONS else "sdpa"


def _load_teacher(
    student: StudentPostmortem, name: str, device: torch.device
) -> PreTrainedModel | None:
    folder, precision = student.postmortem.folder, student.settings.get("teacher_precision")
    if precision is None:
        return None
    attention = _attention(student, "teacher_attention", "attn_implementation")
    try:
        teacher = load_teacher(name, precision, device=device, attn_implementation=attention)
    except (ConfigError, ModelError) as error:
        raise BundleError(
            f"{folder} was recorded with a teacher that cannot be loaded: {error}"
        ) from error
    recorded, loaded = str(student.settings.get("teacher")), base_hash(teacher)
    if loaded != recorded:
        raise BundleError(
            f"{folder} was recorded with teacher {recorded[:12]}, {name!r} is {loaded[:12]}; pass"
            " its own --model_name"
        )
    return teacher
