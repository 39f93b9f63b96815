"""Clean runs of other people's trainers are what they were without a guard, bit for bit: the
examples of debug/compare_trainers.py."""

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from several import several, values

from clean_runs import EXAMPLES
from clean_runs.watched import compared
from npt.guard.trainer import TrainerMixin
from npt.guard.window import Gradients

ROOT = Path(__file__).parents[2]
BY_ID = {example.id: example for example in EXAMPLES}


# Those that ask different things of a guard; debug/compare_trainers.py compares all.
CHOSEN = (
    "accumulation checkpointing-reentrant noisy-embeddings resumed gradients-replaced-by-data"
    " frozen iterable adamw_torch_fused paged_adamw_32bit Muon-over-matrices"
    " AdamW-in-two-groups own-module lora-4-bit t5-seq2seq sft-packed dpo"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN.split())
def test_a_guard_changes_nothing_of_a_clean_run(name: str) -> None:
    assert compared(BY_ID[name]) == []


def loses_what_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    own = TrainerMixin.log
    monkeypatch.setattr(TrainerMixin, "log", lambda self, logs, *rest: own(self, dict(logs), *rest))


def adds_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda p, **rest: like(p, **rest).contiguous())


def loses_what_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    def expose(gradients: Gradients, unreached: Any = ()) -> None:
        gradients.renew()
        for parameter, view in zip(gradients.parameters, gradients.sum_views, strict=True):
            parameter.grad = view

    monkeypatch.setattr(Gradients, "expose", expose)


@pytest.mark.parametrize(
    ("broken", "name", "where"),
    [
        (loses_what_is_added, "defaults", "returned epoch: only plain"),
        (adds_by_index, "resnet-channels-last", "convolution.weight: bits differ"),
        (loses_what_is_moved, "gradients-replaced-by-data", "mlp.up_proj.weight: bits differ"),
    ],
)
def test_a_guard_that_changes_a_run_is_found(
    broken: Any, name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    differences = compared(BY_ID[name])
    assert any(where in line for line in differences), differences


@pytest.mark.parametrize(
    "name",
    [
        "resnet",  # with batch norm, whose statistics are process 0's
        pytest.param("accumulation", marks=pytest.mark.slow),
    ],
)
def test_two_processes_run_as_without_a_guard(name: str) -> None:
    assert values(several(2, in_a_process, name)) == [[], []]


def in_a_process(_processes: Any, name: str) -> list[str]:
    return compared(BY_ID[name])


def script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    path = ROOT / "debug" / "compare_trainers.py"
    spec = importlib.util.spec_from_file_location("compare_trainers_script", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr("sys.argv", [path.name, *arguments])
    return module.main()


def test_the_script_says_which_runs_differ(monkeypatch, capsys) -> None:
    loses_what_is_added(monkeypatch)
    assert script(monkeypatch, "--only", "defaults,log-nothing", "--json") == 1
    figures = json.loads(capsys.readouterr().out)
    assert (figures["equal"], figures["total"]) == (0, 2)
    assert "returned epoch: only plain" in figures["examples"][0]["differences"]
    monkeypatch.undo()
    assert script(monkeypatch, "--only", "defaults") == 0
    assert "1 of 1 guarded runs" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        script(monkeypatch, "--only", "nothing")
    assert "there is no example 'nothing'; choose from defaults," in capsys.readouterr().err


def test_the_page_counts_the_examples() -> None:
    page = (ROOT / "docs" / "results" / "robustness.md").read_text(encoding="utf-8")
    groups = Counter(example.group for example in EXAMPLES)
    assert f" of {len(EXAMPLES)} runs" in page
    assert f"{groups['arguments']} sets of" in page
    assert f"{groups['optimizers']} optimizers" in page
    assert f"{groups['trainers']} models and trainers" in page
