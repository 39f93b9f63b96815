"""Sensitivity of the teacher's predictions to each layer, from one backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from npt.adapters.converted import adapters_disabled, decoder_layers, is_sharded, npt_layers
from npt.adapters.layer import within
from npt.adapters.stream import Stream, open_stream
from npt.base.linear import cast_once
from npt.base.precision import fp32_products
from npt.calibration.cut import Cut
from npt.data.batch import Batch
from npt.distill.logit_losses import LOGIT_CHUNK
from npt.distributed.processes import ProcessGroup
from npt.errors import NumericalError

LARGEST = 2.0
"""Upper bound of a token's size r in S, in medians of its batch."""


class Sensitivity:
    """Second moments over tokens for one layer, [D, D] fp64, in units of each token's size r, the
    root mean square of h + a.

    S is a block of the Fisher information: e'S e / (2 r^2) is the KL that an error e of a costs, to
    second order.

    All that reads h + a first divides it by r, so gradients are proportional to 1 / r. Some tokens,
    above all the first of a text, have a hundred times the r of others (Sun et al., "Massive
    activations in large language models", 2024). Plain means would weight their errors like those
    of other tokens. But all later tokens attend to them, so their gradients do not shrink with
    1 / r, and in units of r they would dominate S. So S bounds r by LARGEST medians.

    Attributes:
        covariance: C = E a a' / r^2.
        to_attention: S = E s s' r^2, with s the gradient at a of the log-likelihood, summed over
            tokens, of tokens drawn from the teacher's own predictions.
    """

    def __init__(self, width: int, device: torch.device):
        self.covariance, self.to_attention = (
            torch.zeros(width, width, dtype=torch.float64, device=device) for _ in range(2)
        )

    def add(self, stream: Tensor, attention: Tensor, to_attention: Tensor) -> None:
        """Add rows [N, D] of h + a, a and s to the sums, which `average` turns into means."""
        size = stream.to(torch.float32).square().mean(dim=-1, keepdim=True).sqrt().clamp_min(1e-12)
        usual = torch.minimum(size, LARGEST * size.median())
        self.covariance += _moved(_gram(attention / size), self.covariance.device)
        self.to_attention += _moved(_gram(to_attention * usual), self.to_attention.device)

    def cut(self, device: torch.device) -> Cut:
        """Return the layer's cut, factorised on `device` and stored where the matrices are."""
        matrices = self.covariance, self.to_attention
        return Cut.of(*(m.to(device) for m in matrices)).to(self.covariance.device)

    def average(self, processes: ProcessGroup, tokens: int) -> None:
        """Turn the sums into means over the tokens of all processes, in place to save memory."""
        for total in (self.covariance, self.to_attention):
            if processes.size > 1:  # NCCL sums only on the GPU
                total.copy_(processes.sum_(total.to(processes.device)))
            total /= tokens


