"""The state of a bundle, restored on its base: every attempt starts from it and never changes
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from npt.adapters.attach import adapter_parameters, attach
from npt.base.identity import base_hash
from npt.base.load import load_base, load_teacher
from npt.config import ATTENTIONS, QUANT_TYPES
from npt.data.batch import Batch
from npt.diagnostics.guards import base_fault, moments_fault, tensor_fault
from npt.distill.local import MicroBatch
from npt.distill.strategies import drive
from npt.errors import BundleError, ConfigError, ModelError
from npt.postmortem.bundle import Bundle
from npt.random_state import kept_random_state, set_random_state
from npt.runs.checkpoint import State
from npt.step.splitting import MicroBatchSplitter
from npt.step.train_step import TrainStep, forward_backward
from npt.step.window_result import MicroBatchRecord, Refusal


@dataclass(frozen=True)
class Tried:
    """The result of a window. traces: of the micro-batches that were computed."""

    refusals: tuple[Refusal, ...]
    traces: tuple[MicroBatchRecord, ...]


class RestoredState:
    """Model, optimizer, schedule and random state as the window of a bundle found them.

    Args:
        bundle: of the state.
        model: its base, with adapters attached.
        teacher: the run's own teacher, if it had one.

    Raises:
        CheckpointError, AdapterFileError: the bundle's tensors do not fit the model.
    """

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

    def fill(self, batch: Batch) -> MicroBatch:
        """Return the sums of one micro-batch, computed as in the run: with its random numbers, and
        in parts of its size, on which an overflow may depend.
        """
        strategy, splitter = self._strategy, MicroBatchSplitter(self.bundle.samples_at_once)
        return forward_backward(self.model, strategy, batch, self.bundle.train_config, splitter)

    def window(self, batches: Sequence[Batch], limits: tuple[float, float] | None = None) -> Tried:
        """Make one step, as the run would have; the state is the bundle's before and after.

        Args:
            batches: its micro-batches, on the host.
            limits: of the spike guard; None refuses no spike.
        """
        self.restore()
        step = self._step()
        window = step.window
        if limits is None:
            window.spikes = None
        elif window.spikes is not None:
            window.spikes.limits = limits
        (result,) = [*step.run(batches), *window.flush()]
        self.restore()
        return Tried(tuple(result.refusals), tuple(window.history))

    def _step(self) -> TrainStep:
        """Return a step in the bundle's state."""
        bundle, splitter = self.bundle, MicroBatchSplitter(self.bundle.samples_at_once)
        step = TrainStep(
            self.model, self._strategy, bundle.train_config, [bundle.rate], splitter=splitter
        )
        self._state.restore(step.window)
        return step

    def findings(self) -> dict[str, str | None]:
        """Return what is not finite in adapters, moments and base before anything is computed."""
        found = {
            "adapters": tensor_fault(self.parameters),
            "moments": moments_fault(self.parameters, self._step().update.optimizer),
            "base": base_fault(self.model),
        }
        return {name: None if finding is None else str(finding) for name, finding in found.items()}


@contextmanager
def restored(
    bundle: Bundle, *, model_name: str | None = None, device: str | torch.device | None = None
) -> Iterator[RestoredState]:
    """Load the bundle's base, check that it is the same, and restore the bundle's state on it.

    Precision of torch's products and random state are the bundle's within the context only.

    Args:
        bundle: from `read_bundle`.
        model_name: of the base; default the recorded name.
        device: default the recorded kind, since statistics of 4-bit weights are rounded otherwise
            on another.

    Raises:
        BundleError: the base cannot be loaded or is another one, or the bundle's tensors do not fit
            it.
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
    base = bundle.base
    quantization = base.quantization if base.quantization in QUANT_TYPES else None
    kind = bundle.device.split(":")[0]
    if device is None and kind == "cpu":
        device = "cpu"
    try:
        device = None if device is None else torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"--device is {device!r}; name one such as cpu or cuda:0") from error
    half = base.quantization is None and base.dtype == "float16"
    compute_dtype = "bf16" if base.quantization is not None and base.dtype == "bfloat16" else "fp32"
    try:
        model, _ = load_base(
            name,
            quantization=quantization,
            device=device,
            use_fp16=half,
            compute_dtype=compute_dtype,
            attn_implementation=_attention(bundle, "attn_implementation"),
        )
    except ModelError as error:
        raise BundleError(
            f"{bundle.folder} was recorded on a base that cannot be loaded: {error}; pass the run's"
            " own --model_name"
        ) from error
    found = base_hash(model)
    if found != base.hash:
        here = next(model.parameters()).device.type
        elsewhere = (
            f", on {kind} (statistics of 4-bit weights are rounded otherwise on {here})"
            if here != kind
            else ""
        )
        raise BundleError(
            f"{bundle.folder} was recorded on base {base.hash[:12]} ({base.name!r}), {name!r} is"
            f" {found[:12]}; pass the run's own model with --model_name{elsewhere}"
        )
    try:
        attach(model, bundle.adapter_config)
    except ConfigError as error:
        raise BundleError(f"{bundle.folder} does not fit its base: {error}") from error
    return model


def _attention(bundle: Bundle, *settings: str) -> str:
    """Return the attention recorded under the first of these settings; the default if none is
    recorded, or one that `load_base` does not know."""
    recorded = next(
        (bundle.said["settings"][name] for name in settings if name in bundle.said["settings"]),
        None,
    )
    return recorded if recorded in ATTENTIONS else "sdpa"


def _load_teacher(bundle: Bundle, name: str, device: torch.device) -> PreTrainedModel | None:
    precision = bundle.said["settings"].get("teacher_precision")
    if precision is None:
        return None
    try:
        # earlier runs recorded one for both
        attention = _attention(bundle, "teacher_attention", "attn_implementation")
        teacher = load_teacher(name, precision, device=device, attn_implementation=attention)
    except (ConfigError, ModelError) as error:
        raise BundleError(
            f"{bundle.folder} was recorded with a teacher that cannot be loaded: {error}"
        ) from error
    recorded, found = str(bundle.said["settings"].get("teacher")), base_hash(teacher)
    if found != recorded:
        raise BundleError(
            f"{bundle.folder} was recorded with teacher {recorded[:12]}, {name!r} is {found[:12]};"
            " pass its own --model_name"
        )
    return teacher
