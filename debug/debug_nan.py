#!/usr/bin/env python
"""Find the operation that produced a NaN: trace a batch through a model, a checkpoint or a
post-mortem bundle.

    python debug/debug_nan.py --demo              plant faults in small models and find them
    python debug/debug_nan.py --demo --rivals     and ask other tools about the same faults
    python debug/debug_nan.py --bundle RUN/postmortem/step-00000123
    python debug/debug_nan.py --model_name FOLDER --adapter RUN/checkpoints/step-00000400/adapter

The last two run `npt replay` and `npt trace`, and take their flags. The demo exits with status 0 if
the tracer locates every fault exactly and raises no alarm on the clean models, else with 1.
"""

import argparse
import sys

import torch

from faults.tracer_cases import all_cases
from faults.tracer_demo import compare, false_alarms, find_fault, print_lines, print_rows, summary
from npt.cli.main import main as npt
from npt.console import make_console, put
from npt.files import to_json
from npt.parser import OneLineParser


def main() -> int:
    parser = OneLineParser(
        prog="debug_nan.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        takes_others=True,
    )
    parser.add_argument(
        "--demo", action="store_true", help="plant faults and check that the tracer locates them"
    )
    parser.add_argument(
        "--case", metavar="ID", help="plant only this fault and print the full verdict"
    )
    parser.add_argument(
        "--rivals",
        action="store_true",
        help="with --demo: ask anomaly mode, DebugUnderflowOverflow and forward hooks too",
    )
    parser.add_argument("--bundle", metavar="FOLDER", help="replay and trace a post-mortem bundle")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args, others = parser.parse_known_args()
    if args.rivals and (not args.demo or args.case is not None):
        parser.error("--rivals asks about all faults: give it with --demo and without --case")
    as_json = ["--json"] if args.json else []
    if args.bundle is not None:
        return npt(["replay", args.bundle, *others, *as_json], prog="debug_nan.py")
    if not args.demo and args.case is None:
        return npt(["trace", *others, *as_json], prog="debug_nan.py")
    if others:
        parser.error(f"the demo does not take {' '.join(others)}: remove it")
    torch.set_num_threads(1)  # fastest at these sizes
    cases = [case for case in all_cases() if args.case in (None, case.id)]
    if not cases:
        parser.error(
            f"there is no case {args.case!r}; choose from"
            f" {', '.join(case.id for case in all_cases())}"
        )
    lines = [find_fault(case) for case in cases]
    alarms = false_alarms() if args.case is None else 0
    rows = compare(lines, alarms) if args.rivals else None
    figures = summary(lines, alarms, rows)
    if args.json:
        put(to_json(figures, indent=2))
    elif args.case is not None:
        put(
            f"planted: {lines[0].case.name}\n "
            f" {lines[0].truth}\nfound:\n{lines[0].verdict or lines[0].error or 'nothing'}"
        )
    else:
        print_lines(make_console(), lines, alarms)
        if rows is not None:
            print_rows(make_console(), rows)
    return 0 if figures["passed"] == figures["total"] and not alarms else 1


if __name__ == "__main__":
    sys.exit(main())
