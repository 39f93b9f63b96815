"""The comparison of number formats in a terminal: predictions, errors by layer, and headroom."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from npt.diagnostics.variants import REFERENCE
from precision.figures import Errors, LayerFigures, PrecisionComparison, VariantFigures

SHOWN = ("residual", "qk", "gate", "up", "product", "down")
"""Checkpoints that have a column; all of them are in the JSON."""

SMALL_HEADROOM = 2.0
"""Bits below which headroom is marked: values only four times smaller than the end of a format
reach it on other text.
"""


def print_precision(comparison: PrecisionComparison, console: Console) -> None:
    """Print the tables, and a line for each variant that is not finite throughout."""
    console.print(_predictions(comparison))
    others = [v for v in comparison.variants if v.name != REFERENCE]
    if others:
        stream = "Residual stream after each layer, free-running: relative error"
        update = "Each layer's own update, on the stream of fp32: relative error"
        console.print(_errors(others, stream, lambda layer: layer.residual))
        console.print(_errors(others, update, lambda layer: layer.update))
    console.print(_headroom(comparison.variants[0]))
    for line in _sentences(comparison):
        console.print(Text(line), soft_wrap=True)


def _predictions(comparison: PrecisionComparison) -> Table:
    text = "held-out" if comparison.heldout else "TRAINING"
    table = _table(
        f"{comparison.model}: predictions against fp32 on {comparison.tokens:,} {text} tokens",
        *("variant", "perplexity", "ratio", "KL, nats", "top-1", "first non-finite value"),
    )
    for v in comparison.variants:
        f, first = v.figures, v.first_non_finite
        row: list[str | Text] = [_bad("not finite")] * 4
        if math.isfinite(f.kl):
            row = [f"{f.perplexity:.3f}", f"{f.perplexity_ratio:.5f}"]
            row += [f"{f.kl:.2e}", f"{100 * f.top1:.1f}%"]
        place = "none" if first is None else _bad(f"layer {first[0]}, {first[1]}")
        table.add_row(v.name, *row, place)
    return table


def _errors(
    variants: list[VariantFigures], title: str, errors: Callable[[LayerFigures], Errors]
) -> Table:
    table = _table(title, "layer", *(v.name for v in variants))
    for index in range(len(variants[0].layers)):
        found = [errors(v.layers[index]) for v in variants]
        cells = [_bad(f"{e.non_finite} bad") if e.non_finite else f"{e.mean:.1e}" for e in found]
        table.add_row(str(index), *cells)
    return table


def _headroom(reference: VariantFigures) -> Table:
    title = "Largest sizes in fp32, and the headroom above the largest of all, in bits"
    table = _table(title, "layer", *SHOWN, "largest", "fp16", "bf16")
    for index, layer in enumerate(reference.layers):
        found = [layer.checkpoints[name] for name in SHOWN]
        sizes = [_bad(f"{e.non_finite} bad") if e.non_finite else f"{e.absmax:.4g}" for e in found]
        name, in_fp16 = layer.tightest(torch.float16)
        _, in_bf16 = layer.tightest(torch.bfloat16)
        table.add_row(str(index), *sizes, name, _bits(in_fp16), _bits(in_bf16))
    return table


def _bits(bits: float) -> str | Text:
    return f"{bits:.1f}" if bits >= SMALL_HEADROOM else _bad(f"{bits:.1f}")


def _sentences(comparison: PrecisionComparison) -> list[str]:
    reference = comparison.variants[0]
    index, name, bits = reference.tightest(torch.float16)
    lines = []
    if math.isfinite(bits):
        size = reference.layers[index].checkpoints[name].absmax
        judgement = f"{bits:.1f} bits below"
        if bits < SMALL_HEADROOM:
            judgement = "beyond it" if bits < 0 else "narrow: other text may reach it"
        lines.append(
            f"fp16 ends at {torch.finfo(torch.float16).max:g}; the largest value of the fp32 pass"
            f" is {name} in layer {index}, {size:.4g}: {judgement}"
        )
    for v in comparison.variants:
        if v.first_non_finite is not None:
            at, where, count = v.first_non_finite
            failing = ", ".join(map(str, v.failing_layers)) or "none"
            tokens = v.layers[-1].residual.non_finite
            lines.append(
                f"{v.name}: the first NaN or Inf is in layer {at}, {where} ({count} values); after"
                f" the last layer {tokens} of {comparison.tokens} tokens are lost; layers that fail"
                f" on the stream of fp32: {failing}"
            )
    return lines


def _table(title: str, first: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, justify="left" if first == "variant" else "right", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def _bad(text: str) -> Text:
    return Text(text, style="red")
