"""The work around the loop: smoke test, closed-form start, evaluations, `run.json`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_parameters, attached_config, is_sharded, npt_layers
from npt.base.identity import BaseIdentity
from npt.base.precision import audit_precision, policy_dtype
from npt.config import TrainConfig
from npt.data.batch import Batch, batches, find_fault
from npt.distill.local import BatchSums
from npt.distill.step import MicroBatchSplitter, forward_backward, free_memory, oom_message
from npt.distill.strategies import Strategy
from npt.errors import SmokeTestError
from npt.random_state import kept_random_state
from npt.runs.resume import plain_settings
from npt.train.data import RunData, makes_start
from npt.train.setup import RunSetup
from npt.versions import versions

if TYPE_CHECKING:
    from npt.calibration.report import Calibration
    from npt.evaluation.evaluate import Fidelity, Reference

T = TypeVar("T")

DESCENT_STEPS = 3

DESCENT_RATE = 1e-4
"""Learning rate of the smoke test. It is small enough that a step follows the gradient, and large
enough that the gain (at least 1e-3 of the loss on the models tried) exceeds fp32 rounding."""


def fitting(
    model: PreTrainedModel, act: Callable[[], T], splitter: MicroBatchSplitter, batch: Batch
) -> T:
    """Return the result of `act`, retried with fewer samples at once until it fits in memory.

    Each failure shrinks `splitter`, starting from `batch`, the largest one. Raise NoMemoryError if
    a single sample does not fit.
    """
    while True:
        try:
            return act()
        except (RuntimeError, MemoryError) as error:
            message = oom_message(error)
            # on a sharded base a retry would put this process out of step with the others
            if message is None or is_sharded(model):
                raise
        free_memory(next(model.parameters()).device)  # inside the handler the error holds the graph
        splitter.shrink(batch, message)


def calibrated(setup: RunSetup, data: RunData) -> Calibration | None:
    """Compute the closed-form start; None if the adapters were loaded or calibrated before."""
    config, model, processes = setup.config, setup.model, setup.processes
    if not makes_start(model):
        return None

    from npt.calibration.calibrate import calibrate
    from npt.calibration.report import print_calibration

    # The graph spans the whole teacher, so an OOM here says nothing about a training micro-batch.
    size = min(processes.gather(min(config.batch_size, setup.splitter.samples)))
    splitter = MicroBatchSplitter(size, partial(setup.say_lack, "the calibration"))

    def solve() -> Calibration:
        return calibrate(
            model,
            setup.tokenizer,
            data.start_samples,
            config.calibration_tokens,
            batch_size=splitter.samples,
            seed=config.seed,
            console=setup.console,
            processes=processes,
        )

    # the same on every process, so that all halve alike
    first = next(batches(data.start_samples, size), None) or data.first_batch()
    calibration = fitting(model, solve, splitter, first)
    print_calibration(calibration, setup.console)
    line = f"training skips the {data.start.begun} samples that calibration used"
    if not data.start.begun:
        line = "too few samples to skip those used for calibration: the first losses are on them"
    setup.say(line)
    return calibration


def evaluator(setup: RunSetup, data: RunData) -> Callable[[], Fidelity]:
    """Return a function that evaluates the student, with no more samples at once than training."""
    report, samples = partial(setup.say_lack, "an evaluation"), data.eval_samples
    splitter = MicroBatchSplitter(setup.config.batch_size, report)
    reference: list[Reference] = []  # a separate teacher's outputs

    def measure() -> Fidelity:
        from npt.evaluation.evaluate import evaluate, reference_outputs

        size = splitter.samples
        if setup.teacher is not None and not reference:
            reference.append(reference_outputs(setup.teacher, samples, batch_size=size))
        return evaluate(
            setup.model,
            setup.tokenizer,
            samples,
            batch_size=size,
            unquantized=reference[0] if reference else None,
            between=setup.check_stop,
        )

    def evaluated() -> Fidelity:
        splitter.samples = min(splitter.samples, setup.splitter.samples)
        largest = next(batches(samples, splitter.samples))
        return fitting(setup.model, measure, splitter, largest)

    return evaluated


def run_record(
    setup: RunSetup, data: RunData, base: BaseIdentity, calibration: Calibration | None
) -> dict[str, Any]:
    """Return settings, model, precision, device and data of a run, for `run.json`."""
    model = setup.model
    form = plain_settings(asdict(attached_config(model)))  # including the ranks of the start
    return {
        "settings": {**setup.settings, **form},
        "layers": [index for index, _ in npt_layers(model)],
        "trainable_parameters": sum(p.numel() for p in adapter_parameters(model).values()),
        "seed": setup.config.seed,
        "date": setup.date,
        **base.as_record(),
        "precision": asdict(audit_precision(model, policy_dtype(model))),
        "device": str(setup.device),
        "deterministic": setup.deterministic,
        "processes": setup.processes.size,
        "versions": versions(),
        "heldout": data.heldout,
        "sources": [
            {"name": source.label, "dataset": source.dataset, "share": source.share}
            for source in data.sources
        ],
        "calibration": None if calibration is None else calibration.as_dict(),
    }


@kept_random_state()
def smoke_test(
    model: PreTrainedModel,
    batch: Batch,
    strategy: Strategy,
    config: TrainConfig,
    splitter: MicroBatchSplitter | None = None,
) -> str:
    """Check on one batch that training can work, before a long run; return the verdict as a line.

    The check uses the model, data and settings of the run. It requires a valid batch, a finite
    loss, no NaN in backward under anomaly detection, a finite and non-zero gradient for every
    adapter tensor, none for frozen tensors, and a lower loss after a few small steps on the same
    batch. Weights and random state are restored.

    Raises:
        SmokeTestError: a requirement is not met.
    """
    fault = find_fault(batch, model.config.vocab_size)
    if fault is not None:
        raise _failure(f"the first batch cannot be used: {fault}; check the data and the tokenizer")
    parameters = adapter_parameters(model)
    snapshot = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    # Every call draws the same random numbers: dropout must not change the loss between steps.
    compute = partial(forward_backward, model, strategy, batch, config, splitter)
    optimizer = torch.optim.AdamW(parameters.values(), lr=DESCENT_RATE, weight_decay=0.0)
    optimizer.zero_grad()
    try:
        sums = _under_anomaly_detection(compute)
        loss = float(sums.loss) / sums.tokens
        if not math.isfinite(loss):
            raise _failure(
                f"the loss of the first batch is {loss}; run npt trace to find the operation"
            )
        _check_gradients(model)
        for _ in range(DESCENT_STEPS):
            optimizer.step()
            optimizer.zero_grad()
            sums = compute()
        after = float(sums.loss) / sums.tokens
    finally:
        optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(snapshot[name])
    if not after < loss:
        raise _failure(
            f"{DESCENT_STEPS} small steps on one batch took its loss from {loss:.6g} to"
            f" {after:.6g}; it should fall, so the gradient does not match the loss"
        )
    return (
        f"smoke test passed: loss {loss:.4g} per token, {after:.4g} after {DESCENT_STEPS} small"
        f" steps on the same batch; all {len(parameters)} adapter tensors get finite gradients, the"
        " base gets none"
    )


def _failure(message: str) -> SmokeTestError:
    return SmokeTestError(f"smoke test: {message}")


def _under_anomaly_detection(compute: Callable[[], BatchSums]) -> BatchSums:
    try:
        with warnings.catch_warnings():
            # anomaly mode warns that it is on, and prints the forward's traceback
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly(check_nan=True):
                return compute()
    except RuntimeError as error:
        if "nan" not in str(error).lower():
            raise
        raise _failure(
            f"backward produced NaN ({str(error).splitlines()[0]}); lower --additive_scale or add"
            " --safe_mode"
        ) from error


def _check_gradients(model: PreTrainedModel) -> None:
    # an A whose B and M are all zero gets no gradient yet, by the chain rule
    silent = {
        f"model.layers.{index}.npt.A"
        for index, layer in npt_layers(model)
        if not any(bool(p.any()) for p in [*layer.npt.B.values(), *layer.npt.M.values()])
    }
    adapters = adapter_parameters(model)
    for name, parameter in adapters.items():
        if parameter.grad is None or not bool(parameter.grad.any()):
            if name not in silent:
                raise _failure(f"{name} gets no gradient, so it would never be trained")
        elif not bool(torch.isfinite(parameter.grad).all()):
            raise _failure(
                f"the gradient of {name} is not finite; lower --additive_scale or add --safe_mode"
            )
    for name, parameter in model.named_parameters():
        if name not in adapters and (parameter.requires_grad or parameter.grad is not None):
            raise _failure(
                f"the frozen tensor {name} would be trained; attach adapters with npt.attach"
            )
