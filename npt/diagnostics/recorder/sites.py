"""The observed modules of a model, and the tensors among what they are given and return."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn

_MAIN_INPUTS = ("hidden_states", "inputs_embeds", "input_ids", "input", "x")


@dataclass(frozen=True)
class Site:
    """A module to be observed. element: it is an element of a list of modules, such as a decoder
    layer. grows: the size of its output may be compared with its input's, which says nothing of a
    normalisation or an embedding. parameters: positional ones of its forward.
    """

    name: str
    layer: int | None
    element: bool
    grows: bool
    parameters: tuple[str, ...]


def sites_of(modules: Mapping[str, nn.Module]) -> dict[str, Site]:
    return {name: _site(name, module, modules) for name, module in modules.items()}


def _site(name: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> Site:
    parts = name.split(".") if name else []
    owners = (modules.get(".".join(parts[:depth])) for depth in range(len(parts)))
    indices = zip(owners, parts, strict=True)
    layer = next((int(part) for owner, part in indices if isinstance(owner, nn.ModuleList)), None)
    kind: Any = type(module)
    return Site(
        name=name,
        layer=layer,
        element=isinstance(modules.get(name.rpartition(".")[0]), nn.ModuleList) and bool(name),
        grows=not any(word in kind.__name__.lower() for word in ("norm", "embedding")),
        parameters=_parameters(kind),
    )


@cache
def _parameters(kind: Any) -> tuple[str, ...]:
    try:
        found = list(inspect.signature(kind.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in found if parameter.kind in positional)


def tensors(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every tensor in nested tuples, lists, mappings and dataclasses, but
    not in caches and the like.
    """
    if isinstance(value, Tensor):
        yield name, value
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    elif is_dataclass(value) and not isinstance(value, type):
        items = ((f.name, getattr(value, f.name)) for f in fields(value))
    if depth < 3:
        for key, item in items:
            yield from tensors(item, f"{name}.{key}" if name else str(key), depth + 1)


def named_inputs(site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that a module is called with, by the names of its parameters."""
    known = len(site.parameters)
    names = (*site.parameters[: len(args)], *(str(i) for i in range(known, len(args))))
    return dict(tensors({**dict(zip(names, args, strict=True)), **kwargs}))


def main_input(found: Mapping[str, Tensor]) -> str:
    """Return the tensor that goes through the module: one of the usual names, else the first."""
    usual = [name for name in _MAIN_INPUTS if name in found]
    return usual[0] if usual else next(iter(found), "")
