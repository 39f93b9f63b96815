"""A sample, and a batch of samples: padded token ids with their masks and labels."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""The label of a token that is not a target."""

PAD_ID = 0
"""The id at padded positions, which are masked. A tokenizer's pad id may lie outside the embedding.
"""


@dataclass(frozen=True)
class Sample:
    """One row of a batch.

    Attributes:
        id: the record, and the index of its first token in the record.
        input_ids: token ids.
        labels: label of each token; None if all tokens are targets.
        lengths: lengths of the documents packed into it; None for one document.
        undated: the messages of a conversation, with its context, whose tokens may depend on the
            date.
        taught: what the teacher reads instead, if it reads a context: the same targets after other
            tokens.
    """

    id: str
    input_ids: tuple[int, ...]
    labels: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    undated: str | None = field(default=None, compare=False, repr=False)
    taught: Sample | None = None

    @property
    def targets(self) -> tuple[int, ...]:
        """The label of each token."""
        return self.labels or self.input_ids

    @property
    def read(self) -> tuple[int, ...]:
        """The ids that the student or the teacher reads."""
        return self.input_ids if self.taught is None else self.input_ids + self.taught.input_ids

    @property
    def heldout(self) -> bool:
        """Whether the sample is held out: one in twenty is, by a hash of its content, with the
        context if there is one."""
        ids = ",".join(map(str, (self.taught or self).input_ids))
        return is_heldout(ids if self.undated is None else self.undated)


