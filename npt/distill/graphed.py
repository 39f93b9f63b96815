"""A micro-batch of the strategy `local` as one CUDA graph.

In an 8B step the host launches about 2,700 kernels, which in bf16 takes it as long as the GPU takes
to compute them. A graph holds the launches of one micro-batch with the addresses that its kernels
read and write, and is launched at once. Nothing in Python runs again. So it serves only where
nothing there could differ: full rows of one shape, the same settings, tensors at the same places,
and no hook, observer or mode that would miss its calls. Anything else is computed as usual.

A graph has to prove itself. At the third micro-batch of a shape in a row, computed as usual, torch
reports whether the host waits or random numbers are drawn, neither of which a graph could repeat.
Then the micro-batch is recorded with other tokens, replayed with its own, and compared bit for bit.
On any doubt the model stays without a graph, with a warning.

A recording keeps the memory that a micro-batch needs. After an OOM it is freed for good. The memory
of a failed recording torch 2.13 keeps until the process ends.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.overrides import _get_current_function_mode
from torch.testing import assert_close
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import PreTrainedModel

from npt.adapters.layer import NPTAdapter
from npt.base.linear import patch_of
from npt.base.precision import tf32_allowed
from npt.batch import Batch
from npt.config import NPTConfig, TrainConfig
from npt.distill.hidden_losses import BUILT_IN
from npt.distill.local import BatchSums
from npt.errors import first_line
from npt.hooks import has_forward_hooks, in_parts, is_unfused, may_change

Act = Callable[[Batch], list[Any]]
"""Computes a micro-batch: its five sums, and the gradient of each trained parameter or None."""

SIGHTS = 3
"""Micro-batches in a row after which one is recorded. The first two load all kernels."""

CONSTANTS = (int, float, torch.dtype, NPTConfig)
"""Attributes of modules that a graph holds as they were, such as a norm's epsilon."""

WAITED = "called a synchronizing CUDA operation"
"""Beginning of torch's warnings about waits."""


@dataclass
class GraphedStep:
    """Computes the micro-batches of one model, by a graph as soon as one has proved itself.

    Attributes:
        left: how many more graphs may be recorded: the shape may change, or the weights may move.
        graph: the key of the micro-batches that it computes, their batch, their results, and what
            computes these from that.
        last: key of the last micro-batch.
        sights: number of micro-batches with this key in a row.
    """

    left: int = 2
    graph: tuple[Any, Batch, list[Any], Callable[[], None]] | None = None
    last: Any = None
    sights: int = 0

    def compute(self, key: Any, batch: Batch, act: Act) -> list[Any]:
        """Return `act(batch)`. `key` is all that a graph depends on besides the tokens."""
        self.sights = self.sights + 1 if key == self.last else 1
        self.last = key
        if self.graph is not None and self.graph[0] == key:
            return self._replayed(batch)
        if self.sights != SIGHTS or self.left == 0:
            return act(batch)
        self.left -= 1
        self.graph = None
        drawn = torch.cuda.get_rng_state()
        results, waits = _watched(partial(act, batch))
        drawn -= torch.cuda.get_rng_state()
        try:
            if waits or drawn.any():
                raise RuntimeError("the host waits for the GPU, or draws random numbers")
            held = batch.mapped(torch.zeros_like)
            self.graph = (key, held, *record(partial(act, held)))
            assert_close(self._replayed(batch), results, rtol=0, atol=0, equal_nan=True)
            # room for what needed most memory so far, which may be a calibration or an evaluation
            room = torch.cuda.max_memory_reserved() - torch.cuda.memory_allocated()
            if torch.cuda.mem_get_info()[0] < room:
                raise RuntimeError("memory is short")
        except Exception as error:  # whatever torch raises
            self.give_up()
            warnings.warn(f"Training runs without a CUDA graph: {first_line(error)}", stacklevel=2)
        return results

    def give_up(self) -> None:
        self.left = 0
        self.graph = None

    def _replayed(self, batch: Batch) -> list[Any]:
        assert self.graph is not None
        _, held, results, replay = self.graph
        for name, tensor in held.row_tensors.items():
            tensor.copy_(getattr(batch, name))
        replay()
        # copies, since the next replay writes to the same memory
        return [None if each is None else each.clone() for each in results]


STEPS: WeakKeyDictionary[nn.Module, GraphedStep] = WeakKeyDictionary()
"""By model. As an attribute of the model they would be copied and saved with it."""


def graphed(
    model: PreTrainedModel, batch: Batch, config: TrainConfig, eager: Callable[[Batch], BatchSums]
) -> BatchSums:
    """Return `eager(batch)` and set the gradients, by a CUDA graph if one has proved itself."""
    parameters = [p for p in model.model.parameters() if p.requires_grad]
    full = not batch.padded and batch.documents is None and batch.kept is None
    # gradients that are there already would have to be added to
    fits = full and all(p.grad is None for p in parameters)
    places = None
    if fits and config.loss in BUILT_IN and not _is_observed():
        places = _places(model.model)
    if places is None:
        return eager(batch)

    def act(batch: Batch) -> list[Any]:
        for parameter in parameters:
            parameter.grad = None
        sums = eager(batch)
        return [*sums[:5], *(parameter.grad for parameter in parameters)]

    key = (batch.input_ids.shape, config, model.config._attn_implementation, tf32_allowed(), places)
    with torch.cuda.device(batch.input_ids.device):
        results = STEPS.setdefault(model, GraphedStep()).compute(key, batch, act)
    for parameter, gradient in zip(parameters, results[5:], strict=True):
        parameter.grad = gradient
    return BatchSums._make([*results[:5], batch.tokens, 0])


def record(act: Callable[[], list[Any]]) -> tuple[list[Any], Callable[[], None]]:
    """Return what `act` returns, and a function that computes these tensors again."""
    graph = torch.cuda.CUDAGraph()
    with (
        # gives the stream back if the capture fails
        torch.cuda.stream(torch.cuda.current_stream()),
        # A stream of this GPU: torch's own is of the first that recorded. Other threads may pin
        # memory meanwhile.
        torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"),
    ):
        results = act()
    return results, graph.replay


def _watched(act: Callable[[], list[Any]]) -> tuple[list[Any], bool]:
    """Return what `act` returns, and whether torch warns that the host waits in it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            results = act()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return results, any(WAITED in str(each.message) for each in caught)


def _is_observed() -> bool:
    """Return whether anything changes or watches the operations of this thread."""
    return bool(
        is_unfused()
        or torch.is_autocast_enabled("cuda")
        or torch.is_anomaly_enabled()
        or torch.cuda.get_sync_debug_mode()
        or torch.cuda.is_current_stream_capturing()
        or _get_current_dispatch_mode()
        or _get_current_function_mode()
    )


def _places(decoder: nn.Module) -> list[Any] | None:
    """Return where a decoder's tensors are, what is trained, and the constants of its modules; None
    if something of it calls more than its own forward and backward, or is sharded.
    """
    places: list[Any] = []
    for module in decoder.modules():
        places.append(type(module))
        if may_change(module) or has_forward_hooks(module) or in_parts(module):
            return None
        if isinstance(module, NPTAdapter) and (module.observer or module.recode):
            return None
        places += [each for each in vars(module).values() if isinstance(each, CONSTANTS)]
        held: tuple[Any, ...] = patch_of(module) or ()
        held += (*module.parameters(recurse=False), *module.buffers(recurse=False))
        for tensor in held:
            if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                return None
            places += [tensor.data_ptr(), tensor.requires_grad]
            if hasattr(tensor, "quant_state"):
                places.append(tensor.quant_state.absmax.data_ptr())
    return places
