#!/usr/bin/env python
"""Plant faults in training steps, and check that each changes nothing and is located exactly.

    python debug/inject_fault.py --list               list the cases and what must happen
    python debug/inject_fault.py --case gradient-nan  run one case
    python debug/inject_fault.py --all                run every case and 1,000 clean steps
    python debug/inject_fault.py --trainer hf --all   run the cases in transformers' Trainer

Faults are planted in copies in memory; files do not change. The exit status is 0 if every case
passes, else 1.
"""

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from faults import row_runs
from faults.campaign import every_case, judged, print_scorecard, summary
from faults.patterns import Case
from faults.row_cases import RowCase, cases_of
from faults.row_pairs import judged_by_processes
from faults.row_trainers import TRAINERS
from faults.verdict import Line
from npt.console import make_console, put
from npt.files import to_json


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--list", action="store_true", help="list the cases and their expected outcomes"
    )
    what.add_argument("--case", metavar="ID", help="run one case")
    what.add_argument("--all", action="store_true", help="run every case and the clean steps")
    parser.add_argument(
        "--trainer",
        choices=("npt", *TRAINERS),
        default="npt",
        help="the trainer: NPT (default), or under npt.guard a plain loop, accelerate,"
        " transformers' Trainer (hf), TRL's SFTTrainer (trl) or GRPOTrainer (grpo), or two"
        " processes under FSDP2 with a sharded base (fsdp), or sharded adapters too (fsdp_sharded)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)  # fastest at these sizes, and one order of summation
    console, ours = make_console(), args.trainer == "npt"
    cases: list[Any] = [*every_case()] if ours else cases_of(args.trainer)
    if args.case is not None:
        cases = [case for case in cases if case.id == args.case]
        if not cases:
            parser.error(f"there is no case {args.case!r}: choose one that --list prints")
    if args.list and args.json:
        put(to_json([{"id": c.id, "name": c.name, "truth": c.truth} for c in cases], indent=2))
        return 0
    if args.list:
        for c in cases:
            console.print(f"{c.id:24} {c.name}\n{'':24} -> {c.truth}", soft_wrap=True)
        return 0
    lines = [*(of_ours(cases) if ours else of_rows(cases, args.trainer))]
    figures = summary(lines)
    if args.json:
        put(to_json(figures, indent=2))
    elif ours:
        print_scorecard(console, lines)
    else:
        print_scorecard(console, lines, f"faults under npt.guard: {args.trainer}", "unguarded")
    return 0 if figures["passed"] == figures["total"] else 1


def of_ours(cases: Sequence[Case]) -> Iterator[Line]:
    """Judge cases of NPT's own training; print progress on a terminal."""
    progress = make_console(stderr=True)
    for case in cases:
        line = judged(case)
        if progress.is_terminal:
            progress.print(f"{case.id}: {line.verdict.verdict}")
        yield line


def of_rows(cases: Sequence[RowCase], trainer: str) -> Iterator[Line]:
    """Judge cases of other trainers, those with several processes last."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers' own, in each run
    yield from (row_runs.judged(case, trainer) for case in cases if case.processes == 1)
    yield from judged_by_processes([case for case in cases if case.processes > 1], trainer)


if __name__ == "__main__":
    sys.exit(main())
