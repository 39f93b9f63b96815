#!/usr/bin/env python
"""One micro-batch of a post-mortem bundle, alone and in the state that the run stopped in: loss,
layers, gradients, verdict.

    python debug/replay_batch.py RUN/postmortem/step-00000012 --micro_batch 0

`npt replay` takes the whole window and says whether it is the data or the state. The exit status is
0, 2 for wrong arguments, 5 if the bundle or its base cannot be used.
"""

import argparse
import sys

from npt.console import make_console
from npt.errors import NPTError
from npt.files import to_json
from npt.postmortem.replay_batch import replay_batch


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", metavar="BUNDLE", help="folder RUN/postmortem/step-XXXXXXXX")
    parser.add_argument(
        "--micro_batch", type=int, default=0, metavar="INT", help="index in the window (default: 0)"
    )
    parser.add_argument(
        "--model_name", help="the run's base, if it is not found under the recorded name"
    )
    parser.add_argument("--device", help="default: the kind that the run was on, if it exists here")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    given = parser.parse_args()
    try:
        found = replay_batch(
            given.bundle, given.micro_batch, model_name=given.model_name, device=given.device
        )
    except NPTError as error:
        print(f"replay_batch.py: error: {error}", file=sys.stderr)
        return error.exit_status
    if given.json:
        print(to_json(found.as_dict(), indent=2))
    else:
        make_console().print(str(found), soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
