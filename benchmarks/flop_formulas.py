"""The arithmetic of a training step, by formula.

Floating-point operations per token, two for every weight that a token is multiplied with. Causal
attention is counted at half of the full score matrix, and its backward at twice its forward: what a
fused kernel computes again is not counted. Norms, rotary embeddings, activations, losses and the
optimizer are left out; they are no matrix products and cost memory traffic rather than arithmetic.

A layer's forward is F = 2 (A + M) + 2 S D, with A and M its weights of attention and MLP and S the
tokens of a row. `local` needs at least F for every layer up to the last converted one, and for each
converted one 2 M, the student's own MLP, and 2 D F_ffn, the one product that the gradient crosses.
All formulas are of full rows: a padded position costs attention as much as a valid one.

Shapes: D hidden, F_ffn ffn, S tokens of a row, V vocabulary, R rank, O width of a modulated
product.
"""

from __future__ import annotations

from collections.abc import Collection

from npt.config import STREAM, TARGETS, NPTConfig
from npt.planning.shape import Shape


def layer_flops(shape: Shape, length: int, attention: float = 1.0) -> float:
    """Return F = 2 (A + M) + 2 S D: forward of one layer, per token.

    attention: how often the scores and their product with the values, 2 S D, are computed.
    """
    return 2.0 * shape.layer_weights + attention * 2.0 * length * shape.query_width


def floor_flops(
    shape: Shape,
    length: int,
    converted: Collection[int],
    strategy: str = "local",
    *,
    residual: str = "modulate",
    stream: bool = False,
    own_teacher: bool = False,
    logits: float = 0.0,
) -> float:
    """Return the least arithmetic of a strategy, per token, the low-rank products left out.

    Args:
        shape: of the base.
        length: S, tokens of a row.
        converted: indices of the converted layers.
        strategy: local, propagated or end_to_end.
        residual: of the adapters; if attention stays in the stream, `local` has gate and up in
            common with the teacher.
        stream: the adapters shift what gate and up read, so gradients pass these two.
        own_teacher: the teacher is a model of its own, which shares no product with the student.
        logits: share of the tokens that are scored on the logits; 0 without such a loss.
    """
    layer, down = layer_flops(shape, length), 2.0 * shape.hidden * shape.ffn
    mlp = 2.0 * shape.mlp_weights
    passed = mlp if stream else down  # backward, to the adapter
    first, last, count = min(converted), max(converted), len(converted)
    if strategy == "local":
        if own_teacher:
            return (last + 1 + count) * layer + count * passed
        student = down if residual == "keep" and not stream else mlp
        return (last + 1) * layer + count * (student + passed)
    shared = 0 if own_teacher else first
    stop = shape.layers if logits and strategy == "end_to_end" else last + 1
    forward = (shared + 2 * (stop - shared)) * layer
    if strategy == "propagated":
        return forward + count * passed
    # through a frozen layer to its input: each product once, attention's two with both factors
    backward = (stop - first - 1) * layer_flops(shape, length, attention=2.0)
    return forward + passed + backward + 3.0 * 2.0 * shape.head_weights * logits


def adapter_flops(shape: Shape, config: NPTConfig, strategy: str = "local") -> float:
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
        codes = 3 if strategy == "end_to_end" and index != min(converted) else 2
        # forward, gradients of M and B, gradient of z; again in backward
        total += 2.0 * rank * (codes * shape.hidden + 4 * width - unread)
    return total


def training_flops(
    shape: Shape,
    length: int,
    config: NPTConfig,
    strategy: str = "local",
    *,
    own_teacher: bool = False,
    logits: float = 0.0,
    checkpointing: bool = False,
) -> float:
    """Return the cost of a training step per token, low-rank products included; arguments as of
    `floor_flops`.

    checkpointing: with what `--gradient_checkpointing` adds to `end_to_end`, a second forward of
    the student's layers that gradients pass, up to the last value that backward reads.
    """
    converted = tuple(shape.converted(config))
    again = 0.0
    if checkpointing:
        passed = (shape.layers if logits else max(converted) + 1) - min(converted)
        unread = (passed - len(converted)) * 2.0 * shape.hidden * shape.ffn
        low_rank = 2.0 * shape.adapter_numbers(config)
        again = passed * layer_flops(shape, length) - unread + low_rank
    floor = floor_flops(
        shape,
        length,
        converted,
        strategy,
        residual=config.residual,
        stream=STREAM in config.targets,
        own_teacher=own_teacher,
        logits=logits,
    )
    return floor + adapter_flops(shape, config, strategy) + again
