"""Shapes of base models, by name or from a configuration."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import LlamaConfig, PreTrainedConfig

from npt.adapters.fit import resolve_layers
from npt.base.families import head_sizes
from npt.config import TARGETS, NPTConfig
from npt.errors import ConfigError


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder of a supported family. Weights are counted without norms and biases.

    Attributes:
        heads: number of query heads, each `head_dim` wide.
        kv_heads: number of key and value heads.
        tied: whether lm_head shares the embedding's weight.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Shape:
        """Return the shape of a model with this configuration."""
        return cls(
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
            *head_sizes(config),
            config.vocab_size,
            bool(config.tie_word_embeddings),
        )

    @property
    def query_width(self) -> int:
        """Width of all query heads together; D in most models."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Width of the keys, and of the values."""
        return self.kv_heads * self.head_dim

    @property
    def mlp_weights(self) -> int:
        """Weights of gate, up and down: 3 D F."""
        return 3 * self.hidden * self.ffn

    @property
    def layer_weights(self) -> int:
        """Weights of the MLP and the four projections of attention."""
        return 2 * self.hidden * (self.query_width + self.key_width) + self.mlp_weights

    @property
    def head_weights(self) -> int:
        """Weights of lm_head, and of the embedding: V D."""
        return self.vocab * self.hidden

    def width(self, target: str) -> int:
        """Return the width of a target: F for gate and up, D for stream and down."""
        return self.hidden if TARGETS[target].width == "hidden" else self.ffn

    def converted(self, config: NPTConfig) -> dict[int, int]:
        """Return the rank of each converted layer."""
        layers = resolve_layers(config.layers, self.layers)
        return dict(zip(layers, config.ranks_of(len(layers)), strict=True))

    def adapter_numbers(self, config: NPTConfig) -> int:
        """Return the number of trainable parameters: A [R, D], and M and B [O, R] per target; of
        the token part L_in [Q, D], L_out [D, Q] and b [D]; and one threshold.
        """
        ranks = self.converted(config).values()
        of_token = self.hidden * (2 * config.token_rank + 1) if config.token_part else 0
        # rows of all M and B of a layer
        modulated = sum(self.width(target) for target in (*config.shifted, *config.multiplied))
        of_code = (self.hidden + modulated) * sum(ranks)
        return of_code + of_token * len(ranks) + (config.active > 0)


SHAPES = {
    "embedded": Shape(8, 192, 512, 6, 2, 32, 2048, tied=True),
    # half the width and depth of TinyLlama: a step takes seconds on two cores
    "cpu-0.2b": Shape(12, 1024, 2816, 16, 4, 64, 32000),
    "llama-3.2-1b": Shape(16, 2048, 8192, 32, 8, 64, 128256, tied=True),
    "llama-3.1-8b": Shape(32, 4096, 14336, 32, 8, 128, 128256),
    "llama-3.1-70b": Shape(80, 8192, 28672, 64, 8, 128, 128256),
    "qwen3-8b": Shape(36, 4096, 12288, 32, 8, 128, 151936),
    "mistral-7b": Shape(32, 4096, 14336, 32, 8, 128, 32768),
    "smollm2-135m": Shape(30, 576, 1536, 9, 3, 64, 49152, tied=True),
}


def shape_named(name: str) -> Shape:
    """Return the shape of this name; ConfigError if there is none."""
    if name not in SHAPES:
        raise ConfigError(f"--shape is {name!r}; choose from {', '.join(SHAPES)}")
    return SHAPES[name]


def llama_config(shape: Shape, length: int = 2048) -> LlamaConfig:
    """Return the configuration of a Llama of this shape, for rows of `length` tokens."""
    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max(length, 2048),
        rms_norm_eps=1e-5,
        tie_word_embeddings=shape.tied,
    )
