"""`shard_base`: spread a base too large for one GPU over a run's processes with FSDP2.

Only the base's layers are sharded. Adapters, embeddings, final norm and lm_head stay whole in every
process. FSDP gathers a layer for its forward and backward, prefetches the next one, and frees it
afterwards. Gathering needs all processes, so all must compute equally often: a process with nothing
to compute passes a placeholder through the layers (npt/train/loop.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import call
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel

from npt.adapters.converted import adapters_disabled, attached_config, decoder_layers, is_sharded
from npt.adapters.layer import NPTLayer
from npt.adapters.stream import Stream, open_stream
from npt.base.layers import real_layers
from npt.batch import Sample, collate
from npt.distributed.join import join_processes
from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError, ModelError
from npt.hooks import WITHIN, within
from npt.packed import quantized_linears


@torch.no_grad()
def shard_base(model: PreTrainedModel, processes: ProcessGroup | None = None) -> ProcessGroup:
    """Shard every decoder layer of the frozen base over the processes; statistics of packed weights
    stay whole.

    Every process must call it on the same base, and then compute equally often. Results equal those
    of the whole base, bit for bit: each layer's bytes, and its output for a few tokens, are
    compared before and after.

    Args:
        model: the base with adapters attached. `load_base(..., layers_later=True)` leaves layers in
            their files, so that no process must hold the whole base; they are read here one by one.
        processes: the run's processes; default: those that a launcher started.

    Returns:
        The processes. A Trainer of this model finds them by itself.

    Raises:
        ConfigError: there is one process, or torch cannot shard a packed base.
        ModelError: no adapters are attached, the base is sharded already, a layer cannot be read,
            or sharding changes it.
        ProcessError: another process failed or was lost.
    """
    attached_config(model)
    processes = processes if processes is not None else join_processes()
    if processes.size == 1 or processes.device is None:
        raise ConfigError(
            "the base cannot be sharded over one process: start several with torchrun"
        )
    if not hasattr(FSDPModule, "reset_iter_state"):  # 2.11 cannot shard integers either
        raise ConfigError(f"sharding a base needs torch 2.13 or later; this is {torch.__version__}")
    if is_sharded(model):
        raise ModelError("the base is sharded already; load it again to shard it differently")
    device = processes.device
    mesh = init_device_mesh(device.type, (processes.size,))
    layers = real_layers(model, device)
    # one short row, to compare each layer's output before and after
    tokens = tuple(range(min(16, model.config.vocab_size)))
    probe = collate([Sample("probe", tokens)])
    stream = open_stream(model, probe.to(device))
    changed = []
    with processes.exchanging(), adapters_disabled(model):
        for index, layer in layers:
            changed += [f"{name} of layer {index}" for name in _shard(layer, mesh, stream)]
        # The root holds no parameters. In its forward, FSDP prefetches the next layer.
        fully_shard(model.model, mesh=mesh, ignored_params=set(model.model.parameters()))
        for module in (*decoder_layers(model), model.model):
            setattr(module, WITHIN, call)
            register_fsdp_forward_method(module, WITHIN)
        within(model.model, lambda: None)  # FSDP must see the root first
    failure = None
    if changed:
        failure = ModelError(
            f"sharding changes {changed[0]} (one of {len(changed)}) with torch {torch.__version__},"
            " and so the base's results; use another version of torch or bitsandbytes"
        )
    processes.raise_together(failure)
    return processes


def _shard(layer: Any, mesh: DeviceMesh, stream: Stream) -> list[str]:
    """Shard a layer; return the names of parameters, and of the output, that changed."""
    packed = []
    for _, module in quantized_linears(layer):
        packed.append((module, module.weight.quant_state, module.weight.quant_type))
    of_adapter = set(layer.npt.parameters()) if isinstance(layer, NPTLayer) else set()
    context = stream.context_of(layer)
    bytes_before = {name: _bytes(p).clone() for name, p in _of_base(layer)}
    output_before = layer.forward(stream.hidden, **context)
    fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=of_adapter)
    # FSDP replaces a packed weight by two plain parameters, its shard and the whole.
    _keep_statistics(packed)
    layer.unshard()  # compare what a forward will see
    _keep_statistics(packed)
    changed = []
    for name, parameter in _of_base(layer):
        if not torch.equal(_bytes(parameter), bytes_before[name]):
            changed.append(name)
    output = layer.forward(stream.hidden, **context)
    layer.reshard()
    if not torch.equal(_bytes(output), _bytes(output_before)):
        changed.append("the output")
    return changed


def _of_base(layer: Any) -> Iterator[tuple[str, Tensor]]:
    return ((name, p) for name, p in layer.named_parameters() if not name.startswith("npt."))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def _keep_statistics(packed: list[tuple[Any, Any, str]]) -> None:
    for module, state, kind in packed:
        module.weight.quant_state = state
        module.weight.quant_type = kind
