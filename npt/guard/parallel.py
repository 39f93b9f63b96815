"""A guarded model on several processes: in DistributedDataParallel, or sharded by FSDP2.

Under DistributedDataParallel each process computes alone; the window sums gradients.

Under FSDP2 each forward and backward gathers layers from all processes. So all compute the same
number of micro-batches, in step. A stand-in that does not count replaces one refused before its
forward. If trained parameters are sharded too, backward sums gradients over the processes, and one
process's NaN reaches all shards. So micro-batches computed together are refused together. Each
gradient is checked before the sum, to name its process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from npt.distributed.processes import DTENSOR, ProcessGroup, is_sharded
from npt.errors import ConfigError, ProcessError
from npt.guard.refusal import IN_GRADIENT, IN_LOSS, UNGUARDED

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

FSDP = "torch.distributed.fsdp"


def whole(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _parallel(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel around a model, compiled or not; None without one."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def unsynchronised(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which processes compute independently: backward spreads no NaN to the
    others, and forward waits for no buffers from a process that refused its micro-batch.
    """
    wrapped = _parallel(model)
    if wrapped is None:
        return nullcontext()
    wrapped.require_forward_param_sync = False
    return wrapped.no_sync()


def share_buffers(model: nn.Module) -> None:
    """Send process 0's buffers to all, as DistributedDataParallel does in a window's first forward.

    All processes must call it.
    """
    wrapped = _parallel(model)
    if wrapped is not None and wrapped.broadcast_buffers and wrapped.modules_buffers:
        wrapped._sync_buffers()


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard, which shares the tensor's memory, or a tensor that is whole."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def full(tensor: Tensor) -> Tensor:
    """Return the whole tensor; if it is sharded, all processes must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def as_gradient(shard: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return a shard as a sharded parameter's gradient, sharing its memory."""
    assert is_sharded(parameter)
    shards: type[DTensor] = sys.modules[DTENSOR].DTensor
    return shards.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def refuse_unfit(model: nn.Module, names: Mapping[str, nn.Parameter]) -> None:
    """Raise ConfigError if the guard does not support how trained parameters are sharded."""
    if is_of_fsdp1(model) or any(getattr(p, "_is_flat_param", False) for p in names.values()):
        raise ConfigError(
            "the guard does not support FSDP1; use FSDP2 (fully_shard; fsdp_version: 2), DDP or one"
            f" process, or {UNGUARDED}"
        )
    if any(getattr(p, "_replicated_grad_hook_registered", False) for p in names.values()):
        raise ConfigError(
            "a model loaded with distributed_config averages its adapters' gradients in each"
            f" backward, which the guard does not support; shard it with fsdp_version: 2, or"
            f" {UNGUARDED}"
        )
    # of tensor parallelism, backward leaves gradients that are no plain shards
    sharded = _sharded(names)
    for name, given in sharded.items():
        by_fsdp = given.device_mesh.ndim == 1 and given.placements[0].is_shard()
        if not (by_fsdp and sharded_modules(model)):
            raise ConfigError(
                f"the guard does not support {name} with placements {given.placements}; use"
                " fully_shard over one dimension, without tensor parallelism"
            )
    if sharded and len(sharded) < len(names):
        whole = next(name for name in names if name not in sharded)
        raise ConfigError(
            f"{next(iter(sharded))} is sharded and {whole} is whole; shard all of the optimizer's"
            " parameters or none (fully_shard's ignored_params)"
        )
    # each process's gradients are checked before their sum
    if sharded and not hasattr(sys.modules[FSDP].FSDPModule, "set_custom_reduce_scatter"):
        raise ConfigError(
            f"guarding sharded parameters needs torch 2.9 or later; this is {torch.__version__}"
        )


def is_of_fsdp1(model: nn.Module) -> bool:
    return bool(_modules_of(model, "FullyShardedDataParallel"))


def _sharded(parameters: Mapping[str, nn.Parameter]) -> dict[str, DTensor]:
    return {name: p for name, p in parameters.items() if is_sharded(p)}


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return _modules_of(model, "FSDPModule")


def _modules_of(model: nn.Module, kind: str) -> list[Any]:
    kinds = getattr(sys.modules.get(FSDP), kind, ())  # without FSDP there are none
    return [module for module in model.modules() if isinstance(module, kinds)]


def reshard(modules: Iterable[FSDPModule]) -> None:
    """Give layers that a forward without a backward left whole, such as an evaluation's, their
    shards back: these are the parameters that the optimizer steps."""
    for module in modules:
        module.reshard()


def sharding_of(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], processes: ProcessGroup
) -> Sharding:
    """Return a model's sharded layers, of which there may be none."""
    modules = sharded_modules(model)
    sizes = {p.device_mesh.size() for p in _sharded(parameters).values()}
    trained = bool(sizes)
    if sizes - {processes.size}:
        raise ConfigError(
            f"parameters are sharded over {sizes.pop()} processes, but the guard has"
            f" {processes.size}; shard them over all"
        )
    return Sharding(modules, processes, trained)


