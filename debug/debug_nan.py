#!/usr/bin/env python
"""Which operation made the NaN? Traces one batch through a model, a checkpoint or the bundle of a
run that gave up.

    python debug/debug_nan.py --demo              plant faults in the embedded model and find them
    python debug/debug_nan.py --bundle RUN/postmortem/step-00000123
    python debug/debug_nan.py --model_name FOLDER --adapter RUN/checkpoints/step-00000400/adapter

The last two are short for `npt replay` and `npt trace`, and take their flags. The exit status of
the demonstration is 0 when every fault was found exactly and the clean model gave no alarm, else 1.
"""

import argparse
import sys

import torch

from faults.tracer_cases import all_cases
from faults.tracer_demo import false_alarms, find_fault, print_lines, summary
from npt.cli.main import main as npt
from npt.console import make_console
from npt.files import to_json
from npt.flags import OneLineParser


def main() -> int:
    parser = OneLineParser(
        prog="debug_nan.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        takes_others=True,
    )
    parser.add_argument("--demo", action="store_true", help="plant faults and find them")
    parser.add_argument(
        "--case",
        metavar="ID",
        help="of the demonstration one fault only, with all that is said about it",
    )
    parser.add_argument(
        "--bundle", metavar="FOLDER", help="a post-mortem bundle to replay and trace"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args, others = parser.parse_known_args()
    as_json = ["--json"] if args.json else []
    if args.bundle is not None:
        return npt(["replay", args.bundle, *others, *as_json], prog="debug_nan.py")
    if not args.demo and args.case is None:
        return npt(["trace", *others, *as_json], prog="debug_nan.py")
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    torch.set_num_threads(1)  # at these sizes the fastest
    cases = [case for case in all_cases() if args.case in (None, case.id)]
    if not cases:
        parser.error(
            f"there is no case {args.case!r}; choose from"
            f" {', '.join(case.id for case in all_cases())}"
        )
    lines = [find_fault(case) for case in cases]
    alarms = false_alarms() if args.case is None else 0
    figures = summary(lines, alarms)
    if args.json:
        print(to_json(figures, indent=2))
    elif args.case is not None:
        print(
            f"planted: {lines[0].case.name}\n "
            f" {lines[0].truth}\nfound:\n{lines[0].verdict or lines[0].error}"
        )
    else:
        print_lines(make_console(), lines, alarms)
    return 0 if figures["passed"] == figures["total"] and not alarms else 1


if __name__ == "__main__":
    sys.exit(main())
