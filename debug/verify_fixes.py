#!/usr/bin/env python
"""Prove on your own model that the causes of NaN that NPT fixes are gone: provoke each and look
where it would show.

    python debug/verify_fixes.py                       the embedded model in 4 bits, about a minute
    python debug/verify_fixes.py --model_name FOLDER --adapter_rank 64
    python debug/verify_fixes.py --no_use_quantization --json

Prints a line a check: ok or FAILED, what is proved, and the figure. Writes nothing. The exit status
is 0 if every fix holds, else 1.
"""

import argparse
import sys
import warnings

import torch

from fixes import CHECKS
from fixes.check import Subject, summary, verify
from npt.adapters.fit import check_fit
from npt.base.load import load_base
from npt.base.precision import set_matmul_precision
from npt.base.source import read_config
from npt.config import BaseConfig, NPTConfig, TrainConfig
from npt.console import complain, put
from npt.errors import NPTError, printable
from npt.files import to_json
from npt.flags import add_settings, build
from npt.parser import OneLineParser

DEFAULTS = {"use_quantization": True}
LEFT_OUT = ("teacher_precision", "shard_base", "residual", "init", "ranks")
"""Settings that no check uses."""


def main() -> int:
    parser = OneLineParser(
        prog="verify_fixes.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    add_settings(parser, BaseConfig, NPTConfig, leave_out=LEFT_OUT, defaults=DEFAULTS)
    flags = {**DEFAULTS, **vars(parser.parse_args())}
    warnings.simplefilter("ignore")  # anomaly mode names the NaN that are planted
    try:
        subject = open_subject(build(BaseConfig, flags), build(NPTConfig, flags))
    except NPTError as error:
        complain(f"{parser.prog}: error: {printable(str(error), one_line=True)}")
        return error.exit_status
    checks = []
    for check in verify(subject):
        checks.append(check)
        if not flags["json"]:
            put(str(check))
    figures = summary(checks)
    if flags["json"]:
        put(to_json(figures, indent=2))
    else:
        put(f"{figures['passed']} of {len(CHECKS)} fixes hold")
    return 0 if figures["passed"] == figures["total"] else 1


def open_subject(base: BaseConfig, adapter: NPTConfig) -> Subject:
    """Load the base as training would.

    Raises:
        NPTError: the base cannot be loaded, or the adapter does not fit it.
    """
    check_fit(adapter, read_config(base.model_name))
    model, tokenizer = load_base(**base.loading)
    set_matmul_precision(base.matmul_precision, model)
    if base.model_name == "tiny":
        torch.set_num_threads(1)  # fastest at its size
    return Subject(model, adapter, TrainConfig(), tokenizer)


if __name__ == "__main__":
    sys.exit(main())
