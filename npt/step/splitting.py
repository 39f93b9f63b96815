"""A micro-batch computed in parts, if memory does not hold all of its samples at once.

The parts add their gradients to the same scratch, and their sums are added, so to the gradient
window they are one micro-batch: its index, samples and refusal are what they would be. Only the
order of a sum changes. Each part is padded to its own longest sample, as if collated by itself.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import reduce
from operator import add

import torch

from npt.data.batch import Batch
from npt.distill.layerwise import MicroBatch
from npt.errors import NoMemoryError, is_out_of_memory


class MicroBatchSplitter:
    """Splits micro-batches into parts of at most `samples` rows.

    samples: at most so many at once. shrunk_to: what `shrink` has brought it to, None if it never
    did.
    """

    def __init__(self, samples: int):
        self.samples = samples
        self.shrunk_to: int | None = None

    def parts(self, batch: Batch) -> list[Batch]:
        """Return the batch in parts of `samples` rows, or itself if it has no more."""
        rows = len(batch.input_ids)
        if rows <= self.samples:
            return [batch]
        return [
            _rows(batch, slice(start, start + self.samples))
            for start in range(0, rows, self.samples)
        ]

    def samples_of(self, batch: Batch) -> int:
        """Return how many samples of this batch are computed at once."""
        return min(len(batch.input_ids), self.samples)

    def shrink(self, batch: Batch, message: str) -> int:
        """Halve the parts, after memory ran out for those of `batch`.

        Args:
            batch: the whole micro-batch.
            message: what was asked for.

        Returns:
            How many samples were computed at once.

        Raises:
            NoMemoryError: it was one.
        """
        before, length = self.samples_of(batch), batch.input_ids.shape[1]
        if before == 1:
            raise NoMemoryError(
                f"out of memory with one sample of {length} tokens at once ({message}); lower"
                " --max_length or --adapter_rank, convert fewer --layers, or take --strategy local"
                " (or end_to_end with --gradient_checkpointing) and --use_quantization"
            )
        self.samples = self.shrunk_to = (before + 1) // 2
        return before


def added(parts: Sequence[MicroBatch]) -> MicroBatch:
    """Return the sums of a micro-batch from those of its parts."""
    if len(parts) == 1:
        return parts[0]
    return MicroBatch(
        **{
            f.name: reduce(add, [getattr(part, f.name) for part in parts])
            for f in fields(MicroBatch)
        }
    )


@dataclass
class OutOfMemory:
    """What `catch_oom` found. message: what was asked for, None if memory did not run out."""

    message: str | None = None


@contextmanager
def catch_oom(active: bool = True) -> Iterator[OutOfMemory]:
    """Catch an out-of-memory error of the block and keep its message; False lets it through.

    Call `free_memory` after the block: within it the error still holds the graph.
    """
    found = OutOfMemory()
    try:
        yield found
    except (RuntimeError, MemoryError) as error:
        if not active or not is_out_of_memory(error):
            raise
        asked = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)", str(error))
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        first = lines[0] if lines else type(error).__name__
        found.message = f"it asked for {asked[1]} more" if asked else first[:200]


def free_memory() -> None:
    """Free what an error that was caught has held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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
