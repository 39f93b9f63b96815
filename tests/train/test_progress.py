"""What a run says: one plain line per logged step."""

import io
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from npt.console import say
from npt.train.metrics import StepMetrics

METRICS = {"loss": 0.123456, "grad_norm": 1.5, "lr": 3e-4, "tokens_per_second": 12345.6}


def metrics_of(load_model: Any, total: int | None, first: int = 0) -> StepMetrics:
    setup = SimpleNamespace(model=load_model(), origin=SimpleNamespace(step=first))
    return StepMetrics(setup, total)


@pytest.mark.parametrize("width", [200, 40])
@pytest.mark.parametrize("terminal", [True, False])
def test_each_logged_step_is_one_line(load_model, width, terminal) -> None:
    out, metrics = io.StringIO(), metrics_of(load_model, 20)
    console = Console(file=out, width=width, force_terminal=terminal)
    for step, refused, loss in ((1, 0, 0.123456), (10, 3, math.nan)):
        logged = {**METRICS, "step": step, "refused_total": refused, "loss": loss}
        say(console, metrics.progress(logged))
    first, last = out.getvalue().splitlines()
    assert first.startswith("step 1/20  loss 0.12346  ") and "refused 0" in first
    for part in ("loss nan", "grad 1.5", "lr 3.00e-04", "12,346 tokens/s", "refused 3"):
        assert part in last
    assert re.search(r"\d+:\d\d left$", last)


@pytest.mark.parametrize(("total", "left"), [(100, "  0:40 left"), (None, "refused 0")])
def test_a_run_that_goes_on_has_no_steps_of_its_own_before_it(
    load_model, monkeypatch, total, left
) -> None:
    """Ten of a hundred steps took ten seconds, whoever made the fifty before them."""
    clock = iter([0.0, 10.0])
    monkeypatch.setattr("npt.train.metrics.time.perf_counter", lambda: next(clock))
    metrics = metrics_of(load_model, total, first=50)
    assert metrics.progress({**METRICS, "step": 60, "refused_total": 0}).endswith(left)
