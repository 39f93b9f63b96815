"""Gradient checkpointing: a layer's graph is dropped in forward and made again in backward.

With torch's non-reentrant checkpoint, so gradients, their order of summation and the hooks on
tensors are as without it. Random numbers are drawn again as they were; their state is kept on the
host, also that of a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

from torch.utils.checkpoint import checkpoint

T = TypeVar("T")

_thread = threading.local()  # backward on a GPU has threads of its own


def recomputed(function: Callable[..., T], *arguments: object) -> T:
    """Return `function(*arguments)`, keeping nothing but the arguments for backward, which calls
    the function again: it must have no side effects, and computes where its arguments are.
    """
    contexts = lambda: (nullcontext(), _recomputing())  # noqa: E731 - of forward, and of backward
    return checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts)


def is_recomputing() -> bool:
    """Return whether this thread repeats a computation that observers have been shown."""
    return getattr(_thread, "recomputing", False)


@contextmanager
def _recomputing() -> Iterator[None]:
    outer, _thread.recomputing = is_recomputing(), True
    try:
        yield
    finally:
        _thread.recomputing = outer
