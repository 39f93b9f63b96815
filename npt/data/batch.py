"""A batch: padded token ids, and which of them are real."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from npt.data.sample import IGNORE_INDEX, Sample

_FOUND = ("scored_index", "document_lengths", "scored_lengths")


@dataclass(frozen=True)
class Batch:
    """One micro-batch. Losses never see padding: they read the rows at `valid_index` and nothing
    else.

    input_ids, attention_mask, position_ids, labels: [B, T] int64; positions count valid tokens, so
        that padding on the left moves nothing, and restart with every packed document; labels are
        the token ids, -100 at padding, on prompts and at what starts a packed document (the shift
        by one happens in the loss).
    documents: [B, T] int64, the number of each token's document in its row, where any row has
        several; attention stays inside.
    valid_index: [N] int64, where in the flattened [B * T] the valid tokens stand. Made on the host,
        so that no device has to be asked how many there are; what the properties find is likewise
        found on the host, and taken along by `to`.
    offset: how many samples the run had drawn before these. With their ids it names the random
        numbers that training draws for them.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    labels: Tensor
    valid_index: Tensor
    sample_ids: tuple[str, ...]
    documents: Tensor | None = None
    offset: int = 0

    @property
    def row_tensors(self) -> dict[str, Tensor]:
        """Every tensor [B, T] that this batch has, by its name: all that has to be copied of it, or
        written down.
        """
        return {
            name: getattr(self, name) for name in ROW_TENSORS if getattr(self, name) is not None
        }

    def with_rows(self, tensors: Mapping[str, Tensor], sample_ids: tuple[str, ...]) -> Batch:
        """This batch with other `row_tensors`; one that is not given is None.

        Args:
            tensors: of them all, [B, T] on the host.
            sample_ids: of their rows.
        """
        valid = tensors["attention_mask"].flatten().nonzero().squeeze(-1)
        changed: dict[str, Any] = {**dict.fromkeys(ROW_TENSORS), **tensors}
        return replace(self, **changed, valid_index=valid, sample_ids=sample_ids)

    @property
    def tokens(self) -> int:
        """Valid tokens N."""
        return len(self.valid_index)

    @property
    def scored(self) -> int:
        """Positions S whose next token is predicted and counts: see `scored_index`."""
        return len(self.scored_index)

    @property
    def padded(self) -> bool:
        return self.tokens != self.input_ids.numel()

    @cached_property
    def scored_index(self) -> Tensor:
        """[S] int64, where in [B * T] the positions stand whose next token belongs to the same
        document and has a label.
        """
        return target_index(self.labels, self.attention_mask, self.position_ids)

    @cached_property
    def document_lengths(self) -> Tensor:
        """[C] int64, how many of the tokens at `valid_index` each document has."""
        return self._per_document(self.valid_index)

    @cached_property
    def scored_lengths(self) -> Tensor:
        """[C'] int64, how many of the positions at `scored_index` each document has that has any."""
        return self._per_document(self.scored_index)

    def to(self, device: torch.device) -> Batch:
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        """The same in memory that a GPU copies from without the host's help; `to` then returns at
        once. Needs a GPU.
        """
        return self._with(Tensor.pin_memory)

    def _with(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """With every tensor changed, those that the properties find among them."""
        found = {name: change(getattr(self, name)) for name in _FOUND}
        tensors: dict[str, Any] = {
            name: change(tensor) for name, tensor in self.row_tensors.items()
        }
        changed = replace(self, **tensors, valid_index=change(self.valid_index))
        vars(changed).update(found)
        return changed

    def _per_document(self, index: Tensor) -> Tensor:
        starts = torch.ones_like(self.attention_mask, dtype=torch.bool)
        starts[:, 1:] = ~_follows(self.attention_mask, self.position_ids, 1)
        documents = starts.flatten().cumsum(dim=0)[index]
        return torch.unique_consecutive(documents, return_counts=True)[1]


ROW_TENSORS = tuple(
    f.name for f in fields(Batch) if "Tensor" in str(f.type) and f.name != "valid_index"
)
"""Fields of a batch that are tensors [B, T]; told from the class, so that whoever copies them
leaves none out.
"""


def collate(
    samples: Sequence[Sample], pad_id: int, *, side: str = "right", length: int | None = None
) -> Batch:
    """Pad samples to the longest of them, or to `length`.

    Args:
        samples: B of them, none empty.
        pad_id: what to fill with. Any id of the vocabulary does: which tokens are real is taken
            from the samples' lengths, never from the id, so that pad = eos hides no real end token.
        side: where the padding goes, left or right.
        length: T, when it is to be more than the longest sample.
    """
    longest = max(len(s.input_ids) for s in samples)
    width = longest if length is None else length
    if side not in ("left", "right") or width < longest:
        raise ValueError(
            f"cannot pad {longest} tokens to {width} on the {side!r}; the side is left or right,"
            " the length the longest at least"
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
        labels[row, columns] = (
            ids[row, columns]
            if sample.labels is None
            else torch.tensor(sample.labels, dtype=torch.int64)
        )
        if sample.lengths is not None:
            documents[row, columns] = torch.arange(len(sample.lengths)).repeat_interleave(
                torch.tensor(sample.lengths)
            )
    batch = batch_from_tensors(ids, mask, tuple(s.id for s in samples))
    if not packed:
        return replace(batch, labels=labels)
    return replace(
        batch,
        labels=labels,
        documents=documents,
        position_ids=_restarting(batch.position_ids, documents),
    )


def _restarting(positions: Tensor, documents: Tensor) -> Tensor:
    """Positions that count from 0 in every document, out of those that count through the row: both
    [B, T].
    """
    starts = torch.zeros_like(positions)
    fresh = documents[:, 1:] != documents[:, :-1]
    starts[:, 1:] = torch.where(fresh, positions[:, 1:], 0)
    return positions - starts.cummax(dim=-1).values


def batch_from_tensors(
    input_ids: Tensor, attention_mask: Tensor, sample_ids: tuple[str, ...] | None = None
) -> Batch:
    """A batch from [B, T] ids and a [B, T] mask of ones and zeros, both on the host."""
    return Batch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=(attention_mask.cumsum(dim=-1) - 1).clamp(min=0),
        labels=torch.where(attention_mask.bool(), input_ids, IGNORE_INDEX),
        valid_index=attention_mask.flatten().nonzero().squeeze(-1),
        sample_ids=(
            sample_ids if sample_ids is not None else tuple(str(i) for i in range(len(input_ids)))
        ),
    )


def target_index(
    labels: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor | None = None,
    *,
    ahead: int = 1,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Positions that have a target `ahead` tokens on: both tokens valid and of one document, and
    the target's label counts.

    Args:
        labels: [B, T], not shifted.
        attention_mask: [B, T] of ones and zeros.
        position_ids: [B, T], counting through each document; default through each row's valid
            tokens.
        ahead: how far the target lies ahead, 1 for the next token.
        ignore_index: label of what is no target.

    Returns:
        [S] int64, positions in [B * T] in ascending order; the target of position i stands at i +
        `ahead`.
    """
    positions = attention_mask.cumsum(dim=-1) if position_ids is None else position_ids
    counts = _follows(attention_mask, positions, ahead) & (labels[:, ahead:] != ignore_index)
    row, column = counts.nonzero(as_tuple=True)
    return row * labels.shape[1] + column


def _follows(attention_mask: Tensor, position_ids: Tensor, ahead: int) -> Tensor:
    """[B, T - ahead] bool: the token `ahead` on belongs to the same document, with nothing but
    valid tokens between.
    """
    valid = attention_mask.bool()
    kept = max(0, valid.shape[1] - ahead)
    return (
        valid[:, :kept]
        & valid[:, ahead:]
        & (position_ids[:, ahead:] == position_ids[:, :kept] + ahead)
    )


def batches(
    samples: Iterable[Sample], batch_size: int, pad_id: int, side: str = "right"
) -> Iterator[Batch]:
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
    """The tokenizer's pad id, else its end id, else 0; padding is told by position, so the choice
    changes nothing.
    """
    for name in ("pad_token_id", "eos_token_id"):
        value = getattr(tokenizer, name, None)
        if isinstance(value, int):
            return value
    return 0


def find_fault(batch: Batch, vocab_size: int) -> str | None:
    """What is wrong with a batch, checked on the host before anything is computed; None where
    nothing is.

    Token ids have to lie in [0, V), labels too or be -100, and every row needs a valid token. The
    first offence is located.
    """
    if (
        batch.input_ids.ndim != 2
        or batch.input_ids.shape != batch.attention_mask.shape
        or batch.input_ids.numel() == 0
    ):
        return (
            f"shapes {tuple(batch.input_ids.shape)} of ids and {tuple(batch.attention_mask.shape)}"
            " of mask, expected [B, T] twice"
        )
    for name, ids, allowed in (
        ("token id", batch.input_ids, None),
        ("label", batch.labels, IGNORE_INDEX),
    ):
        wrong = (ids < 0) | (ids >= vocab_size)
        if allowed is not None:
            wrong &= ids != allowed
        if wrong.any():
            row, column = (int(i) for i in wrong.nonzero()[0])
            return (
                f"{name} {int(ids[row, column])} outside the vocabulary [0, {vocab_size}) at row"
                f" {row}, position {column} of sample {batch.sample_ids[row]}"
            )
    empty = (batch.attention_mask.sum(dim=-1) == 0).nonzero()
    if len(empty):
        return f"no valid token in row {int(empty[0])}, sample {batch.sample_ids[int(empty[0])]}"
    return None
