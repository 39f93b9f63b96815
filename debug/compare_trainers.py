#!/usr/bin/env python
"""Check that npt.guard.protect changes no bit of a clean run: train small runs in the installed
transformers and TRL, plain and guarded, and compare them.

    python debug/compare_trainers.py                          all runs, some three minutes
    python debug/compare_trainers.py --only dpo,vit,AdamW-in-two-groups
    python debug/compare_trainers.py --json                   all differences

The comparison covers weights, optimizer, schedule, random numbers, the log, the results of train(),
evaluate() and predict(), the Trainer's state, checkpoint files, and every callback event with the
gradients before a step. It leaves out `refused`, which the guard adds to the log. No files remain.
The exit status is 0 if all runs are equal, else 1.
"""

import argparse
import sys
import warnings

import torch
from rich.table import Table
from transformers.utils import logging

from clean_runs import EXAMPLES
from clean_runs.watched import compared
from npt.console import make_console, put
from npt.files import to_json
from npt.parser import OneLineParser


def main() -> int:
    parser = OneLineParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--only", metavar="LIST", help="comma-separated examples (default: all)")
    parser.add_argument("--json", action="store_true", help="print all differences as JSON")
    args = parser.parse_args()
    names = [each.id for each in EXAMPLES] if args.only is None else args.only.split(",")
    unknown = next((name for name in names if name not in [e.id for e in EXAMPLES]), None)
    if unknown is not None:
        every = ", ".join(each.id for each in EXAMPLES)
        parser.error(f"there is no example {unknown!r}; choose from {every}")
    torch.set_num_threads(1)  # fastest at these sizes
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")  # from transformers and TRL, twice in each run
    console, progress = make_console(), make_console(stderr=True)
    table = Table(title="clean runs in other trainers, plain and guarded")
    for heading in ("example", "group", "guarded run"):
        table.add_column(heading, overflow="fold")
    figures = []
    for example in (each for each in EXAMPLES if each.id in names):
        try:
            differences = compared(example)
        except Exception as error:  # an example that cannot run fails alone
            differences = [f"{type(error).__name__}: {error}"]
        result = "equal" if not differences else f"{len(differences)} differ: {differences[0]}"
        if progress.is_terminal:
            progress.print(f"{example.id}: {result}")
        table.add_row(example.id, example.group, result)
        figures.append({"id": example.id, "of": example.group, "differences": differences})
    equal = sum(not figure["differences"] for figure in figures)
    if args.json:
        put(to_json({"examples": figures, "equal": equal, "total": len(figures)}, indent=2))
    else:
        console.print(table)
        console.print(f"{equal} of {len(figures)} guarded runs are equal to the plain run")
    return 0 if equal == len(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
