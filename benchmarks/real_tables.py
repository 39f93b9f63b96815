"""The rows of `real.py` for a terminal and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from npt.evaluation.formatting import FIGURES
from npt.evaluation.metrics import Figures

QUANTIZATION_ROW = "nf4"
"""The row whose KL is the unit of the others'."""

Rows = Sequence[Mapping[str, Any]]


def with_shares(rows: Rows) -> list[dict[str, Any]]:
    """Return the rows with each KL as a share of what quantisation costs, if both are known."""
    unit = next((r["figures"]["kl"] for r in rows if r["name"] == QUANTIZATION_ROW), None)
    return [
        {**row, "kl_share_of_nf4": row["figures"]["kl"] / unit if unit else None} for row in rows
    ]


def _figure(name: str) -> Callable[[Mapping[str, Any]], str]:
    def write(row: Mapping[str, Any]) -> str:
        figures = Figures.from_dict(row["figures"])
        value, error = getattr(figures, name), getattr(figures, f"{name}_se")
        if name == "perplexity_ratio" and value >= 100:  # of a floor
            return f"{value:,.0f} ± {error:,.0f}" if math.isfinite(error) else f"{value:,.0f}"
        return FIGURES[name].write(value, error)

    return write


def _number(key: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    def write(row: Mapping[str, Any]) -> str:
        value = row.get(key)
        return "–" if value is None else format(value, form)

    return write


COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "row": lambda row: row["name"],
    "what it is": lambda row: row["about"],
    "parameters": _number("parameters", ","),
    "minutes": _number("minutes", ".1f"),
    "start, x": _number("start_passes", ".1f"),
    "all, x": _number("forward_passes", ".1f"),
    "KL, nats": _figure("kl"),
    "of NF4's": _number("kl_share_of_nf4", ".2f"),
    "ratio": _figure("perplexity_ratio"),
    "top-1": _figure("top1"),
}
"""Cells of a row by the column's heading."""

_WORDS = 2  # leading columns that are words


def terminal(figures: Mapping[str, Any]) -> Table:
    """Return the rows as a table for a terminal, without their descriptions."""
    headings = [heading for heading in COLUMNS if heading != "what it is"]
    table = Table(
        Column(headings[0], no_wrap=True),
        *(Column(heading, justify="right", no_wrap=True) for heading in headings[1:]),
        title=about(figures),
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for row in with_shares(figures["rows"]):
        table.add_row(*(COLUMNS[heading](row) for heading in headings))
    return table


def about(figures: Mapping[str, Any]) -> str:
    """Return what was measured, on what."""
    text = figures["text"]
    return (
        f"{figures['model']}, {figures['quantization']} base, against its own base on"
        f" {text['heldout_tokens']:,} held-out tokens of {text['heldout_documents']} documents"
        f" ({text['name']}); ± is the standard error over documents"
    )


def markdown(figures: Mapping[str, Any]) -> str:
    """Return machine, text and rows."""
    machine, sizes, text = figures["machine"], figures["sizes"], figures["text"]
    lines = [
        (
            f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads,"
            f" computing on {machine['device']}; torch {machine['torch']}, transformers"
            f" {machine['transformers']}, Python {machine['python']}."
        ),
        "",
        (
            f"{about(figures)}. {sizes['layers']} layers, D {sizes['hidden']}, F {sizes['ffn']}, V"
            f" {sizes['vocab']:,}; samples of {text['length']} tokens at most,"
            f" {text['fitted_tokens']:,} tokens may be fitted. Times are in minutes, and in passes"
            " (x): forward passes of the whole base over the tokens that the row's start is fitted"
            " to, or over as many if a rival has no such start, timed in the same process."
        ),
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * _WORDS}{'---:|' * (len(COLUMNS) - _WORDS)}",
    ]
    for row in with_shares(figures["rows"]):
        lines.append(f"| {' | '.join(cell(row) for cell in COLUMNS.values())} |")
    lines += [
        f"\nLeft out: `{name}` ({reason})." for name, reason in figures.get("failed", {}).items()
    ]
    codes = {row["code"] for row in figures["rows"]}
    if len(codes) > 1:
        lines.append("\nThe rows were made by more than one version of the code.")
    return "\n".join(lines) + "\n"
