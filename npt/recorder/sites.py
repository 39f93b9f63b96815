"""The observed modules of a model, and their input tensors."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn

from npt.tracer.tensors import tensors_in

_MAIN_INPUTS = ("hidden_states", "inputs_embeds", "input_ids", "input", "x")


@dataclass(frozen=True)
class Site:
    """An observed module.

    Attributes:
        layer: index of its decoder layer.
        element: whether it is an element of a ModuleList, as a decoder layer is.
        grows: whether its output scales with its input, unlike a normalisation or an embedding.
        parameters: the positional parameters of its forward.
    """

    name: str
    layer: int | None
    element: bool
    grows: bool
    parameters: tuple[str, ...]


def sites_of(modules: Mapping[str, Any]) -> dict[str, Site]:
    """Return a site for each module in `named_modules`, by name."""
    sites = {}
    for name, module in modules.items():
        kind = type(module).__name__.lower()
        layer = None
        element = False
        parts = name.split(".") if name else []
        for depth, part in enumerate(parts):
            element = isinstance(modules.get(".".join(parts[:depth])), nn.ModuleList)
            if element and layer is None:  # an expert in a list of its own is no layer
                layer = int(part)
        sites[name] = Site(
            name=name,
            layer=layer,
            element=element,
            grows="norm" not in kind and "embedding" not in kind,
            parameters=_parameters(module.__class__),
        )
    return sites


@cache
def _parameters(kind: Any) -> tuple[str, ...]:
    try:
        parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in positional)


def named_inputs(
    site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Tensor], str]:
    """Return a module's input tensors by parameter name, and the name of the main one: one of the
    usual names, else the first.
    """
    # those of *args have numbers for names
    names = (*site.parameters, *map(str, range(len(site.parameters), len(args))))
    given = dict(zip(names, args, strict=False))
    inputs = dict(tensors_in({**given, **kwargs}))
    unmasked = [name for name in inputs if "mask" not in name]
    main = next((name for name in (*_MAIN_INPUTS, *unmasked) if name in inputs), "")
    return inputs, main
