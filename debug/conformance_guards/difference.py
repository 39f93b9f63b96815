"""What a guard lost: two states of a run, compared bit for bit, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]


def lost(found: State, reference: State, without_window: State | None = None) -> list[str]:
    """Return in words what differs, the worst first; empty if the states are equal bit for bit.

    Args:
        found: the state after a bad batch.
        reference: the state of the run without it.
        without_window: the state of the run without the whole window.
    """
    words = []
    for part, name in (("weights", "weights"), ("optimizer", "moments"), ("ema", "EMA")):
        if _bad(found[part]) and not _bad(reference[part]):
            words.append(f"{name} not finite")
    if _bad(found["buffers"]) and not _bad(reference["buffers"]):
        words.append("buffers not finite")
    elif not same(found["buffers"], reference["buffers"]):
        words.append("buffers changed")
    if "weights not finite" not in words and not same(found["weights"], reference["weights"]):
        words.append(_changed_weights(found, reference, without_window))
    elif "moments not finite" not in words and not _same_moments(found, reference):
        words.append("moments changed")
    words += _ahead_or_behind(found, reference)
    if not same(found["random"], reference["random"]):
        words.append("random state changed")
    if not words and not same(found, reference):
        parts = [part for part in reference if not same(found[part], reference[part])]
        words.append(f"{', '.join(parts)} changed")
    return words


def _changed_weights(found: State, reference: State, without_window: State | None) -> str:
    """Return why finite weights differ."""
    if without_window is not None and same(found["weights"], without_window["weights"]):
        return "other micro-batches of the window lost"
    if _steps(found) > _steps(reference):
        return "bad batch stepped"
    return "weights changed"


def _ahead_or_behind(found: State, reference: State) -> Iterator[str]:
    """Yield what was advanced or not advanced: schedule, EMA, scale."""
    if found["scheduler"] is not None:
        here, there = found["scheduler"]["last_epoch"], reference["scheduler"]["last_epoch"]
        if here != there:
            yield "schedule advanced" if here > there else "schedule behind"
    if found["ema"] is not None:
        here, there = int(found["ema"]["n_averaged"]), int(reference["ema"]["n_averaged"])
        if here != there:
            yield "EMA advanced" if here > there else "EMA behind"
    if found["scaler"] is not None:
        if found["scaler"]["scale"] != reference["scaler"]["scale"]:
            yield "loss scale changed"
        elif not same(found["scaler"], reference["scaler"]):
            yield "scaler's count changed"


def _steps(state: State) -> int:
    """Return how often the optimizer stepped."""
    counts = [float(held["step"]) for held in state["optimizer"]["state"].values()]
    return int(max(counts, default=0))


def _same_moments(one: State, other: State) -> bool:
    return same(one["optimizer"]["state"], other["optimizer"]["state"])


def _bad(part: Any) -> bool:
    """Return whether a tensor in nested containers is not finite."""
    if isinstance(part, Tensor):
        return not bool(torch.isfinite(part).all())
    values = part.values() if isinstance(part, dict) else part
    return isinstance(part, dict | list | tuple) and any(map(_bad, values))


def same(one: Any, other: Any) -> bool:
    """Return whether nested containers have the same keys and, bit for bit, the same values."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        # by their bytes: a NaN equals itself, and 0 differs from -0
        first, second = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
        return torch.equal(first, second)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(same(*pair) for pair in pairs)
    return bool(one == other)


def close(one: State, other: State) -> bool:
    """Return whether two runs ended with the same weights up to rounding."""
    # A mean over micro-batches is rounded in another order by each trainer, some 1e-7 of a weight,
    # which a few steps of Adam amplify. A step that is missing moves a weight by its rate, 1e-2.
    return all(
        torch.allclose(weight, other["weights"][name], rtol=1e-3, atol=1e-3)
        for name, weight in one["weights"].items()
    )
