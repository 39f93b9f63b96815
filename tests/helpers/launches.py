"""How many kernels a card would be asked to launch, counted without one.

An operator that returns a view or memory left as it is launches nothing; any other launches one
kernel, a copy and a read of a value included. For lists of tensors (`_foreach_*`, `_fused_*`) it is
what ATen's MultiTensorApply.cuh makes: one launch for each full table of 320 blocks of 2^16
numbers, or of 110, 64, 48, 36 or 30 tensors of 1 to 5 lists; `_foreach_norm` also zeroes a buffer
and sums up, and `cat` takes 128 tensors a launch. A second pass of a large reduction, splits of a
product, and kernels of compiled functions are not counted.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "lift"}
FREE |= {"_unsafe_view", "_reshape_alias", "lift_fresh", "is_same_size", "record_stream", "set_"}
CHUNK, BLOCKS, TENSORS = 65536, 320, (110, 64, 48, 36, 30)


class Launches(TorchDispatchMode):
    """Counts launches by operator that takes or returns a tensor of a device."""

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self.device, self.counts = device, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name, leaves = func.overloadpacket.__name__, tree_leaves((args, kwargs, out))
        on = any(isinstance(t, Tensor) and t.device.type == self.device for t in leaves)
        if on and not func.is_view and name not in FREE:
            self.counts[name] += _launches(name, args)
        return out


def _launches(name: str, args: Any) -> int:
    lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
    if name in ("stack", "cat"):
        return -(-len(args[0]) // 128)
    if not lists or not name.startswith(("_foreach", "_fused")):
        return 1
    return of_lists(lists) + 2 * (name == "_foreach_norm")


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
