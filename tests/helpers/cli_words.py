"""Arguments of a command line as one writes them, and adapters to name in them."""

from pathlib import Path
from typing import Any

from students import moved

import npt


def flags(line: str, *more: object) -> list[str]:
    """`flags("--seed 3 --output", path)` is ["--seed", "3", "--output", str(path)]."""
    return [*line.split(), *map(str, more)]


def saved_adapter(folder: Path, noise: float = 0.0, **form: Any) -> Path:
    """Save an adapter of the embedded model in NF4, with random numbers of that size if any."""
    model, _ = npt.load_base("tiny", quantization="nf4", device="cpu")
    npt.attach(model, npt.NPTConfig(**form))
    if noise:
        moved(model, noise)
    return npt.save_adapter(model, folder)
