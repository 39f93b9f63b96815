"""`--compile`: elementwise functions of the fused path, by `torch.compile`."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def compiled(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled as a whole; from a failure of the compiler on, `plain` itself.

    So whatever the compiler lacks shows before anything is computed. An error while it runs is
    raised: some arguments may have been written over by then.
    """
    fast: Callable[..., Any] | None = torch.compile(plain, dynamic=True, fullgraph=True)

    def call(*arguments: Any) -> Any:
        nonlocal fast
        if fast is None:
            return plain(*arguments)
        try:
            return fast(*arguments)
        except Exception as error:
            if not _is_of_the_compiler(error):
                raise
            fast = None
            reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
            warnings.warn(
                f"--compile: {plain.__name__.strip('_')} could not be compiled and is computed as"
                f" it is ({reason})",
                stacklevel=2,
            )
            return plain(*arguments)

    return call


def _is_of_the_compiler(error: Exception) -> bool:
    """Return whether nothing was computed: the compiler is missing, or failed, or was asked for
    too many forms of one function."""
    # here, since it takes a second to load
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return isinstance(error, TorchDynamoException | FailOnRecompileLimitHit)
