"""A base that is spread over several devices of one process computes, trains, saves and evaluates
as on one.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_runs import without_report
from rich.console import Console
from simulated_cuda import Simulated, simulated_cuda, spread, to_cuda
from torch import Tensor

import npt
from faults.runs import NoTokenizer
from npt.adapters.converted import adapter_parameters
from npt.config import DataConfig, NPTConfig, TrainConfig
from npt.data.batch import Batch, Sample
from npt.distill.step import student_guard
from npt.distill.strategies import STRATEGIES, drive
from npt.errors import NotSupportedError
from npt.evaluation.greedy import compare_prompts
from npt.tracer.watchdogs import base_fault, tensor_fault


@pytest.fixture
def models(load_model) -> Iterator[tuple[Any, ...]]:
    """The random Llama in NF4 three times: on one GPU, and twice with its upper half on another."""
    one, two, three = (load_model() for _ in range(3))
    with simulated_cuda(devices=2):
        yield to_cuda(one), spread(two, 2), spread(three, 2)


def held(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.held if isinstance(tensor, Simulated) else tensor


# Copies between devices are aligned otherwise in memory, for which the CPU's products sum in
# another order: a few units of 2^-24 in every layer, relative to the largest entry.
ROUNDING = 2e-5


def assert_near(one: Tensor, other: Tensor, what: str, tolerance: float = ROUNDING) -> None:
    one, other = held(one), held(other)
    error, scale = float((one - other).abs().max()), float(other.abs().max())
    assert error <= tolerance * scale, f"{what}: off by {error} at scale {scale}"


def filled(model: Any, batch: Batch, config: TrainConfig) -> dict[str, Tensor]:
    """Sums and gradients of a micro-batch."""
    parameters = adapter_parameters(model)
    for parameter in parameters.values():
        parameter.grad = None
    sums = STRATEGIES[config.strategy](model, batch, config)
    return {
        "loss": sums.loss,
        "layer_nmse": sums.layer_nmse,
        "logit": sums.logit,
        **{name: p.grad for name, p in parameters.items()},
    }


WAYS: list[dict[str, Any]] = [
    {},
    {"loss": "nmse_update"},
    {"strategy": "end_to_end", "loss": "nmse_update", "logit_kl_weight": 0.5},
    {"strategy": "end_to_end", "logit_kl_weight": 0.5, "gradient_checkpointing": True},
]

PLACED = list(zip(WAYS, ("0,1", "all", "1,2", "all"), strict=True))
"""All of them on the first device, on both, with one on either side of the border."""


def name_of(way: dict[str, Any]) -> str:
    return ",".join(map(str, way.values())) or "local"


@pytest.mark.parametrize(
    ("way", "layers"), PLACED, ids=lambda value: value if isinstance(value, str) else name_of(value)
)
def test_losses_and_gradients_are_those_of_one_device(models, batch, way, layers) -> None:
    for model in models[:2]:
        npt.attach(model, NPTConfig(rank=4, layers=layers, additive_scale=1.0))
    config = TrainConfig(regularization_lambda=0.1, **way)
    here = batch.to(torch.device("cuda"))
    expected, found = (filled(model, here, config) for model in models[:2])
    for name, value in found.items():
        assert_near(value, expected[name], name)
        if ".npt." in name:
            assert value.device.index == (int(name.split(".")[2]) >= 2), name


def trained(model: Any, out: Path, **config: Any) -> dict[str, Tensor]:
    """Weights after a run of two steps, and its figures."""
    kept: dict[str, Tensor] = {}
    settings = {"batch_size": 2, "learning_rate": 1e-2, "log_steps": 1, "eval_samples": 2}
    settings |= {"max_steps": 2, "output_dir": str(out), "gradient_accumulation_steps": 2, **config}
    trainer = npt.Trainer(
        model,
        NoTokenizer(),
        [{"input_ids": [3 + (11 * i + 7 * j) % 90 for j in range(6 + i % 4)]} for i in range(40)],
        TrainConfig(**settings),
        data_config=DataConfig(max_length=16),
        eval_data=[{"input_ids": list(range(5, 15))}],
        console=Console(file=io.StringIO()),
    )
    result = without_report(trainer).train()
    kept |= {name: held(p).clone() for name, p in adapter_parameters(model).items()}
    assert result.fidelity is not None
    return kept | {
        "fidelity": torch.tensor([result.fidelity.student.kl, result.fidelity.student.perplexity])
    }


ADAPTERS = NPTConfig(rank=4, layers="1-3", additive_scale=1.0)


def test_a_run_on_two_devices_equals_one_and_resumes_from_it(models, tmp_path, monkeypatch) -> None:
    # as on a GPU
    monkeypatch.setattr(
        "npt.train.trainer.student_guard", functools.partial(student_guard, late=True)
    )
    for model in models:
        npt.attach(model, ADAPTERS)
    expected = trained(models[0], tmp_path / "one", smoke_test=False, gradient_accumulation_steps=1)
    found = trained(models[1], tmp_path / "two", save_steps=1, gradient_accumulation_steps=1)
    for name, value in found.items():
        # Adam divides by the size of gradients, and of the smallest rounding is a good part.
        assert_near(value, expected[name], name, 1e-2)
    checkpoint = str(tmp_path / "two" / "checkpoints" / "step-00000001")
    again = {"gradient_accumulation_steps": 1, "resume": checkpoint, "smoke_test": False}
    resumed = trained(models[2], tmp_path / "again", **again)
    assert all(torch.equal(value, found[name]) for name, value in resumed.items())


def test_a_nan_on_the_second_device_is_refused_without_a_trace(
    models, tmp_path, monkeypatch
) -> None:
    local, calls = STRATEGIES["local"], iter(range(1000))

    def poisoned(model: Any, batch: Batch, config: TrainConfig, teacher: Any = None) -> Any:
        sums = local(model, batch, config)
        if next(calls) == 1:
            held(adapter_parameters(model)["model.layers.3.npt.A"].grad)[0, 0] = float("nan")
        return sums

    model = models[1]
    npt.attach(model, ADAPTERS)
    monkeypatch.setitem(STRATEGIES, "local", poisoned)
    found = trained(model, tmp_path / "run", smoke_test=False, max_steps=1)
    events = [
        json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    ]
    (refusal,) = (event for event in events if event["event"] == "refusal")
    assert refusal["kind"] == "gradient" and "model.layers.3.npt.A" in refusal["detail"]
    (diagnosis,) = (event for event in events if event["event"] == "diagnosis")
    assert diagnosis["message"].startswith("computed again, all was finite")
    assert all(torch.isfinite(value).all() for value in found.values())


def test_what_looks_at_a_model_looks_at_both_devices(models, tmp_path) -> None:
    one, two, _ = models
    for model in (one, two):
        npt.attach(model, ADAPTERS, seed=3)
    npt.save_adapter(two, tmp_path / "adapter")
    npt.load_adapter(one, tmp_path / "adapter")  # the base is the same, so its hash is
    prompts = [Sample("a", (3, 4, 5)), Sample("b", (9, 8, 7, 6))]
    alone, spread_out = (compare_prompts(model, prompts, 3, frozenset()) for model in (one, two))
    for expected, found in zip(alone, spread_out, strict=True):
        for name in ("completion", "position", "student_token"):
            assert getattr(found, name) == getattr(expected, name)
    assert base_fault(two) is None
    held(two.get_parameter("model.layers.3.npt.A"))[1, 2] = float("inf")
    finding = tensor_fault(adapter_parameters(two))
    assert (
        finding is not None and finding.name == "model.layers.3.npt.A" and finding.index == (1, 2)
    )


@pytest.mark.parametrize(
    "way", [{"strategy": "propagated"}, {"strategy": "end_to_end", "logit_kl_weight": 1.0}], ids=str
)
def test_a_spread_student_learns_from_a_teacher_on_one_device(
    load_model, llama_folder, batch, way
) -> None:
    teacher = npt.load_teacher(str(llama_folder), "bf16", device="cpu")
    config = TrainConfig(**way)
    one, two = load_model(), load_model()
    with simulated_cuda(devices=2):
        to_cuda(teacher)
        here = batch.to(torch.device("cuda"))
        found = []
        for model in (to_cuda(one), spread(two, 2)):
            npt.attach(model, ADAPTERS)
            found.append(drive(model, here, config, teacher))
        assert_near(found[1].loss, found[0].loss, "loss")


def test_calibration_of_a_spread_model_is_refused(load_model, tokenizer) -> None:
    model = load_model()
    with simulated_cuda(devices=2):
        spread(model, 2)
        npt.attach(model, ADAPTERS)
        with pytest.raises(NotSupportedError, match="calibration needs it on one device"):
            npt.calibrate(model, tokenizer, [{"text": "a b c d e f"}] * 40, 200, max_length=12)
