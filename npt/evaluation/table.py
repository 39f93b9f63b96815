"""The figures of an evaluation for a terminal: models, layers, positions, attribution, greedy
divergence.

A figure is a row and a model a column, so that all of it fits 80 columns, errors included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from npt.evaluation.evaluate import Fidelity
from npt.evaluation.formatting import FIGURES, NO_ERROR
from npt.evaluation.greedy import Divergence
from npt.evaluation.harness import Results
from npt.evaluation.metrics import Figures

WIDE = 116
"""Columns from which on the long headings fit."""

_ROWS = ("perplexity", "perplexity_ratio", "kl", "reverse_kl", "top1", "top5", "acceptance")
_COMPARISONS = {
    "unquantized_to_4bit": "unquantised to 4-bit",
    "4bit_to_npt": "4-bit to NPT",
    "unquantized_to_npt": "unquantised to NPT",
}
_NARROW: dict[str, Any] = {
    "box": SIMPLE_HEAD,
    "show_edge": False,
    "pad_edge": False,
    "collapse_padding": True,
}


def print_fidelity(
    fidelity: Fidelity, console: Console | None = None, text: str = "held-out"
) -> None:
    """Print models and layers, and what else was measured; `text` names the text evaluated on."""
    console = console if console is not None else Console()
    width = console.width
    title = f"Fidelity to the teacher on {fidelity.teacher.tokens:,} {text} tokens"
    models = _models(fidelity, width >= WIDE)
    console.print(_figures_table(f"{title} (± standard error)", models, width))
    console.print(_layers_table(fidelity, width))
    if fidelity.positions:
        console.print(_positions_table(fidelity.positions, width))
    if fidelity.attribution:
        columns = [(_COMPARISONS[name], f) for name, f in fidelity.attribution.items()]
        title = "What quantisation costs, and what the conversion"
        console.print(_figures_table(title, columns, width))
    if fidelity.divergence is not None:
        console.print(Text(divergence_line(fidelity.divergence)))


def divergence_line(d: Divergence) -> str:
    """Return a line about where greedy texts part, those that never did counted."""
    ended = f", {d.ended} ended the same" if d.ended else ""
    median = (
        "fewer than half part"
        if math.isnan(d.median)
        else f"half have parted within {d.median:.0f} tokens"
    )
    agreed, rate = _plus_minus(d.agreed, d.agreed_se, 1), _plus_minus(d.rate, d.rate_se, 4)
    bound = " (at least: the limit cuts some off)" if d.censored else ""
    return (
        f"Greedy texts of student and teacher after {d.prompts} prompts, up to {d.max_new_tokens}"
        f" tokens: {d.parted} part, {d.censored} are the same at the limit{ended}. {agreed} tokens"
        f" agree on average{bound}; {median}; {rate} partings per token."
    )


def print_scores(scores: Results, console: Console) -> None:
    """Print lm-evaluation-harness' table: a metric of a task is a row, a model a column."""
    title = "lm-evaluation-harness (± standard error)"
    table = _table(title, console.width, ["task", "metric", "samples"], scores)
    first = next(iter(scores.values()), {})
    for task, values in first.items():
        for metric in [name for name in values if name != "samples" and not name.endswith("_se")]:
            cells = [
                _plus_minus(of[task][metric], of[task].get(f"{metric}_se", math.nan), 4)
                for of in scores.values()
            ]
            table.add_row(task, metric, f"{values.get('samples', math.nan):.0f}", *cells)
    console.print(table)


def _models(fidelity: Fidelity, wide: bool) -> list[tuple[str, Figures]]:
    trained = fidelity.initial is not None
    # If attention stays in the residual stream, the model without modulation is the teacher itself.
    floor = "floor (adapters off)" if fidelity.floor.kl == 0 else "floor (attention dropped)"
    models: Sequence[tuple[str, str, Figures | None]] = (
        (floor, "floor", fidelity.floor),
        ("student before training", "before", fidelity.initial),
        ("student after training" if trained else "student", "student", fidelity.student),
        ("teacher (the base)", "teacher", fidelity.teacher),
    )
    return [(long if wide else short, f) for long, short, f in models if f is not None]


def _table(title: str, width: int, names: Sequence[str | Column], numbers: Iterable[str]) -> Table:
    """Return a table with columns of names and of numbers, narrow without lines between them."""
    columns = [*names, *(Column(heading, justify="right") for heading in numbers)]
    shape = {} if width >= WIDE else _NARROW
    return Table(*columns, title=title, title_justify="left", **shape)


def _figures_table(title: str, columns: Sequence[tuple[str, Figures]], width: int) -> Table:
    table = _table(title, width, [Column(no_wrap=True)], [heading for heading, _ in columns])
    for name in _ROWS:
        if not all(math.isnan(getattr(f, name)) for _, f in columns):
            table.add_row(FIGURES[name].short, *(_figure(f, name) for _, f in columns))
    return table


def _positions_table(positions: Mapping[str, Figures], width: int) -> Table:
    """Return a table with a row for each octave, of which there may be many."""
    names = ("perplexity_ratio", "kl", "top1")
    title = "The student by position, the tokens before the one that predicts"
    headings = ["tokens", *(FIGURES[name].short for name in names)]
    table = _table(title, width, ["position"], headings)
    for octave, f in positions.items():
        table.add_row(octave, f"{f.tokens:,}", *(_figure(f, name) for name in names))
    return table


def _figure(figures: Figures, name: str) -> str:
    value = getattr(figures, name)
    if math.isnan(value) and math.isfinite(figures.kl):
        return "–"  # an earlier version did not take it
    return FIGURES[name].write(value, getattr(figures, f"{name}_se"))


def _layers_table(fidelity: Fidelity, width: int) -> Table:
    layers = dict(sorted((fidelity.layers | fidelity.unconverted_layers).items()))
    columns = [
        (f"{kind}_{model}", f"{heading}, {how}")
        for kind, how in (("nmse", "forced"), ("free_running", "free"))
        for model, heading in (("floor", "floor"), ("initial", "before"), ("student", "student"))
        if any(f"{kind}_{model}" in values for values in layers.values())
    ]
    title = "NMSE after each layer: fed the teacher's states (forced), running on its own (free)"
    index_column = Column("layer", justify="right", no_wrap=True)
    table = _table(title, width, [index_column], [heading for _, heading in columns])
    for index, values in layers.items():
        cells = (f"{values[key]:.5f}" if key in values else "" for key, _ in columns)
        table.add_row(str(index), *cells)
    return table


def _plus_minus(value: float, error: float, digits: int) -> str:
    tail = "" if math.isnan(error) or error < NO_ERROR else f" ± {error:.{digits}f}"
    return f"{value:.{digits}f}{tail}"
