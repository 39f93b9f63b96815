"""Plans: shapes, and formulas that are within 15% of what is measured."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

import npt
from npt.adapters.converted import adapter_parameters, decoder_layers
from npt.batch import Sample
from npt.config import NPTConfig, TrainConfig
from npt.doctor.measure import measure_window, peak_bytes, storage_bytes, tensors_of
from npt.doctor.plan import Workload, base_bytes, shown
from npt.doctor.shape import SHAPES, Shape, llama_config, shape_named
from npt.evaluation.evaluate import evaluate
from npt.guard.window import IN_FLIGHT
from random_base import random_base

SMALL = Shape(5, 64, 160, 4, 2, 16, 5000)


def workload(
    shape: Shape = SMALL, layers: str = "upper_half", length: int = 48, **training: Any
) -> Workload:
    config = llama_config(shape, length)
    settings = TrainConfig(**{"batch_size": 4, **training})
    adapter = NPTConfig(rank=8, layers=layers)
    return Workload(config, adapter, settings, length, "nf4", torch.bfloat16)


def student(planned: Workload) -> Any:
    model = random_base(
        planned.config,
        quantization=planned.quantization,
        device="cpu",
        compute_dtype=planned.compute_dtype,
    )
    npt.attach(model, replace(planned.adapter, init="random"))
    return model


KL = {"strategy": "end_to_end", "logit_kl_weight": 0.5}
CASES: dict[str, Workload] = {
    "local": workload(strategy="local"),
    "reverse": workload(layers="all", logit_loss="reverse_kl", **KL),
    "cross entropy": workload(layers="3", logit_loss="cross_entropy", **KL),
    "checkpointed": workload(layers="0,3", gradient_checkpointing=True, **KL),
    "logits alone": workload(layers="0,3", hidden_weight=0.0, **KL),
    "embedded": workload(SHAPES["embedded"], length=128, **KL),
    "long rows": workload(
        Shape(4, 128, 336, 4, 2, 32, 300), length=512, batch_size=2, strategy="end_to_end"
    ),
    "dense": replace(
        workload(Shape(4, 96, 256, 6, 6, 16, 1000), **KL), quantization=None, stored=torch.float32
    ),
}
CASES["local, another form"] = replace(
    workload(layers="all", strategy="local"),
    adapter=NPTConfig(rank=8, layers="all", mult_form="one_plus_tanh"),
)
CASES["stream alone"] = replace(
    CASES["embedded"], adapter=NPTConfig(rank=48, layers="upper_half", targets=("stream",))
)


@pytest.mark.parametrize("case", CASES)
def test_a_predicted_peak_is_within_15_percent_of_the_measured_one(case: str) -> None:
    planned = CASES[case]
    memory, model = planned.plan(), student(planned)
    training = planned.training
    peak = measure_window(model, training, training.batch_size, planned.length)[0]
    assert memory.of("micro-batch", "step") == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize("case", ["local", "embedded"])
def test_an_evaluation_is_within_15_percent(case: str) -> None:
    planned = CASES[case]
    model, shape = student(planned), (planned.training.batch_size, planned.length)
    ids = torch.randint(3, 500, shape).tolist()
    samples = [Sample(str(number), tuple(row)) for number, row in enumerate(ids)]
    adapters = sum(4 * p.numel() for p in adapter_parameters(model).values())
    taken = peak_bytes(lambda: evaluate(model, None, samples, batch_size=len(samples)), "cpu")
    measured = storage_bytes(tensors_of(model)) + 4 * adapters + taken  # as in a run
    assert planned.plan().of("evaluation") == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("quantization", ["nf4", None])
def test_the_bytes_of_a_base_are_those_of_its_tensors(quantization: str | None) -> None:
    stored = torch.float32 if quantization is None else torch.bfloat16
    for shape in (SHAPES["embedded"], SMALL):
        model = random_base(llama_config(shape), quantization=quantization, device="cpu")
        size = base_bytes(Shape.of(model.config), quantization, stored)
        assert size == pytest.approx(storage_bytes(tensors_of(model)), rel=0.1)


def test_named_shapes_have_the_sizes_in_their_names_and_make_models_of_that_shape() -> None:
    for name, shape in SHAPES.items():
        config = llama_config(shape_named(name), 4096)
        assert Shape.of(config) == shape and config.max_position_embeddings == 4096
    for name, numbers in {
        "llama-3.1-8b": 8.03e9,
        "llama-3.1-70b": 70.55e9,
        "llama-3.2-1b": 1.236e9,
        "qwen3-8b": 8.19e9,
        "mistral-7b": 7.248e9,
        "smollm2-135m": 134.5e6,
    }.items():
        size = base_bytes(SHAPES[name], None, torch.float32) / 4
        assert size == pytest.approx(numbers, rel=1e-3), name


def weights(module: nn.Module) -> int:
    """The weights of linear layers and embeddings, tied ones once."""
    parts = [part for part in module.modules() if isinstance(part, nn.Linear | nn.Embedding)]
    return sum({id(part.weight): part.weight.numel() for part in parts}.values())


SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4,
}  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, num_key_value_heads=2),
        # heads together are wider than the model
        Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=24),
    ],
    ids=["grouped", "wide heads"],
)
def test_the_weights_of_a_shape_are_those_of_its_model(config: Any, tied: bool) -> None:
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
        {"targets": "up,down", "modulation": "additive"},
        {"modulation": "multiplicative", "layers": "0,2-3"},
        {"layers": "all", "ranks": (1, 2, 3, 4)},
    ],
    ids=str,
)
def test_trainable_numbers_are_those_that_attach_makes(load_model: Any, settings: Any) -> None:
    model = load_model(None)
    config = NPTConfig(**{"rank": 3, **settings})
    npt.attach(model, config)
    trainable = sum(p.numel() for p in adapter_parameters(model).values())
    assert Shape.of(model.config).adapter_numbers(config) == trainable


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1024, "1.00 KiB"), (2**20, "1.00 MiB"), (6.2 * 2**30, "6.20 GiB")],
)
def test_sizes_are_written_in_the_largest_unit_that_they_fill(size: float, text: str) -> None:
    assert shown(size) == text


def test_a_teacher_of_its_own_is_counted() -> None:
    alone, beside = workload(), replace(workload(), teacher=torch.bfloat16)
    more = beside.plan().of("step") - alone.plan().of("step")
    assert more == base_bytes(alone.shape, None, torch.bfloat16)


@pytest.mark.parametrize(
    ("device", "training", "late"),
    [("cpu", {}, 0), ("cuda", {}, IN_FLIGHT), ("cuda", {"skip_spikes": True}, 1)],
)
def test_states_are_counted_of_as_many_steps_as_may_be_in_flight(
    device: str, training: dict[str, Any], late: int
) -> None:
    planned = replace(workload(**training), device=torch.device(device))
    sizes = {term.name: term.bytes for term in planned.plan().terms}
    assert sizes.get("states of steps in flight", 0) == late * 3 * sizes["adapters"]
