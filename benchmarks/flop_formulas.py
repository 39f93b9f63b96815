"""The arithmetic of a training step, by formula, for adapters of gate, up and down.

Floating-point operations per token, two for every weight that a token is multiplied with. Causal
attention is counted at half of the full score matrix, and its backward at twice its forward: what a
fused kernel computes again is not counted. Norms, rotary embeddings, activations, losses and the
optimizer are left out; they are no matrix products and cost memory traffic rather than arithmetic.

A layer's forward is F = 2 (A + M) + 2 S D, with A and M its weights of attention and MLP and S the
tokens of a row. `local` needs at least F for every layer up to the last converted one, and for each
converted one 2 M, the student's own MLP, and 2 D F_ffn, the one product that the gradient crosses.

Shapes: D hidden, F_ffn ffn, S tokens of a row, V vocabulary, R rank, O width of a modulated
product.
"""

from __future__ import annotations

from collections.abc import Collection

from npt.config import TARGETS, NPTConfig
from npt.doctor.shape import Shape


def layer_flops(shape: Shape, length: int, attention: float = 1.0) -> float:
    """Return F = 2 (A + M) + 2 S D: forward of one layer, per token.

    attention: how often the scores and their product with the values, 2 S D, are computed.
    """
    return 2.0 * shape.layer_weights + attention * 2.0 * length * shape.query_width


def floor_flops(
    shape: Shape, length: int, converted: Collection[int], *, local: bool, logits: float = 0.0
) -> float:
    """Return the least arithmetic per token, the low-rank products left out.

    Args:
        shape: of the base.
        length: S, tokens of a row.
        converted: indices of the converted layers.
        local: of the strategy `local`; else of `end_to_end`.
        logits: share of the tokens that are scored on the logits; 0 without such a loss.
    """
    layer, down = layer_flops(shape, length), 2.0 * shape.hidden * shape.ffn
    first, last, count = min(converted), max(converted), len(converted)
    if local:
        return (last + 1) * layer + count * (2.0 * shape.mlp_weights + down)
    stop = shape.layers if logits else last + 1
    forward = (first + 2 * (stop - first)) * layer
    # through a frozen layer to its input: each product once, attention's two with both factors
    backward = (stop - first - 1) * layer_flops(shape, length, attention=2.0)
    return forward + down + backward + 3.0 * 2.0 * shape.head_weights * logits


def adapter_flops(shape: Shape, config: NPTConfig, *, local: bool) -> float:
    """Return the low-rank products, per token: codes, modulation, its recomputation in backward,
    and their gradients. The figure of the regulariser, about 2 R^2 more for each target with an
    additive term, is left out.
    """
    width, converted = shape.modulated_width(config), shape.converted(config)
    # nothing reads what is added to the stream in backward
    unread = sum(shape.width(t) for t in config.shifted if TARGETS[t].width == "hidden")
    total = 0.0
    for index, rank in converted.items():
        # z, gradient of A, gradient of a
        codes = 2 if local or index == min(converted) else 3
        # forward, gradients of M and B, gradient of z; again in backward
        total += 2.0 * rank * (codes * shape.hidden + 4 * width - unread)
    return total
