"""How many kernels a card would be asked to launch, counted without one.

The rule, that of `benchmarks/step_cost.py` where both count:

- an operator that returns a view or fresh memory launches nothing; any other launches one kernel,
  a copy between devices and a read of a value included;
- an operator over lists of tensors (`_foreach_*`, `_fused_adam*`) launches as many as torch's
  `multi_tensor_apply` does: one for each full table of 320 blocks of 2^16 numbers, or of 110, 64,
  48, 36 or 30 tensors (of 1 to 5 lists); `_foreach_norm` sets a buffer to zero before, and sums up
  after.

What CUDA adds of itself is not counted: the second pass of a large reduction, the splits of a
product, a library's unpacking. Counts are of operators that reach the dispatcher on whatever device
the tensors are, so autograd's and the optimizer's are in; a compiled function's kernels are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach"}
FREE |= {"_unsafe_view", "_reshape_alias", "lift_fresh", "is_same_size", "record_stream", "set_"}
CHUNK, BLOCKS, TENSORS = 65536, 320, (110, 64, 48, 36, 30)


class Launches(TorchDispatchMode):
    """Counts within its context; `by_name` has the launches of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name = Counter[str]()

    @property
    def total(self) -> int:
        return self.by_name.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and name not in FREE:
            lists = (
                [a for a in args if _is_list(a)] if name.startswith(("_foreach", "_fused")) else []
            )
            self.by_name[name] += of_lists(lists) + 2 * (name == "_foreach_norm") if lists else 1
        return out


def _is_list(argument: Any) -> bool:
    return isinstance(argument, list | tuple) and all(isinstance(t, Tensor) for t in argument)


def of_lists(lists: Sequence[Sequence[Tensor]]) -> int:
    """Return how many launches `multi_tensor_apply` makes for lists of tensors."""
    full = [tensors for tensors in lists if any(t.dim() for t in tensors)] or lists  # no steps
    most = TENSORS[min(len(full), len(TENSORS)) - 1]
    launches = tensors = blocks = 0
    for tensor in full[0]:
        tensors += 1
        for chunk in range(chunks := -(-tensor.numel() // CHUNK)):
            blocks += 1
            last = chunk == chunks - 1
            if blocks == BLOCKS or (tensors == most and last):
                launches, blocks, tensors = launches + 1, 0, int(not last)
    return launches + bool(blocks)
