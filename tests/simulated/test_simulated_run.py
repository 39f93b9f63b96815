"""A run, an evaluation and generation on a simulated card."""

import io
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from simulated_cuda import simulated_cuda
from students import load_student, rows

import npt
from npt.adapters.converted import adapter_parameters
from npt.distill.strategies import STRATEGIES
from npt.evaluation.generate import write

UNTIMED = {"tokens_per_second"}


def train(model: Any, folder: Path, **settings: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train for three steps of two micro-batches; the logged lines without timings, and weights."""
    config: dict[str, Any] = {
        "max_steps": 3,
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "log_steps": 1,
        "eval_samples": 2,
    }
    trainer = npt.Trainer(
        model,
        npt.load_base("tiny", device="cpu")[1],
        rows(40),
        npt.TrainConfig(output_dir=str(folder), **(config | settings)),
        data_config=npt.DataConfig(max_length=16),
        eval_data=rows(2),
        console=Console(file=io.StringIO()),
    )
    result = trainer.train()
    lines = (Path(result.folder) / "metrics.jsonl").read_text().splitlines()
    metrics = [{k: v for k, v in json.loads(line).items() if k not in UNTIMED} for line in lines]
    weights = {name: p.detach().cpu() for name, p in adapter_parameters(model).items()}
    assert result.fidelity is not None
    return metrics, {**weights, "kl": torch.tensor(result.fidelity.student.kl)}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], value) for name, value in other.items())


def test_a_run_with_a_refusal_is_the_cpus_and_resumes_exactly(tmp_path, monkeypatch) -> None:
    """The strategy that keeps most; the others' steps and refusals are compared by the step."""
    strategy = "end_to_end"
    original, calls = STRATEGIES[strategy], iter(())

    def poisoned(model: Any, *arguments: Any) -> Any:
        sums = original(model, *arguments)
        if next(calls) == 2:  # the first micro-batch of the second step
            adapter_parameters(model)["model.layers.1.npt.A"].grad.mul_(float("nan"))
        return sums

    monkeypatch.setitem(STRATEGIES, strategy, poisoned)
    settings = {"strategy": strategy, "smoke_test": False}

    def run(model: Any, name: str, first: int = 0, **more: Any) -> Any:
        nonlocal calls
        calls = iter(range(first, 1000))
        return train(model, tmp_path / name, **settings, **more)

    expected_metrics, expected = run(load_student(), "cpu")
    assert expected_metrics[-1]["refused_total"] == 1
    with simulated_cuda():
        metrics, found = run(load_student("cuda"), "cuda", save_steps=2)
        checkpoint = tmp_path / "cuda" / "checkpoints" / "step-00000002"
        resumed = run(load_student("cuda"), "again", first=100, resume=str(checkpoint))
    assert metrics == expected_metrics
    assert_same(found, expected)
    assert_same(resumed[1], found)


def test_a_student_on_a_card_is_evaluated_and_writes_as_on_the_cpu() -> None:
    tokenizer = npt.load_base("tiny", device="cpu")[1]

    def looked_at(model: Any) -> tuple[dict[str, Any], tuple[int, ...]]:
        config = npt.DataConfig(max_length=16)
        fidelity = npt.evaluate(model, tokenizer, rows(6), data_config=config, batch_size=2)
        written = write(model, tokenizer, [5, 6, 7, 8], 6)
        return fidelity.as_dict(), written.ids

    expected = looked_at(load_student())
    with simulated_cuda():
        assert looked_at(load_student("cuda")) == expected
