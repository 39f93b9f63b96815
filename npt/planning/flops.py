"""The arithmetic of a training step, by formula and by count.

Floating-point operations per token, two for every weight that a token is multiplied with. Causal
attention is counted at half of the full score matrix, and its backward at twice its forward: what a
fused kernel computes again is not counted. Norms, rotary embeddings, activations, losses and the
optimizer are left out; they are no matrix products and cost memory traffic rather than arithmetic.

A layer's forward is F = 2 (A + M) + 2 S D, with A and M its weights of attention and MLP and S the
tokens of a row. `local` cannot do with less than F for every layer up to the last converted one,
and for each converted one 2 M, the student's own MLP, and 2 D F_ffn, the one product that the
gradient has to cross. All formulas are of full rows: a padded position costs attention what a valid
one does.

Shapes: D hidden, F_ffn ffn, S tokens of a row, V vocabulary, R rank, O width of a modulated
product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from npt.adapters.fit import resolve_layers
from npt.config import TARGETS, NPTConfig
from npt.planning.shape import Shape


def attention_flops(shape: Shape, length: int) -> float:
    """Scores and their product with the values, of one layer, per token: 2 S D."""
    return 2.0 * length * shape.query_width


def layer_flops(shape: Shape, length: int) -> float:
    """F = 2 (A + M) + 2 S D: forward of one layer, per token."""
    return 2.0 * shape.layer_weights + attention_flops(shape, length)


def _layer_backward(shape: Shape, length: int) -> float:
    """Through all of a frozen layer to its input: every product once, attention's two with both of
    their factors.
    """
    return 2.0 * shape.layer_weights + 2.0 * attention_flops(shape, length)


def floor_flops(
    shape: Shape,
    length: int,
    converted: Collection[int],
    strategy: str = "local",
    *,
    residual: str = "modulate",
    own_teacher: bool = False,
    logits: float = 0.0,
) -> float:
    """The least arithmetic that a strategy can do with, per token, the low-rank products left out.

    Args:
        shape: of the base.
        length: S, tokens of a row.
        converted: indices of the converted layers.
        strategy: local, propagated or end_to_end.
        residual: of the adapters; where attention stays in the stream, `local` has gate and up in
            common with the teacher.
        own_teacher: the teacher is a model of its own, which shares no product with the student.
        logits: share of the tokens that are scored on the logits; 0 without such a loss.
    """
    layer, down = layer_flops(shape, length), 2.0 * shape.hidden * shape.ffn
    mlp = 2.0 * shape.mlp_weights
    first, last, count = min(converted), max(converted), len(converted)
    if strategy == "local":
        if own_teacher:
            return (last + 1 + count) * layer + count * down
        student = down if residual == "keep" else mlp
        return (last + 1) * layer + count * (student + down)
    shared = 0 if own_teacher else first
    stop = shape.layers if logits and strategy == "end_to_end" else last + 1
    forward = (shared + 2 * (stop - shared)) * layer
    if strategy == "propagated":
        return forward + count * down
    head = 3.0 * 2.0 * shape.head_weights * logits
    return forward + down + (stop - first - 1) * _layer_backward(shape, length) + head


def adapter_flops(
    shape: Shape,
    converted: Sequence[int],
    ranks: int | Sequence[int],
    targets: Collection[str] = tuple(TARGETS),
    strategy: str = "local",
    *,
    multiplicative: bool = True,
    additive: bool = True,
) -> float:
    """The low-rank products, per token: codes, modulation, its recomputation in backward, and their
    gradients. The figure of the regulariser, about 2 R^2 more for each target with an additive
    term, is left out.

    Args:
        shape, converted, strategy: as for `floor_flops`.
        ranks: R of each converted layer, or one for all.
        targets: that are modulated.
        multiplicative, additive: the terms that there are.
    """
    ranks = [ranks] * len(converted) if isinstance(ranks, int) else list(ranks)
    terms = int(multiplicative) + int(additive)
    width = terms * sum(shape.width(target) for target in targets)
    # nothing reads down's s in backward
    again = width - (shape.width("down") if additive and "down" in targets else 0)
    first = min(converted)
    total = 0.0
    for index, rank in sorted(zip(converted, ranks, strict=True)):
        # z, gradient of A, gradient of a
        code = shape.hidden * (3 if strategy == "end_to_end" and index != first else 2)
        # forward, gradients of M and B, gradient of z; again in backward
        total += 2.0 * rank * (code + 3 * width + again)
    return total


def recomputation_flops(
    shape: Shape, length: int, config: NPTConfig, *, logits: float = 0.0
) -> float:
    """What `--gradient_checkpointing` adds to `end_to_end`, per token: a second forward of the
    student's layers that gradients pass.

    It ends with the last thing that backward reads: of a layer without an adapter that is what
    down_proj is given.

    Args:
        shape, length, config, logits: as for `training_flops`.
    """
    converted = resolve_layers(config.layers, shape.layers)
    passed = range(converted[0], shape.layers if logits else converted[-1] + 1)
    terms = int(config.multiplicative) + int(config.additive)
    width = shape.hidden + terms * sum(shape.width(target) for target in config.targets)
    low_rank = 2.0 * width * sum(config.ranks_of(len(converted)))
    unread = (len(passed) - len(converted)) * 2.0 * shape.hidden * shape.ffn
    return len(passed) * layer_flops(shape, length) - unread + low_rank


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
    """What a training step costs per token, low-rank products included: arguments as of
    `floor_flops` and `adapter_flops`.

    Args:
        checkpointing: with what `recomputation_flops` adds.
    """
    converted = resolve_layers(config.layers, shape.layers)
    form = {"multiplicative": config.multiplicative, "additive": config.additive}
    again = recomputation_flops(shape, length, config, logits=logits) if checkpointing else 0.0
    return (
        floor_flops(
            shape,
            length,
            converted,
            strategy,
            residual=config.residual,
            own_teacher=own_teacher,
            logits=logits,
        )
        + adapter_flops(
            shape, converted, config.ranks_of(len(converted)), config.targets, strategy, **form
        )
        + again
    )


def count_flops(act: Callable[[], Any]) -> int:
    """The floating-point operations of all matrix products that a call makes, backward passes in it
    included.

    As torch's counter, with these differences: products of packed 4-bit weights and products added
    in place are counted (the counter does not know their operators), causal attention counts half
    of its score matrix, and its backward twice its forward.
    """
    with FlopCounterMode(display=False, custom_mapping=_formulas()) as counter:
        act()
    return int(counter.get_total_flops())


_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def _formulas() -> dict[Any, Callable[..., int]]:
    """By operator. One that is not marked raw is handed shapes in place of tensors."""
    packed, aten = torch.ops.bitsandbytes, torch.ops.aten
    formulas: dict[Any, Callable[..., int]] = {packed.gemv_4bit: _packed_product}
    # bitsandbytes before 0.50 unpacks and multiplies, which is counted as such
    if hasattr(packed, "gemm_4bit"):
        formulas[packed.gemm_4bit] = _packed_product
    formulas[aten.addmm_] = _added_product
    for name in _ATTENTION:
        for factor, full_name in ((1, name), (2, f"{name}_backward")):
            operator = getattr(aten, full_name)
            formulas[operator] = _attention(operator, factor)
    formulas[aten._efficient_attention_backward] = _attention_backward_by_token
    return formulas


def _packed_product(x: Sequence[int], packed: Any, shape: Sequence[int], *_: Any, **__: Any) -> int:
    """Of rows [..., in] with a packed weight [out, in]."""
    return 2 * math.prod(x[:-1]) * math.prod(shape)


def _added_product(total: Sequence[int], one: Sequence[int], other: Sequence[int], **_: Any) -> int:
    """Of two matrices, added in place."""
    return 2 * math.prod(one) * other[1]


def _attention(operator: Any, factor: int) -> Callable[..., int]:
    """Of an attention operator. It is handed tensors, since whether it is causal stands among its
    arguments, in another place in each.
    """
    names = [argument.name for argument in operator.default._schema.arguments]

    def formula(*arguments: Any, out_val: Any = None, **named: Any) -> int:
        given = dict(zip(names, arguments, strict=False)) | named
        query, key, value = given["query"], given["key"], given["value"]
        whole = 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        return factor * whole // (2 if given.get("is_causal", False) else 1)

    formula._get_raw = True  # type: ignore[attr-defined]
    return formula


def _attention_backward_by_token(
    gradient: Sequence[int],
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    *rest: Any,
    **_: Any,
) -> int:
    """Of the memory-efficient kernel called by itself, whose tensors are [B, T, H, d]."""
    rows, length, heads, width = query
    causal = rest[10]
    return 2 * 2 * rows * heads * length * key[1] * (width + value[-1]) // (2 if causal else 1)
