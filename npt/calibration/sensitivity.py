"""What the teacher's predictions are sensitive to, layer by layer: one backward pass over the
calibration tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from npt.adapters.attach import adapters_disabled, decoder_layers, npt_layers
from npt.adapters.stream import Stream, open_stream
from npt.base.linear import cast_once
from npt.calibration.placement import HOST
from npt.calibration.precision import full_precision
from npt.data.batch import Batch
from npt.distill.divergence import LOGIT_CHUNK
from npt.errors import NumericalError


@dataclass
class Sensitivity:
    """Means over tokens for one layer, [D, D] fp64.

    covariance: C = E a a'. to_attention: S = E s s', s the gradient at a. to_output: G = E g g', g
    the gradient at t. The gradients are of the log-likelihood, summed over the tokens, of what is
    drawn from the teacher's own predictions, so S and G are blocks of the Fisher information: half
    of e'G e is the KL that an error e of t costs, to second order.
    """

    covariance: Tensor
    to_attention: Tensor
    to_output: Tensor
    tokens: int = 0

    def add(self, attention: Tensor, to_attention: Tensor, to_output: Tensor) -> None:
        """Add rows [N, D] of a, s and g to what are sums until `divide` is called."""
        sums = (self.covariance, self.to_attention, self.to_output)
        for total, rows in zip(sums, (attention, to_attention, to_output), strict=True):
            total += _moved(_gram(rows), total.device)
        self.tokens += len(attention)

    def divide(self) -> None:
        """Turn sums into means, in place: a copy would double the largest thing in memory."""
        for total in (self.covariance, self.to_attention, self.to_output):
            total /= self.tokens


def measure(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    seed: int,
    tick: Callable[[Batch], None],
    sums_on: torch.device = HOST,
) -> dict[int, Sensitivity]:
    """The sensitivities of every converted layer, by its index.

    Args:
        model: with adapters attached; its teacher is measured, and it is left as it was.
        batches: of the calibration tokens.
        seed: of the draws from the predictions.
        tick: called behind every batch.
        sums_on: device of the matrices.

    Raises:
        NumericalError: an activation or a gradient is not finite, by layer and name.
    """
    converted = npt_layers(model)
    layers, width = decoder_layers(model), model.config.hidden_size
    found = {}
    for index, _ in converted:
        covariance, to_attention, to_output = (_zeros(width, sums_on) for _ in range(3))
        found[index] = Sensitivity(covariance, to_attention, to_output)
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    first = converted[0][0]
    for host_batch in batches:
        batch = host_batch.to(device)
        seen: dict[tuple[int, str], Tensor] = {}
        with ExitStack() as stack:
            stack.enter_context(adapters_disabled(model))
            for index, own in converted:
                stack.enter_context(_watched(own, index, seen))
            with torch.no_grad():
                stream = open_stream(model, batch)
                hidden = stream.hidden
                for layer in layers[:first]:
                    hidden = stream.clean(layer(hidden, **stream.context_of(layer)))
            with torch.enable_grad():
                hidden = hidden.detach().requires_grad_()
                for index in range(first, len(layers)):
                    hidden = stream.clean(layers[index](hidden, **stream.context_of(layers[index])))
                    if index in found:
                        hidden.retain_grad()
                        seen[index, "output"] = hidden
                states = stream.rows(model.model.norm(hidden))
            for index in found:
                _check(index, "attention output", seen[index, "attention"], stream)
                _check(index, "output", seen[index, "output"], stream)
            states.backward(_score(model, states.detach(), generator))
        for index, sums in found.items():
            sums.add(
                stream.rows(seen[index, "attention"].detach()),
                _check(
                    index,
                    "gradient at the attention output",
                    _gradient(seen[index, "stream"]),
                    stream,
                ),
                _check(index, "gradient at the output", _gradient(seen[index, "output"]), stream),
            )
        tick(host_batch)
    for sums in found.values():
        sums.divide()
    return found


def _watched(layer: Any, index: int, seen: dict[tuple[int, str], Tensor]) -> Any:
    """Hooks that show a layer's attention output and the stream behind it, h + a, whose gradient is
    that of a with h held still.
    """

    def attention(module: Any, inputs: Any, output: Any) -> None:
        seen[index, "attention"] = output[0]

    def stream(module: Any, inputs: Any) -> None:
        inputs[0].retain_grad()
        seen[index, "stream"] = inputs[0]

    stack = ExitStack()
    stack.callback(layer.self_attn.register_forward_hook(attention).remove)
    stack.callback(layer.post_attention_layernorm.register_forward_pre_hook(stream).remove)
    return stack


def _score(model: PreTrainedModel, states: Tensor, generator: torch.Generator) -> Tensor:
    """The gradient at the final states [N, D] of the log-likelihood of one token per row, drawn
    from the prediction there.

    Logits exist for a chunk of rows at a time only.
    """
    parts = []
    with cast_once(model.lm_head):
        for rows in states.split(max(1, LOGIT_CHUNK // model.config.vocab_size)):
            with torch.enable_grad():
                leaf = rows.detach().requires_grad_()
                logits = model.lm_head(leaf).to(torch.float32)
                if not bool(torch.isfinite(logits).all()):
                    raise NumericalError(
                        "calibration: the teacher's logits are not finite; run npt trace on the"
                        " base, nothing was changed"
                    )
                drawn = torch.multinomial(
                    torch.softmax(logits.detach(), dim=-1), 1, generator=generator
                ).squeeze(-1)
                parts.append(
                    torch.autograd.grad(F.cross_entropy(logits, drawn, reduction="sum"), leaf)[0]
                )
    return torch.cat(parts)


def _gradient(states: Tensor) -> Tensor:
    assert states.grad is not None
    return states.grad


def _zeros(width: int, device: torch.device) -> Tensor:
    return torch.zeros(width, width, dtype=torch.float64, device=device)


def _gram(rows: Tensor) -> Tensor:
    rows = rows.to(torch.float32)
    with full_precision():
        return rows.T @ rows


def _moved(gram: Tensor, device: torch.device) -> Tensor:
    """From a GPU to the host through pinned memory: pageable memory takes several times as long."""
    if gram.device.type == "cuda" and device == HOST:
        return torch.empty(gram.shape, dtype=gram.dtype, pin_memory=True).copy_(gram)
    return gram.to(device)


def _check(index: int, name: str, states: Tensor, stream: Stream) -> Tensor:
    """The valid tokens' rows of [B, T, D] states."""
    rows = stream.rows(states.detach())
    if not bool(torch.isfinite(rows).all()):
        raise NumericalError(
            f"calibration: the {name} of layer {index} is not finite; find its cause with npt"
            " trace, nothing was changed"
        )
    return rows
