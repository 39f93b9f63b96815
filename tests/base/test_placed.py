"""Where a base lies: on the GPUs as a whole, judged without a card by tensors that have a device
and no storage.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig

from npt.base.linear import quantized_linears
from npt.base.placement import check_placement
from npt.base.random_base import random_base
from npt.errors import ModelError

FAKE = FakeTensorMode(allow_non_fake_inputs=True)

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def on_cuda(quantization: str | None = "nf4") -> Any:
    """A base whose tensors claim to be on a GPU; they have no storage."""
    model = random_base(CONFIG, quantization=quantization, device="cpu")
    packed = {id(module.weight) for _, module in quantized_linears(model)}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = claimed(buffer)
        for name, old in module._parameters.items():
            if old is not None and id(old) not in packed:
                module._parameters[name] = torch.nn.Parameter(claimed(old), requires_grad=False)
            elif old is not None:
                weight: Any = claimed(old)
                weight.quant_state = state = old.quant_state
                for part in (state, state.state2):
                    for key, value in vars(part).items():
                        if isinstance(value, torch.Tensor):
                            setattr(part, key, claimed(value))
                module._parameters[name] = weight
    return model


def claimed(tensor: torch.Tensor, device: str = "cuda:0") -> torch.Tensor:
    with FAKE:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def host(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32)


def norm_on_host(model: Any) -> str:
    model.model.layers[1].input_layernorm.weight = torch.nn.Parameter(host(64), requires_grad=False)
    return "model.layers.1.input_layernorm.weight"


def rotary_on_host(model: Any) -> str:
    model.model.rotary_emb.inv_freq = host(8)
    return "model.rotary_emb.inv_freq"


def layer_on_disk(model: Any) -> str:
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(
        torch.empty(4, 1, dtype=torch.uint8, device="meta"), requires_grad=False
    )
    return "model.layers.0.mlp.up_proj.weight"


def statistics(part: str) -> Any:
    def leave(model: Any) -> str:
        name, module = quantized_linears(model)[3]
        owner, _, last = part.rpartition(".")
        state = module.weight.quant_state
        setattr(state.state2 if owner else state, last, host(1))
        return f"{name}.weight.{part}"

    return leave


@pytest.mark.parametrize("quantization", ["nf4", "fp4", None])
def test_a_base_on_a_gpu_is_taken(quantization) -> None:
    check_placement("base", on_cuda(quantization))


@pytest.mark.parametrize(
    "leave",
    [
        norm_on_host,
        rotary_on_host,
        layer_on_disk,
        *map(statistics, ("absmax", "code", "offset", "state2.absmax", "state2.code")),
    ],
    ids=[
        "norm",
        "rotary",
        "disk",
        "absmax",
        "code",
        "offset",
        "absmax of the absmax",
        "code of the absmax",
    ],
)
def test_what_is_left_behind_is_refused_by_name(leave) -> None:
    model = on_cuda()
    name = leave(model)
    with pytest.raises(ModelError, match=rf"base is not all on the GPUs: {re.escape(name)} "):
        check_placement("base", model)


def test_a_base_on_the_host_alone_is_taken() -> None:
    check_placement("base", random_base(CONFIG, device="cpu"))


def test_a_weight_whose_statistics_are_on_another_gpu_is_refused() -> None:
    model = on_cuda()
    state = model.model.layers[1].mlp.gate_proj.weight.quant_state
    state.absmax = claimed(state.absmax, "cuda:1")
    with pytest.raises(
        ModelError, match=r"layers\.1 on cuda:0 and cuda:1; a layer must stay in one piece"
    ):
        check_placement("base", model)
