"""Write weights one file at a time, so that the host holds only one file's tensors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from npt.files import write_json

SHARD_BYTES = 4 << 30
"""Size limit of a weight file, in bytes. Only a larger single tensor may exceed it."""


def write_shards(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> tuple[int, int]:
    """Write (name, tensor) pairs to files; return the number of files and the tensors' bytes."""
    parts: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        save_file(held, folder / f"{len(parts)}.part", metadata={"format": "pt"})
        parts.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and size + tensor.nbytes > SHARD_BYTES:
            flush()
            size = 0
        held[name] = tensor.detach().to("cpu").contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    # a name holds the number of files, which is known only now
    files = [f"model-{n:05d}-of-{len(parts):05d}.safetensors" for n in range(1, len(parts) + 1)]
    if len(parts) == 1:
        files = [SAFE_WEIGHTS_NAME]
    else:
        where: dict[str, str] = {}
        for file, names in zip(files, parts, strict=True):
            where |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        write_json(folder / SAFE_WEIGHTS_INDEX_NAME, index)
    for number, file in enumerate(files):
        (folder / f"{number}.part").rename(folder / file)
    return len(files), total
