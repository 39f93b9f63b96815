"""The fidelity table: floor, student before and after, teacher; and the layers."""

from __future__ import annotations

import math

from rich.console import Console, RenderableType
from rich.table import Table

from npt.fidelity.evaluate import Fidelity
from npt.fidelity.metrics import Figures

_NAMES = {
    "floor": "floor (attention dropped)",
    "initial": "student before training",
    "student": "student",
    "teacher": "teacher (the base)",
}


def fidelity_tables(fidelity: Fidelity, text: str = "held-out") -> list[RenderableType]:
    """Two tables for a terminal: the models, and each converted layer's NMSE. `text` says what was evaluated on."""
    models = Table(title=f"Fidelity to the teacher on {fidelity.teacher.tokens:,} {text} tokens (± standard error)", title_justify="left")
    models.add_column("model")
    for heading in ("perplexity", "ratio", "KL, nats", "top-1", "acceptance"):
        models.add_column(heading, justify="right")
    for name, label in _NAMES.items():
        f: Figures | None = getattr(fidelity, name)
        if f is None:
            continue
        label = "student after training" if name == "student" and fidelity.initial is not None else label
        models.add_row(
            label,
            f"{f.perplexity:.3f}",
            _plus_minus(f.perplexity_ratio, f.perplexity_ratio_se, 4),
            _plus_minus(f.kl, f.kl_se, 4),
            _plus_minus(100 * f.top1, 100 * f.top1_se, 1, "%"),
            _plus_minus(100 * f.acceptance, 100 * f.acceptance_se, 1, "%"),
        )
    columns = [key for key in ("nmse_floor", "nmse_initial", "nmse_student") if any(key in v for v in fidelity.layers.values())]
    headings = {"nmse_floor": "floor", "nmse_initial": "before training", "nmse_student": "student"}
    layers = Table(title="NMSE by layer", title_justify="left")
    layers.add_column("layer", justify="right")
    for key in columns:
        layers.add_column(headings[key], justify="right")
    for index, values in fidelity.layers.items():
        layers.add_row(str(index), *(f"{values[key]:.5f}" for key in columns))
    return [models, layers]


def print_fidelity(fidelity: Fidelity, console: Console | None = None, text: str = "held-out") -> None:
    console = console if console is not None else Console()
    for table in fidelity_tables(fidelity, text):
        console.print(table)


def _plus_minus(value: float, error: float, digits: int, unit: str = "") -> str:
    tail = "" if math.isnan(error) else f" ± {error:.{digits}f}"
    return f"{value:.{digits}f}{tail}{unit}"
