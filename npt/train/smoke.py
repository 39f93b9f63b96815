"""The smoke test: one batch forward and backward under anomaly detection, before a long run.

It proves on the real model, data and settings that the batch has ids inside the vocabulary and a
token to predict in every row, that the loss is finite, that every adapter tensor gets a finite,
non-zero gradient and no frozen tensor gets any, and that a few small steps on this same batch lower
its loss. Weights, optimizer and random state are as before afterwards.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_parameters, npt_layers
from npt.config import TrainConfig
from npt.data.batch import IGNORE_INDEX, Batch, find_fault
from npt.distill.local import MicroBatch
from npt.distill.strategies import Strategy
from npt.errors import SmokeTestError
from npt.random_state import kept_random_state, micro_batch_draws

DESCENT_STEPS = 3

DESCENT_RATE = 1e-4
"""Small enough that a step follows the gradient, whatever learning rate the run is going to use;
large enough that its gain (1e-3 of the loss and more on the models tried) is far above fp32
rounding."""


@kept_random_state()
def smoke_test(
    model: PreTrainedModel, batch: Batch, strategy: Strategy, config: TrainConfig
) -> str:
    """Run the test on `batch`; return the verdict as one line, or raise SmokeTestError."""
    fault = find_fault(batch, model.config.vocab_size)
    if fault is not None:
        raise _failure(f"the first batch cannot be used: {fault}; check the data and the tokenizer")
    targets = (batch.labels[:, 1:] != IGNORE_INDEX).sum(dim=-1).tolist()
    if 0 in targets:
        raise _failure(
            f"sample {batch.sample_ids[targets.index(0)]} has no token to predict; check prompts,"
            " truncation and padding"
        )
    parameters = adapter_parameters(model)
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    batch = batch.to(next(model.parameters()).device)

    def compute() -> MicroBatch:
        # the same random numbers each time: a base that draws would have another loss for those
        with micro_batch_draws(config.seed, batch.sample_ids, batch.offset):
            return strategy(model, batch, config)

    optimizer = torch.optim.AdamW(parameters.values(), lr=DESCENT_RATE, weight_decay=0.0)
    optimizer.zero_grad()
    try:
        sums = _under_anomaly_detection(compute)
        loss = float(sums.loss) / sums.tokens
        if not math.isfinite(loss):
            raise _failure(
                f"the loss of the first batch is {loss}; the base or an adapter holds non-finite"
                " values"
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
                parameter.copy_(before[name])
    if not after < loss:
        raise _failure(
            f"{DESCENT_STEPS} small steps on one batch took its loss from {loss:.6g} to"
            f" {after:.6g}; the gradient does not point downhill, so loss and gradient disagree"
        )
    return (
        f"smoke test passed: loss {loss:.4g} per token, {after:.4g} after {DESCENT_STEPS} small"
        f" steps on the same batch, finite gradients on {len(parameters)} adapter tensors, none on"
        " the base"
    )


def _failure(message: str) -> SmokeTestError:
    return SmokeTestError(f"smoke test: {message}")


def _under_anomaly_detection(compute: Callable[[], MicroBatch]) -> MicroBatch:
    try:
        with warnings.catch_warnings():
            # anomaly mode announces itself, and a fault with the forward's traceback
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly(check_nan=True):
                return compute()
    except RuntimeError as error:
        if "nan" not in str(error).lower():
            raise
        raise _failure(
            f"backward produced NaN ({str(error).splitlines()[0]}); lower --additive_scale, or"
            " start with --safe_mode"
        ) from error


def _check_gradients(model: PreTrainedModel) -> None:
    # by the chain rule an A whose B and M are all zero gets no gradient yet
    silent = {
        f"model.layers.{index}.npt.A"
        for index, layer in npt_layers(model)
        if not any(bool(p.any()) for p in [*layer.npt.B.values(), *layer.npt.M.values()])
    }
    adapters = adapter_parameters(model)
    for name, parameter in adapters.items():
        if parameter.grad is None or not bool(parameter.grad.any()):
            if name not in silent:
                raise _failure(f"{name} gets no gradient; it would never be trained")
        elif not bool(torch.isfinite(parameter.grad).all()):
            raise _failure(f"the gradient of {name} is not finite; start with --safe_mode")
    for name, parameter in model.named_parameters():
        if name not in adapters and (parameter.requires_grad or parameter.grad is not None):
            raise _failure(
                f"the frozen tensor {name} would be trained; attach the adapters with npt.attach"
            )
