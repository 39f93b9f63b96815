"""The comparison of number formats in a terminal: predictions, errors by layer, and headroom."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from npt.diagnostics.headroom import (
    REFERENCE,
    Errors,
    LayerFigures,
    PrecisionComparison,
    VariantFigures,
)

SHOWN = ("residual", "qk", "gate", "up", "product", "down")
"""Checkpoints that have a column; all of them are in the JSON."""

SMALL_HEADROOM = 2.0
"""Bits below which headroom is pointed out: what is only four times away from the end of a format
reaches it on other text.
"""


def precision_tables(comparison: PrecisionComparison) -> list[RenderableType]:
    """The tables, and a line for each variant that is not finite throughout."""
    others = [v for v in comparison.variants if v.name != REFERENCE]
    text = "held-out" if comparison.heldout else "TRAINING"
    parts: list[RenderableType] = [
        _predictions(
            comparison,
            f"{comparison.model}: predictions against fp32 on {comparison.tokens:,} {text} tokens",
        )
    ]
    if others:
        parts += [
            _errors(
                others,
                "Residual stream behind each layer, free-running: relative error",
                lambda x: x.residual,
            ),
            _errors(
                others,
                "Each layer's own update, on the stream of fp32: relative error",
                lambda x: x.update,
            ),
        ]
    parts.append(_headroom(comparison.variants[0]))
    return parts + [Text(line) for line in _sentences(comparison)]


def print_precision(comparison: PrecisionComparison, console: Console) -> None:
    for part in precision_tables(comparison):
        console.print(part, soft_wrap=isinstance(part, Text))


def _predictions(comparison: PrecisionComparison, title: str) -> Table:
    table = _table(
        title, "variant", "perplexity", "ratio", "KL, nats", "top-1", "first non-finite value"
    )
    for v in comparison.variants:
        f, first = v.figures, v.first_non_finite
        row: list[str | Text]
        if math.isfinite(f.kl):
            row = [
                f"{f.perplexity:.3f}",
                f"{f.perplexity_ratio:.5f}",
                f"{f.kl:.2e}",
                f"{100 * f.top1:.1f}%",
            ]
        else:
            row = [_bad("not finite")] * 4
        table.add_row(
            v.name, *row, "none" if first is None else _bad(f"layer {first[0]}, {first[1]}")
        )
    return table


def _errors(
    variants: list[VariantFigures], title: str, errors: Callable[[LayerFigures], Errors]
) -> Table:
    table = _table(title, "layer", *(v.name for v in variants))
    for index in range(len(variants[0].layers)):
        table.add_row(str(index), *(_error(errors(v.layers[index])) for v in variants))
    return table


def _error(errors: Errors) -> str | Text:
    if errors.non_finite:
        return _bad(f"{errors.non_finite} bad")
    return f"{errors.mean:.1e}"


def _headroom(reference: VariantFigures) -> Table:
    table = _table(
        "Largest sizes in fp32, and the headroom above the largest of all, in bits",
        "layer",
        *SHOWN,
        "largest",
        "fp16",
        "bf16",
    )
    for index, layer in enumerate(reference.layers):
        sizes = [
            _bad(f"{extent.non_finite} bad") if extent.non_finite else f"{extent.absmax:.4g}"
            for extent in (layer.checkpoints[name] for name in SHOWN)
        ]
        bits = [layer.tightest(dtype)[1] for dtype in (torch.float16, torch.bfloat16)]
        table.add_row(
            str(index), *sizes, layer.tightest(torch.float16)[0], *(_bits(value) for value in bits)
        )
    return table


def _bits(bits: float) -> str | Text:
    return f"{bits:.1f}" if bits >= SMALL_HEADROOM else _bad(f"{bits:.1f}")


def _sentences(comparison: PrecisionComparison) -> list[str]:
    reference = comparison.variants[0]
    index, name, bits = reference.tightest(torch.float16)
    lines = []
    if math.isfinite(bits):
        largest = f"{name} in layer {index}, {reference.layers[index].checkpoints[name].absmax:.4g}"
        judgement = (
            "beyond it"
            if bits < 0
            else (
                "narrow: other text may reach it"
                if bits < SMALL_HEADROOM
                else f"{bits:.1f} bits below"
            )
        )
        lines.append(
            f"fp16 ends at {torch.finfo(torch.float16).max:g}; the largest value of the fp32 pass"
            f" is {largest}: {judgement}"
        )
    for v in comparison.variants:
        first = v.first_non_finite
        if first is not None:
            at, where, count = first
            failing = ", ".join(map(str, v.failing_layers)) or "none"
            tokens = v.layers[-1].residual.non_finite
            lines.append(
                f"{v.name}: the first NaN or Inf is in layer {at}, {where} ({count} values); behind"
                f" the last layer {tokens} of {comparison.tokens} tokens are lost; layers that fail"
                f" on the stream of fp32: {failing}"
            )
    return lines


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(
            heading,
            justify="left" if number == 0 and heading == "variant" else "right",
            overflow="fold",
        )
    return table


def _bad(text: str) -> Text:
    return Text(text, style="red")
