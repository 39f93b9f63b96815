"""The shape of a base model: all that its cost depends on, and where its weights are."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig

from npt.config import TARGETS


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder of a known family; weights are counted without norms and biases, which
    cost nothing beside them.

    layers: L. hidden: D. ffn: F. heads, kv_heads: of queries, and of keys and values. head_dim: of
    each. vocab: V. tied: lm_head is the embedding.
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
        """That of a model of this configuration; needs no weights."""
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            ffn=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            vocab=config.vocab_size,
            tied=bool(config.tie_word_embeddings),
        )

    @property
    def query_width(self) -> int:
        """Width of all heads together: D in most models."""
        return self.heads * self.head_dim

    @property
    def attention_weights(self) -> int:
        """A: of a layer's four projections."""
        return 2 * self.hidden * (self.query_width + self.kv_heads * self.head_dim)

    @property
    def mlp_weights(self) -> int:
        """M = 3 D F: of gate, up and down."""
        return 3 * self.hidden * self.ffn

    @property
    def layer_weights(self) -> int:
        """A + M."""
        return self.attention_weights + self.mlp_weights

    @property
    def head_weights(self) -> int:
        """V D: of lm_head, and of the embedding."""
        return self.vocab * self.hidden

    @property
    def weights(self) -> int:
        """Of the whole model; tied ones count once."""
        return self.layers * self.layer_weights + (1 if self.tied else 2) * self.head_weights

    def width(self, target: str) -> int:
        """Of the product that a target modulates: F for gate and up, D for down."""
        return self.hidden if TARGETS[target].width == "hidden" else self.ffn


LLAMA_3_1_8B = Shape(
    layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256
)
LLAMA_3_2_1B = Shape(
    layers=16, hidden=2048, ffn=8192, heads=32, kv_heads=8, head_dim=64, vocab=128256, tied=True
)
