"""The arithmetic of a training step, by formula and by count.

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

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from npt.config import NPTConfig
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
        own_teacher: the teacher is a model of its own, which shares no product with the student.
        logits: share of the tokens that are scored on the logits; 0 without such a loss.
    """
    layer, down = layer_flops(shape, length), 2.0 * shape.hidden * shape.ffn
    first, last, count = min(converted), max(converted), len(converted)
    if strategy == "local":
        if own_teacher:
            return (last + 1 + count) * layer + count * down
        student = down if residual == "keep" else 2.0 * shape.mlp_weights
        return (last + 1) * layer + count * (student + down)
    shared = 0 if own_teacher else first
    stop = shape.layers if logits and strategy == "end_to_end" else last + 1
    forward = (shared + 2 * (stop - shared)) * layer
    if strategy == "propagated":
        return forward + count * down
    # through a frozen layer to its input: each product once, attention's two with both factors
    backward = (stop - first - 1) * layer_flops(shape, length, attention=2.0)
    return forward + down + backward + 3.0 * 2.0 * shape.head_weights * logits


def adapter_flops(shape: Shape, config: NPTConfig, strategy: str = "local") -> float:
    """Return the low-rank products, per token: codes, modulation, its recomputation in backward,
    and their gradients. The figure of the regulariser, about 2 R^2 more for each target with an
    additive term, is left out.
    """
    width, converted = shape.modulated_width(config), shape.converted(config)
    # nothing reads down's s in backward
    unread = shape.width("down") if config.additive and "down" in config.targets else 0
    total = 0.0
    for index, rank in converted.items():
        # z, gradient of A, gradient of a
        codes = 3 if strategy == "end_to_end" and index != min(converted) else 2
        # forward, gradients of M and B, gradient of z; again in backward
        total += 2.0 * rank * (codes * shape.hidden + 4 * width - unread)
    return total


def recomputation_flops(
    shape: Shape, length: int, config: NPTConfig, *, logits: float = 0.0
) -> float:
    """Return what `--gradient_checkpointing` adds to `end_to_end`, per token: a second forward of
    the student's layers that gradients pass.

    It ends with the last value that backward reads, in a layer without an adapter down_proj's
    input. Arguments as of `training_flops`.
    """
    converted = tuple(shape.converted(config))
    passed = (shape.layers if logits else max(converted) + 1) - min(converted)
    unread = (passed - len(converted)) * 2.0 * shape.hidden * shape.ffn
    low_rank = 2.0 * shape.adapter_numbers(config)
    return passed * layer_flops(shape, length) - unread + low_rank


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
    """Return the cost of a training step per token, low-rank products included.

    Args:
        shape, length, strategy, own_teacher, logits: as of `floor_flops`.
        config: of the adapters.
        checkpointing: with what `recomputation_flops` adds.
    """
    floor = floor_flops(
        shape,
        length,
        shape.converted(config),
        strategy,
        residual=config.residual,
        own_teacher=own_teacher,
        logits=logits,
    )
    again = recomputation_flops(shape, length, config, logits=logits) if checkpointing else 0.0
    return floor + adapter_flops(shape, config, strategy) + again


def count_flops(act: Callable[[], Any]) -> int:
    """Return the floating-point operations of all matrix products of a call, its backward passes
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
    """Return a formula by operator. One that is not marked raw is given shapes, not tensors."""
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
    """Count rows [..., in] times a packed weight [out, in]."""
    return 2 * math.prod(x[:-1]) * math.prod(shape)


def _added_product(total: Sequence[int], one: Sequence[int], other: Sequence[int], **_: Any) -> int:
    """Count a product of two matrices that is added in place."""
    return 2 * math.prod(one) * other[1]


def _attention(operator: Any, factor: int) -> Callable[..., int]:
    """Return the formula of an attention operator. It is given tensors, since `is_causal` is among
    its arguments, at another place in each.
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
    """Count the memory-efficient kernel called by itself, whose tensors are [B, T, H, d]."""
    rows, length, heads, width = query
    causal = rest[10]
    return 2 * 2 * rows * heads * length * key[1] * (width + value[-1]) // (2 if causal else 1)
