"""Students of the embedded model and batches of every kind for them."""

from collections.abc import Iterable
from typing import Any

import torch
from simulated_cuda import to_cuda
from torch import nn

import npt
from npt.adapters.converted import adapter_parameters
from npt.batch import Batch, Sample, collate
from npt.data.packing import pack

LENGTHS = {"full": (24, 24), "right": (24, 15), "left": (15, 24), "packed": (9, 7, 12, 6)}
"""By kind of batch, the lengths of its samples."""


def rows(count: int, shortest: int = 10) -> list[dict[str, list[int]]]:
    """Records of token ids of the embedded vocabulary, no two alike."""
    return [
        {"input_ids": [3 + (7 * i + j * j) % 2000 for j in range(shortest + i % 5)]}
        for i in range(count)
    ]


def make_batch(kind: str, seed: int = 0) -> Batch:
    """A batch on the host: `full` rows, padded on the `right` or the `left`, or `packed`."""
    generator = torch.Generator().manual_seed(seed)
    samples = [
        Sample(f"{seed}-{i}", tuple(torch.randint(3, 2000, (n,), generator=generator).tolist()))
        for i, n in enumerate(LENGTHS[kind])
    ]
    if kind == "packed":
        samples = pack(samples, 18)
        assert any(len(sample.lengths or ()) > 1 for sample in samples)
    return collate(samples, 2, side="left" if kind == "left" else "right")


def load_student(on: str = "cpu", **adapter: Any) -> Any:
    """Load a fresh student in NF4 of the embedded model's first three layers; onto the simulated
    card where `on` is cuda.
    """
    model, _ = npt.load_base("tiny", quantization="nf4", device="cpu")
    model.config.num_hidden_layers = 3
    model.model.layers = model.model.layers[:3]
    settings = {"additive_scale": 1.0, "layers": "1-2", "rank": 8, **adapter}
    npt.attach(model, npt.NPTConfig(**settings), seed=0)
    return to_cuda(model) if on == "cuda" else model


def enlarge(model: nn.Module, a: float = 1.0, b: float = 1.0) -> None:
    """Multiply the A and B of attached adapters, whose random start is next to nothing."""
    with torch.no_grad():
        for name, parameter in adapter_parameters(model).items():
            parameter.mul_(b if ".B." in name else a if name.endswith(".A") else 1.0)


def moved(model: Any, std: float, seed: int = 5) -> Any:
    """Fill its adapters with noise of this size, and return it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return model


def random_samples(lengths: Iterable[int], seed: int = 3) -> list[Sample]:
    """Samples of these lengths, of the small vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Sample(str(i), tuple(torch.randint(3, 128, (n,), generator=generator).tolist()))
        for i, n in enumerate(lengths)
    ]