def measure(
    model: PreTrainedModel,
    numbered: Iterable[tuple[int | None, Batch]],
    seed: int,
    sums: Mapping[int, Sensitivity],
) -> None:
    """Add batches to the sums of every converted layer. The model does not change.

    With a sharded base, a fault is raised only after the last batch, because the other processes
    need this one for every pass through a layer.

    Args:
        model: with adapters attached.
        numbered: batches and their numbers; None for a batch whose result is discarded.
        seed: seeds the draws from the predictions, together with a batch's number.
        sums: sums by layer index.

    Raises:
        NumericalError: an activation or gradient is non-finite.
    """
    converted, layers = npt_layers(model), decoder_layers(model)
    device = next(model.parameters()).device
    generator = torch.Generator(device)
    first, to_the_end = converted[0][0], is_sharded(model)
    faults: list[NumericalError] = []

    def check(name: str, rows: Tensor, command: str = "find its cause with npt trace") -> bool:
        finite = bool(torch.isfinite(rows).all())
        if not finite:
            message = f"calibration: the {name} not finite; {command}. The adapters are unchanged"
            faults.append(NumericalError(message))
            if not to_the_end:
                raise faults[0]
        return finite

    def walked(batch: Batch, seen: dict[tuple[int, str], Tensor]) -> Stream:
        with ExitStack() as stack:
            stack.enter_context(adapters_disabled(model))
            for index, watched in converted:
                stack.enter_context(_watched(watched, index, seen))
            with torch.no_grad():
                stream = open_stream(model, batch)
                stream = stream.through(layers[:first])
            with torch.enable_grad():
                stream = replace(stream, hidden=stream.hidden.detach().requires_grad_())
                hidden = stream.through(layers[first:]).hidden
                states = stream.rows(model.model.norm(hidden))
            for index in sums:
                for name in ("attention output", "stream"):
                    check(f"{name} of layer {index} is", stream.rows(seen[index, name].detach()))
            states.backward(_score(model, states.detach(), generator, check))
        return stream

    for number, batch in numbered:
        generator.manual_seed(seed * 1_000_003 + (number or 0))
        seen: dict[tuple[int, str], Tensor] = {}
        stream = within(model.model, partial(walked, batch.to(device), seen))
        for index, of_layer in sums.items():
            gradient = seen[index, "stream"].grad
            assert gradient is not None
            at_attention = stream.rows(gradient)
            check(f"gradient at the attention output of layer {index} is", at_attention)
            if number is not None and not faults:
                of_layer.add(
                    stream.rows(seen[index, "stream"].detach()),
                    stream.rows(seen[index, "attention output"].detach()),
                    at_attention,
                )
    if faults:
        raise faults[0]


def _watched(layer: Any, index: int, seen: dict[tuple[int, str], Tensor]) -> ExitStack:
    """Hook a layer's attention output a and the stream h + a. The gradient of the stream is that of
    a at constant h.
    """

    def attention(module: Any, inputs: Any, output: Any) -> None:
        seen[index, "attention output"] = output[0]

    def stream(module: Any, inputs: Any) -> None:
        inputs[0].retain_grad()
        seen[index, "stream"] = inputs[0]

    stack = ExitStack()
    stack.callback(layer.self_attn.register_forward_hook(attention).remove)
    stack.callback(layer.post_attention_layernorm.register_forward_pre_hook(stream).remove)
    return stack


def _score(
    model: PreTrainedModel,
    states: Tensor,
    generator: torch.Generator,
    check: Callable[[str, Tensor, str], bool],
) -> Tensor:
    """Return the gradient at the final states [N, D] of the log-likelihood of one token per row,
    drawn from its prediction; zeros if logits are not finite. Works in chunks of rows.
    """
    parts = []
    with cast_once(model.lm_head), torch.enable_grad():
        for rows in states.split(max(1, LOGIT_CHUNK // model.config.vocab_size)):
            leaf = rows.detach().requires_grad_()
            logits = model.lm_head(leaf).to(torch.float32)
            if not check("teacher's logits are", logits, "run npt trace on the base"):
                return torch.zeros_like(states)
            predicted = torch.softmax(logits.detach(), dim=-1)
            drawn = torch.multinomial(predicted, 1, generator=generator).squeeze(-1)
            loss = F.cross_entropy(logits, drawn, reduction="sum")
            parts.append(torch.autograd.grad(loss, leaf)[0])
    return torch.cat(parts)


def _gram(rows: Tensor) -> Tensor:
    """Return X'X of rows X, computed in full fp32 whatever --matmul_precision is.

    With unit roundoff u = 2^-24, the error of a product over n rows is at most n u |X|'|X|, and in
    practice about sqrt(n) u: 3e-6 of the diagonal for n = 2,048, below the bound of eigenvalues
    (`cut.SMALLEST`, 1e-5). TF32 rounds the rows themselves to 2^-11 = 5e-4, far above that bound:
    whitened directions would be noise.
    """
    rows = rows.to(torch.float32)
    with fp32_products("highest"):
        return rows.T @ rows


def _moved(gram: Tensor, device: torch.device) -> Tensor:
    """Move a matrix to a device; to the host through pinned memory, several times as fast."""
    if gram.device.type == "cuda" and device.type == "cpu":
        return torch.empty(gram.shape, dtype=gram.dtype, pin_memory=True).copy_(gram)
    return gram.to(device)
