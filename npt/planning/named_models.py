"""Shapes by name or by their numbers, for plans and benchmarks of bases whose configuration is not
at hand.
"""

from __future__ import annotations

from transformers import LlamaConfig

from npt.errors import ConfigError
from npt.planning.shape import LLAMA_3_1_8B, LLAMA_3_2_1B, Shape

SHAPES = {
    "embedded": Shape(
        layers=8, hidden=192, ffn=512, heads=6, kv_heads=2, head_dim=32, vocab=2048, tied=True
    ),
    "cpu-0.2b": Shape(
        layers=12, hidden=1024, ffn=2816, heads=16, kv_heads=4, head_dim=64, vocab=32000
    ),
    "llama-3.2-1b": LLAMA_3_2_1B,
    "llama-3.1-8b": LLAMA_3_1_8B,
    "qwen3-8b": Shape(
        layers=36, hidden=4096, ffn=12288, heads=32, kv_heads=8, head_dim=128, vocab=151936
    ),
    "mistral-7b": Shape(
        layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=32768
    ),
    "smollm2-135m": Shape(
        layers=30, hidden=576, ffn=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152, tied=True
    ),
}
"""`cpu-0.2b` is a TinyLlama of half the width and half the depth: 0.2 B parameters, a step within
seconds on two cores.
"""

LARGEST = 2**24
"""Of each number of a shape: beyond it no model is, but sums that a plan cannot be made of."""

FORM = "D,F,L,heads,kv_heads,V"
"""How a shape is written in numbers."""


def parse_shape(text: str) -> Shape:
    """A shape by its name, or from six numbers `D,F,L,heads,kv_heads,V`.

    Raises:
        ConfigError: neither, or numbers that no model has.
    """
    if text in SHAPES:
        return SHAPES[text]
    try:
        hidden, ffn, layers, heads, kv_heads, vocab = (int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--shape is {text!r}; choose from {', '.join(SHAPES)}, or give {FORM} like"
            " 1024,2816,12,16,4,8192"
        ) from None
    if (
        min(hidden, ffn, layers, heads, kv_heads, vocab) < 1
        or max(hidden, ffn, layers, heads, kv_heads, vocab) > LARGEST
    ):
        raise ConfigError(f"--shape is {text}; {FORM} are all from 1 to {LARGEST}")
    if hidden % (2 * heads) or heads % kv_heads:
        raise ConfigError(
            f"--shape is {text}; D has to be an even multiple of the heads ({heads}), and these a"
            f" multiple of {kv_heads}"
        )
    return Shape(layers, hidden, ffn, heads, kv_heads, hidden // heads, vocab)


def llama_config(shape: Shape, length: int = 2048) -> LlamaConfig:
    """A Llama of this shape that takes rows of `length` tokens."""
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
