"""What a run says: one plain line per logged step without a terminal, a live bar with one."""

from __future__ import annotations

import io
import math
import re

import pytest
from rich.console import Console

from npt.train.run_context import ProgressDisplay

METRICS = {"loss": 0.123456, "grad_norm": 1.5, "lr": 3e-4, "tokens_per_second": 12345.6}


def console(terminal: bool, width: int = 200) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=terminal)


def text(console: Console) -> str:
    """Return the text written, without colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


@pytest.mark.parametrize("width", [200, 40])
def test_without_a_terminal_each_logged_step_is_one_plain_line(width) -> None:
    out = console(False, width)
    display = ProgressDisplay(20, out)
    display.step(1, METRICS, 0)
    display.step(2, None, 0)
    display.step(10, METRICS, 3)
    display.close()
    written = out.file.getvalue()
    assert "\x1b" not in written and "\r" not in written
    first, last = written.splitlines()
    assert first.startswith("step 1/20  ") and last.startswith("step 10/20  ")
    for part in ("loss 0.12346", "grad 1.5", "lr 3.00e-04", "12,346 tokens/s", "refused 3"):
        assert part in last
    assert "refused 0" in first
    assert re.search(r"\d+:\d\d left$", last)


def test_a_run_that_goes_on_has_no_steps_of_its_own_before_it(monkeypatch) -> None:
    """Ten of a hundred steps took ten seconds, whoever made the fifty before them."""
    clock = iter([0.0, 10.0])
    monkeypatch.setattr("npt.train.run_context.time.perf_counter", lambda: next(clock))
    out = console(False)
    ProgressDisplay(100, out, first=50).step(60, METRICS, 0)
    assert text(out).rstrip().endswith("0:40 left")


def test_without_a_known_end_neither_total_nor_time_left_is_shown() -> None:
    out = console(False)
    ProgressDisplay(None, out).step(7, METRICS, 0)
    assert text(out).startswith("step 7  loss ")
    assert "left" not in text(out)


def test_on_a_terminal_the_bar_shows_loss_speed_and_refusals() -> None:
    out = console(True)
    display = ProgressDisplay(20, out)
    display.step(10, METRICS, 3)
    display.step(11, None, 3)
    display.close()
    last = text(out).splitlines()[-1]
    for part in ("11/20", "loss 0.12346", "12,346 tokens/s", "refused 3"):
        assert part in last  # the figures of the last logged step stay in sight


def test_on_a_terminal_an_unknown_end_is_no_obstacle() -> None:
    out = console(True)
    display = ProgressDisplay(None, out)
    display.step(3, METRICS, 0)
    display.close()
    assert "loss 0.12346" in text(out)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_line_is_shown_as_it_is(terminal) -> None:
    out = console(terminal)
    display = ProgressDisplay(5, out)
    display.say("refused: token id 999 [row 0] of sample [a/b]")
    display.close()
    assert "refused: token id 999 [row 0] of sample [a/b]" in text(out)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_loss_that_is_not_a_number_is_shown_as_such(terminal) -> None:
    out = console(terminal)
    display = ProgressDisplay(5, out)
    display.step(1, {**METRICS, "loss": math.nan}, 0)
    display.close()
    assert "loss nan" in text(out)


def test_closing_twice_is_harmless() -> None:
    display = ProgressDisplay(5, console(True))
    display.close()
    display.close()
