import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

import npt
from npt.adapters.converted import adapter_parameters, decoder_layers
from npt.config import NPTConfig
from npt.errors import ConfigError
from npt.planning.shape import SHAPES, Shape, llama_config, parse_shape

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
    assert shape.mlp_weights == weights(layer.mlp)
    assert shape.layer_weights == weights(layer)
    assert shape.head_weights == weights(model.lm_head)
    assert [shape.width(t) for t in ("gate", "up", "down")] == [80, 80, 32]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"targets": "gate"},
        {"targets": "up,down", "modulation": "additive"},
        {"modulation": "multiplicative", "layers": "0,2-3"},
        {"layers": "all", "ranks": (1, 2, 3, 4)},
    ],
    ids=str,
)
def test_trainable_numbers_are_those_that_attach_makes(load_model, settings):
    model = load_model(None)
    config = NPTConfig(**{"rank": 3, **settings})
    npt.attach(model, config)
    assert Shape.of(model.config).adapter_numbers(config) == sum(
        p.numel() for p in adapter_parameters(model).values()
    )


@pytest.mark.parametrize("name", SHAPES)
def test_a_named_shape_makes_a_model_of_that_shape(name):
    assert Shape.of(llama_config(parse_shape(name), 4096)) == SHAPES[name]
    assert llama_config(SHAPES[name], 4096).max_position_embeddings == 4096


def test_a_shape_may_be_given_in_numbers():
    assert parse_shape("256,512,8,4,2,1000") == Shape(8, 256, 512, 4, 2, 64, 1000)


@pytest.mark.parametrize(
    "text",
    [
        "llama",
        "1,2,3",
        "256,512,8,4,2,x",
        "256,512,8,0,2,1000",
        "100,512,8,8,2,1000",
        "256,512,8,4,3,1000",
        f"256,512,{10**30},4,2,1000",
    ],
)
def test_a_shape_that_cannot_be_is_refused_in_one_line(text):
    with pytest.raises(ConfigError, match="--shape is") as caught:
        parse_shape(text)
    assert "\n" not in str(caught.value)
