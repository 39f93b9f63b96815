import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from npt.adapters.converted import decoder_layers
from npt.planning.shape import SHAPES, Shape

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def weights(module: nn.Module) -> int:
    """Of linear layers and embeddings, tied ones once."""
    return sum(
        {
            id(part.weight): part.weight.numel()
            for part in module.modules()
            if isinstance(part, nn.Linear | nn.Embedding)
        }.values()
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL, num_key_value_heads=2),
        LlamaConfig(**SMALL),
        # heads together are wider than the model
        Qwen3Config(**SMALL, num_key_value_heads=1, head_dim=24),
    ],
    ids=["grouped", "plain", "wide heads"],
)
def test_the_weights_of_a_shape_are_those_of_its_model(config, tied):
    config.tie_word_embeddings = tied
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape, layer = Shape.of(config), decoder_layers(model)[0]
    assert shape.attention_weights == weights(layer.self_attn)
    assert shape.mlp_weights == weights(layer.mlp)
    assert shape.layer_weights == weights(layer)
    assert shape.head_weights == weights(model.lm_head)
    assert shape.weights == weights(model)
    assert [shape.width(t) for t in ("gate", "up", "down")] == [80, 80, 32]


def test_the_named_shapes_have_the_sizes_in_their_names():
    for name, weights in {
        "llama-3.1-8b": 8.03e9,
        "llama-3.2-1b": 1.236e9,
        "qwen3-8b": 8.19e9,
        "mistral-7b": 7.248e9,
        "smollm2-135m": 134.5e6,
    }.items():
        assert SHAPES[name].weights == pytest.approx(weights, rel=1e-3), name
