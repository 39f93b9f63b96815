"""The micro-batches of a guard's post-mortem, traced once more in a model of the reader's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from npt.errors import BundleError
from npt.guard.forensics import Finding, Kept, traced
from npt.guard.outcome import Refusal
from npt.guard.parallel import plain_name
from npt.guard.postmortem import read_postmortem


def replay(
    folder: str | Path, model: nn.Module, loss: Callable[[nn.Module, Any], Any] | None = None
) -> list[Finding]:
    """Compute the refused micro-batches again, from the weights and random state of then.

    Args:
        folder: of the post-mortem.
        model: the one that was trained, in the same mode (`train` or `eval`). Its current
            weights are restored afterwards.
        loss: makes the loss from the model and the stored inputs; default
            `model(**inputs)`, which is enough if the model returns its loss.

    Returns:
        For each micro-batch the operation that made the first bad number, or why none was found.

    Raises:
        BundleError: it is no guard's post-mortem, or of another model.
        CheckpointError: a file is not the one that was written.
    """
    found = read_postmortem(folder)
    home = next((p.device for p in model.parameters()), torch.device("cpu"))
    findings = []
    with _weights(model, found.weights, found.folder):
        for number, (entry, random) in enumerate(
            zip(found.micro_batches, found.random, strict=True)
        ):
            inputs = _nested(entry, home)
            refusal = Refusal.from_dict(found.said["micro_batches"][number]["refusal"])
            run = partial(_called if loss is None else loss, model, inputs)
            findings.append(traced(model, refusal, Kept(random, inputs, run)))
    return findings


def _called(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


@contextmanager
def _weights(model: nn.Module, stored: Mapping[str, Tensor], folder: Path) -> Iterator[None]:
    """Let the model have the stored weights within the context."""
    own = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    stored = {plain_name(name): weight for name, weight in stored.items()}
    for name, weight in stored.items():
        if name not in own or own[name].shape != weight.shape:
            there = f"of shape {tuple(own[name].shape)}" if name in own else "none"
            raise BundleError(
                f"{folder} has {name} of shape {tuple(weight.shape)}, the model has {there}; give"
                " the model that was trained"
            )
    before = {name: own[name].detach().clone() for name in stored}
    try:
        _copied(own, stored)
        yield
    finally:
        _copied(own, before)


@torch.no_grad()
def _copied(own: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> None:
    for name, weight in weights.items():
        own[name].copy_(weight)


def _nested(entry: Mapping[str, Any], home: torch.device) -> Any:
    """Return inputs by name, or in their order, from values by their paths."""
    parts: dict[str, Any] = {}
    for path, value in entry.items():
        first, _, rest = path.partition(".")
        if rest:
            parts.setdefault(first, {})[rest] = value
        else:
            parts[first] = value.to(home) if isinstance(value, Tensor) else value
    parts = {
        key: _nested(part, home) if any(path.startswith(f"{key}.") for path in entry) else part
        for key, part in parts.items()
    }
    if not all(key.isdecimal() for key in parts):
        return parts
    return tuple(parts[key] for key in sorted(parts, key=int))
