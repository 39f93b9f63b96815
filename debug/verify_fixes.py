#!/usr/bin/env python
"""Are the earlier causes of NaN gone, on your model and with your settings? Each is provoked, and
looked at where it would show.

    python debug/verify_fixes.py                                        the embedded model in 4 bit
    python debug/verify_fixes.py --model_name FOLDER --adapter_rank 64  your own, flags of a run
    python debug/verify_fixes.py --no_use_quantization --json           unquantised, all figures

The base is loaded in 4 bit unless told otherwise. Nothing is written. The exit status is 0 when
every check passed, else 1.
"""

import argparse
import sys
import warnings
from dataclasses import fields

import torch

from faults.check import Check
from faults.fixes import describe, open_base, print_checks, summary, verify
from npt.config import BaseConfig, NPTConfig, TrainConfig, flag_of
from npt.console import make_console
from npt.errors import NPTError
from npt.files import to_json
from npt.flags import OneLineParser, add_settings, build

TRAINING = ("strategy", "logit_kl_weight", "weight_decay", "regularization_lambda", "max_grad_norm")
"""Of the training settings, those that the checks train with."""


def main() -> int:
    parser = OneLineParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--json", action="store_true", help="print the checks as JSON instead of a table"
    )
    parser.add_argument(
        "--use_quantization",
        action="store_true",
        default=True,
        help="load the base in 4 bit (default)",
    )
    parser.add_argument(
        "--no_use_quantization",
        dest="use_quantization",
        action="store_false",
        help="load the base as it is stored",
    )
    unused = [flag_of(f) for f in fields(TrainConfig) if flag_of(f) not in TRAINING]
    add_settings(
        parser,
        BaseConfig,
        NPTConfig,
        TrainConfig,
        leave_out=("use_quantization", "share_embeddings", "device_map", "shard_base", *unused),
    )
    given = vars(parser.parse_args())
    console, progress = make_console(), make_console(stderr=True)

    def watch(check: Check) -> None:
        if progress.is_terminal:
            progress.print(f"{check.name}: {'passed' if check.passed else 'FAILED'}")

    warnings.showwarning = lambda message, *_, **__: progress.print(
        f"warning: {message}", soft_wrap=True
    )
    try:
        settings = build(BaseConfig, given)
        if settings.model_name == "tiny":
            torch.set_num_threads(1)  # at its size the fastest
        base = open_base(settings, build(NPTConfig, given), build(TrainConfig, given))
    except NPTError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return error.exit_status
    checks = verify(base, watch=watch)
    if given["json"]:
        print(to_json(summary(checks), indent=2))
    else:
        print_checks(console, checks, describe(base))
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
