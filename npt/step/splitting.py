"""Passes: a micro-batch computed in parts, where memory does not hold all of its samples at once.

The parts add their gradients to the same scratch, and their sums are added, so that to the
transaction they are one micro-batch: its index, its samples, its refusal and its place on a rank
are what they would be. Nothing but the order of a sum changes. Each part is padded to its own
longest sample, as if it had been collated by itself.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import reduce
from operator import add
from typing import TypeVar

import torch

from npt.data.batch import Batch
from npt.distill.strategies import MicroBatch
from npt.errors import NoMemoryError, is_out_of_memory

T = TypeVar("T")


class Passes:
    """How many samples of a micro-batch are computed at once.

    samples: at most so many. lowered: what `lower` has brought it to, None where it was never
    called.
    """

    def __init__(self, samples: int):
        self.samples = samples
        self.lowered: int | None = None

    def parts(self, batch: Batch) -> list[Batch]:
        """The batch in parts of `samples` rows, the last one of what is left; itself where it has
        no more.
        """
        rows = len(batch.input_ids)
        if rows <= self.samples:
            return [batch]
        return [
            _rows(batch, slice(start, start + self.samples))
            for start in range(0, rows, self.samples)
        ]

    def of(self, batch: Batch) -> int:
        """How many samples of this batch are computed at once."""
        return min(len(batch.input_ids), self.samples)

    def lower(self, batch: Batch, lack: str) -> int:
        """Halve what is computed at once, after a batch for whose parts memory did not do.

        Args:
            batch: in whole.
            lack: what was asked for, for the message.

        Returns:
            How many samples there were at once.

        Raises:
            NoMemoryError: there was one.
        """
        before, length = self.of(batch), batch.input_ids.shape[1]
        if before == 1:
            raise NoMemoryError(
                f"out of memory with one sample of {length} tokens at once ({lack}); lower"
                " --max_length or --adapter_rank, convert fewer --layers, or take --strategy local"
                " (or end_to_end with --gradient_checkpointing) and --use_quantization"
            )
        self.samples = self.lowered = (before + 1) // 2
        return before


def added(parts: Sequence[MicroBatch]) -> MicroBatch:
    """The sums of the parts of one micro-batch, as those of the whole."""
    if len(parts) == 1:
        return parts[0]
    return MicroBatch(
        **{
            f.name: reduce(add, [getattr(part, f.name) for part in parts])
            for f in fields(MicroBatch)
        }
    )


def tried(act: Callable[[], T]) -> tuple[T | None, str | None]:
    """Do what memory may not do for.

    Returns:
        What `act` gave and None; or None and what was asked for, once all that it had made is freed
        again.
    """
    try:
        return act(), None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        lack = _lack(error)
    # Behind the handler: until then the error holds the frames, and these hold the graph.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None, lack


def _lack(error: BaseException) -> str:
    """What was asked for in vain, as far as the error says it."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)", str(error))
    first = next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )
    return f"it asked for {found[1]} more" if found else first[:200]


def _rows(batch: Batch, rows: slice) -> Batch:
    """Some rows of a batch, without the columns that are padding in all of them."""
    filled = batch.attention_mask[rows].any(dim=0).nonzero()
    columns = slice(int(filled[0]), int(filled[-1]) + 1) if len(filled) else slice(None)
    tensors = {name: tensor[rows, columns].clone() for name, tensor in batch.row_tensors.items()}
    if "documents" in tensors and not bool(tensors["documents"].any()):
        del tensors["documents"]
    part = batch.with_rows(tensors, batch.sample_ids[rows])
    # so that it is on its way to the device while the host goes on
    return part.pinned() if batch.input_ids.is_pinned() else part
