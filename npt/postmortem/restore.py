"""The state of a bundle, restored on its base: every attempt starts from it and leaves it so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from npt.adapters.attach import attach
from npt.adapters.converted import adapter_parameters
from npt.base.identity import base_hash
from npt.base.load import load_base, load_teacher
from npt.config import ATTENTIONS, QUANT_TYPES
from npt.data.batch import Batch
from npt.diagnostics.guards import base_fault, moments_fault, tensor_fault
from npt.distill.local import BatchSums
from npt.distill.splitting import MicroBatchSplitter
from npt.distill.step import add_batch, forward_backward, student_guard, summed
from npt.distill.strategies import drive
from npt.errors import BundleError, ConfigError, ModelError
from npt.guard.guard import Guard
from npt.guard.outcome import MicroBatchRecord, Outcome, Refusal
from npt.postmortem.bundle import Bundle
from npt.random_state import kept_random_state, set_random_state
from npt.runs.checkpoint import State


@dataclass(frozen=True)
class Tried:
    """The result of a window. traces: of the micro-batches that were computed."""

    refusals: tuple[Refusal, ...]
    traces: tuple[MicroBatchRecord, ...]


class RestoredState:
    """Model, optimizer, schedule and random state as the window of a bundle found them."""

    def __init__(
        self, bundle: Bundle, model: PreTrainedModel, teacher: PreTrainedModel | None = None
    ):
        self.bundle, self.model, self.teacher = bundle, model.eval(), teacher
        self.parameters = adapter_parameters(model)
        self._strategy = partial(drive, teacher=teacher)
        self._state = State(bundle.step, bundle.snapshot(model), None, {0: bundle.random_state})
        self.device = next(model.parameters()).device
        self.restore()

    def restore(self) -> None:
        """Restore adapters and random state, and remove gradients."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self._state.snapshot[name][0])
                parameter.grad = None
        set_random_state(self.bundle.random_state)

    def fill(self, batch: Batch) -> BatchSums:
        """Return the sums of one micro-batch, computed as in the run: with its random numbers, and
        in parts of its size, on which an overflow may depend.
        """
        config, splitter = self.bundle.train_config, self._splitter()
        return forward_backward(self.model, self._strategy, batch, config, splitter)

    def window(self, batches: Sequence[Batch], limits: tuple[float, float] | None = None) -> Tried:
        """Make one step, as the run would have, with limits of the spike guard, if any; the state
        is the bundle's before and after.
        """
        self.restore()
        with self._guard() as guard:
            if limits is None:
                guard.window.spikes = None
            elif guard.window.spikes is not None:
                guard.window.spikes.limits = limits
            config, splitter = self.bundle.train_config, self._splitter()
            for batch in batches:
                add_batch(
                    guard, batch,
                    lambda batch: summed(self.model, self._strategy, batch, config, splitter),
                    self.model.config.vocab_size,
                )  # fmt: skip
            outcomes: list[Outcome] = guard.step()
            (outcome,) = outcomes + guard.flush()
            traces = tuple(guard.window.history)
        self.restore()
        return Tried(outcome.refused, traces)

    def _guard(self) -> Guard:
        guard = student_guard(self.model, self.bundle.train_config, [self.bundle.rate])
        self._state.restore(guard.window)
        return guard

    def _splitter(self) -> MicroBatchSplitter:
        return MicroBatchSplitter(self.bundle.samples_at_once)

    def findings(self) -> dict[str, str | None]:
        """Return what is not finite in adapters, moments and base before anything is computed."""
        found = {
            "adapters": tensor_fault(self.parameters),
            "moments": moments_fault(self.parameters, self._guard().update.optimizer),
            "base": base_fault(self.model),
        }
        return {name: None if finding is None else str(finding) for name, finding in found.items()}


@contextmanager
def restored(
    bundle: Bundle, *, model_name: str | None = None, device: str | torch.device | None = None
) -> Iterator[RestoredState]:
    """Load the bundle's base, check that it is the same, and restore the bundle's state on it.

    Precision of torch's products and random state are the bundle's within the context only. Default
    are the recorded base and kind of device: statistics of 4-bit weights are rounded otherwise on
    another.

    Raises:
        BundleError: the base cannot be loaded, is another one, or does not fit the tensors.
        ConfigError: no such kind of device exists.
    """
    precision = torch.get_float32_matmul_precision()
    with kept_random_state():
        try:
            torch.set_float32_matmul_precision(bundle.base.matmul_precision)
            name = model_name if model_name is not None else bundle.base.name
            model = _load(bundle, name, device)
            yield RestoredState(bundle, model, _load_teacher(bundle, name, model.device))
        finally:
            torch.set_float32_matmul_precision(precision)


def _load(bundle: Bundle, name: str, device: str | torch.device | None) -> PreTrainedModel:
    base, recorded = bundle.base, f"{bundle.folder} was recorded on"
    kind = bundle.device.split(":")[0]
    if device is None and kind == "cpu":
        device = "cpu"
    try:
        device = None if device is None else torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"--device is {device!r}; name one such as cpu or cuda:0") from error
    packed, recipe = base.quantization is not None, bundle.adapter.recipe
    try:
        model, _ = load_base(
            name,
            quantization=base.quantization if base.quantization in QUANT_TYPES else None,
            device=device,
            use_fp16=not packed and base.dtype == "float16",
            compute_dtype="bf16" if packed and base.dtype == "bfloat16" else "fp32",
            attn_implementation=_attention(bundle, "attn_implementation"),
            **({} if recipe is None else recipe.storage),
        )
    except ModelError as error:
        raise BundleError(
            f"{recorded} a base that cannot be loaded: {error}; pass the run's own --model_name"
        ) from error
    found = base_hash(model)
    if found != base.hash:
        here = next(model.parameters()).device.type
        elsewhere = f", on {kind} (statistics of 4-bit weights are rounded otherwise on {here})"
        raise BundleError(
            f"{recorded} base {base.hash[:12]} ({base.name!r}), {name!r} is {found[:12]}; pass the"
            f" run's own model with --model_name{elsewhere if here != kind else ''}"
        )
    try:
        attach(model, bundle.adapter.config)
    except ConfigError as error:
        raise BundleError(f"{bundle.folder} does not fit its base: {error}") from error
    return model


def _attention(bundle: Bundle, *names: str) -> str:
    """Return the attention recorded under the first of these settings; the default if none is
    recorded, or one that `load_base` does not know."""
    settings = bundle.said["settings"]
    recorded = next((settings[name] for name in names if name in settings), None)
    return recorded if recorded in ATTENTIONS else "sdpa"


def _load_teacher(bundle: Bundle, name: str, device: torch.device) -> PreTrainedModel | None:
    settings = bundle.said["settings"]
    precision, with_teacher = settings.get("teacher_precision"), "was recorded with"
    if precision is None:
        return None
    try:
        # earlier runs recorded one for both
        attention = _attention(bundle, "teacher_attention", "attn_implementation")
        teacher = load_teacher(name, precision, device=device, attn_implementation=attention)
    except (ConfigError, ModelError) as error:
        raise BundleError(
            f"{bundle.folder} {with_teacher} a teacher that cannot be loaded: {error}"
        ) from error
    recorded, found = str(settings.get("teacher")), base_hash(teacher)
    if found != recorded:
        raise BundleError(
            f"{bundle.folder} {with_teacher} teacher {recorded[:12]}, {name!r} is {found[:12]};"
            " pass its own --model_name"
        )
    return teacher
