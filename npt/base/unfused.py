"""Whether converted layers compute operation by operation, for inspection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_UNFUSED: ContextVar[bool] = ContextVar("unfused", default=False)


@contextmanager
def unfused() -> Iterator[None]:
    """Within the context, compute converted layers operation by operation."""
    token = _UNFUSED.set(True)
    try:
        yield
    finally:
        _UNFUSED.reset(token)


def is_unfused() -> bool:
    """Return whether the caller is within `unfused`."""
    return _UNFUSED.get()
