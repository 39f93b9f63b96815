"""A study's table as CSV: a row for each trial, in the design's order."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from npt.errors import ConfigError
from npt.files import write_text
from npt.tools.sweep.spec import Design

CSV = "trials.csv"

SETTINGS = ("learning_rate", "adapter_rank", "mult_form", "compute_dtype", "seed")
"""Settings that have a column in every study."""

MEASURES = (
    "outcome", "reason", "kl", "kl_start", "kl_se", "perplexity_ratio", "top1", "acceptance",
    "floor_kl", "nmse", "loss_first", "loss_last", "loss_max", "grad_norm_max", "steps", "refused",
    "refused_kinds", "limit_low", "limit_high", "runs", "parameters", "tokens", "seconds_training",
    "seconds", "heldout", "trial", "worker", "started", "ended",
)  # fmt: skip
"""Columns of the outcome, in their order; empty for a trial that has not been run."""

_TEXTS = (
    "key", "parts", "arms", "outcome", "reason", "refused_kinds", "worker", "started", "ended",
)  # fmt: skip
"""Columns that stay text, whatever they look like."""

Row = dict[str, Any]


def rows_of(design: Design, figures: Mapping[str, Row]) -> list[Row]:
    """Return the rows of a design, finished or not.

    Args:
        figures: the outcomes, by key.
    """
    rows = []
    for trial in design.trials:
        values, outcome = trial.settings.values(), figures.get(trial.key, {})
        row: Row = {
            "key": trial.key,
            "parts": ";".join(origin.part for origin in trial.origins),
            "arms": ";".join(origin.arm for origin in trial.origins),
        }
        for name in dict.fromkeys([*SETTINGS, *design.varied]):
            value = values[name]
            row[name] = ",".join(map(str, value)) if isinstance(value, list) else value
        row |= {name: outcome.get(name) for name in MEASURES}
        if trial.bisect is not None:
            row[trial.bisect.setting] = row["limit_low"]
        rows.append(row)
    return rows


def write_table(folder: Path, rows: list[Row]) -> None:
    """Write `trials.csv` atomically; equal rows give equal bytes."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(folder / CSV, stream.getvalue())


def read_table(folder: Path) -> list[Row]:
    """Return the rows that `write_table` wrote, None for empty cells.

    Raises:
        ConfigError: there is no table that can be read.
    """
    path = folder / CSV
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            rows = [{n: _value(n, text) for n, text in r.items()} for r in csv.DictReader(stream)]
        if not rows or not {"key", "parts", "arms", "outcome", "kl", "seed"} <= rows[0].keys():
            raise ValueError("it is no table of trials")
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise ConfigError(
            f"{path} cannot be read: {str(error)[:200]}; run npt sweep again, which repeats no"
            " finished trial"
        ) from error
    return rows


def by_part(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each part, in the design's order; a trial of two parts is in both, with
    the arm that it has there.
    """
    parts: dict[str, list[Row]] = {}
    for row in rows:
        for part, arm in zip(row["parts"].split(";"), row["arms"].split(";"), strict=True):
            parts.setdefault(part, []).append({**row, "arms": arm})
    return parts


def factors(rows: Sequence[Row]) -> list[str]:
    """Return the names that differ in the rows of a part, seeds left out: the arms, and the
    settings that no arm decides.
    """
    first = rows[0]
    settings = list(first)[3 : list(first).index("outcome")]

    def varied(group: Sequence[Row]) -> set[str]:
        return {name for name in settings if len({repr(row[name]) for row in group}) > 1} - {"seed"}

    arms = {row["arms"] for row in rows}
    within = set().union(*(varied([row for row in rows if row["arms"] == arm]) for arm in arms))
    return ["arms"] * (len(arms) > 1) + [name for name in settings if name in within]


def _value(name: str, text: str) -> Any:
    if text in ("", "True", "False"):
        return {"": None, "True": True, "False": False}[text] if name != "arms" else text
    for kind in (int, float) if name not in _TEXTS else ():
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
