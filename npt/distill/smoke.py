"""The smoke test: one batch forward and backward under anomaly detection, before a run spends its first hour.

It proves on the real model, data and settings that the loss is finite, that every adapter tensor gets a finite, non-zero
gradient and that no frozen tensor gets any. Weights, optimizer and random state are as before afterwards.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn
from transformers import LlamaForCausalLM

from npt.adapters.attach import adapter_parameters, npt_layers
from npt.config import TrainConfig
from npt.data.batch import Batch, find_fault
from npt.distill.strategies import Strategy
from npt.errors import SmokeTestError


def smoke_test(model: LlamaForCausalLM, batch: Batch, strategy: Strategy, config: TrainConfig) -> str:
    """Run the test on `batch`; return the verdict as one line.

    Raises:
        SmokeTestError: what failed, by name, and what to do.
    """
    fault = find_fault(batch, model.config.vocab_size)
    if fault is not None:
        raise SmokeTestError(f"smoke test: the first batch has a {fault}; check the data and the tokenizer")
    parameters = adapter_parameters(model)
    for parameter in parameters.values():
        parameter.grad = None
    try:
        loss = _forward_and_backward(model, batch, strategy, config)
        _check_gradients(model, parameters)
    finally:
        for parameter in parameters.values():
            parameter.grad = None
    return f"smoke test passed: loss {loss:.4g} per token, finite gradients on {len(parameters)} adapter tensors, none on the base"


def _forward_and_backward(model: LlamaForCausalLM, batch: Batch, strategy: Strategy, config: TrainConfig) -> float:
    """The loss per token, with the gradients left in place."""
    device = next(model.parameters()).device
    try:
        with warnings.catch_warnings():
            # Anomaly mode announces itself, and a fault with the forward's traceback; the error below says it in a line.
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly(check_nan=True):
                sums = strategy(model, batch.to(device), config)
    except RuntimeError as error:
        if "nan" not in str(error).lower():
            raise
        first = str(error).splitlines()[0]
        raise SmokeTestError(f"smoke test: backward produced NaN ({first}); lower --additive_scale, or start with --safe_mode") from error
    loss = float(sums.loss) / sums.tokens
    if loss - loss != 0.0:  # NaN or infinite
        raise SmokeTestError(f"smoke test: the loss of the first batch is {loss}; the base or an adapter holds non-finite values")
    return loss


def _check_gradients(model: LlamaForCausalLM, parameters: dict[str, nn.Parameter]) -> None:
    silent = _expected_silent(model)
    for name, parameter in parameters.items():
        if parameter.grad is None or not bool(parameter.grad.any()):
            if name not in silent:
                raise SmokeTestError(f"smoke test: {name} gets no gradient; it would never be trained")
        elif not bool(torch.isfinite(parameter.grad).all()):
            raise SmokeTestError(f"smoke test: the gradient of {name} is not finite; start with --safe_mode")
    for name, parameter in model.named_parameters():
        if name not in parameters and (parameter.requires_grad or parameter.grad is not None):
            raise SmokeTestError(f"smoke test: the frozen tensor {name} would be trained; attach the adapters with npt.attach")


def _expected_silent(model: LlamaForCausalLM) -> set[str]:
    """A's whose B and M are all zero: by the chain rule they get no gradient before these have moved."""
    silent: set[str] = set()
    for index, layer in npt_layers(model):
        if not any(bool(p.any()) for p in [*layer.npt.B.values(), *layer.npt.M.values()]):
            silent.add(f"model.layers.{index}.npt.A")
    return silent
