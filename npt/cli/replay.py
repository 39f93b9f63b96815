"""`npt replay`."""

from __future__ import annotations

import argparse
from typing import Any

from npt.cli.arguments import tell


def replay(flags: dict[str, Any]) -> int:
    """Re-run the last window of a failed run and find the cause.

    Report which operation causes the fault, and whether data or state is to blame.
    """
    from npt.forensics.student import replay_student

    result = replay_student(flags["bundle"], model_name=flags["model_name"])
    tell(flags, result.as_dict(), *str(result).split("\n"))
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "bundle", metavar="BUNDLE", help="post-mortem bundle: a folder RUN/postmortem/step-XXXXXXXX"
    )
    text = "base to use instead of the one recorded in the bundle"
    parser.add_argument("--model_name", metavar="NAME", help=text)
