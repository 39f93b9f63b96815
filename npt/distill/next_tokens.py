"""Cross-entropy with the text: the next token, or several tokens ahead.

Aligned teacher forcing: logits at position t predict the label at t + 1, so labels are the token
ids themselves, not shifted, and -100 where a token is not to be predicted. Positions that count are
gathered before anything is computed on them; what stands at the others, NaN included, reaches
neither value nor gradient.

Shapes: B batch, T time, D hidden, V vocabulary, N tokens that are predicted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from npt.data.batch import IGNORE_INDEX, target_index
from npt.distill.hidden_losses import SumAndCount
from npt.distill.logit_losses import through_head, token_cross_entropy


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    ignore_index: int = IGNORE_INDEX,
) -> SumAndCount:
    """Sum of -log q(label at t + 1) of the logits at t, over the labels that count.

    Args:
        logits: [B, T, V], as a model's forward gives them.
        labels: [B, T], not shifted.
        attention_mask: [B, T] of ones and zeros; without it every position is taken for real. With
            padding on the left it has to be given, or the last padded position would predict the
            first token.
        position_ids: [B, T], where several documents lie in a row: none predicts the first token of
            another.
        ignore_index: label of what is no target.

    Returns:
        (sum, count); on a GPU the host waits for the count.
    """
    return multi_token_prediction_loss(
        [logits], labels, attention_mask, position_ids, ignore_index=ignore_index
    )[2][0]


def multi_token_prediction_loss(
    states: Sequence[Tensor],
    labels: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    heads: Sequence[nn.Module] | None = None,
    vocab_size: int | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> tuple[Tensor, int, list[SumAndCount]]:
    """Cross-entropy of heads of which each looks one token further: head k, from 0, at t predicts
    the label at t + 1 + k.

    Labels, mask and `ignore_index` are shifted for each head. A target that is padding, ignored,
    beyond its row's end or in another document never counts, nor does what a padded position
    predicts.

    Args:
        states: each head's logits [B, T, V]; or, with `heads`, the state [B, T, D] that each of
            them reads.
        labels, attention_mask, position_ids, ignore_index: as for `cross_entropy`.
        heads: modules from [N, D] to [N, V]. Logits then exist for positions that count alone, and
            a chunk of them at a time.
        vocab_size: V, needed with `heads`.

    Returns:
        (sum, count) over all heads, and each head's (sum, count); on a GPU the host waits for the
        counts.

    Raises:
        ValueError: shapes or numbers that do not fit.
    """
    _check(states, labels, heads, vocab_size)
    mask = torch.ones_like(labels) if attention_mask is None else attention_mask
    per_head: list[SumAndCount] = []
    for k, state in enumerate(states):
        index = target_index(labels, mask, position_ids, ahead=k + 1, ignore_index=ignore_index)
        rows = state.flatten(0, 1).index_select(0, index)
        targets = labels.flatten().index_select(0, index + k + 1)
        if heads is None:
            per_head.append(token_cross_entropy(rows, targets))
        else:
            assert vocab_size is not None
            per_head.append(through_head(heads[k], _row_loss, rows, targets, vocab_size))
    return (
        torch.stack([part for part, _ in per_head]).sum(),
        sum(count for _, count in per_head),
        per_head,
    )


def _row_loss(logits: Tensor, targets: Tensor, weights: Tensor | None) -> SumAndCount:
    return token_cross_entropy(logits, targets, weights=weights)


def _check(
    states: Sequence[Tensor],
    labels: Tensor,
    heads: Sequence[nn.Module] | None,
    vocab_size: int | None,
) -> None:
    if not states:
        raise ValueError("no logits; pass a tensor [B, T, V] for each head")
    for state in states:
        if state.ndim != 3 or state.shape[:2] != labels.shape:
            raise ValueError(
                f"logits or states of shape {tuple(state.shape)} for labels of shape"
                f" {tuple(labels.shape)}; pass [B, T, ...]"
            )
    if heads is not None and (len(heads) != len(states) or vocab_size is None):
        raise ValueError(
            f"{len(heads)} heads for {len(states)} states and vocab_size {vocab_size}; pass a state"
            " for each head, and V"
        )
