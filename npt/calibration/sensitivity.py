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
from npt.adapters.stream import Stream, open_stream
from npt.base.linear import cast_once
from npt.base.precision import fp32_products
from npt.batch import Batch
from npt.calibration.cut import Cut
from npt.calibration.token_part import TokenPart, read_by, read_width
from npt.config import NPTConfig
from npt.distill.logit_losses import LOGIT_CHUNK
from npt.distributed.processes import ProcessGroup
from npt.errors import NumericalError
from npt.hooks import within

LARGEST = 2.0
"""Upper bound in S of a token's size r, in medians of its batch."""

SMALLEST = 0.25
"""Lower bound of r in the other sums, in medians. With a token part, S leaves out a token below it:
one with a state of about 0, as after an embedding that was never trained, would dominate all."""


class Sensitivity:
    """Second moments over tokens for one layer, fp64, in units of each token's size r: the root
    mean square of h with a token part, else of h + a.

    S is a block of the Fisher information: e'S e / (2 r^2) is the KL that an error e of a costs, to
    second order.

    All that reads h + a first divides it by r, so gradients are proportional to 1 / r. Some tokens,
    above all the first of a text, have a hundred times the r of others (Sun et al., "Massive
    activations in large language models", 2024). Plain means would weight their errors like those
    of other tokens. But all later tokens attend to them, so their gradients do not shrink with
    1 / r, and in units of r they would dominate S. So S bounds r by LARGEST medians.

    Attributes:
        covariance: C = E a a' / r^2, [D, D].
        to_attention: S = E s s' r^2, [D, D], with s the gradient at a of the log-likelihood, summed
            over tokens, of tokens drawn from the teacher's own predictions.
        cross: with a token part, E a x' / r^2, [D, n], where x is x1 with a 1 appended, or 1 alone
            at Q = 0.
        inputs: with a token part, E x x' / r^2, [n, n].
    """

    def __init__(self, width: int, form: NPTConfig, device: torch.device):
        def zeros(rows: int, columns: int) -> Tensor:
            return torch.zeros(rows, columns, dtype=torch.float64, device=device)

        self.form = form
        self.covariance = zeros(width, width)
        self.to_attention = zeros(width, width)
        self.sums = [self.covariance, self.to_attention]
        if form.token_part:
            read = read_width(width, form.token_rank)
            self.cross = zeros(width, read)
            self.inputs = zeros(read, read)
            self.sums += [self.cross, self.inputs]

    def add(self, seen: Mapping[str, Tensor]) -> None:
        """Add the rows [N, D] that `_watched` names to the sums, which `average` makes means."""
        stream = seen["state"] if self.form.token_part else seen["stream"]
        stream = stream.to(torch.float32)
        size = stream.square().mean(dim=-1, keepdim=True).sqrt()
        size = size.clamp_min(1e-12)
        median = size.median()
        usual = torch.minimum(size, LARGEST * median)
        if self.form.token_part:
            # the norms multiply a gradient at a state of about 0 by 1 / sqrt(eps), layer by layer
            usual = torch.where(size < SMALLEST * median, 0.0, usual)
            size = bounded(size)
        scaled = seen["attention output"] / size
        sensed = seen["gradient"] * usual
        parts = [product(scaled, scaled), product(sensed, sensed)]
        if self.form.token_part:
            read = read_by(seen["input"], size, self.form.token_rank)
            parts += [product(scaled, read), product(read, read)]
        for total, part in zip(self.sums, parts, strict=True):
            total += _moved(part, total.device)

    def cut(self, device: torch.device) -> Cut:
        """Return the layer's cut, factorised on `device` and stored where the matrices are."""
        home = self.covariance.device
        covariance, sensitivity, *read = (total.to(device) for total in self.sums)
        if not read:
            return Cut.of(covariance, sensitivity).to(home)
        cross, inputs = read
        part = TokenPart.of(cross, inputs, sensitivity, self.form.token_rank)
        rest = part.left(covariance, cross, cross, inputs)
        # the mean of e'S e is the trace of E e e' S
        lost = (rest * sensitivity).sum() / (covariance * sensitivity).sum()
        known = 1.0 - float(lost)
        cut = Cut.of(rest, sensitivity)
        return replace(cut, token_part=part, known=known).to(home)

    def average(self, processes: ProcessGroup, tokens: int) -> None:
        """Turn the sums into means over the tokens of all processes, in place to save memory."""
        for total in self.sums:
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
    converted = npt_layers(model)
    layers = decoder_layers(model)
    device = model.device
    generator = torch.Generator(device)
    first, _ = converted[0]
    to_the_end = is_sharded(model)
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
            # no sum needs the gradient below the first converted layer, so no graph is held there
            with torch.no_grad():
                stream = open_stream(model, batch)
                stream = stream.through(layers[:first])
            with torch.enable_grad():
                stream = replace(stream, hidden=stream.hidden.detach().requires_grad_())
                hidden = stream.through(layers[first:]).hidden
                states = stream.rows(model.model.norm(hidden))
            for index in sums:
                for name in ("state", "attention output", "stream"):
                    check(f"{name} of layer {index} is", stream.rows(seen[index, name].detach()))
            states.backward(_score(model, states.detach(), generator, check))
        return stream

    for number, batch in numbered:
        # by the batch's number, so that the draws do not depend on how processes share batches
        generator.manual_seed(seed * 1_000_003 + (number or 0))
        seen: dict[tuple[int, str], Tensor] = {}
        stream = within(model.model, partial(walked, batch.to(device), seen))
        for index, of_layer in sums.items():
            gradient = seen[index, "stream"].grad
            assert gradient is not None
            gradient = stream.rows(gradient)
            check(f"gradient at the attention output of layer {index} is", gradient)
            if number is None or faults:
                continue
            rows = {n: stream.rows(t.detach()) for (i, n), t in seen.items() if i == index}
            of_layer.add({**rows, "gradient": gradient})
    if faults:
        raise faults[0]


