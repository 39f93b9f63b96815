"""Random changes of files and records, as a bad disk or somebody hostile would make them."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import torch

ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**31, 2**70, 0.5, 1e308, float("nan"), "", "x", "a\nb", "\ud800"),
    *([], {}, [[]], [None], ["x"], {"x": 1}, {"tensor": "x"}),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every entry below a nested value."""
    keys = value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    for key in keys:
        yield (*path, key)
        yield from places(value[key], (*path, key))


def mutated(record: Any, source: random.Random) -> Any:
    """Return a copy of a nested record in which one to three entries are odd, gone or doubled."""
    record = copy.deepcopy(record)
    for _ in range(source.choice((1, 1, 2, 3))):
        chosen = source.choice(list(places(record)) or [()])
        if not chosen:
            break
        *path, last = chosen
        owner = record
        for key in path:
            owner = owner[key]
        act = source.randrange(6)
        if act == 0:
            del owner[last]
        elif act == 1 and isinstance(owner, list):
            owner.append(copy.deepcopy(owner[last]))
        else:
            owner[last] = copy.deepcopy(source.choice(ODD))
    return record


def mutated_bytes(content: bytes, source: random.Random) -> bytes:
    """Return bytes of which some were changed, most of them in the first two thousand, or cut."""
    changed = bytearray(content)
    for _ in range(source.choice((1, 2, 8))):
        end = min(len(changed), 2048) if source.random() < 0.7 else len(changed)
        changed[source.randrange(end)] = source.randrange(256)
    cut = source.randrange(len(changed)) if source.random() < 0.2 else len(changed)
    return bytes(changed[:cut])


def mutated_tensors(
    tensors: dict[str, torch.Tensor], source: random.Random
) -> dict[str, torch.Tensor]:
    """Return tensors of which one has another dtype, shape, name or odd values, or is gone."""
    name = source.choice(sorted(tensors))
    tensor = tensors[name].clone()
    others = {key: value for key, value in tensors.items() if key != name}
    dtypes = (torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool)
    act = source.randrange(6)
    if act == 0:
        return others
    if act == 1:
        return {**others, f"{name}.more": tensor}
    if act == 2:
        return {**others, name: tensor.to(source.choice((*dtypes, torch.complex64)))}
    if act == 3:
        return {**others, name: tensor.reshape(-1)[: source.choice((0, 1, 3))]}
    if act == 4:
        return {**others, name: tensor.unsqueeze(0)}
    return {**others, name: torch.full_like(tensor, source.choice((-1, 0, 1, 120)))}
