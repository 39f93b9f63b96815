"""A study's table as Parquet and CSV: a row for each trial, in the design's order."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from npt.errors import ConfigError
from npt.files import write_bytes
from npt.tools.sweep.spec import Design

PARQUET, CSV = "trials.parquet", "trials.csv"

SETTINGS = ("learning_rate", "adapter_rank", "mult_form", "compute_dtype", "seed")
"""Settings that have a column in every study."""

_WHOLE = (
    "runs", "parameters", "steps", "applied", "refused", "tokens", "stopped_at", "recovered_after",
    "bad_layer", "trial", "fault_step",
)  # fmt: skip

MEASURES = (
    "outcome", "reason", "stopped_at", "detail", "bad_layer", "bad_stage", "bad_finite", "kl",
    "kl_start", "kl_se", "perplexity_ratio", "top1", "acceptance", "floor_kl", "nmse", "loss_first",
    "loss_last", "loss_end", "loss_max", "steps", "applied", "refused", "refused_kinds",
    "grad_norm_first", "grad_norm_last", "grad_norm_max", "grad_growth", "residual_ratio",
    "saturated", "dead", "m_min", "m_max", "additive_to_residual", "additive_to_product",
    "limit_low", "limit_high", "fault_refused", "fault_loss",
    "fault_grad_norm", "fault_harm", "loss_before_fault", "loss_worst_behind", "loss_after_fault",
    "recovered_after", "runs", "parameters", "tokens", "seconds_start", "seconds_training",
    "seconds", "heldout", "trial", "worker", "started", "ended", "curve",
)  # fmt: skip
"""Columns of the outcome, in their order; empty for a trial that has not been run."""

Row = dict[str, Any]


def rows_of(design: Design, found: Mapping[str, Row]) -> list[Row]:
    """Return the rows of a design, finished or not. found: the outcomes, by key."""
    rows = []
    for trial in design.trials:
        values, came = trial.settings.values(), found.get(trial.key, {})
        # a part and an arm for each place of the trial
        row: Row = {
            "key": trial.key,
            "parts": ";".join(place.part for place in trial.places),
            "arms": ";".join(place.arm for place in trial.places),
        }
        for name in dict.fromkeys([*SETTINGS, *design.varied]):
            value = values[name]
            row[name] = ",".join(map(str, value)) if isinstance(value, list) else value
        row |= {name: came.get(name) for name in MEASURES}
        if trial.bisect is not None:
            row[trial.bisect.setting] = row["limit_low"]
        rows.append(row)
    return rows


def write_table(folder: Path, rows: list[Row]) -> None:
    """Write `trials.parquet` and `trials.csv`, each atomically; equal rows give equal CSV."""
    import pandas

    frame = pandas.DataFrame(rows)
    frame = frame.astype({name: "Int64" for name in frame.columns if name in _WHOLE})
    stream = io.BytesIO()
    frame.to_parquet(stream, index=False)
    write_bytes(folder / PARQUET, stream.getvalue())
    write_bytes(folder / CSV, frame.drop(columns="curve").to_csv(index=False).encode())


def read_table(folder: Path) -> list[Row]:
    """Return the rows that `write_table` wrote, None for missing values; raise ConfigError if there
    is no table that can be read.
    """
    import pandas

    path = folder / PARQUET
    try:
        frame = pandas.read_parquet(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {str(error)[:200]}; run npt sweep again, which repeats no"
            " finished trial"
        ) from error
    return [
        {name: _plain(value) for name, value in row.items()} for row in frame.to_dict("records")
    ]


def _plain(value: Any) -> Any:
    """Return a cell as JSON would have it."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    missing = isinstance(value, float) and math.isnan(value)
    return None if missing or type(value).__name__ in ("NAType", "NaTType") else value