def _watched(layer: Any, index: int, seen: dict[tuple[int, str], Tensor]) -> ExitStack:
    """Hook a layer's state h, the input x1 and the output a of its attention, and the stream h + a.
    The gradient of the stream is that of a at constant h.
    """

    def state(module: Any, inputs: Any, output: Tensor) -> None:
        seen[index, "state"] = inputs[0]
        seen[index, "input"] = output

    def attention(module: Any, inputs: Any, output: Any) -> None:
        seen[index, "attention output"] = output[0]

    def stream(module: Any, inputs: Any) -> None:
        inputs[0].retain_grad()
        seen[index, "stream"] = inputs[0]

    stack = ExitStack()
    stack.enter_context(layer.input_layernorm.register_forward_hook(state))
    stack.enter_context(layer.self_attn.register_forward_hook(attention))
    stack.enter_context(layer.post_attention_layernorm.register_forward_pre_hook(stream))
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
    at_once = max(1, LOGIT_CHUNK // model.config.vocab_size)
    with cast_once(model.lm_head), torch.enable_grad():
        for rows in states.split(at_once):
            leaf = rows.detach().requires_grad_()
            logits = model.lm_head(leaf).to(torch.float32)
            if not check("teacher's logits are", logits, "run npt trace on the base"):
                return torch.zeros_like(states)
            predicted = torch.softmax(logits.detach(), dim=-1)
            drawn = torch.multinomial(predicted, 1, generator=generator)
            loss = F.cross_entropy(logits, drawn.squeeze(-1), reduction="sum")
            parts += torch.autograd.grad(loss, leaf)
    return torch.cat(parts)


def bounded(size: Tensor) -> Tensor:
    """Return the sizes r = rms(h) of a batch's tokens, [N, 1], bounded from below."""
    return torch.maximum(size, SMALLEST * size.median()).clamp_min(1e-12)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return X'Y of rows X and Y, computed in full fp32 whatever --matmul_precision is.

    With unit roundoff u = 2^-24, the error of a product over n rows is at most n u |X|'|Y|, and in
    practice about sqrt(n) u: 3e-6 of the diagonal for n = 2,048, below the bound of eigenvalues
    (`cut.SMALLEST`, 1e-5). TF32 rounds the rows themselves to 2^-11 = 5e-4, far above that bound:
    whitened directions would be noise.
    """
    with fp32_products("highest"):
        return left.to(torch.float32).T @ right.to(torch.float32)


def _moved(gram: Tensor, device: torch.device) -> Tensor:
    """Move a matrix to a device; to the host through pinned memory, several times as fast."""
    if gram.device.type == "cuda" and device.type == "cpu":
        return torch.empty(gram.shape, dtype=gram.dtype, pin_memory=True).copy_(gram)
    return gram.to(device)
