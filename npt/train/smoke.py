"""The smoke test: forward, backward and a few steps on one batch, before a long run.

A few steps at the run's own learning rate should lower the loss of the batch that they are taken
on. Where they do not, that alone says little: a student near its optimum is thrown off by any rate
that is of use later, and one at its optimum only moves within rounding. So the gradient is compared
with the loss itself, by a central difference along the gradient:

    (loss(w + h g/|g|) - loss(w - h g/|g|)) / 2h      against      |g|

The ratio is 1 for a right gradient, and below 1 for a strategy that drops a part of it on purpose
(`propagated`). It is about 0 or negative for one of another loss. Only that is called wrong, and
only where the gradients at both ends still agree with the one in the middle: a gradient that
changes from one rounding to the next proves nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_parameters, npt_layers
from npt.batch import Batch, find_fault
from npt.config import TrainConfig
from npt.distill import graphed
from npt.distill.local import BatchSums
from npt.distill.step import ADAM_BETAS, MicroBatchSplitter, forward_backward
from npt.distill.strategies import Strategy
from npt.distributed.processes import ProcessGroup
from npt.errors import SmokeTestError, first_line
from npt.random_state import kept_random_state

STEPS = 3

SMALLER_RATES = 6
"""Rates to try below the run's own, each a tenth of the one before."""

SHARES = (1e-1, 1e-2, 1e-3, 1e-4)
"""Distances of the central difference: the gradient predicts a change of this share of the loss. A
large one leaves the range in which the gradient holds, a small one the loss's resolution."""

STEADY = 0.5
"""How far the mean of the gradients at both ends may be from the one in the middle, as a share of
it. Curvature cancels in the mean."""

LEAST_RATIO = 0.1
"""Lowest ratio of the loss's change to the gradient's prediction for a right gradient. For a random
one the models tried give at most 0.02."""


@kept_random_state()
def smoke_test(
    model: PreTrainedModel,
    batch: Batch,
    strategy: Strategy,
    config: TrainConfig,
    splitter: MicroBatchSplitter | None = None,
    processes: ProcessGroup | None = None,
) -> str:
    """Check on one batch that training can work, before a long run; return the verdict as a line.

    The check uses the model, data and settings of the run. It requires a valid batch, a finite
    loss, no NaN in backward under anomaly detection, a finite and non-zero gradient for every
    adapter tensor, none for frozen tensors, and a loss that falls in a few steps on the same batch
    or is at the limit of its resolution. Weights and random state are restored.

    Args:
        processes: those of the run. They take the same number of passes, as a sharded base needs.

    Raises:
        SmokeTestError: a requirement is not met.
    """
    fault = find_fault(batch, model.config.vocab_size)
    if fault is not None:
        raise _failure(f"the first batch cannot be used: {fault}; check the data and the tokenizer")
    parameters = adapter_parameters(model)
    moved = {name: p for name, p in parameters.items() if not name.endswith(".log_tau")}
    # Every call draws the same random numbers: dropout must not change the loss between steps.
    compute = partial(forward_backward, model, strategy, batch, config, splitter)
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    # the run records its own CUDA graph, maybe of other ranks
    graphed.STEPS[model] = graphed.GraphedStep(left=0)
    try:
        # the loss jumps where a number becomes active, so let all of them be
        for name in parameters.keys() - moved.keys():
            parameters[name].detach().fill_(-100.0)
        _clear(parameters)
        sums = _under_anomaly_detection(compute)
        loss = float(sums.loss) / sums.tokens
        if not math.isfinite(loss):
            raise _failure(
                f"the loss of the first batch is {loss}; run npt trace to find the operation"
            )
        _check_gradients(model)
        start = _Start(moved, weights, compute, loss, sums.tokens, processes or ProcessGroup())
        after = start.descend(config.learning_rate)
    finally:
        _restore(parameters, weights)
        _clear(parameters)
        del graphed.STEPS[model]
    return (
        f"smoke test passed: loss {loss:.4g} per token, {after}; all {len(parameters)} adapter"
        " tensors get finite gradients, the base gets none"
    )


