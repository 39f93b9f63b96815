"""A sharded base (FSDP2): each process keeps a share of every decoder layer.

Only the base is sharded. Adapters, embeddings, final norm and lm_head stay whole in every process.
The layer-local strategy needs one layer at a time, forward and backward, so a process holds one
whole layer besides its shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from npt.adapters.converted import attached_config, decoder_layers, is_sharded
from npt.adapters.layer import GATHER, NPTLayer
from npt.base.hooks import only_looks
from npt.base.linear import quantized_linears
from npt.errors import ModelError


def shard_layers(
    model: PreTrainedModel, mesh: Any, device: torch.device, gather: Callable[[int], None]
) -> None:
    """Shard every decoder layer over the processes of a mesh: 4-bit weights in their packed bytes,
    their statistics stay whole.

    Args:
        model: with adapters attached, on one device.
        mesh: one-dimensional, from `torch.distributed.device_mesh.init_device_mesh`.
        device: of this process, where everything goes, layer by layer.
        gather: makes the layer of this index whole, in all processes that need it now; called
            before its use.
    """
    from torch.distributed.fsdp import fully_shard

    attached_config(model)
    if is_sharded(model):
        raise ModelError("the base is sharded already; load it again to shard it in another way")
    for part in (model.model.embed_tokens, model.model.rotary_emb, model.model.norm, model.lm_head):
        part.to(device)
    for index, layer in enumerate(decoder_layers(model)):
        sharded: Any = layer.to(device)
        packed: list[tuple[Any, Any, str]] = [
            (m, m.weight.quant_state, m.weight.quant_type) for _, m in quantized_linears(layer)
        ]
        of_adapter = set(layer.npt.parameters()) if isinstance(layer, NPTLayer) else set()
        # Resharding must be asked for: a layer without a parent here is a root, which would stay
        # whole after its first use.
        with _shares_without_gradient():
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=of_adapter)
        _keep_statistics(packed)
        sharded.unshard()
        _keep_statistics(packed)
        sharded.reshard()
        vars(layer)[GATHER] = lambda index=index: gather(index)
        # Before FSDP's own hook, which then finds the layer whole.
        layer.register_forward_pre_hook(
            only_looks(lambda layer, _: vars(layer)[GATHER]()), prepend=True
        )


@contextmanager
def _shares_without_gradient() -> Iterator[None]:
    """Let FSDP make a parameter of a share of packed bytes.

    torch 2.11 makes it with a gradient, which whole numbers cannot have, and sets the flag of the
    original in the next line; newer versions pass the flag on.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    frozen = partial(nn.Parameter, requires_grad=False)
    original = _fsdp_param.nn
    _fsdp_param.nn = SimpleNamespace(**{**vars(nn), "Parameter": frozen})  # type: ignore[assignment]
    try:
        yield
    finally:
        _fsdp_param.nn = original


def _keep_statistics(packed: list[tuple[Any, Any, str]]) -> None:
    """Give packed weights their statistics back: FSDP makes two plain parameters of them."""
    for module, state, kind in packed:
        module.weight.quant_state, module.weight.quant_type = state, kind


def is_share(tensor: Tensor) -> bool:
    """Return whether only a part of a tensor is here."""
    return hasattr(tensor, "full_tensor")
