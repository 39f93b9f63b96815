#!/usr/bin/env python
"""Which number format carries a base, and where would it overflow? fp32 against bf16, fp16 and 4
bit, layer by layer.

    python debug/compare_precision.py                                     the embedded model
    python debug/compare_precision.py --model_name FOLDER --samples 32
    python debug/compare_precision.py --variants bf16,nf4 --json          some variants, all figures

Held-out text runs through the base once per variant, one variant in memory at a time. Nothing is
written.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from npt.config import DataConfig
from npt.console import make_console
from npt.diagnostics.variants import REFERENCE, VARIANTS
from npt.errors import NPTError
from npt.files import to_json
from npt.flags import OneLineParser, add_settings, build
from precision import Comparison, Errors, LayerFigures, VariantFigures, compare_precision

DATA = (
    "num_samples",
    "packing",
    "prompt_column",
    "completion_column",
    "replay_dataset",
    "replay_ratio",
)

SHOWN = ("residual", "qk", "gate", "up", "product", "down")
"""Checkpoints that have a column; all of them are in the JSON."""

SMALL_HEADROOM = 2.0
"""Bits below which headroom is marked: values only four times smaller than the end of a format
reach it on other text.
"""


def print_precision(comparison: Comparison, console: Console) -> None:
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


def _predictions(comparison: Comparison) -> Table:
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
        row = [errors(v.layers[index]) for v in variants]
        table.add_row(str(index), *(_cell(e.non_finite, f"{e.mean:.1e}") for e in row))
    return table


def _headroom(reference: VariantFigures) -> Table:
    title = "Largest sizes in fp32, and the headroom above the largest of all, in bits"
    table = _table(title, "layer", *SHOWN, "largest", "fp16", "bf16")
    for index, layer in enumerate(reference.layers):
        extents = [layer.checkpoints[name] for name in SHOWN]
        sizes = [_cell(extent.non_finite, f"{extent.absmax:.4g}") for extent in extents]
        name, in_fp16 = layer.tightest(torch.float16)
        bits = [
            f"{bits:.1f}" if bits >= SMALL_HEADROOM else _bad(f"{bits:.1f}")
            for bits in (in_fp16, layer.tightest(torch.bfloat16)[1])
        ]
        table.add_row(str(index), *sizes, name, *bits)
    return table


def _sentences(comparison: Comparison) -> Iterator[str]:
    reference = comparison.variants[0]
    index, name, bits = reference.tightest(torch.float16)
    if math.isfinite(bits):
        size = reference.layers[index].checkpoints[name].absmax
        judgement = f"{bits:.1f} bits below"
        if bits < SMALL_HEADROOM:
            judgement = "beyond it" if bits < 0 else "narrow: other text may reach it"
        yield (
            f"fp16 ends at {torch.finfo(torch.float16).max:g}; the largest value of the fp32 pass"
            f" is {name} in layer {index}, {size:.4g}: {judgement}"
        )
    for v in comparison.variants:
        if v.first_non_finite is not None:
            at, where, count = v.first_non_finite
            failing = ", ".join(map(str, v.failing_layers)) or "none"
            tokens = v.layers[-1].residual.non_finite
            yield (
                f"{v.name}: the first NaN or Inf is in layer {at}, {where} ({count} values); after"
                f" the last layer {tokens} of {comparison.tokens} tokens are lost; layers that fail"
                f" on the stream of fp32: {failing}"
            )


def _table(title: str, first: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, justify="left" if first == "variant" else "right", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def _cell(non_finite: int, text: str) -> str | Text:
    return _bad(f"{non_finite} bad") if non_finite else text


def _bad(text: str) -> Text:
    return Text(text, style="red")


def main() -> int:
    parser = OneLineParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model_name",
        default="tiny",
        help="'tiny' (embedded), a folder, or a hub id (default: tiny)",
    )
    parser.add_argument(
        "--variants",
        default=",".join(VARIANTS),
        metavar="LIST",
        help="number formats (default: %(default)s)",
    )
    parser.add_argument(
        "--samples", type=int, default=16, metavar="INT", help="held-out samples (default: 16)"
    )
    parser.add_argument(
        "--batch_size", type=int, default=4, metavar="INT", help="samples at a time (default: 4)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON instead of tables"
    )
    add_settings(parser, DataConfig, leave_out=DATA)
    args = vars(parser.parse_args())
    progress = make_console(stderr=True)
    try:
        comparison = compare_precision(
            args["model_name"],
            build(DataConfig, args),
            count=args["samples"],
            batch_size=args["batch_size"],
            variants=[v.strip() for v in args["variants"].split(",")],
            watch=lambda variant: (
                progress.print(f"{variant} ...") if progress.is_terminal else None
            ),
        )
    except NPTError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return error.exit_status
    if args["json"]:
        print(to_json(comparison.as_dict(), indent=2))
    else:
        print_precision(comparison, make_console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
