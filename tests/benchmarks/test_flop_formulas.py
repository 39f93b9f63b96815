"""The formulas against the figures of a known shape, and against the products that the strategies
make.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import npt
from flop_count import count_flops
from flop_formulas import adapter_flops, floor_flops, layer_flops
from npt.adapters.converted import npt_layers
from npt.adapters.fit import resolve_layers
from npt.config import PRODUCTS, NPTConfig, TrainConfig
from npt.data.batch import Batch, batch_from_tensors
from npt.distill.strategies import drive
from npt.doctor.shape import SHAPES, Shape
from random_base import random_base

LLAMA_3_1_8B = SHAPES["llama-3.1-8b"]
ALL = range(32)
LENGTH = 96


def test_the_floors_of_an_8b_model_are_those_of_its_shape():
    """At rows of 2,048 tokens."""
    layer = layer_flops(LLAMA_3_1_8B, 2048)
    assert layer == 2 * (41_943_040 + 3 * 4096 * 14336) + 2 * 2048 * 4096
    whole = floor_flops(LLAMA_3_1_8B, 2048, ALL, local=True)
    assert whole / 1e9 == pytest.approx(29.5, abs=0.05)
    # layers after the last converted one cost `local` nothing
    lower = floor_flops(LLAMA_3_1_8B, 2048, range(16), local=True)
    assert lower == whole / 2 < floor_flops(LLAMA_3_1_8B, 2048, range(16, 32), local=True)
    upper, every = (
        floor_flops(LLAMA_3_1_8B, 2048, layers, local=False, logits=1.0)
        for layers in (range(16, 32), ALL)
    )
    assert upper < 0.7 * every


PLAIN = {"targets": tuple(PRODUCTS)}
FORMS = {
    "all": NPTConfig(rank=8, layers="all", **PLAIN),
    "some": NPTConfig(rank=4, layers="1-2", targets=("gate", "down"), modulation="additive"),
    "apart": NPTConfig(ranks=(3, 5), layers="1,3", targets=("up",), modulation="multiplicative"),
}


@pytest.fixture(scope="module")
def llama() -> Any:
    """A random Llama whose layers are wide in comparison with all else."""
    size = {"vocab_size": 160, "hidden_size": 128, "intermediate_size": 352}
    heads = {"num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**size, **heads, max_position_embeddings=128, tie_word_embeddings=False)
    return lambda quantization: random_base(config, quantization=quantization, device="cpu")


def full_rows() -> Batch:
    ids = torch.randint(3, 160, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    return batch_from_tensors(ids, torch.ones_like(ids))


def counted(model: Any, config: TrainConfig) -> float:
    """Per token, without the figure of the regulariser (B'B of each additive term, and a product
    with it per token), and without the angles of the positions, which transformers before 5.23
    multiplies out as matrices.
    """
    batch = full_rows()
    angles: list[Any] = []
    hook = model.model.rotary_emb.register_forward_hook(
        lambda *call: angles.append(call), with_kwargs=True
    )
    layers = [layer.npt for _, layer in npt_layers(model)]
    energy = sum(
        2 * add.shape[1] ** 2 * (len(add) + batch.tokens)
        for adapter in layers
        for add in adapter.B.values()
    )
    total = count_flops(lambda: drive(model, batch, config, None))
    hook.remove()
    assert angles
    rotary = count_flops(lambda: [module(*args, **named) for module, args, named, _ in angles])
    return (total - energy - rotary) / batch.tokens


def expected(model: Any, form: NPTConfig, local: bool, logits: float = 0.0) -> float:
    shape, converted = Shape.of(model.config), resolve_layers(form.layers, 5)
    floor = floor_flops(shape, LENGTH, converted, local=local, logits=logits)
    return floor + adapter_flops(shape, form, local=local)


@pytest.mark.parametrize("quantization", ["nf4", None])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strategy", ["local", "end_to_end"])
def test_a_strategy_makes_exactly_the_products_of_its_formula(llama, quantization, form, strategy):
    model = llama(quantization)
    npt.attach(model, FORMS[form])
    flops = expected(model, FORMS[form], strategy == "local")
    assert counted(model, TrainConfig(strategy=strategy)) == flops


def test_a_loss_on_the_logits_adds_the_layers_after_and_the_head(llama):
    model, form = llama("nf4"), NPTConfig(rank=4, layers="1-2", **PLAIN)
    npt.attach(model, form)
    batch = full_rows()
    flops = expected(model, form, False, logits=batch.scored / batch.tokens)
    config = TrainConfig(strategy="end_to_end", logit_kl_weight=0.5)
    assert counted(model, config) == pytest.approx(flops, rel=1e-12)
