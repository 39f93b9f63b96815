"""Arguments of a command line as one writes them, and adapters to name in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import npt
from npt.adapters.converted import adapter_parameters


def flags(line: str, *more: object) -> list[str]:
    """`flags("--seed 3 --output", path)` is ["--seed", "3", "--output", str(path)]."""
    return [*line.split(), *map(str, more)]


def saved_adapter(folder: Path, noise: float = 0.0, **form: Any) -> Path:
    """Save an adapter of the embedded model in NF4, with random numbers of that size if any."""
    model, _ = npt.load_base("tiny", quantization="nf4", device="cpu")
    npt.attach(model, npt.NPTConfig(**form))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values() if noise else ():
            parameter.copy_(noise * torch.randn(parameter.shape, generator=generator))
    return npt.save_adapter(model, folder)
