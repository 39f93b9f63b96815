"""What a training step asks of a GPU: the rule of the count, and the budget of an 8B shape."""

import json
from pathlib import Path

import pytest
import torch

import step_cost
from fill import RESULTS
from step_cost import Cost, figures, main

D = 1 << 10


def matrix(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape or (D, D), dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("act", "launches", "moved", "flops"),
    [
        (lambda: matrix().view(-1)[3:].detach(), 0, 0, 0),
        (lambda: matrix() @ matrix(), 1, 12, 2 * D**3),
        (lambda: matrix().addmm_(matrix(), matrix()), 1, 12, 2 * D**3),
        # copies what it adds to
        (lambda: torch.addmm(matrix(), matrix(), matrix(), out=matrix()), 2, 20, 2 * D**3),
        (lambda: matrix(D) + matrix(), 1, 8, 0),
        (lambda: matrix(D).expand(D, D) + matrix(), 1, 8, 0),
        (lambda: matrix().mul_(2.0), 1, 4, 0),
        (lambda: matrix().index_select(0, matrix(2, dtype=torch.int64)), 1, 0, 0),
        (lambda: matrix().half(), 1, 6, 0),
    ],
)
def test_the_rule_of_the_count(act, launches, moved, flops) -> None:
    with Cost() as cost:
        act()
    assert cost.launches.total() == launches and cost.flops == flops
    assert cost.moved.total() // D**2 == moved


@pytest.mark.parametrize("name", step_cost.NAMES)
def test_a_step_stays_within_its_budget(name) -> None:
    """More of anything is a decision: `step_cost.py --json` then writes the new ceiling."""
    ceiling = json.loads((RESULTS / "step_cost.json").read_text())[-1][name]
    now = figures(name)
    for key in ("launches", "launches_by_host", "gigabytes", "teraflops", "milliseconds"):
        assert now[key] <= ceiling[key], (key, now, ceiling)
    assert now["roofline_share"] >= ceiling["roofline_share"]
    if name == "local":
        assert now["launches_by_host"] < 900


def test_the_file_has_a_step_of_each_name(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(step_cost, "figures", lambda name: {"launches": len(name)})
    path = tmp_path / "steps.json"
    for name in ("one", "two", "two"):
        assert main(["--json", str(path), "--name", name]) == 0
    assert [step["name"] for step in json.loads(path.read_text())] == ["one", "two"]
    assert json.loads(path.read_text())[1]["local"] == {"launches": 5}
