"""FSDP2 under a guard: parameters that lie in shards on several processes.

Each forward and backward gathers layers, for which all processes must come. So they compute the
same number of micro-batches, in step, and one that is refused before its forward is computed as a
stand-in that does not count.

If the trained parameters are sharded too, a backward sums gradients over the processes as it
scatters them, and one process's NaN is in everybody's shards: the micro-batches that were computed
together are dropped together. Each gradient is looked at before it is summed, to name its process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError, ProcessError
from npt.guard.refusal import IN_GRADIENT, IN_LOSS, UNGUARDED

FSDP = "torch.distributed.fsdp"
DTENSOR = "torch.distributed.tensor"


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor, of which this process has a shard."""
    module = sys.modules.get(DTENSOR)  # not loaded: there is none
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, which shares its memory, or a whole tensor."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[attr-defined]


def full(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor, for which all processes must come if it is sharded."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def as_gradient(shard: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return a shard as the gradient of a sharded parameter; it shares the shard's memory."""
    kind: Any = sys.modules[DTENSOR].DTensor
    given: Any = parameter
    form = {"shape": given.shape, "stride": given.stride(), "run_check": False}
    return kind.from_local(shard, given.device_mesh, given.placements, **form)


def refuse_unfit(model: nn.Module, names: Mapping[str, nn.Parameter]) -> None:
    """Raise ConfigError if trained parameters are sharded in a way that a guard cannot follow."""
    if is_of_fsdp1(model) or any(getattr(p, "_is_flat_param", False) for p in names.values()):
        raise ConfigError(
            "the model is sharded by FSDP1, whose gradients a guard cannot hold; use FSDP2"
            f" (fully_shard; fsdp_version: 2), DDP or one process, or {UNGUARDED}"
        )
    if any(getattr(p, "_replicated_grad_hook_registered", False) for p in names.values()):
        raise ConfigError(
            "transformers averages the adapters' gradients inside each backward, as of a model that"
            f" was loaded with distributed_config; shard it by fsdp_version 2, or {UNGUARDED}"
        )
    sharded = _sharded(names)
    for name, given in sharded.items():
        by_fsdp = given.device_mesh.ndim == 1 and given.placements[0].is_shard()
        if not (by_fsdp and sharded_modules(model)):
            raise ConfigError(
                f"{name} is laid out as {given.placements} over processes, and a guard knows"
                " fully_shard over one dimension; use it alone, without tensor parallelism"
            )
    if sharded and len(sharded) < len(names):
        whole = next(name for name in names if name not in sharded)
        raise ConfigError(
            f"{next(iter(sharded))} is sharded and {whole} is whole; shard all parameters of the"
            " optimizer or none (ignored_params of fully_shard)"
        )


def is_of_fsdp1(model: nn.Module) -> bool:
    module: Any = sys.modules.get(FSDP)
    kinds = () if module is None else (module.FullyShardedDataParallel,)
    return any(isinstance(m, kinds) for m in model.modules())


def _sharded(parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    return {name: p for name, p in parameters.items() if is_sharded(p)}


def sharded_modules(model: nn.Module) -> list[Any]:
    module: Any = sys.modules.get(FSDP)
    kinds = () if module is None else (module.FSDPModule,)
    return [m for m in model.modules() if isinstance(m, kinds)]


def sharding_of(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], processes: ProcessGroup
) -> Sharding | None:
    """Return the sharded layers of a model, None if it has none."""
    modules = sharded_modules(model)
    sizes = {p.device_mesh.size() for p in _sharded(parameters).values()}
    trained = bool(sizes)
    if sizes - {processes.size}:
        raise ConfigError(
            f"parameters are sharded over {sizes.pop()} processes, and the guard has"
            f" {processes.size}; shard them over all"
        )
    return Sharding(modules, processes, trained) if modules else None


class Sharding:
    """The sharded layers of a guarded model, which the processes gather.

    Attributes:
        trained: the trained parameters are sharded, and so are their gradients.
        weight: by which gradients are multiplied before they are summed over the processes.
    """

    def __init__(self, modules: Iterable[Any], processes: ProcessGroup, trained: bool):
        self.modules, self.processes, self.trained = list(modules), processes, trained
        self.weight = 1
        self._norms: list[Tensor] = []  # of the micro-batch, before the sums
        if trained:
            try:
                for module in self.modules:
                    module.set_custom_reduce_scatter(_Summing(self))
            except ValueError as error:
                raise ConfigError(f"FSDP2 cannot be guarded here: {error}") from error
            self._sum(True)

    @property
    def weighs(self) -> bool:
        return self.trained and self.processes.size > 1

    def begin(self, weight: int) -> None:
        """Weigh the gradients of the micro-batch that begins, and let its backward sum them."""
        self.weight = weight
        self._norms.clear()
        for module in self.modules if self.trained else ():
            # accelerate would wait for the last micro-batch of a window
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_is_last_backward(True)  # and leave the sums to be waited for later

    def prepare(self, gradients: Tensor) -> None:
        """Weigh this process's gradients of a layer, flat, and look at them."""
        if not self.trained:  # closed
            return
        if self.weight != 1:
            gradients.mul_(self.weight)
        self._norms.append(torch.linalg.vector_norm(gradients, dtype=torch.float32))

    def judge(self, loss: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange what each process found in a micro-batch: its loss, and the norms [P] of its
        shards of the sums. Return what is wrong on each, a code or 0: [W]; the norms [P] of the
        whole sums.
        """
        before = torch.stack([norms.new_zeros(()), *(n.to(norms.device) for n in self._norms)])
        code = torch.where(before.isfinite().all(), 0.0, IN_GRADIENT)
        code += torch.where(loss.to(norms.device).isfinite(), 0.0, IN_LOSS)
        return self.exchange(code, norms)

    def exchange(self, code: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange what is wrong on this process, and sum norms, zeros if it computed none."""
        codes = torch.zeros(self.processes.size, device=norms.device)
        codes[self.processes.index] = code
        flat = self.processes.sum_(torch.cat([codes, norms.square()]))
        codes, squares = flat.split([self.processes.size, len(norms)])
        return codes, squares.sqrt()

    def norms_of_all(self, norms: Tensor) -> Tensor:
        """Return the norms [P] of whole tensors, from those of this process's shards."""
        return self.processes.sum_(norms.square()).sqrt()

    def end_together(self, error: BaseException, done: bool) -> None:
        """Raise ProcessError in place of refusing an error after which processes would be out of
        step, before all passes were `done`; in one process, in a backward, which FSDP2 does not
        begin anew.
        """
        alone = self.processes.size == 1
        if _in_backward(error) if alone else not done:
            self.processes.leave()
            others = "" if alone else ", and the others wait for its layers"
            raise ProcessError(
                f"process {self.processes.index} met {type(error).__name__}: {error} in the middle"
                f" of a micro-batch{others}; check data before the forward, and call"
                " guard.refuse(detail, ids, run=...)"
            ) from error

    def close(self) -> None:
        """Let gradients be means over the processes again, which is FSDP2's default."""
        self.begin(1)
        if self.trained:
            self._sum(False)
            self.trained = False

    def _sum(self, sums: bool) -> None:
        for module in self.modules:
            module.set_force_sum_reduction_for_comms(sums)
            module.set_gradient_divide_factor(1.0 if sums else float(self.processes.size))


class _Summing:
    """A reduce-scatter of FSDP2 (`set_custom_reduce_scatter`) that shows what it sums."""

    def __init__(self, sharding: Sharding):
        self._sharding = sharding

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: Any = False,
    ) -> Any:
        self._sharding.prepare(input_tensor)
        new = getattr(dist, "reduce_scatter_single", None)  # its name from torch 2.13 on
        scatter = dist.reduce_scatter_tensor if new is None else new
        return scatter(output_tensor, input_tensor, op, group, async_op)


def _in_backward(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").startswith("torch.autograd"):
            return True
        trace = trace.tb_next
    return False
