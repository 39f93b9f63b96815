"""`npt replay`."""

from __future__ import annotations

import argparse
from typing import Any

from npt.cli.arguments import add_number, print_json
from npt.console import make_console


def replay(given: dict[str, Any]) -> int:
    """Take the last window of a run that gave up again: does the fault recur, where does it arise,
    is it the data or the state?
    """
    from npt.forensics.student import replay_student

    result = replay_student(
        given["bundle"],
        model_name=given["model_name"],
        device=given["device"],
        micro_batch=given["micro_batch"],
    )
    if given["json"]:
        print_json(result.as_dict())
    else:
        make_console().say(*str(result).split("\n"))
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help="folder RUN/postmortem/step-XXXXXXXX")
    parser.add_argument(
        "--model_name", help="the run's base, if it is not found under the recorded name"
    )
    parser.add_argument("--device", help="default: the kind that the run was on, if available")
    add_number(
        parser, "micro_batch", "trace this micro-batch of the window, refused or not", kind=int
    )
