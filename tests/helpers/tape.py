"""A recording of operations that runs them again as a CUDA graph does: the same operations on the
same tensors, without any Python in between.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Records the operations that run inside it. What they make stays where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, dict[str, Any], Any]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.steps.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.steps:
            again = func(*args, **kwargs)
            if func.is_view or func._schema.is_mutable:
                continue
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)
                else:
                    assert old == new, f"{func} gave the host a value"


def record(act: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Stand in for `npt.distill.graphed.record`."""
    tape = Tape()
    with tape:
        found = act()
    return found, tape.replay
