"""The embedded model in NF4 with adapters, and small batches of each kind, on the host."""

from __future__ import annotations

import torch

import npt
from npt.batch import Batch, Sample, collate
from npt.data.packing import pack

LENGTHS = {"full": (48, 48), "padded": (48, 33), "packed": (20, 15, 13, 30, 11)}
"""Tokens of the samples of a batch; the packed ones lie in two rows, of 48 and of 41 tokens."""


def student(device: str = "cuda"):
    model, tokenizer = npt.load_base("tiny", quantization="nf4", device=device)
    npt.attach(model, npt.NPTConfig(additive_scale=1.0), seed=0)
    return model, tokenizer


def micro_batch(seed: int, kind: str = "padded") -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = [tuple(torch.randint(3, 2048, (n,), generator=generator).tolist()) for n in LENGTHS[kind]]
    samples = [Sample(f"{seed}-{row}", row_ids) for row, row_ids in enumerate(ids)]
    return collate(pack(samples, 48) if kind == "packed" else samples, 2)
