"""The families of base models, in one table: which decoder layers are known, what they are made of,
which tokens they see.

All of them compute t = (h + a) + MLP(RMSNorm2(h + a)) from modules of the same names, so that a
name stands in the code as it is and is checked for here, once. Names alone are no proof: others
(Granite, Gemma, OLMo 2) scale or norm the same parts in other places, so that a family is taken in
by hand and never guessed. What differs between the families, and is looked after elsewhere, is
inside their attention (biases of Qwen2, norms of q and k of Qwen3, layers without rotary embedding
of SmolLM3), which nobody opens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.smollm3.modeling_smollm3 import SmolLM3DecoderLayer

from npt.errors import ModelError, article, kind_of

Sight = Literal["full", "window", "by layer"]
"""What a family's attention looks back on: everything; a window where the configuration sets one;
either, by `layer_types`.
"""


@dataclass(frozen=True)
class Family:
    """A family's decoder layer and what its attention looks back on."""

    layer: type[nn.Module]
    sight: Sight

    @property
    def prefix(self) -> str:
        """How the names of the family's classes begin."""
        return self.layer.__name__.removesuffix("DecoderLayer")


FAMILIES = {
    "llama": Family(LlamaDecoderLayer, "full"),
    "mistral": Family(MistralDecoderLayer, "window"),
    "qwen2": Family(Qwen2DecoderLayer, "by layer"),
    "qwen3": Family(Qwen3DecoderLayer, "by layer"),
    "smollm3": Family(SmolLM3DecoderLayer, "by layer"),
}
"""By the configuration's `model_type`."""


def register_family(model_type: str, layer: type[nn.Module], sight: Sight = "full") -> None:
    """Add a family of bases; define its NPT layer as well (npt/adapters/layer.py).

    Args:
        model_type: of the configuration.
        layer: the decoder layer's class, which computes t = (h + a) + MLP(RMSNorm2(h + a)) from
            parts of the names below, and does so exactly: names alone are no proof.
        sight: what its attention looks back on.

    Raises:
        ModelError: the family is known already.
    """
    if model_type in FAMILIES:
        raise ModelError(f"the family {model_type!r} is known already")
    FAMILIES[model_type] = Family(layer, sight)


NORM_1, ATTENTION, NORM_2 = "input_layernorm", "self_attn", "post_attention_layernorm"
LAYER_PARTS = (
    NORM_1,
    ATTENTION,
    NORM_2,
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "mlp.act_fn",
)
"""Where a decoder layer keeps what an NPT layer is made of."""

MODEL_PARTS = ("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head")
"""Where a causal language model keeps what a pass is made of."""


def missing_parts(module: nn.Module, parts: Iterable[str]) -> list[str]:
    """Those of the dotted names that lead nowhere from `module`."""

    def leads_somewhere(name: str) -> bool:
        found: Any = module
        for step in name.split("."):
            found = getattr(found, step, None)
        return found is not None

    return [name for name in parts if not leads_somewhere(name)]


def check_layer(index: int, layer: nn.Module) -> None:
    """Refuse a decoder layer that cannot be converted.

    Raises:
        ModelError: what is missing, or that its class is of no known family.
    """
    missing = missing_parts(layer, LAYER_PARTS)
    if missing:
        raise ModelError(
            f"layer {index} is {kind_of(layer)} and has no {', '.join(missing)}; it cannot be"
            " converted"
        )
    known = [family.layer for family in FAMILIES.values()]
    if type(layer) not in known:
        names = ", ".join(c.__name__ for c in known)
        raise ModelError(
            f"layer {index} is {kind_of(layer)}, which may put its parts together differently; only"
            f" {names} are known"
        )


def check_family(name: str, config: PreTrainedConfig) -> None:
    """Refuse a base of an unknown family before its weights are read, saying what its layers lack
    where they can be made.

    Raises:
        ModelError: the family, those that are known, and what is missing.
    """
    if config.model_type in FAMILIES:
        return
    lacking = _lacking(config)
    because = f" (it has no {', '.join(lacking)})" if lacking else ""
    kind = f"{article(config.model_type)} {config.model_type!r} model"
    raise ModelError(
        f"{name} is {kind}{because}; only {', '.join(FAMILIES)} models can be converted"
    )


def is_known(model: nn.Module) -> bool:
    """Whether the model's configuration is of a family in the table."""
    return getattr(getattr(model, "config", None), "model_type", None) in FAMILIES


def _lacking(config: PreTrainedConfig) -> list[str]:
    """What a model of this configuration has no part for; nothing is allocated, and nothing said
    where it cannot be made.
    """
    one = copy.deepcopy(config)
    try:
        one.num_hidden_layers = 1
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(one, trust_remote_code=False)
    except Exception:  # a configuration of anything at all, of which the family's name says enough
        return []
    missing = missing_parts(model, MODEL_PARTS)
    return (
        missing if "model.layers" in missing else missing_parts(model.model.layers[0], LAYER_PARTS)
    )
