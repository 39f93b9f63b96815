"""The formulas against the figures of a known shape, and against the products that the strategies
make.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import npt
from flop_count import count_flops, matmul_roofline
from flop_formulas import adapter_flops, floor_flops, layer_flops, training_flops
from npt.adapters.converted import npt_layers
from npt.adapters.fit import resolve_layers
from npt.config import PRODUCTS, NPTConfig, TrainConfig
from npt.data.batch import Batch, batch_from_tensors
from npt.distill.strategies import drive
from npt.planning.shape import SHAPES, Shape

LLAMA_3_1_8B = SHAPES["llama-3.1-8b"]
ALL = range(32)
LENGTH = 96


class TestLlama8B:
    """At rows of 2,048 tokens, in GFLOP per token."""

    def test_one_layer_is_two_for_every_weight_and_half_of_the_scores(self):
        assert (
            layer_flops(LLAMA_3_1_8B, 2048) == 2 * (41_943_040 + 3 * 4096 * 14336) + 2 * 2048 * 4096
        )

    def test_local_with_all_layers_takes_29_5(self):
        assert floor_flops(LLAMA_3_1_8B, 2048, ALL) / 1e9 == pytest.approx(29.5, abs=0.05)

    def test_layers_after_the_last_converted_one_cost_local_nothing(self):
        lower = floor_flops(LLAMA_3_1_8B, 2048, range(16))
        assert lower == floor_flops(LLAMA_3_1_8B, 2048, ALL) / 2
        assert lower < floor_flops(LLAMA_3_1_8B, 2048, range(16, 32))

    def test_end_to_end_with_the_upper_half_costs_less_than_seven_tenths(self):
        upper = floor_flops(LLAMA_3_1_8B, 2048, range(16, 32), "end_to_end", logits=1.0)
        whole = floor_flops(LLAMA_3_1_8B, 2048, ALL, "end_to_end", logits=1.0)
        assert upper < 0.7 * whole


FORMS = {
    "all": NPTConfig(rank=8, layers="all"),
    "some": NPTConfig(rank=4, layers="1-2", targets=("gate", "down"), modulation="additive"),
    "apart": NPTConfig(ranks=(3, 5), layers="1,3", targets=("up",), modulation="multiplicative"),
    "keep": NPTConfig(rank=4, layers="1-3", residual="keep"),
    "products": NPTConfig(rank=4, layers="all", targets=tuple(PRODUCTS)),
    "kept products": NPTConfig(rank=4, layers="1-3", residual="keep", targets=("gate", "down")),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, load_model: Any) -> Any:
    """A random Llama whose layers are wide in comparison with all else: D 128, F 352, 5
    layers, V 160.
    """
    import shutil

    from npt.base import load as loading

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=160,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("wide")
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(loading.EMBEDDED_FOLDER / file, folder / file)
    return lambda quantization: npt.load_base(str(folder), quantization=quantization, device="cpu")[
        0
    ]


def full_rows() -> Batch:
    ids = torch.randint(3, 160, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    return batch_from_tensors(ids, torch.ones_like(ids))


def counted(model: Any, config: TrainConfig, teacher: Any = None) -> float:
    """Per token, without what the figure of the regulariser takes: B'B of each additive term, and a
    product with it per token; both once for every forward of the layer.

    Nor with the angles of the positions, which transformers before 5.23 multiplies out as matrices.
    """
    batch = full_rows()
    angles: list[Any] = []
    models = [model] if teacher is None else [model, teacher]
    hooks = [
        m.model.rotary_emb.register_forward_hook(
            lambda *call: angles.append(call), with_kwargs=True
        )
        for m in models
    ]
    layers = [layer.npt for _, layer in npt_layers(model)]
    energy = sum(
        2 * add.shape[1] ** 2 * (len(add) + batch.tokens)
        for adapter in layers
        for target, add in adapter.B.items()
        if target != "stream"
    )
    energy *= 1 + config.gradient_checkpointing
    total = count_flops(lambda: drive(model, batch, config, teacher))
    for hook in hooks:
        hook.remove()
    assert angles
    rotary = count_flops(lambda: [module(*given, **named) for module, given, named, _ in angles])
    return (total - energy - rotary) / batch.tokens


@pytest.mark.parametrize("quantization", ["nf4", None])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strategy", ["local", "propagated", "end_to_end"])
def test_a_strategy_makes_exactly_the_products_of_its_formula(llama, quantization, form, strategy):
    model = llama(quantization)
    npt.attach(model, FORMS[form])
    expected = training_flops(Shape.of(model.config), LENGTH, FORMS[form], strategy)
    assert counted(model, TrainConfig(strategy=strategy)) == expected


@pytest.mark.parametrize("quantization", ["nf4", None])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("logits", [0.0, 1.0])
def test_checkpointing_adds_a_second_forward(llama, quantization, form, logits):
    model, batch = llama(quantization), full_rows()
    npt.attach(model, FORMS[form])
    share = logits * batch.scored / batch.tokens
    config = TrainConfig(strategy="end_to_end", logit_kl_weight=logits, gradient_checkpointing=True)
    expected = training_flops(
        Shape.of(model.config), LENGTH, FORMS[form], "end_to_end", logits=share, checkpointing=True
    )
    assert counted(model, config) == pytest.approx(expected, rel=1e-12)


def test_local_is_within_three_percent_of_the_floor(llama):
    model = llama("nf4")
    npt.attach(model, NPTConfig(rank=1, layers="all", targets=tuple(PRODUCTS)))
    floor = floor_flops(Shape.of(model.config), LENGTH, resolve_layers("all", 5))
    assert floor < counted(model, TrainConfig()) < 1.03 * floor


@pytest.mark.parametrize("loss", ["kl", "cross_entropy"])
def test_a_loss_on_the_logits_adds_the_layers_after_and_the_head(llama, loss):
    model, form = llama("nf4"), NPTConfig(rank=4, layers="1-2")
    npt.attach(model, form)
    batch, shape = full_rows(), Shape.of(model.config)
    share = batch.scored / batch.tokens
    expected = training_flops(shape, LENGTH, form, "end_to_end", logits=share)
    # the teacher has no logits in it, and needs no layer after the last converted one
    if loss == "cross_entropy":
        expected -= 2 * shape.head_weights * share + 2 * layer_flops(shape, LENGTH)
    config = TrainConfig(strategy="end_to_end", logit_kl_weight=0.5, logit_loss=loss)
    assert counted(model, config) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("strategy", ["local", "propagated", "end_to_end"])
def test_a_teacher_of_its_own_shares_nothing(llama, strategy):
    model, form = llama("nf4"), NPTConfig(rank=4, layers="1-3")
    npt.attach(model, form)
    expected = training_flops(Shape.of(model.config), LENGTH, form, strategy, own_teacher=True)
    assert counted(model, TrainConfig(strategy=strategy), llama(None)) == expected


def test_the_low_rank_products_grow_with_rank_targets_and_terms():
    def flops(strategy: str = "local", rank: int = 16, **form: Any) -> float:
        return adapter_flops(LLAMA_3_1_8B, NPTConfig(layers="0,1", rank=rank, **form), strategy)

    full = flops()
    assert flops(rank=32) == 2 * full
    assert flops(targets=("gate",)) < full
    assert flops(modulation="multiplicative") < full
    assert full < flops("end_to_end") < 1.1 * full
    assert full / 2 < 0.02 * layer_flops(LLAMA_3_1_8B, 2048)  # little in comparison with a layer


def test_the_roofline_is_the_best_of_the_sizes():
    found = matmul_roofline("cpu", sizes=(64, 128), seconds=0.01)
    assert found.size in (64, 128) and found.flops_per_second > 1e6
