"""`shard_base`: a base that no GPU holds, in parts over the processes of a run.

Making a layer whole takes all processes, and these do not walk in step: a micro-batch is refused on
one of them, the last window is uneven, process 0 alone looks into a fault. So before a layer is
gathered every process says which layer it needs, or that it waits at one of the sums that the
processes share; each layer that somebody needs is then gathered by all. A process that waits hands
out its shares meanwhile, so nothing hangs that would not hang with a whole base.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from npt.adapters.attach import attached_config, decoder_layers, viewed
from npt.adapters.sharding import shard_layers
from npt.base.identity import keep_identity
from npt.distributed.processes import ProcessGroup, join_processes
from npt.errors import ConfigError, ProcessError

_RANKS = "_npt_processes"

_NONE = -1
"""What a process says that needs no layer now."""


class ShardedProcessGroup(ProcessGroup):
    """ProcessGroup that hold parts of one base: in front of every sum they see to it that nobody
    lacks a layer.
    """

    layers: list[Any]
    _end: ProcessError | None = None

    def gather(self, index: int) -> None:
        """Make a layer whole here, and every other one in the processes that need it now."""
        self._round(index)

    def _lost(self, error: RuntimeError) -> ProcessError:
        self._end = super()._lost(error)
        return self._end

    def _collect(self, collective: Callable[[], Any], device: torch.device | None = None) -> None:
        while any(needed != _NONE for needed in self._round(_NONE)):
            pass
        super()._collect(collective, device)

    def _round(self, needed: int) -> list[int]:
        """One question to all processes, and the layers that they answer with; by process, what
        each needs.
        """
        if self._end is not None:  # met in the middle of a micro-batch, and not yet the end of all
            raise self._end
        everyone: list[int] = []

        def ask() -> None:
            own = torch.tensor([needed], device=self._speaking)
            answers = [torch.empty_like(own) for _ in range(self.size)]
            dist.all_gather(answers, own)
            everyone.extend(int(answer) for answer in answers)

        super()._collect(ask)
        for index in sorted(set(everyone) - {_NONE}):
            super()._collect(self.layers[index].unshard, self.device)
            if index != needed:
                self.layers[index].reshard()
        return everyone


def shard_base(model: PreTrainedModel, processes: ProcessGroup | None = None) -> ProcessGroup:
    """Spread every decoder layer of the frozen base over the processes, each of which keeps a share
    on its device (FSDP2).

    Every process calls it, on the same base, and from then on every process has to compute: what
    one needs of a layer the others hand out. Strategy `local`, evaluation and training with
    `npt.Trainer` go on as before, with the same results; `end_to_end` is refused.

    Args:
        model: with adapters attached, on the CPU if a GPU could not hold it; `load_base(...,
            device="cpu", pack_on=processes.device)` packs it on the GPU all the same.
        processes: of the run; default those that a launcher started. They are changed in place.

    Returns:
        The processes, which a Trainer of this model takes by itself.

    Raises:
        ConfigError: there is one process.
        ModelError: no adapters are attached, or the base is sharded or spread over devices already.
        ProcessError: another process failed or was lost.
    """
    attached_config(model)
    processes = processes if processes is not None else join_processes()
    if processes.size == 1 or processes.device is None:
        raise ConfigError(
            "there is one process, and nobody to share the base with; start several with torchrun,"
            " or load with device_map"
        )
    keep_identity(model)
    mesh = init_device_mesh(processes.device.type, (processes.size,))
    processes.__class__ = ShardedProcessGroup
    assert isinstance(processes, ShardedProcessGroup)
    processes.layers = list(decoder_layers(model))
    shard_layers(model, mesh, processes.device, processes.gather)
    setattr(viewed(model), _RANKS, processes)
    return processes


def processes_of(model: PreTrainedModel) -> ProcessGroup | None:
    """The processes that a base is sharded over, if it is."""
    return getattr(viewed(model), _RANKS, None)
