"""Gradient checkpointing: forward drops a layer's graph, and backward recomputes it.

It uses torch's non-reentrant checkpoint, which changes neither gradients and their order of
summation nor the hooks on tensors.
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
    """Return `function(*arguments)`, which backward calls again: it must have no side effects."""
    contexts = lambda: (nullcontext(), _recomputing())  # noqa: E731 - of forward, and of backward
    return checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts)


def is_recomputing() -> bool:
    """Return whether this thread is recomputing what observers have already seen."""
    return _RECOMPUTING.get()


@contextmanager
def _recomputing() -> Iterator[None]:
    token = _RECOMPUTING.set(True)
    try:
        yield
    finally:
        _RECOMPUTING.reset(token)
