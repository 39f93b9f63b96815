"""The page about a study: Optuna's plots of its parts, and every trial."""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from markupsafe import Markup

from npt.evaluation.formatting import FIGURES
from npt.files import write_text
from npt.report.pages import render
from npt.report.words import clean, number
from npt.tools.sweep.study import read_study
from npt.tools.sweep.table import Row, by_part, factors, read_table

SHOWN = (
    "outcome", "reason", "kl", "perplexity_ratio", "top1", "loss_first", "loss_last", "refused",
    "limit_low", "limit_high", "parameters", "seconds",
)  # fmt: skip
"""Columns of the outcome that the page has."""

FEWEST = 4  # trials of which a plot is drawn


def write_study_report(folder: Path, output: Path) -> dict[str, Any]:
    """Write the page about a study that has ended, was killed or is under way, from its table.
    Return its results in a few numbers.

    Raises:
        ConfigError: there is no table yet, or the folder cannot be read.
    """
    record, rows = read_study(folder), read_table(folder)
    write_text(output, page(record, rows))
    outcomes = dict(Counter(row["outcome"] or "not run" for row in rows))
    return {
        "report": str(output),
        "name": record["name"],
        "trials": len(rows),
        "outcomes": outcomes,
    }


def page(record: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return the HTML page of a study's table, and of the name, notes and versions on record."""
    parts = by_part(rows)
    with _plotting():
        plots = [plot for part, rows_in in parts.items() for plot in plots_of(part, rows_in)]
    trials = [
        (part, *(", ".join(f"{n} {_shown(n, row[n])}" for n in names) or "all", row["seed"]),
         *(_shown(name, row.get(name)) for name in SHOWN))
        for part, rows_in in parts.items()
        for names in [factors(rows_in)]
        for row in rows_in
    ]  # fmt: skip
    sections = {"plots": "Optuna's plots", "trials": "Trials"}
    outcomes = Counter(row["outcome"] for row in rows)
    return render(
        "study.html.j2",
        title=f"{clean(record['name'], 80)}: report of a study",
        sections={name: words for name, words in sections.items() if name == "trials" or plots},
        count=len(rows),
        open=outcomes.pop(None, 0),
        facts=[(str(name), f"{count:,}") for name, count in outcomes.items()],
        recipe=[
            ("versions", ", ".join(f"{k} {v}" for k, v in (record.get("versions") or {}).items())),
            *((part, note) for part, note in record["parts"].items() if note),
        ],
        plots=plots,
        names=SHOWN,
        trials=trials,
    )


def _shown(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in FIGURES:
        return FIGURES[name].write(value)
    if isinstance(value, float):
        return number(value)
    return f"{value:,}" if type(value) is int else str(value)


@contextmanager
def _plotting() -> Iterator[None]:
    """Draw without a screen, and leave the user's settings of matplotlib and Optuna's warnings, as
    that a plot is experimental, out of it.
    """
    import matplotlib
    import optuna
    from matplotlib import pyplot

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    settings: Any = {"svg.hashsalt": "npt", "figure.max_open_warning": 0}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pyplot.switch_backend("agg")
        yield


def plots_of(part: str, rows: Sequence[Row]) -> list[tuple[str, Markup]]:
    """Return what each plot of a part's trials that have ended shows, and its address: which
    settings matter for the KL of stable trials, the KL by setting, and which matter for stability.
    """
    from optuna.importance import PedAnovaImportanceEvaluator
    from optuna.visualization.matplotlib import plot_param_importances, plot_slice

    # a limit that was sought is of no one value that was chosen
    ended = [row for row in rows if row["outcome"] and row["limit_low"] == row["limit_high"]]
    stable = [
        row
        for row in ended
        if row["outcome"] == "stable" and row["kl"] is not None and math.isfinite(row["kl"])
    ]
    failed = [float(row["outcome"] != "stable") for row in ended]
    plots = []
    for measure, of, values in (
        ("the KL of stable trials", stable, [row["kl"] for row in stable]),
        ("whether a trial is stable", ended, failed),
    ):
        study, names = _study(of, values)
        if len(of) >= FEWEST and len(names) > 1 and len(set(values)) > 1:
            axes: Any = plot_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
            axes.set_title(f"importance for {measure}", loc="left")
            axes.get_legend().remove()
            alt = f"Part {part}: importance of each setting for {measure}."
            plots.append((alt, _address(axes.figure)))
        if len(of) >= FEWEST and names and of is stable:
            axes = plot_slice(study, params=names, target_name="KL")
            figure = (axes if len(names) == 1 else axes.flat[0]).figure
            for each in figure.axes:
                each.tick_params(axis="x", labelrotation=90)  # names of arms are long
            alt = f"Part {part}: KL of stable trials by {', '.join(names)}."
            plots.append((alt, _address(figure)))
    return plots


def _study(rows: Sequence[Row], values: Sequence[float]) -> tuple[Any, list[str]]:
    """Return these trials and values as a study of Optuna's in memory, and the settings that differ
    in them. A setting that is not a number everywhere is one of choices.
    """
    import optuna
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    columns: dict[str, list[Any]] = {}
    distributions: dict[str, Any] = {}
    for name in factors(rows) if rows else ():
        column: list[Any] = [row[name] for row in rows]
        if all(type(value) in (int, float) for value in column):
            low, high = float(min(column)), float(max(column))
            distributions[name] = FloatDistribution(low, high, log=high > 8 * low > 0)
            columns[name] = [float(value) for value in column]
        else:
            # two dollars would make a formula for matplotlib
            columns[name] = [clean(str(value), 40).replace("$", "\\$") for value in column]
            distributions[name] = CategoricalDistribution(list(dict.fromkeys(columns[name])))
    names = [name for name, column in columns.items() if len(set(column)) > 1]
    study = optuna.create_study()
    for i, value in enumerate(values):
        params = {name: columns[name][i] for name in names}
        ranges = {name: distributions[name] for name in names}
        study.add_trial(optuna.create_trial(params=params, distributions=ranges, value=value))
    return study, names


def _address(figure: Any) -> Markup:
    """Return the figure's SVG as an address, the same for the same figure, and close it."""
    from matplotlib import pyplot

    stream = io.BytesIO()
    figure.savefig(stream, format="svg", bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    return Markup(f"data:image/svg+xml;base64,{base64.b64encode(stream.getvalue()).decode()}")
