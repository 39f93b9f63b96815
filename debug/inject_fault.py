#!/usr/bin/env python
"""The fault campaign: does a training step survive what can go wrong, and is it said exactly what
went wrong?

    python debug/inject_fault.py --list               the cases and their ground truth
    python debug/inject_fault.py --case gradient-nan  one of them
    python debug/inject_fault.py --all                all of them and 1,000 clean steps
    python debug/inject_fault.py --compare            the same faults in plain loops
    python debug/inject_fault.py --trainer hf --all   transformers' Trainer under npt.guard; also
                                                      loop, accelerate, trl. hf and accelerate with
                                                      two processes too

Faults are planted in copies in memory; nothing is changed on disk. The exit status is 0 when every
case passed, else 1.
"""

import argparse
import sys
import warnings

import torch

from faults.campaign import (
    Line,
    campaign,
    comparison,
    every_case,
    find,
    print_comparison,
    print_scorecard,
    summary,
)
from faults.row_cases import cases_of
from faults.row_pairs import judged_by_processes
from faults.row_runs import judged, print_lines
from faults.row_trainers import TRAINERS
from npt.console import make_console
from npt.files import to_json


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="the cases and their ground truth")
    what.add_argument("--case", metavar="ID", help="run one case")
    what.add_argument("--all", action="store_true", help="run every case and the clean steps")
    what.add_argument(
        "--compare",
        action="store_true",
        help="run the faults that plain loops can meet against them",
    )
    parser.add_argument(
        "--trainer",
        choices=("npt", *TRAINERS),
        default="npt",
        help="who trains: NPT, or under npt.guard a plain loop, one of accelerate's,"
        " transformers' Trainer, or TRL's SFTTrainer",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)  # at these sizes the fastest, and one order of summation
    if given.trainer != "npt":
        return of_rows(parser, given)
    console, cases = make_console(), every_case()
    if given.list:
        if given.json:
            print(
                to_json([{"id": c.id, "name": c.name, "truth": c.truth} for c in cases], indent=2)
            )
        else:
            for c in cases:
                console.print(f"{c.id:24} {c.name}\n{'':24} -> {c.truth}", soft_wrap=True)
        return 0
    if given.compare:
        rows = comparison()
        if given.json:
            print(to_json(rows, indent=2))
        else:
            print_comparison(console, rows)
        return 0 if all(row["ours"] == "survives" for row in rows) else 1
    if given.case is not None:
        chosen = find(cases, given.case)
        if chosen is None:
            parser.error(f"there is no case {given.case!r}; --list names them")
        cases = [chosen]
    progress = make_console(stderr=True)

    def watch(line: Line) -> None:
        if progress.is_terminal:
            progress.print(f"{line.case.id}: {line.verdict.verdict}")

    lines = campaign(cases, watch)
    figures = summary(lines)
    if given.json:
        print(to_json(figures, indent=2))
    else:
        print_scorecard(console, lines)
    return 0 if figures["passed"] == figures["total"] else 1


def of_rows(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    """Run, or list, the cases of other people's trainers."""
    console, cases = make_console(), cases_of(given.trainer)
    if given.compare:
        parser.error("--compare is part of --trainer loop --all: its last column")
    if given.case is not None:
        cases = [case for case in cases if case.id == given.case]
        if not cases:
            parser.error(f"there is no case {given.case!r}; --list names them")
    if given.list:
        if given.json:
            entries = [{"id": c.id, "name": c.name, "truth": c.truth} for c in cases]
            print(to_json(entries, indent=2))
        else:
            for c in cases:
                console.print(f"{c.id:24} {c.name}\n{'':24} -> {c.truth}", soft_wrap=True)
        return 0
    warnings.filterwarnings("ignore", category=FutureWarning)  # of transformers, for each run
    lines = [judged(case, given.trainer) for case in cases if case.processes == 1]
    shared = [case for case in cases if case.processes > 1]
    lines += judged_by_processes(shared, given.trainer)
    figures = summary(lines)
    if given.json:
        print(to_json(figures, indent=2))
    else:
        print_lines(console, lines, given.trainer)
    return 0 if figures["passed"] == figures["total"] else 1


if __name__ == "__main__":
    sys.exit(main())
