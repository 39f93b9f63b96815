"""The NPT decoder layer: a class that a decoder layer becomes in place, and goes back from.

A converted layer keeps its modules, parameter names and hooks; only its class changes, to a
subclass of itself, and it gains the child `npt`. A wrapper would not do: transformers finds decoder
layers by `isinstance` to collect `output_hidden_states`, and a wrapper hides them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.smollm3.modeling_smollm3 import SmolLM3DecoderLayer

from npt.adapters.adapter import NPTAdapter
from npt.base.hooks import call_around

NPT_FORMS: dict[type[nn.Module], type[NPTLayer]] = {}
"""What a decoder layer becomes, by its class: every subclass of `NPTLayer` and a decoder layer."""


class NPTLayer(nn.Module):
    """Mix-in that replaces a decoder layer's forward; put in front of the layer's own class."""

    npt: NPTAdapter
    # The base class's own modules, by the names that every supported family gives them.
    input_layernorm: Any
    self_attn: Any
    post_attention_layernorm: Any
    mlp: Any

    def __init_subclass__(cls, **named: Any) -> None:
        """Note what the decoder layer becomes that the subclass is made of."""
        super().__init_subclass__(**named)
        if cls.__bases__[0] is NPTLayer:  # FSDP makes subclasses of its own
            NPT_FORMS[cls.__bases__[1]] = cls

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """h [B, T, D] -> o [B, T, D], by the adapter's mode; the `teacher` is the base class's own
        code, untouched.
        """
        context = dict(
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        if self.npt.mode == "teacher":
            return super().forward(hidden_states, **context)
        return student_output(
            self, hidden_states, attention_output(self, hidden_states, **context)
        )[0]


class NPTLlamaDecoderLayer(NPTLayer, LlamaDecoderLayer):
    """A Llama decoder layer in NPT form."""


class NPTMistralDecoderLayer(NPTLayer, MistralDecoderLayer):
    """A Mistral decoder layer in NPT form."""


class NPTQwen2DecoderLayer(NPTLayer, Qwen2DecoderLayer):
    """A Qwen2 decoder layer in NPT form."""


class NPTQwen3DecoderLayer(NPTLayer, Qwen3DecoderLayer):
    """A Qwen3 decoder layer in NPT form."""


class NPTSmolLM3DecoderLayer(NPTLayer, SmolLM3DecoderLayer):
    """A SmolLM3 decoder layer in NPT form."""


Terms = list[tuple[Tensor | None, Tensor | None]]
"""(m, s) of each target, in the order gate, up, down."""


def device_of(layer: Any) -> torch.device:
    """Where a decoder layer computes."""
    return layer.input_layernorm.weight.device


def attention_output(layer: Any, hidden: Tensor, **context: Any) -> Tensor:
    """a = Attention(RMSNorm1(h)), after o_proj: [B, T, D]. `context` is what the decoder passes to
    its layers.
    """
    return layer.self_attn(hidden_states=layer.input_layernorm(hidden), **context)[0]


def student_stream(layer: NPTLayer, hidden: Tensor, attention: Tensor) -> Tensor:
    """The residual stream that the student's MLP reads and adds to: h, or h + a where the attention
    residual is kept.
    """
    return hidden + attention if layer.npt.config.residual == "keep" else hidden


def student_output(layer: NPTLayer, hidden: Tensor, attention: Tensor) -> tuple[Tensor, Terms]:
    """o, the NPT layer's output, from h and a of the same tokens. Hooks of the MLP and of its parts
    are called, those of the layer not.

    Args:
        layer: a converted layer.
        hidden: h, [..., D].
        attention: a, [..., D].

    Returns:
        o [..., D] and the modulation terms. In mode `floor` nothing is modulated and the terms are
        empty.

    Raises:
        ModelError: the MLP's forward was replaced.
    """
    adapter, mlp = layer.npt, layer.mlp
    stream = student_stream(layer, hidden, attention)
    z = None if adapter.mode == "floor" else adapter.code(attention)
    terms: Terms = []

    def modulated(target: str, y: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return (y, None, None) if z is None else adapter.apply_to(target, y, z)

    def modulated_mlp(x: Tensor) -> Tensor:
        product, found = stages_to_product(
            layer,
            modulated,
            mlp.gate_proj(x),
            mlp.up_proj(x),
            h=hidden,
            a=attention,
            stream=stream,
            z=z,
        )
        adapter.show(product=product)
        down, m, s = modulated("down", mlp.down_proj(product))
        terms[:] = [*found, (m, s)]
        return down

    down = call_around(
        mlp,
        f"layer {layer.self_attn.layer_idx}'s mlp",
        modulated_mlp,
        layer.post_attention_layernorm(stream),
    )
    output = stream + down
    down_m, down_s = terms[-1]
    adapter.show(m_down=down_m, s_down=down_s, mlp=down, o=output)
    return output, [] if z is None else terms


def stages_to_product(
    layer: NPTLayer,
    modulated: Callable[[str, Tensor], tuple[Tensor, Tensor | None, Tensor | None]],
    gate: Tensor,
    up: Tensor,
    **before: Any,
) -> tuple[Tensor, Terms]:
    """What down_proj reads, operation by operation, and the terms of gate and up; the observer is
    shown all but the product.

    Args:
        layer: a converted layer.
        modulated: a target and its product, modulated, with m and s.
        gate, up: [..., F].
        before: stages in front of these, to be shown with them.
    """
    gate, gate_m, gate_s = modulated("gate", gate)
    up, up_m, up_s = modulated("up", up)
    layer.npt.show(**before, m_gate=gate_m, s_gate=gate_s, gate=gate, m_up=up_m, s_up=up_s, up=up)
    activation = layer.mlp.act_fn(gate)
    layer.npt.show(activation=activation)
    return activation * up, [(gate_m, gate_s), (up_m, up_s)]
