"""`npt replay`."""

from __future__ import annotations

import argparse
from typing import Any

from npt.console import make_console


def replay(given: dict[str, Any]) -> int:
    """Take the last window of a run that gave up again: does the fault recur, where does it arise,
    is it the data or the state?
    """
    from npt.files import to_json
    from npt.postmortem.replay import replay as replay_bundle

    result = replay_bundle(
        given["bundle"],
        model_name=given["model_name"],
        device=given["device"],
        micro_batch=given["micro_batch"],
    )
    if given["json"]:
        print(to_json(result.as_dict(), indent=2))
    else:
        make_console().print(str(result), soft_wrap=True)
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help="folder RUN/postmortem/step-XXXXXXXX")
    parser.add_argument(
        "--model_name", help="the run's base, where it is not to be found under the recorded name"
    )
    parser.add_argument(
        "--device", help="default: the kind that the run was on, where there is one"
    )
    parser.add_argument(
        "--micro_batch",
        type=int,
        metavar="INT",
        help="trace this micro-batch of the window, refused or not",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
