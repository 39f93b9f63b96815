"""The table of a study as CSV: one row per trial, in the order of the design."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from npt.config.field import as_text
from npt.files import write_text
from npt.tools.sweep.spec import Design, values_of

CSV = "trials.csv"

SETTINGS = ("learning_rate", "adapter_rank", "mult_form", "compute_dtype", "seed")
"""Settings with a column in every table."""

MEASURES = (
    "outcome", "reason", "kl", "kl_start", "kl_se", "perplexity_ratio", "top1", "acceptance",
    "floor_kl", "nmse", "loss_first", "loss_last", "loss_max", "grad_norm_max", "steps", "refused",
    "refused_kinds", "limit_low", "limit_high", "runs", "parameters", "tokens", "seconds_training",
    "seconds", "heldout", "trial", "worker", "started", "ended",
)  # fmt: skip
"""Columns of the outcome, in order; empty for a trial that has not run."""

Row = dict[str, Any]


def rows_of(design: Design, figures: Mapping[str, Row]) -> list[Row]:
    """Return a row for every trial, finished or not; `figures` are the outcomes by key."""
    rows = []
    for trial in design.trials:
        values = values_of(trial.settings)
        outcome = figures.get(trial.key, {})
        row: Row = {
            "key": trial.key,
            "parts": ";".join(origin.part for origin in trial.origins),
            "arms": ";".join(origin.arm for origin in trial.origins),
        }
        for name in dict.fromkeys([*SETTINGS, *design.varied]):
            value = values[name]
            row[name] = as_text(value) if isinstance(value, tuple) else value
        row |= {name: outcome.get(name) for name in MEASURES}
        # the value that was searched for stands in the column of its setting
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
