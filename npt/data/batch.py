"""A batch: padded token ids, and which of them are real."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from npt.data.sample import IGNORE_INDEX, Sample


@dataclass(frozen=True)
class Batch:
    """One micro-batch. Losses never see padding: they read the rows at `valid_index` and nothing else.

    input_ids, attention_mask, position_ids, labels: [B, T] int64; positions count valid tokens, so that padding on the left
        moves nothing, and restart with every packed document; labels are the token ids, -100 at padding, on prompts and at
        what starts a packed document (the shift by one happens in the loss).
    documents: [B, T] int64, the number of each token's document in its row, where any row has several; attention stays inside.
    valid_index: [N] int64, where in the flattened [B * T] the valid tokens stand. Made on the host, so that no device has
        to be asked how many there are.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    labels: Tensor
    valid_index: Tensor
    sample_ids: tuple[str, ...]
    documents: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Valid tokens N."""
        return len(self.valid_index)

    @property
    def padded(self) -> bool:
        return self.tokens != self.input_ids.numel()

    def to(self, device: torch.device) -> Batch:
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("input_ids", "attention_mask", "position_ids", "labels", "valid_index", "documents")
            if getattr(self, name) is not None
        }
        return replace(self, **moved)


def collate(samples: Sequence[Sample], pad_id: int, *, side: str = "right", length: int | None = None) -> Batch:
    """Pad samples to the longest of them, or to `length`.

    Args:
        samples: B of them, none empty.
        pad_id: what to fill with. Any id of the vocabulary does: which tokens are real is taken from the samples' lengths,
            never from the id, so that pad = eos hides no real end token.
        side: where the padding goes, left or right.
        length: T, when it is to be more than the longest sample.
    """
    longest = max(len(s.input_ids) for s in samples)
    width = longest if length is None else length
    if side not in ("left", "right") or width < longest:
        raise ValueError(
            f"cannot pad {longest} tokens to {width} on the {side!r}; the side is left or right, the length the longest at least"
        )
    ids = torch.full((len(samples), width), pad_id, dtype=torch.int64)
    mask = torch.zeros((len(samples), width), dtype=torch.int64)
    labels, documents = torch.full_like(ids, IGNORE_INDEX), torch.zeros_like(ids)
    packed = any(len(s.lengths or ()) > 1 for s in samples)
    for row, sample in enumerate(samples):
        n = len(sample.input_ids)
        columns = slice(0, n) if side == "right" else slice(width - n, width)
        ids[row, columns] = torch.tensor(sample.input_ids, dtype=torch.int64)
        mask[row, columns] = 1
        labels[row, columns] = ids[row, columns] if sample.labels is None else torch.tensor(sample.labels, dtype=torch.int64)
        if sample.lengths is not None:
            documents[row, columns] = torch.arange(len(sample.lengths)).repeat_interleave(torch.tensor(sample.lengths))
    batch = batch_from_tensors(ids, mask, tuple(s.id for s in samples))
    if not packed:
        return replace(batch, labels=labels)
    return replace(batch, labels=labels, documents=documents, position_ids=_restarting(batch.position_ids, documents))


def _restarting(positions: Tensor, documents: Tensor) -> Tensor:
    """Positions that count from 0 in every document, out of those that count through the row: both [B, T]."""
    starts = torch.zeros_like(positions)
    fresh = documents[:, 1:] != documents[:, :-1]
    starts[:, 1:] = torch.where(fresh, positions[:, 1:], 0)
    return positions - starts.cummax(dim=-1).values


def batch_from_tensors(input_ids: Tensor, attention_mask: Tensor, sample_ids: tuple[str, ...] | None = None) -> Batch:
    """A batch from [B, T] ids and a [B, T] mask of ones and zeros, both on the host."""
    return Batch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=(attention_mask.cumsum(dim=-1) - 1).clamp(min=0),
        labels=torch.where(attention_mask.bool(), input_ids, IGNORE_INDEX),
        valid_index=attention_mask.flatten().nonzero().squeeze(-1),
        sample_ids=sample_ids if sample_ids is not None else tuple(str(i) for i in range(len(input_ids))),
    )


def batches(samples: Iterable[Sample], batch_size: int, pad_id: int, side: str = "right") -> Iterator[Batch]:
    """Batches of `batch_size` in order, padded on one side; the last one may be smaller."""
    group: list[Sample] = []
    for sample in samples:
        group.append(sample)
        if len(group) == batch_size:
            yield collate(group, pad_id, side=side)
            group = []
    if group:
        yield collate(group, pad_id, side=side)


def pad_id_of(tokenizer: object) -> int:
    """The tokenizer's pad id, else its end id, else 0; padding is told by position, so the choice changes nothing."""
    for name in ("pad_token_id", "eos_token_id"):
        value = getattr(tokenizer, name, None)
        if isinstance(value, int):
            return value
    return 0


def find_fault(batch: Batch, vocab_size: int) -> str | None:
    """What is wrong with a batch, checked on the host before anything is computed; None where nothing is.

    Token ids have to lie in [0, V), labels too or be -100, and every row needs a valid token. The first offence is located.
    """
    if batch.input_ids.ndim != 2 or batch.input_ids.shape != batch.attention_mask.shape or batch.input_ids.numel() == 0:
        return f"shapes {tuple(batch.input_ids.shape)} of ids and {tuple(batch.attention_mask.shape)} of mask, expected [B, T] twice"
    for name, ids, allowed in (("token id", batch.input_ids, None), ("label", batch.labels, IGNORE_INDEX)):
        wrong = (ids < 0) | (ids >= vocab_size)
        if allowed is not None:
            wrong &= ids != allowed
        if wrong.any():
            row, column = (int(i) for i in wrong.nonzero()[0])
            return (
                f"{name} {int(ids[row, column])} outside the vocabulary [0, {vocab_size}) at row {row}, position {column} "
                f"of sample {batch.sample_ids[row]}"
            )
    empty = (batch.attention_mask.sum(dim=-1) == 0).nonzero()
    if len(empty):
        return f"no valid token in row {int(empty[0])}, sample {batch.sample_ids[int(empty[0])]}"
    return None