def is_heldout(name: str, one_in: int = 20) -> bool:
    """Return whether the hash of a name or text says to hold it out from training."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:4], "big") % one_in == 0


@dataclass(frozen=True)
class Batch:
    """One micro-batch. Losses read the rows at `valid_index` and never see padding.

    Attributes:
        input_ids: [B, T] int64, like the next three.
        attention_mask: 1 on valid tokens, 0 on padding.
        position_ids: position of each token in its document; arbitrary at padding.
        labels: -100 at padding, on prompts and at a packed document's first token; not shifted.
        sample_ids: one per row.
        documents: [B, T] int64, number of each token's document, if a row has several; else None.
        offset: samples drawn before these. With their ids it seeds the random numbers of training.
        teacher: what the teacher reads instead, with the same targets in the same order; None if it
            reads this batch.
        kept: states of frozen layers that the run keeps (npt/train/states.py), if it does.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    labels: Tensor
    sample_ids: tuple[str, ...]
    documents: Tensor | None = None
    offset: int = 0
    teacher: Batch | None = None
    kept: Any = field(default=None, compare=False, repr=False)

    @property
    def taught(self) -> Batch:
        """The batch that the teacher reads."""
        return self.teacher or self

    @property
    def row_tensors(self) -> dict[str, Tensor]:
        tensors = {name: getattr(self, name) for name in ROW_TENSORS}
        if self.documents is None:
            del tensors["documents"]
        return tensors

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The arguments of a model's forward, which cannot tell documents of a row apart."""
        return {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "position_ids": self.position_ids,
        }

    @property
    def tokens(self) -> int:
        """Number N of valid tokens."""
        return len(self.valid_index)

    @property
    def scored(self) -> int:
        """Number S of positions in `scored_index`."""
        return len(self.scored_index)

    @property
    def padded(self) -> bool:
        return len(self.valid_index) != self.input_ids.numel()

    @cached_property
    def valid_index(self) -> Tensor:
        """[N] int64, positions of the valid tokens in [B * T]."""
        return self.attention_mask.flatten().nonzero().squeeze(-1)

    @cached_property
    def scored_index(self) -> Tensor:
        """[S] int64, positions in [B * T] whose next token has a label and the same document."""
        return target_index(self.labels, self.attention_mask, self.position_ids)

    @cached_property
    def texts(self) -> list[tuple[int, slice, Tensor]]:
        """Row, columns and token ids [T] of every document, without padding."""
        documents = torch.zeros_like(self.input_ids) if self.documents is None else self.documents
        numbers = torch.where(self.attention_mask.bool(), documents, -1)
        texts = []
        for row, of_row in enumerate(numbers):
            stop = 0
            found, lengths = of_row.unique_consecutive(return_counts=True)
            for number, length in zip(found.tolist(), lengths.tolist(), strict=True):
                columns = slice(stop, stop + length)
                stop += length
                if number >= 0:
                    texts.append((row, columns, self.input_ids[row, columns]))
        return texts

    def to(self, device: torch.device) -> Batch:
        return self.mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        """Return the batch in pinned memory, from which `to` copies without waiting (on a GPU)."""
        return self.mapped(Tensor.pin_memory)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return this batch with every tensor changed. The host computes the indices first, so that
        nothing waits for a device."""
        rows: dict[str, Any] = {name: change(tensor) for name, tensor in self.row_tensors.items()}
        if self.teacher is not None:
            rows["teacher"] = self.teacher.mapped(change)
        changed = replace(self, **rows)
        for index in ("valid_index", "scored_index"):
            vars(changed)[index] = change(getattr(self, index))
        return changed


ROW_TENSORS = ("input_ids", "attention_mask", "position_ids", "labels", "documents")
"""Fields of a batch that are tensors [B, T]. The last may be None."""


def collate(
    samples: Sequence[Sample],
    pad_id: int = PAD_ID,
    *,
    side: str = "right",
    length: int | None = None,
) -> Batch:
    """Pad non-empty samples on one `side` to the longest of them, or to a greater `length`."""
    width = length or max(len(s.input_ids) for s in samples)
    ids = torch.full((len(samples), width), pad_id)
    labels = torch.full_like(ids, IGNORE_INDEX)
    mask = torch.zeros_like(ids)
    positions = torch.zeros_like(ids)
    documents = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        size = len(sample.input_ids)
        start = 0 if side == "right" else width - size
        cells = (row, slice(start, start + size))
        mask[cells] = 1
        ids[cells] = torch.tensor(sample.input_ids)
        labels[cells] = torch.tensor(sample.targets)
        # each document's positions start at 0 again
        lengths = sample.lengths or (size,)
        positions[cells] = torch.cat([torch.arange(each) for each in lengths])
        documents[cells] = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    teacher = None
    if any(sample.taught for sample in samples):
        teacher = collate([sample.taught or sample for sample in samples], pad_id, side=side)
    return Batch(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        labels=labels,
        sample_ids=tuple(sample.id for sample in samples),
        documents=documents if documents.any() else None,
        teacher=teacher,
    )


def batch_from_tensors(
    input_ids: Tensor, attention_mask: Tensor, sample_ids: tuple[str, ...] | None = None
) -> Batch:
    """Return a batch of [B, T] ids and a [B, T] mask of ones and zeros, both on the host."""
    return Batch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=(attention_mask.cumsum(dim=-1) - 1).clamp(min=0),
        labels=torch.where(attention_mask.bool(), input_ids, IGNORE_INDEX),
        sample_ids=sample_ids or tuple(map(str, range(len(input_ids)))),
    )


def target_index(
    labels: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None, *, ahead: int = 1
) -> Tensor:
    """Return positions [S] in [B * T] with a label `ahead` tokens later, both of them valid and in
    one document. All tensors are [B, T]. `position_ids` default to those of one document a row.
    """
    positions = attention_mask.cumsum(dim=-1) if position_ids is None else position_ids
    valid = attention_mask.bool()
    kept = max(0, valid.shape[1] - ahead)
    adjacent = positions[:, ahead:] == positions[:, :kept] + ahead
    counts = valid[:, :kept] & valid[:, ahead:] & adjacent & (labels[:, ahead:] != IGNORE_INDEX)
    row, column = counts.nonzero(as_tuple=True)
    return row * labels.shape[1] + column


def batches(samples: Iterable[Sample], batch_size: int) -> Iterator[Batch]:
    samples = iter(samples)
    while group := list(itertools.islice(samples, batch_size)):
        yield collate(group)


def find_fault(batch: Batch, vocab_size: int) -> str | None:
    """Return the first fault of a batch on the host, with its location, or None: an id or label
    outside [0, V), a mask value other than 0 and 1, or a row without a valid token.
    """
    ids = batch.input_ids
    mask = batch.attention_mask
    if ids.ndim != 2 or ids.shape != mask.shape or ids.numel() == 0:
        shapes = f"shapes {tuple(ids.shape)} of ids and {tuple(mask.shape)} of mask"
        return f"{shapes}, expected [B, T] twice"
    labels = torch.where(batch.labels == IGNORE_INDEX, 0, batch.labels)
    for name, values in (("token id", ids), ("label", labels)):
        outside = (values < 0) | (values >= vocab_size)
        for row, column in outside.nonzero().tolist():
            return (
                f"{name} {int(values[row, column])} outside the vocabulary [0, {vocab_size}) at row"
                f" {row}, position {column} of sample {batch.sample_ids[row]}"
            )
    odd = (mask != 0) & (mask != 1)
    for row, column in odd.nonzero().tolist():
        return (
            f"attention mask {mask[row, column].item()} at row {row}, position {column} of sample"
            f" {batch.sample_ids[row]}, expected 0 or 1"
        )
    empty = mask.sum(dim=-1) == 0
    for row in empty.nonzero().flatten().tolist():
        return f"no valid token in row {row}, sample {batch.sample_ids[row]}"
    return None if batch.teacher is None else find_fault(batch.teacher, vocab_size)
