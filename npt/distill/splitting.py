"""A micro-batch computed in parts, if memory does not hold all of its samples at once.

The parts add their gradients to the same scratch, and their sums are added, so to the gradient
window they are one micro-batch: its index, samples and refusal are what they would be. Only the
order of a sum changes. Each part is padded to its own longest sample, as if collated by itself.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence
from dataclasses import fields
from functools import reduce
from operator import add

import torch

from npt.data.batch import Batch
from npt.distill.local import BatchSums
from npt.errors import NoMemoryError, is_out_of_memory


class MicroBatchSplitter:
    """Splits micro-batches into parts of at most `samples` rows.

    Attributes:
        samples: at once.
        shrunk_to: samples that `shrink` has come down to; None if it was never called.
    """

    def __init__(self, samples: int):
        self.samples = samples
        self.shrunk_to: int | None = None

    def parts(self, batch: Batch) -> list[Batch]:
        """Return the batch in parts of `samples` rows, or itself if it has no more."""
        count, size = len(batch.input_ids), self.samples
        if count <= size:
            return [batch]
        return [_rows(batch, slice(start, start + size)) for start in range(0, count, size)]

    def samples_of(self, batch: Batch) -> int:
        """Return how many samples of this batch are computed at once."""
        return min(len(batch.input_ids), self.samples)

    def shrink(self, batch: Batch, message: str) -> int:
        """Halve the parts of a batch after memory ran out; return the samples at once until then.

        Raises:
            NoMemoryError: it was one sample.
        """
        at_once, length = self.samples_of(batch), batch.input_ids.shape[1]
        if at_once == 1:
            raise NoMemoryError(
                f"out of memory with one sample of {length} tokens at once ({message}); lower"
                " --max_length or --adapter_rank, convert fewer --layers, or take --strategy local"
                " (or end_to_end with --gradient_checkpointing) and --use_quantization"
            )
        self.samples = self.shrunk_to = (at_once + 1) // 2
        return at_once


def added(parts: Sequence[BatchSums]) -> BatchSums:
    """Return the sums of a micro-batch from those of its parts."""
    sums = {f.name: [getattr(part, f.name) for part in parts] for f in fields(BatchSums)}
    return BatchSums(**{name: reduce(add, values) for name, values in sums.items()})


def oom_message(error: RuntimeError | MemoryError) -> str | None:
    """Return what was asked for when memory ran out; None for any other error."""
    if not is_out_of_memory(error):
        return None
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)", str(error))
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    return f"it asked for {asked[1]} more" if asked else first[:200]


def free_memory() -> None:
    """Free what a caught error has held; call it after the handler, in which the error is alive."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _rows(batch: Batch, rows: slice) -> Batch:
    """Return some rows of a batch, without the columns that are padding in all of them."""
    filled = batch.attention_mask[rows].any(dim=0).nonzero()
    columns = slice(int(filled[0]), int(filled[-1]) + 1) if len(filled) else slice(None)
    tensors = {name: tensor[rows, columns].clone() for name, tensor in batch.row_tensors.items()}
    if "documents" in tensors and not bool(tensors["documents"].any()):
        del tensors["documents"]
    part = batch.with_rows(tensors, batch.sample_ids[rows])
    # so that it is on its way to the device while the host continues
    return part.pinned() if batch.input_ids.is_pinned() else part
