"""Compile the Triton kernels for several generations of GPUs, without a GPU.

    python benchmarks/compile_kernels.py > benchmarks/results/kernels.json

Prints the registers of a thread and the bytes that it spills to memory. The kernels
(npt/adapters/kernels.py) are compiled with every optional part: both products, M and B, energy, the
teacher's product, and the gradients of gate and up. Takes half a minute.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from npt.adapters import kernels
from npt.adapters.kernels import SMALL, TILES
from npt.console import put

ARCHITECTURES = {75: "T4", 80: "A100", 90: "H100", 100: "B200", 120: "RTX 50"}
TF32 = 80
"""The first architecture with TF32. Before it, torch computes M z and B z."""

USAGE = re.compile(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)")


def cases(architecture: int) -> Iterator[tuple[str, int]]:
    """Yield (kernel, padded rank) for an architecture; rank 0 means that torch multiplies."""
    for kernel in ("forward", "backward"):
        for rank in (0, 16, SMALL) if architecture >= TF32 else (0,):
            yield kernel, rank


def compiled(kernel: str, rank: int, architecture: int) -> dict[str, Any]:
    """Compile a kernel; return its registers, spilled bytes and bytes of shared memory."""
    tile = dict(TILES[rank > 0])
    function, warps = getattr(kernels, f"_{kernel}"), tile.pop("num_warps")
    constants = {"RANK": rank, **tile}
    integers, floats = {"count", "width", "low_width", "rank"}, {"alpha", "slope"}
    signature, aligned = {}, {}
    for place, name in enumerate(function.arg_names):
        numbers = "i32" if name in integers else "fp32" if name in floats else "*fp32"
        signature[name] = "constexpr" if name in constants else numbers
        if name not in constants and name not in floats:
            aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, aligned)
    target = GPUTarget("cuda", architecture, 32)
    made = triton.compile(source, target=target, options={"num_warps": warps})
    with TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(made.asm["cubin"])
        reader = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(binary)]
        found = USAGE.search(subprocess.run(reader, capture_output=True, text=True).stdout)
    assert found is not None, f"cuobjdump prints no usage of {kernel} for sm_{architecture}"
    registers, stack, local = map(int, found.groups())
    shared = int(made.metadata.shared)
    return {"registers": registers, "spilled": stack + local, "shared": shared}


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    rows = [
        {
            "kernel": kernel,
            "rank": rank,
            "architecture": architecture,
            **compiled(kernel, rank, architecture),
        }
        for architecture in ARCHITECTURES
        for kernel, rank in cases(architecture)
    ]
    cards = {str(number): card for number, card in ARCHITECTURES.items()}
    put(json.dumps({"triton": triton.__version__, "cards": cards, "kernels": rows}, indent=1))


if __name__ == "__main__":
    main()
