"""`shard_base`: a base too large for one GPU, in parts over the processes of a run.

Making a layer whole takes all processes, and these are not in step: a micro-batch is refused on one
of them, the last window is uneven, process 0 alone looks into a fault. So before a layer is
gathered every process says which layer it needs, or that it waits at a sum; all gather each layer
that somebody needs. A process that waits hands out its shares meanwhile, so nothing hangs that
would not hang with a whole base.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from npt.adapters.converted import attached_config, decoder_layers, viewed
from npt.adapters.sharding import shard_layers
from npt.base.identity import keep_identity
from npt.distributed.join import SHARDED_OVER, join_processes
from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError

_NONE = -1
"""Sent by a process that needs no layer now."""


class LayerGatherer:
    """Gathers the layers of a sharded base, in all processes together."""

    def __init__(self, processes: ProcessGroup, model: PreTrainedModel):
        self._processes = processes
        self._layers: list[Any] = list(decoder_layers(model))

    def gather(self, index: int) -> None:
        """Make a layer whole here, and every other one in the processes that need it now."""
        self._round(index)

    def hand_out(self) -> None:
        """Gather layers for the others until no process needs any."""
        while any(needed != _NONE for needed in self._round(_NONE)):
            pass

    def _round(self, needed: int) -> list[int]:
        """Exchange which layer each process needs, make it whole there, and return the needs."""
        processes = self._processes
        everyone = [_NONE] * processes.size
        processes.collect(lambda: dist.all_gather_object(everyone, needed))
        for index in sorted(set(everyone) - {_NONE}):
            processes.collect(self._layers[index].unshard)
            if index != needed:
                self._layers[index].reshard()
        return everyone


def shard_base(model: PreTrainedModel, processes: ProcessGroup | None = None) -> ProcessGroup:
    """Spread every decoder layer of the frozen base over the processes, each of which keeps a share
    on its device (FSDP2).

    Every process calls it on the same base, and from then on every process must compute: what one
    needs of a layer the others hand out. Strategy `local`, evaluation and training with
    `npt.Trainer` give the same results as before; `end_to_end` is refused.

    Args:
        model: with adapters attached, on the CPU if a GPU could not hold it; `load_base(...,
            device="cpu", pack_on=processes.device)` packs it on the GPU all the same.
        processes: of the run; default those that a launcher started. From now on their sums hand
            out layers.

    Returns:
        The processes, which a Trainer of this model takes by itself.

    Raises:
        ConfigError: there is one process.
        ModelError: no adapters are attached, or the base is sharded already.
        ProcessError: another process failed or was lost.
    """
    attached_config(model)
    processes = processes if processes is not None else join_processes()
    if processes.size == 1 or processes.device is None:
        raise ConfigError(
            "there is one process, and nobody to share the base with; start several with torchrun"
        )
    keep_identity(model)
    mesh = init_device_mesh(processes.device.type, (processes.size,))
    gatherer = LayerGatherer(processes, model)
    shard_layers(model, mesh, processes.device, gatherer.gather)
    processes.before_sums = gatherer.hand_out
    setattr(viewed(model), SHARDED_OVER, processes)
    return processes
