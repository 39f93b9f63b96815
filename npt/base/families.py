"""The supported families of base models: their decoder layers and the reach of their attention.

All compute t = (h + a) + MLP(RMSNorm2(h + a)) from modules of the same names, and differ only
inside attention. Names alone prove nothing: Granite, Gemma and OLMo 2 scale or normalise the same
parts elsewhere. So families are listed by hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedConfig

from npt.errors import ModelError, kind_of
from npt.stored import RESTORE, shown

Sight = Literal["full", "window", "by layer"]
"""Reach of attention: all earlier tokens, a window if configured, or either by `layer_types`."""


@dataclass(frozen=True)
class Family:
    """A family of base models.

    Attributes:
        prefix: of its class names, such as 'Llama'.
        sight: reach of its attention.
        registered: class of its decoder layers, if it is not transformers' own.
    """

    prefix: str
    sight: Sight
    registered: type[nn.Module] | None = None

    @property
    def layer(self) -> type[nn.Module]:
        """The class of its decoder layers. To check a configuration, model classes, which are slow
        to import, are not needed.
        """
        if self.registered is not None:
            return self.registered
        name = self.prefix.lower()
        module = import_module(f"transformers.models.{name}.modeling_{name}")
        layer: type[nn.Module] = getattr(module, f"{self.prefix}DecoderLayer")
        return layer


FAMILIES = {
    "llama": Family("Llama", "full"),
    "mistral": Family("Mistral", "window"),
    "qwen2": Family("Qwen2", "by layer"),
    "qwen3": Family("Qwen3", "by layer"),
    "smollm3": Family("SmolLM3", "by layer"),
}
"""Families by the `model_type` of their configuration."""


def head_sizes(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Return the number of query heads, of key and value heads, and the width of a head."""
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, key_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def register_family(model_type: str, layer: type[nn.Module], sight: Sight = "full") -> None:
    """Register a family of bases under its configuration's `model_type`.

    Its decoder layer must compute exactly t = (h + a) + MLP(RMSNorm2(h + a)) from LAYER_PARTS.
    Define its NPT layer as well (npt/adapters/layer.py). Raises ModelError if the type is taken.
    """
    if model_type in FAMILIES:
        raise ModelError(f"the family {model_type!r} already exists: choose another model_type")
    prefix = layer.__name__.removesuffix("DecoderLayer")
    FAMILIES[model_type] = Family(prefix, sight, layer)


LAYER_PARTS = (
    "input_layernorm",
    "self_attn",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "mlp.act_fn",
)
"""Names of the modules of a decoder layer that an NPT layer uses."""

MODEL_PARTS = ("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head")
"""Names of the modules of a causal language model that NPT uses."""


def missing_parts(module: nn.Module, parts: Iterable[str]) -> list[str]:
    """Return the dotted names that are not modules of `module`."""
    present = {name for name, _ in module.named_modules(remove_duplicate=False)}
    return [name for name in parts if name not in present]


def check_layer(index: int, layer: nn.Module) -> None:
    """Raise ModelError for a decoder layer that lacks parts or belongs to no supported family."""
    missing = missing_parts(layer, LAYER_PARTS)
    if missing:
        raise ModelError(
            f"layer {index} is {kind_of(layer)} without {', '.join(missing)}, which NPT does not"
            f" support: choose a base of type {', '.join(FAMILIES)}"
        )
    classes = [family.layer for family in FAMILIES.values()]
    if type(layer) not in classes:
        names = ", ".join(c.__name__ for c in classes)
        raise ModelError(
            f"layer {index} is {kind_of(layer)}, which may combine its parts differently; NPT"
            f" supports only {names}"
        )


def check_family(name: str, config: PreTrainedConfig) -> None:
    """Raise ModelError, before weights are read, for an unsupported family or for LongRoPE, which
    transformers computes with the longest row's frequencies for all rows of a batch.
    """
    if config.model_type not in FAMILIES:
        raise ModelError(
            f"{name} is of type {config.model_type!r}; NPT supports only {', '.join(FAMILIES)}"
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "longrope" in rope.values():
        raise ModelError(
            f"{name} uses LongRoPE, which NPT does not support: a text's states would depend on its"
            " batch"
        )


MOST_LAYERS = 2_000
"""Ten times as many layers as the deepest models have. transformers lists and builds them all."""

SIZES = {
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_attention_heads",
    "max_position_embeddings",
}
_POSITIVE = ("rms_norm_eps", "rope_theta", "factor")
_DERIVED = ("num_key_value_heads", "head_dim")
"""Sizes that follow from the others if they are null."""


def check_entries(name: str, entries: Mapping[str, Any]) -> None:
    """Check the entries of a configuration, nested ones too, before transformers reads them.

    Raises:
        ModelError: a size is not a whole number from 1 up, layers or experts are too many, or a
            number is not finite or not above 0.
    """
    for key, value in entries.items():
        if isinstance(value, Mapping):
            check_entries(name, value)
            continue
        fault = _fault_of(key, value)
        if fault is not None:
            raise ModelError(f"{name} has {key} {shown(value)}: {fault}; {RESTORE}")


def _fault_of(key: str, value: Any) -> str | None:
    # no comparison with NaN holds
    number = value if isinstance(value, int | float) else math.nan
    if key.endswith(("layers", "experts")) and number > MOST_LAYERS:
        return f"NPT supports at most {MOST_LAYERS:,}"
    if isinstance(value, float) and not math.isfinite(value):
        return "expected a finite number"
    if key in _POSITIVE and not number > 0:
        return "expected a number above 0"
    if key not in SIZES and (value is None or key not in _DERIVED):
        return None
    # isinstance would count True as 1
    if type(value) is int and value >= 1:
        return None
    return "expected a whole number from 1 up"


def check_shape(name: str, config: PreTrainedConfig, stored: int = 0) -> None:
    """Check that the sizes in a configuration fit one another and the files.

    Args:
        name: of the base, for messages.
        config: of a supported family.
        stored: bytes of the weight files, or 0 if unknown.

    Raises:
        ModelError: they do not. transformers would allocate weights that no file holds.
    """
    heads, key_heads, width = head_sizes(config)
    # queries share keys in equal groups; rotary embeddings turn pairs of numbers
    if heads % key_heads or width % 2:
        raise ModelError(
            f"{name} has {heads} query heads, {key_heads} key heads and heads of width {width}:"
            f" key heads must divide query heads, and the width be even; {RESTORE}"
        )
    # q and o, k and v, and the MLP's three; the head may be tied to the embedding
    attention = 2 * (heads + key_heads) * width
    layer = (attention + 3 * config.intermediate_size) * config.hidden_size
    weights = config.num_hidden_layers * layer + config.vocab_size * config.hidden_size
    if stored and weights > 2 * stored:  # in 4 bits
        raise ModelError(
            f"{name} has {weights:,} weights by its config.json, but its files have only"
            f" {stored:,} bytes; {RESTORE}"
        )
