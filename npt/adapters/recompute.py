"""Gradient checkpointing: a layer's graph is dropped in forward and made again in backward.

With torch's non-reentrant checkpoint, so gradients, their order of summation and the hooks on
tensors are as without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TypeVar

from torch.utils.checkpoint import checkpoint

T = TypeVar("T")

_RECOMPUTING: ContextVar[bool] = ContextVar("recomputing", default=False)


def recomputed(function: Callable[..., T], *arguments: object) -> T:
    """Return `function(*arguments)`, keeping nothing but the arguments for backward, which calls
    the function again: it must have no side effects.
    """
    contexts = lambda: (nullcontext(), _recomputing())  # noqa: E731 - of forward, and of backward
    return checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts)


def is_recomputing() -> bool:
    """Return whether this thread repeats a computation that observers have been shown."""
    return _RECOMPUTING.get()


@contextmanager
def _recomputing() -> Iterator[None]:
    token = _RECOMPUTING.set(True)
    try:
        yield
    finally:
        _RECOMPUTING.reset(token)
