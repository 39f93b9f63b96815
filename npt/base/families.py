"""The families of base models: known decoder layers, their parts, and the tokens they see.

All of them compute t = (h + a) + MLP(RMSNorm2(h + a)) from modules of the same names. Names alone
are no proof: others (Granite, Gemma, OLMo 2) scale or norm the same parts in other places, so a
family is added by hand and never guessed. They differ inside their attention, which nobody opens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.smollm3.modeling_smollm3 import SmolLM3DecoderLayer

from npt.errors import ModelError, kind_of

Sight = Literal["full", "window", "by layer"]
"""What a family's attention looks back on: everything; a window if the configuration sets one;
either, by `layer_types`."""


@dataclass(frozen=True)
class Family:
    """A family's decoder layer and the reach of its attention."""

    layer: type[nn.Module]
    sight: Sight

    @property
    def prefix(self) -> str:
        """The beginning of the names of the family's classes."""
        return self.layer.__name__.removesuffix("DecoderLayer")


FAMILIES = {
    "llama": Family(LlamaDecoderLayer, "full"),
    "mistral": Family(MistralDecoderLayer, "window"),
    "qwen2": Family(Qwen2DecoderLayer, "by layer"),
    "qwen3": Family(Qwen3DecoderLayer, "by layer"),
    "smollm3": Family(SmolLM3DecoderLayer, "by layer"),
}
"""By the configuration's `model_type`."""


def head_sizes(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Return the number of heads of queries, that of keys and values, and the width of each."""
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, key_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def register_family(model_type: str, layer: type[nn.Module], sight: Sight = "full") -> None:
    """Add a family of bases, by its configuration's `model_type`; define its NPT layer as well
    (npt/adapters/layer.py). Its decoder layer computes t = (h + a) + MLP(RMSNorm2(h + a)) from
    LAYER_PARTS, exactly so.
    """
    if model_type in FAMILIES:
        raise ModelError(f"the family {model_type!r} is known already")
    FAMILIES[model_type] = Family(layer, sight)


LAYER_PARTS = (
    "input_layernorm",
    "self_attn",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "mlp.act_fn",
)
"""Names of the parts of a decoder layer that an NPT layer uses."""

MODEL_PARTS = ("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head")
"""Names of the parts of a causal language model that a pass uses."""


def missing_parts(module: nn.Module, parts: Iterable[str]) -> list[str]:
    """Return those of the dotted names that are no module below `module`."""
    present = {name for name, _ in module.named_modules(remove_duplicate=False)}
    return [name for name in parts if name not in present]


def check_layer(index: int, layer: nn.Module) -> None:
    """Refuse, with a ModelError, a decoder layer that lacks parts or is of no known family."""
    missing = missing_parts(layer, LAYER_PARTS)
    if missing:
        raise ModelError(
            f"layer {index} is {kind_of(layer)} and has no {', '.join(missing)}; it cannot be"
            " converted"
        )
    classes = [family.layer for family in FAMILIES.values()]
    if type(layer) not in classes:
        names = ", ".join(c.__name__ for c in classes)
        raise ModelError(
            f"layer {index} is {kind_of(layer)}, which may put its parts together differently; only"
            f" {names} are known"
        )


def check_family(name: str, config: PreTrainedConfig) -> None:
    """Refuse, with a ModelError, a base of an unknown family before its weights are read, and one
    with LongRoPE: transformers gives all rows of a batch the frequencies of the longest.
    """
    if config.model_type not in FAMILIES:
        raise ModelError(
            f"{name} is of type {config.model_type!r}; only {', '.join(FAMILIES)} can be converted"
        )
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        raise ModelError(
            f"{name} has LongRoPE, by which a text's states depend on what it is batched with; it"
            " cannot be converted"
        )


def is_known(model: nn.Module) -> bool:
    """Return whether the model's configuration is of a family in the table."""
    return getattr(getattr(model, "config", None), "model_type", None) in FAMILIES
