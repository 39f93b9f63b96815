"""Optuna's own plots of a study's parts, as SVG: which settings matter, and the KL by setting."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from npt.report.words import clean
from npt.tools.sweep.analysis import Row, factors, level_text, sought, stable

Plot = tuple[str, bytes]
"""Description of a plot, and its SVG."""

FEWEST = 4  # trials of which a plot is drawn


def plots_of(part: str, rows: Sequence[Row]) -> list[Plot]:
    """Return the plots of a part's trials that have ended: none if they differ in nothing."""
    ended = [row for row in rows if row["outcome"] is not None and not sought(row)]
    names = factors(ended) if ended else []
    trained = [row for row in ended if stable(row)]
    found = []
    with _plotting():
        if len(trained) >= FEWEST:
            study, varied = _study(trained, names, [row["kl"] for row in trained])
            found += _importances(study, varied, "the KL of stable trials", part)
            found += _slices(study, varied, part)
        failed = [float(row["outcome"] != "stable") for row in ended]
        if len(ended) >= FEWEST and len(set(failed)) > 1:
            study, varied = _study(ended, names, failed)
            found += _importances(study, varied, "whether a trial is stable", part)
    return found


@contextmanager
def _plotting() -> Iterator[None]:
    """Draw without a screen, and leave the user's settings of matplotlib and Optuna's warnings, as
    that a plot is experimental, out of it.
    """
    import matplotlib
    from matplotlib import pyplot

    settings: Any = {"svg.hashsalt": "npt", "figure.max_open_warning": 0}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pyplot.switch_backend("agg")
        yield


def _study(rows: Sequence[Row], names: Sequence[str], values: Sequence[float]) -> tuple[Any, list]:
    """Return a study of Optuna's in memory of these trials and values, and the settings that differ
    in them. A setting that is not a number everywhere is one of choices.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    columns = {name: [row[name] for row in rows] for name in names}
    distributions: dict[str, Any] = {}
    for name, column in columns.items():
        if all(type(value) in (int, float) for value in column):
            low, high = float(min(column)), float(max(column))
            found: Any = optuna.distributions.FloatDistribution(low, high, log=high > 8 * low > 0)
            columns[name] = [float(value) for value in column]
        else:
            # two dollars would make a formula for matplotlib
            columns[name] = [clean(level_text(value), 40).replace("$", "\\$") for value in column]
            found = optuna.distributions.CategoricalDistribution(list(dict.fromkeys(columns[name])))
        if len(set(columns[name])) > 1:
            distributions[name] = found
    study = optuna.create_study()
    for i, value in enumerate(values):
        params = {name: columns[name][i] for name in distributions}
        study.add_trial(
            optuna.create_trial(params=params, distributions=distributions, value=value)
        )
    return study, list(distributions)


def _importances(study: Any, names: Sequence[str], of: str, part: str) -> list[Plot]:
    from optuna.importance import PedAnovaImportanceEvaluator
    from optuna.visualization.matplotlib import plot_param_importances

    if len(names) < 2 or len({trial.value for trial in study.trials}) < 2:
        return []
    axes: Any = plot_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    axes.set_title(f"importance for {of}", loc="left")
    axes.get_legend().remove()
    return [(f"Part {part}: importance of each setting for {of}.", _svg(axes.figure))]


def _slices(study: Any, names: Sequence[str], part: str) -> list[Plot]:
    from optuna.visualization.matplotlib import plot_slice

    if not names:
        return []
    axes: Any = plot_slice(study, params=list(names), target=_value_of, target_name="KL")
    figure = (axes if len(names) == 1 else axes.flat[0]).figure
    for each in figure.axes:
        each.tick_params(axis="x", labelrotation=90)  # names of arms are long
    return [(f"Part {part}: KL of stable trials by {', '.join(names)}.", _svg(figure))]


def _value_of(trial: Any) -> float:
    return float(trial.value)


def _svg(figure: Any) -> bytes:
    """Return the figure's SVG, the same bytes for the same figure, and close it."""
    from matplotlib import pyplot

    stream = io.BytesIO()
    figure.savefig(stream, format="svg", bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    return stream.getvalue()
