"""Plans: the formula is within 15% of what is measured, and what fits is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import npt
from npt.adapters.converted import adapter_parameters
from npt.base.random_base import random_base
from npt.config import NPTConfig, TrainConfig
from npt.data.batch import Sample
from npt.errors import ConfigError
from npt.evaluation.evaluate import evaluate
from npt.guard.window import IN_FLIGHT
from npt.planning.measure import measure_window, peak_bytes, storage_bytes, tensors_of
from npt.planning.memory import Workload, base_bytes, shown
from npt.planning.shape import SHAPES, Shape, llama_config, parse_shape

SMALL = "64,160,5,4,2,5000"


def workload(
    shape: str = SMALL, layers: str = "upper_half", length: int = 48, **training: Any
) -> Workload:
    config = llama_config(parse_shape(shape), length)
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
    "local, bf16": replace(workload(layers="all", strategy="local"), compute_dtype=torch.bfloat16),
    "propagated": workload(layers="1,4", strategy="propagated"),
    "reverse": workload(layers="all", logit_loss="reverse_kl", **KL),
    "cross entropy": workload(layers="3", logit_loss="cross_entropy", **KL),
    "checkpointed": workload(layers="0,3", gradient_checkpointing=True, **KL),
    "logits alone": workload(layers="0,3", hidden_weight=0.0, **KL),
    "embedded": workload("embedded", length=128, **KL),
    "long rows": workload("128,336,4,4,2,300", length=512, batch_size=2, strategy="end_to_end"),
    "wide": workload("512,1024,2,8,2,500", length=16, strategy="local"),
    "dense": replace(workload("96,256,4,6,6,1000", **KL), quantization=None, stored=torch.float32),
}
for strategy in ("local", "end_to_end"):
    CASES[f"{strategy}, another form"] = replace(
        workload(layers="all", strategy=strategy),
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


@pytest.mark.parametrize("shape", ["embedded", "256,768,4,4,2,512"])
def test_a_calibrated_start_is_within_15_percent(shape: str) -> None:
    planned = workload(shape, length=64)
    planned = replace(planned, adapter=NPTConfig(layers="2-3", init="calibrated"))
    model = student(planned)
    ids = torch.randint(3, 500, (16, 64)).tolist()
    samples = [Sample(str(number), tuple(row)) for number, row in enumerate(ids)]
    taken = peak_bytes(lambda: npt.calibrate(model, None, samples, 1000, batch_size=4), "cpu")
    measured = storage_bytes(tensors_of(model)) + taken
    assert planned.plan().of("start") == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("quantization", ["nf4", None])
def test_the_bytes_of_a_base_are_those_of_its_tensors(quantization: str | None) -> None:
    stored = torch.float32 if quantization is None else torch.bfloat16
    for name in ("embedded", SMALL):
        model = random_base(
            llama_config(parse_shape(name)), quantization=quantization, device="cpu"
        )
        found = base_bytes(Shape.of(model.config), quantization, stored)
        assert found == pytest.approx(storage_bytes(tensors_of(model)), rel=0.1)


def test_the_named_shapes_have_the_sizes_in_their_names() -> None:
    for name, numbers in {
        "llama-3.1-8b": 8.03e9,
        "llama-3.2-1b": 1.236e9,
        "qwen3-8b": 8.19e9,
        "mistral-7b": 7.248e9,
        "smollm2-135m": 134.5e6,
    }.items():
        found = base_bytes(SHAPES[name], None, torch.float32) / 4
        assert found == pytest.approx(numbers, rel=1e-3), name


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
    ("device", "training", "processes", "late"),
    [
        ("cpu", {}, 1, 0),
        ("cuda", {}, 1, IN_FLIGHT),
        ("cuda", {"skip_spikes": True}, 1, 1),
        ("cuda", {}, 2, 1),
    ],
)
def test_states_are_counted_of_as_many_steps_as_may_be_in_flight(
    device: str, training: dict[str, Any], processes: int, late: int
) -> None:
    planned = replace(workload(**training), device=torch.device(device), processes=processes)
    sizes = {term.name: term.bytes for term in planned.plan().terms}
    assert sizes.get("states of steps in flight", 0) == late * 3 * sizes["adapters"]


def test_what_fits_is_the_most_that_does_and_parts_are_even() -> None:
    planned = workload(
        "64,160,5,4,2,200", layers="all", batch_size=5, max_memory="1GiB", strategy="end_to_end"
    )
    peaks = {samples: planned.plan(samples).peak for samples in (1, 2, 4, 5)}
    assert sorted(peaks.values()) == list(peaks.values())
    for samples, peak in peaks.items():
        found = planned.fitting(peak)
        assert found.samples_at_once == -(-5 // -(-5 // samples)) and found.peak <= peak
        assert found.evaluated_at_once <= found.samples_at_once


def test_if_one_sample_does_not_fit_the_largest_term_is_named() -> None:
    planned = workload(batch_size=2, max_memory="100KB")
    with pytest.raises(
        ConfigError, match=r"--max_memory is 100KB, but one sample of 48 tokens .*most of it"
    ) as caught:
        planned.fitting(100_000)
    assert "\n" not in str(caught.value)
