"""Arguments of a command line as one writes them."""

from __future__ import annotations


def flags(line: str) -> list[str]:
    """`flags("--seed 3 --packing")` is ["--seed", "3", "--packing"]."""
    return line.split()
