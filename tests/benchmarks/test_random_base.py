import bitsandbytes as bnb
import pytest
import torch
from families import config_of, save_base
from transformers import GPT2Config, LlamaConfig

import npt
from npt.base.attention import SDPA
from npt.base.linear import dense_weight
from npt.doctor.measure import peak_bytes, storage_bytes, tensors_of
from npt.errors import ConfigError, ModelError
from npt.packed import quantized_linears
from random_base import random_base

FAMILIES = ["llama", "mistral, window", "qwen2", "qwen3, window", "smollm3"]


def small(**changes) -> LlamaConfig:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        **heads,
    }
    return LlamaConfig(**{**sizes, **changes})


def description(model) -> dict:
    """All of a model that is not a value."""
    # numbers in decimals, of any length
    state = {name: t for name, t in model.state_dict().items() if ".quant_state." not in name}
    tensors = {name: (tuple(t.shape), t.dtype, t.device.type) for name, t in state.items()}
    frozen = {name: (p.requires_grad, type(p).__name__) for name, p in model.named_parameters()}
    buffers = {name: (tuple(b.shape), b.dtype) for name, b in model.named_buffers()}
    modules = {name: (type(m), m.training) for name, m in model.named_modules()}
    packed = {
        name: (
            m.compute_dtype,
            m.compute_type_is_set,
            m.support_avx512bf16_for_cpu,
            m.weight.quant_type,
            m.weight.quant_state.dtype,
        )
        for name, m in quantized_linears(model)
    }
    return {
        "tensors": tensors,
        "frozen": frozen,
        "buffers": buffers,
        "modules": modules,
        "packed": packed,
    }


@pytest.mark.parametrize("quantization", ["nf4", "fp4", None])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_what_load_base_gives_but_for_its_values(family, quantization, tmp_path):
    loaded, _ = npt.load_base(
        str(save_base(family, tmp_path / "base")), quantization=quantization, device="cpu"
    )
    made = random_base(config_of(family), quantization=quantization, device="cpu")
    assert description(made) == description(loaded)
    assert made.config._attn_implementation == loaded.config._attn_implementation == SDPA
    assert getattr(made, "is_loaded_in_4bit", False) == getattr(loaded, "is_loaded_in_4bit", False)
    for own, other in zip(made.buffers(), loaded.buffers(), strict=True):
        # the rotary frequencies, which the configuration alone decides
        assert torch.equal(own, other)


def test_the_seed_decides_the_values():
    first, again, other = (random_base(small(), device="cpu", seed=seed) for seed in (3, 3, 4))
    assert npt.base_hash(first) == npt.base_hash(again) != npt.base_hash(other)
    rows = [dense_weight(module).flatten() for _, module in quantized_linears(first)]
    assert len({tuple(row[:4].tolist()) for row in rows}) == len(rows)  # no two weights are alike


def test_the_weights_are_of_a_size_that_keeps_states_finite():
    model = random_base(small(), device="cpu")
    for _, module in quantized_linears(model):
        # 0.02 and what packing and a small sample add
        assert 0.015 < dense_weight(module).std().item() < 0.025
    assert torch.equal(model.model.norm.weight.float(), torch.ones(64))
    assert torch.isfinite(model(input_ids=torch.arange(90)[None]).logits).all()


def test_tied_embeddings_are_one_tensor():
    model = random_base(small(tie_word_embeddings=True), device="cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model = random_base(small(tie_word_embeddings=False), device="cpu")
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_the_dense_model_never_exists():
    # The largest matrix takes more than all packed weights, the dense matrices of eight layers
    # eight times more.
    config = small(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        head_dim=32,
    )
    matrix = torch.zeros(1024, 256)
    packing = peak_bytes(
        lambda: bnb.nn.Params4bit(matrix, requires_grad=False, quant_type="nf4").to("cpu"), "cpu"
    )  # of one, by itself
    kept: list = []
    added = peak_bytes(lambda: kept.append(random_base(config, device="cpu")), "cpu")
    largest = 4 * 256 * 1024
    # the matrix, and its form for packing
    assert added < storage_bytes(tensors_of(kept[0])) + packing + 2 * largest


def test_what_cannot_be_made_is_refused_and_the_configuration_stays_as_it_was():
    config = small()
    before = config.to_dict()
    random_base(config, device="cpu")
    assert config.to_dict() == before
    with pytest.raises(ConfigError, match="int3"):
        random_base(small(), quantization="int3", device="cpu")
    with pytest.raises(ModelError, match="gpt2"):
        random_base(GPT2Config(n_layer=1), device="cpu")
