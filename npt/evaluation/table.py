"""Tables of an evaluation for the terminal, with models as columns to fit 80 characters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from npt.errors import printable
from npt.evaluation.evaluate import Fidelity
from npt.evaluation.greedy import Divergence
from npt.evaluation.metrics import Figures
from npt.figures import COMPARISON_NAMES, FIGURES, NO_ERROR, change_line

_ROWS = ("perplexity", "perplexity_ratio", "kl", "top1", "acceptance")


def print_fidelity(fidelity: Fidelity, console: Console, text: str = "held-out tokens") -> None:
    """Print everything that was measured; `text` describes the tokens evaluated on."""
    text = printable(text, one_line=True)  # it may name a file
    models = {
        "floor": fidelity.floor,
        "before": fidelity.initial,
        "student": fidelity.student,
        "teacher": fidelity.teacher,
    }
    tokens = fidelity.teacher.tokens
    title = f"Fidelity on {tokens:,} {text} (± standard error)"
    measured = {name: f for name, f in models.items() if f is not None}
    console.print(_figures_table(title, measured))
    if fidelity.layers:
        console.print(_layers_table(fidelity))
    if fidelity.positions:
        console.print(_positions_table(fidelity.positions))
    if fidelity.attribution:
        columns = {COMPARISON_NAMES[name]: f for name, f in fidelity.attribution.items()}
        title = "Cost of quantisation and of conversion"
        console.print(_figures_table(title, columns))
    if fidelity.change is not None:
        change = change_line(fidelity.change, text)
        console.print(Text(change))
    if fidelity.divergence is not None:
        divergence = divergence_line(fidelity.divergence)
        console.print(Text(divergence))


def divergence_line(d: Divergence) -> str:
    known = math.isfinite(d.agreed_se) and d.agreed_se >= NO_ERROR
    error = f" ± {d.agreed_se:.1f}" if known else ""
    return (
        f"Greedy continuations of {d.prompts} prompts, up to {d.max_new_tokens} tokens: student and"
        f" teacher diverge in {d.parted}; they agree for {d.agreed:.1f}{error} tokens on average."
    )


def _table(title: str, names: Sequence[str | Column], numbers: Iterable[str]) -> Table:
    columns = [*names, *(Column(heading, justify="right") for heading in numbers)]
    return Table(
        *columns, title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False,
        pad_edge=False, collapse_padding=True,
    )  # fmt: skip


def _figures_table(title: str, models: Mapping[str, Figures]) -> Table:
    table = _table(title, [Column(no_wrap=True)], models)
    for name in _ROWS:
        table.add_row(FIGURES[name].short, *(_figure(f, name) for f in models.values()))
    return table


def _positions_table(positions: Mapping[str, Figures]) -> Table:
    names = ("perplexity_ratio", "kl", "top1")
    title = "Student by position in the text"
    headings = ["tokens", *(FIGURES[name].short for name in names)]
    table = _table(title, ["position"], headings)
    for octave, f in positions.items():
        table.add_row(octave, f"{f.tokens:,}", *(_figure(f, name) for name in names))
    return table


def _figure(figures: Figures, name: str) -> str:
    return FIGURES[name].write(getattr(figures, name), getattr(figures, f"{name}_se"))


def _layers_table(fidelity: Fidelity) -> Table:
    measured = set(itertools.chain(*fidelity.layers.values()))
    columns = {}
    for kind, how in (("nmse", "forced"), ("free_running", "free")):
        for model, heading in (("floor", "floor"), ("initial", "before"), ("student", "student")):
            columns[f"{kind}_{model}"] = f"{heading}, {how}"
    columns["active"] = "active numbers"
    shown = [key for key in columns if key in measured]
    title = "Layer NMSE, fed the teacher's states (forced) or its own (free)"
    index_column = Column("layer", justify="right", no_wrap=True)
    table = _table(title, [index_column], [columns[key] for key in shown])
    for index, values in fidelity.layers.items():
        cells = []
        for key in shown:
            digits = 1 if key == "active" else 5
            cells.append(f"{values[key]:.{digits}f}" if key in values else "")
        table.add_row(str(index), *cells)
    return table
