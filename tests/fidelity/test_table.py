"""The fidelity table says all it was given, each row under its name."""

from __future__ import annotations

import io
import math

from rich.console import Console

from npt.fidelity.evaluate import Fidelity
from npt.fidelity.metrics import Figures
from npt.fidelity.table import print_fidelity


def some(seed: int, se: float = 0.25) -> Figures:
    """perplexity seed + 2.5, ratio seed + 1.5, KL seed / 8, shares seed / 10."""
    return Figures(12345, seed + 2.5, se, seed + 1.5, se, seed / 8, se, seed / 10, se, seed / 10 + 0.05, se)


LAYERS = {1: {"nmse_floor": 0.5, "nmse_student": 0.125}, 12: {"nmse_floor": 0.25, "nmse_student": 0.0625}}


def shown(fidelity: Fidelity) -> list[str]:
    out = io.StringIO()
    print_fidelity(fidelity, Console(file=out, width=200))
    return out.getvalue().splitlines()


def row(lines: list[str], label: str) -> str:
    (found,) = [line for line in lines if line.strip("│┃ ").startswith(label)]
    return found


def test_every_model_has_its_row_with_figures_and_errors() -> None:
    lines = shown(Fidelity(some(0), some(3), some(2), None, LAYERS))
    for label, seed in (("floor (attention dropped)", 3), ("student ", 2), ("teacher (the base)", 0)):
        line = row(lines, label)
        for part in (f"{seed + 2.5:.3f}", f"{seed + 1.5:.4f} ± 0.2500", f"{seed / 8:.4f} ± 0.2500", f"{10 * seed:.1f} ± 25.0%"):
            assert part in line, (label, part)
    assert not [line for line in lines if "before training" in line]
    assert [line for line in lines if "12,345 held-out tokens" in line]


def test_a_trained_student_is_shown_before_and_after() -> None:
    layers = {i: {**values, "nmse_initial": 0.375} for i, values in LAYERS.items()}
    lines = shown(Fidelity(some(0), some(3), some(1), some(2), layers))
    assert "4.500" in row(lines, "student before training")
    assert "3.500" in row(lines, "student after training")
    assert all(part in row(lines, "12 ") for part in ("0.25000", "0.37500", "0.06250"))


def test_every_layer_has_its_row() -> None:
    lines = shown(Fidelity(some(0), some(3), some(2), None, LAYERS))
    assert all(part in row(lines, "1 ") for part in ("0.50000", "0.12500"))
    assert all(part in row(lines, "12 ") for part in ("0.25000", "0.06250"))


def test_an_error_that_is_unknown_is_left_out() -> None:
    lines = shown(Fidelity(some(0, math.nan), some(3, math.nan), some(2, math.nan), None, LAYERS))
    models = [row(lines, label) for label in ("floor", "student", "teacher")]
    assert not [line for line in models if "nan" in line or "±" in line]


def test_a_terminal_of_eighty_columns_shows_every_figure_whole() -> None:
    out = io.StringIO()
    print_fidelity(Fidelity(some(0), some(3), some(2), None, LAYERS), Console(file=out, width=80))
    assert "…" not in out.getvalue()
    assert max(len(line) for line in out.getvalue().splitlines()) <= 80
