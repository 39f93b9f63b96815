"""The first operation with finite inputs and a non-finite output, by a dispatch mode around one run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from npt.health.verdict import Operand, Verdict


class _First(TorchDispatchMode):
    def __init__(self, limit: float):
        super().__init__()
        self.limit = limit
        self.found: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.found is None and "empty" not in str(func):
            inputs = list(_floats((args, kwargs)))
            for tensor in _floats(out):
                bad = ~torch.isfinite(tensor) | (tensor.abs() > self.limit)
                if inputs and bool(bad.any()) and all(bool(torch.isfinite(i).all()) for i in inputs):
                    index = tuple(int(i) for i in bad.nonzero()[0])
                    operands = tuple(
                        Operand(f"input {n}", str(i.dtype), tuple(i.shape), 0, 0, float(i.abs().max()) if i.numel() else 0.0)
                        for n, i in enumerate(inputs)
                    )
                    self.found = (str(func), tuple(tensor.shape), index, float(tensor[index]), operands)
                    break
        return out


def _floats(values: Any) -> Iterator[Tensor]:
    yield from (v.detach() for v in tree_leaves(values) if isinstance(v, Tensor) and v.is_floating_point())


def trace(model: nn.Module, batch: Any, *, run: Callable[[], Any] | None = None, limit: float = math.inf) -> Verdict | None:
    assert run is not None
    state = torch.get_rng_state()
    grads = [(p, p.grad) for p in model.parameters()]
    for p, _ in grads:
        p.grad = None
    watch = _First(limit)
    try:
        with watch:
            run()
    finally:
        for p, grad in grads:
            p.grad = grad
        torch.set_rng_state(state)
    if watch.found is None:
        return None
    name, shape, index, value, operands = watch.found
    return Verdict(
        cause="overflow",
        phase="forward",
        layer=None,
        module="",
        operation=name,
        source="",
        tensor=f"output {list(shape)}",
        index=index,
        value=value,
        reached="loss",
        explanation="finite inputs, an output that is not",
        remedy="look at the inputs",
        operands=operands,
    )
