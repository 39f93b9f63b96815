"""Bases of any size with random weights, to measure speed and memory.

Weights are drawn and packed one at a time, so an 8B base takes no more than the 6 GB that it keeps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import bitsandbytes as bnb
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations import replace_with_bnb_linear

from npt.base.attention import implementation_of
from npt.base.families import check_family
from npt.base.load import check_choice, frozen, packing_config
from npt.base.precision import enforce_policy
from npt.config import QUANT_TYPES, check_attention
from npt.device import default_device
from npt.packed import quantized_linears

STD = 0.02
"""Standard deviation of every weight matrix, as in transformers."""


@torch.inference_mode(False)
def random_base(
    config: PreTrainedConfig,
    *,
    quantization: str | None = "nf4",
    device: str | torch.device | None = None,
    seed: int = 0,
    attn_implementation: str = "sdpa",
    compute_dtype: torch.dtype = torch.float32,
) -> Any:
    """Return a model like those of `load_base`, with random values and no tokenizer.

    Under quantisation, weights that are not packed are stored in bf16. The seed fixes the values;
    they differ between kinds of devices.
    """
    check_choice("quantization", quantization, (*QUANT_TYPES, None))
    check_attention(attn_implementation)
    check_family("a random base", config)
    device = torch.device(device) if device is not None else default_device()
    stored = torch.float32 if quantization is None else torch.bfloat16
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            dtype=stored,
            attn_implementation=implementation_of(attn_implementation),
        )
    if quantization is not None:
        replace_with_bnb_linear(
            model,
            modules_to_not_convert=["lm_head"],  # as in a loaded checkpoint
            quantization_config=packing_config(quantization),
        )
        model.is_loaded_in_4bit = True  # by which PEFT finds its form of a layer
    _draw_weights(model, stored, device, torch.Generator(device).manual_seed(seed))
    # built on the meta device, it has no frequencies yet
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    if quantization is not None:
        enforce_policy(model, compute_dtype)
    model.config._name_or_path = "random"
    return frozen(model, torch.float32)


def _draw_weights(
    model: Any, stored: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Draw every weight: matrices are random, norms are 1, biases are 0."""
    packed = {id(module.weight) for _, module in quantized_linears(model)}

    # a tied weight is listed once
    for name, parameter in list(model.named_parameters()):
        owner, _, last_name = name.rpartition(".")
        value = torch.full(parameter.shape, float(last_name != "bias"), dtype=stored, device=device)
        if parameter.ndim > 1:
            value.normal_(generator=generator).mul_(STD)
        drawn: nn.Parameter = nn.Parameter(value, requires_grad=False)
        if id(parameter) in packed:
            settings = {k: v for k, v in vars(parameter).items() if k != "quant_state"}
            # the move to the device packs it
            drawn = bnb.nn.Params4bit(drawn.data, requires_grad=False, **settings).to(device)
        setattr(model.get_submodule(owner), last_name, drawn)
    model.tie_weights()


def shard(model: Any, whole: Iterable[nn.Parameter]) -> None:
    """Shard a PEFT model over all processes, layer by layer, without the parameters `whole`.
    Backward sums gradients instead of averaging them.
    """
    for _, linear in quantized_linears(model):
        linear.quant_state = linear.weight.quant_state  # gathering the weight loses it
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.get_base_model().model.layers, model):
        sharded = fully_shard(module, mesh=mesh, ignored_params={*whole})
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)