@dataclass(eq=False)
class _Start:
    """The adapters before training, and their loss per token of one batch around them.

    Attributes:
        gradient: of the loss per token, of each tensor that has one yet.
        norm: the gradient's norm.
    """

    parameters: Mapping[str, nn.Parameter]
    weights: Mapping[str, Tensor]
    compute: Callable[[], BatchSums]
    loss: float
    tokens: int
    processes: ProcessGroup

    def __post_init__(self) -> None:
        self.gradient: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self.gradient[name] = parameter.grad / self.tokens
        self.norm = math.sqrt(self._times_gradient(self.gradient))

    def descend(self, rate: float) -> str:
        """Return what steps do to the loss; raise SmokeTestError if training cannot work."""
        after = self._after_steps(rate)
        falls = self._everywhere(after < self.loss)
        steps = f"{after:.4g} after {STEPS} steps on the same batch"
        # along a wrong gradient the loss may fall too, by chance and by little
        if self._everywhere(self.loss - after > LEAST_RATIO * STEPS * rate * self._size()):
            return steps
        resolved = self._everywhere(self._resolved())
        if falls:
            return steps
        if not resolved:
            return (
                "whether steps lower it cannot be told, since the change that its gradient predicts"
                f" is below the loss's resolution ({after:.4g} after {STEPS} steps at the run's"
                f" {rate:.2g})"
            )
        # the gradient is right, so only the rate can be too high
        lower = rate
        for _ in range(SMALLER_RATES):
            lower /= 10
            at_lower = self._after_steps(lower)
            if self._everywhere(at_lower < self.loss):
                return (
                    f"{at_lower:.4g} after {STEPS} steps on the same batch at a learning rate of"
                    f" {lower:.2g} ({after:.4g} at the run's {rate:.2g})"
                )
        raise _failure(
            f"{STEPS} steps on one batch took its loss from {self.loss:.6g} to {after:.6g}, and no"
            f" learning rate from {rate:.2g} down to {lower:.2g} lowers it, though its gradient is"
            " right; lower --learning_rate"
        )

    def _size(self) -> float:
        """Return by how much the loss falls per unit of the rate, at first: Adam's first step moves
        every weight by the rate.
        """
        return sum(float(gradient.double().abs().sum()) for gradient in self.gradient.values())

    def _after_steps(self, rate: float) -> float:
        """Return the loss after a few steps of the run's optimizer at this rate."""
        _restore(self.parameters, self.weights)
        _clear(self.parameters)
        optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=rate, betas=ADAM_BETAS, weight_decay=0.0
        )
        for name, gradient in self.gradient.items():
            self.parameters[name].grad = gradient.clone()
        loss = self.loss
        for _ in range(STEPS):
            optimizer.step()
            loss, _ = self._loss_and_slope()
        return loss

    def _resolved(self) -> bool:
        """Return whether the loss resolves the gradient, by a central difference along it.

        Raises:
            SmokeTestError: at two neighbouring distances the loss does not follow the gradient.
        """
        if not self._everywhere(self.loss != 0):  # no share of 0 is a distance
            return False
        right = False
        wrong = 0
        for share in SHARES:
            distance = share * abs(self.loss) / self.norm
            above, slope_above = self._at(distance)
            below, slope_below = self._at(-distance)
            # curvature cancels in the mean; what remains is a gradient that jumps
            mean_slope = (slope_above + slope_below) / 2
            steady = abs(mean_slope - self.norm) < STEADY * self.norm
            ratio = (above - below) / (2 * distance * self.norm)
            right = right or (steady and ratio > LEAST_RATIO)
            # a process for which it is right goes on with the others until it is for all
            if self._everywhere(right):
                return True
            # one distance alone may be too large, or too small to resolve
            wrong = wrong + 1 if steady and ratio <= LEAST_RATIO else 0
            if wrong == 2 and not right:
                raise _failure(
                    f"the gradient does not match the loss of the first batch ({self.loss:.6g}):"
                    f" along the gradient the loss changes by {ratio:.2g} times what the"
                    " gradient predicts; check the losses, strategies and targets that you added"
                )
        return False

    def _at(self, distance: float) -> tuple[float, float]:
        """Return loss and slope at a distance along the gradient at the start."""
        _restore(self.parameters, self.weights)
        with torch.no_grad():
            for name, gradient in self.gradient.items():
                self.parameters[name].add_(gradient, alpha=distance / self.norm)
        return self._loss_and_slope()

    def _loss_and_slope(self) -> tuple[float, float]:
        """Return the loss at the present weights, and its gradient along that of the start."""
        _clear(self.parameters)
        sums = self.compute()
        gradients = {name: parameter.grad for name, parameter in self.parameters.items()}
        slope = self._times_gradient(gradients) / sums.tokens / self.norm
        return float(sums.loss) / sums.tokens, slope

    def _times_gradient(self, other: Mapping[str, Tensor | None]) -> float:
        """Return the inner product with the gradient at the start."""
        total = 0.0
        for name, gradient in self.gradient.items():
            along = other[name]
            if along is not None:
                total += float((gradient.double() * along.double()).sum())
        return total

    def _everywhere(self, holds: bool) -> bool:
        """Return whether something holds in every process, so that all go on alike."""
        return all(self.processes.gather(holds))


@torch.no_grad()
def _restore(parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


def _clear(parameters: Mapping[str, nn.Parameter]) -> None:
    """Remove the gradients."""
    for parameter in parameters.values():
        parameter.grad = None


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
            f"backward produced NaN ({first_line(error)}); lower --additive_scale or add"
            " --safe_mode"
        ) from error


def _silent(model: PreTrainedModel) -> set[str]:
    """Return the names of tensors that get no gradient yet. By the chain rule, an A whose B and M
    are all zero gets none, nor does an L_in whose L_out is; a threshold that all numbers pass needs
    none.
    """
    layers = npt_layers(model)
    silent = {f"model.layers.{layers[0][0]}.npt.log_tau"}
    for index, layer in layers:
        adapter = layer.npt
        reads_code = [*adapter.B.values(), *adapter.M.values()]
        if not any(p.any() for p in reads_code):
            silent.add(f"model.layers.{index}.npt.A")
        if adapter.config.token_rank and not adapter.L_out.any():
            silent.add(f"model.layers.{index}.npt.L_in")
    return silent


def _check_gradients(model: PreTrainedModel) -> None:
    silent = _silent(model)
    adapters = adapter_parameters(model)
    for name, parameter in adapters.items():
        if parameter.grad is None or not parameter.grad.any():
            if name not in silent:
                raise _failure(f"{name} gets no gradient, so it would never be trained")
        elif not torch.isfinite(parameter.grad).all():
            raise _failure(
                f"the gradient of {name} is not finite; lower --additive_scale or add --safe_mode"
            )
    for name, parameter in model.named_parameters():
        if name not in adapters and (parameter.requires_grad or parameter.grad is not None):
            raise _failure(
                f"the frozen tensor {name} would be trained; attach adapters with npt.attach"
            )
