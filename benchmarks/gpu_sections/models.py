"""Models and batches that sections share."""

from __future__ import annotations

from typing import Any

import torch

import npt
from gpu_sections.runner import Bench
from npt.batch import Batch, Sample, batch_from_tensors, collate
from npt.data.packing import pack
from npt.doctor.shape import SHAPES, Shape, llama_config
from random_base import random_base

PAD_ID = 2

LENGTHS = {"full": (48, 48), "padded": (48, 33), "packed": (20, 15, 13, 30, 11)}
"""Tokens of each sample of a small batch. The packed ones fill rows of 48 and 41 tokens."""


def embedded_student(device: torch.device | str, compute_dtype: str = "fp32") -> Any:
    """Return the embedded model in NF4 with adapters that change its output."""
    model, _ = npt.load_base("tiny", quantization="nf4", device=device, compute_dtype=compute_dtype)
    npt.attach(model, npt.NPTConfig(additive_scale=1.0), seed=0)
    return model


def small_batch(kind: str, seed: int = 0, vocab: int = 2048) -> Batch:
    """Return a batch of `LENGTHS` on the host."""
    generator = torch.Generator().manual_seed(seed)
    ids = [
        tuple(torch.randint(3, vocab, (n,), generator=generator).tolist()) for n in LENGTHS[kind]
    ]
    samples = [Sample(f"{seed}-{row}", row_ids) for row, row_ids in enumerate(ids)]
    return collate(
        pack(samples, max(LENGTHS[kind][0], 48)) if kind == "packed" else samples, PAD_ID
    )


def full_batch(rows: int, length: int, vocab: int, device: torch.device, seed: int = 0) -> Batch:
    """Return full rows of random tokens."""
    ids = torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(seed))
    return batch_from_tensors(ids, torch.ones_like(ids)).to(device)


def base_of(
    bench: Bench, large: str, length: int, layers: int | None = None, vocab: int | None = None
) -> Any:
    """Return a random base of shape `large` (of the embedded model's in a small check) for rows of
    `length`. `layers` and `vocab` override the shape's.
    """
    shape: Shape = SHAPES[bench.pick("embedded", large)]
    config = llama_config(shape, length)
    if layers is not None:
        config.num_hidden_layers = layers
    if vocab is not None:
        config.vocab_size = vocab
    return random_base(config, quantization="nf4", device=bench.device)
