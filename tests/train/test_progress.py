"""What a run says: one plain line per logged step."""

from __future__ import annotations

import io
import math
import re

import pytest
from rich.console import Console

from npt.train.run_context import ProgressDisplay

METRICS = {"loss": 0.123456, "grad_norm": 1.5, "lr": 3e-4, "tokens_per_second": 12345.6}


@pytest.mark.parametrize("width", [200, 40])
@pytest.mark.parametrize("terminal", [True, False])
def test_each_logged_step_is_one_line(width, terminal) -> None:
    out = io.StringIO()
    display = ProgressDisplay(20, Console(file=out, width=width, force_terminal=terminal))
    display.step(1, METRICS, 0)
    display.step(2, None, 0)
    display.step(10, {**METRICS, "loss": math.nan}, 3)
    display.say("refused: token id 999 [row 0] of sample [a/b]")
    first, last, line = out.getvalue().splitlines()
    assert first.startswith("step 1/20  loss 0.12346  ") and "refused 0" in first
    for part in ("loss nan", "grad 1.5", "lr 3.00e-04", "12,346 tokens/s", "refused 3"):
        assert part in last
    assert re.search(r"\d+:\d\d left$", last)
    assert line == "refused: token id 999 [row 0] of sample [a/b]"


@pytest.mark.parametrize(("total", "left"), [(100, "  0:40 left"), (None, "refused 0")])
def test_a_run_that_goes_on_has_no_steps_of_its_own_before_it(monkeypatch, total, left) -> None:
    """Ten of a hundred steps took ten seconds, whoever made the fifty before them."""
    clock = iter([0.0, 10.0])
    monkeypatch.setattr("npt.train.run_context.time.perf_counter", lambda: next(clock))
    out = io.StringIO()
    ProgressDisplay(total, Console(file=out, width=200), first=50).step(60, METRICS, 0)
    assert out.getvalue().rstrip().endswith(left)