class Sharding:
    """The sharded layers of a guarded model. Without any, its methods change nothing.

    Attributes:
        modules: the sharded layers.
        trained: whether trained parameters, and so their gradients, are sharded.
        weight: the factor on gradients before they are summed over the processes.
    """

    def __init__(self, modules: Iterable[FSDPModule], processes: ProcessGroup, trained: bool):
        self.modules = list(modules)
        self.processes = processes
        self.trained = trained
        self.weight = 1
        self._norms: list[Tensor] = []  # of the micro-batch's gradients, before the sums
        if trained:
            try:
                for module in self.modules:
                    # its base class is private to torch
                    module.set_custom_reduce_scatter(_Summing(self))  # type: ignore[arg-type]
            except ValueError as error:
                raise ConfigError(f"this use of FSDP2 is not supported: {error}") from error
            self._sum(True)

    @property
    def together(self) -> bool:
        """Whether the processes can only compute together, since each holds a part of a layer."""
        return bool(self.modules) and self.processes.size > 1

    @property
    def weighs(self) -> bool:
        """Whether backward weights gradients, before it sums them over the processes."""
        return self.trained and self.processes.size > 1

    def begin(self, weight: int) -> None:
        """Set the weight of the next micro-batch's gradients, and let its backward sum them."""
        self.weight = weight
        self._norms.clear()
        for module in self.modules if self.trained else ():
            # accelerate would sum only in the last micro-batch of a window, and wait later
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_is_last_backward(True)

    def prepare(self, gradients: Tensor) -> None:
        """Weight this process's flat gradients of a layer, and note their norm."""
        if not self.trained:  # closed
            return
        if self.weight != 1:
            gradients.mul_(self.weight)
        self._norms.append(torch.linalg.vector_norm(gradients, dtype=torch.float32))

    def judge(self, loss: Tensor, norms: Tensor) -> tuple[Tensor | None, Tensor]:
        """Exchange each process's loss and the norms [P] of its shards of the summed gradients.
        Return a code for what is wrong on each process, or 0: [W], or None if each judges for
        itself; and the norms [P] of the whole gradients.
        """
        if not self.trained:
            return None, norms
        before = torch.stack([norms.new_zeros(()), *(n.to(norms.device) for n in self._norms)])
        code = torch.where(before.isfinite().all(), 0.0, IN_GRADIENT)
        code += torch.where(loss.to(norms.device).isfinite(), 0.0, IN_LOSS)
        return self.exchange(code, norms)

    def exchange(self, code: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange this process's code, and add up norms, which are zeros if it computed none."""
        codes = torch.zeros(self.processes.size, device=norms.device)
        codes[self.processes.index] = code
        flat = self.processes.sum_(torch.cat([codes, norms.square()]))
        codes, squares = flat.split([self.processes.size, len(norms)])
        return codes, squares.sqrt()

    def norms_of_all(self, norms: Tensor) -> Tensor:
        """Return the norms [P] of whole gradients from those of this process's shards."""
        return self.processes.sum_(norms.square()).sqrt() if self.trained else norms

    def end_together(self, error: BaseException, done: bool) -> None:
        """Raise ProcessError instead of refusing an error that puts processes out of step, because
        not all passes were `done`. On one process, an error in backward is fatal too: FSDP2 cannot
        restart it.
        """
        if not self.modules:
            return
        alone = self.processes.size == 1
        if _in_backward(error) if alone else not done:
            self.processes.leave()
            others = "" if alone else ", and the other processes wait for its layers"
            raise ProcessError(
                f"process {self.processes.index} raised {type(error).__name__}: {error} in the"
                f" middle of a micro-batch{others}; check the data before the forward, and call"
                " guard.refuse(detail, ids, run=...)"
            ) from error

    def close(self) -> None:
        """Restore FSDP2's default, which averages gradients over the processes."""
        self.begin(1)
        if self.trained:
            self._sum(False)
            self.trained = False

    def _sum(self, sums: bool) -> None:
        for module in self.modules:
            module.set_force_sum_reduction_for_comms(sums)
            module.set_gradient_divide_factor(1.0 if sums else float(self.processes.size))


class _Summing:
    def __init__(self, sharding: Sharding):
        self._sharding = sharding

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: object,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._sharding.prepare(input_tensor)
        new = getattr(dist, "reduce_scatter_single", None)  # the name since torch 2.13
        scatter = dist.reduce_scatter_tensor if new is None else new
        return scatter(output_tensor, input_tensor, op, group, async_op)


def _in_backward(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").startswith("torch.autograd"):
            return True
        trace = trace.tb_next
    return False
