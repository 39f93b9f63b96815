#!/usr/bin/env python
"""Which number format carries a base, and where would it overflow? fp32 against bf16, fp16 and 4
bit, layer by layer.

    python debug/compare_precision.py                                     the embedded model
    python debug/compare_precision.py --model_name FOLDER --samples 32
    python debug/compare_precision.py --variants bf16,nf4 --json          some variants, all figures

Held-out text runs through the base once per variant, one variant in memory at a time. Nothing is
written.
"""

import argparse
import sys

from npt.config import DataConfig
from npt.console import make_console
from npt.diagnostics.variants import VARIANTS
from npt.errors import NPTError
from npt.files import to_json
from npt.flags import OneLineParser, add_settings, build
from precision.headroom import compare_precision
from precision.table import print_precision

DATA = (
    "num_samples",
    "packing",
    "prompt_column",
    "completion_column",
    "replay_dataset",
    "replay_ratio",
)


def main() -> int:
    parser = OneLineParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model_name",
        default="tiny",
        help="'tiny' (embedded), a folder, or a hub id (default: tiny)",
    )
    parser.add_argument(
        "--variants",
        default=",".join(VARIANTS),
        metavar="LIST",
        help="number formats (default: %(default)s)",
    )
    parser.add_argument(
        "--samples", type=int, default=16, metavar="INT", help="held-out samples (default: 16)"
    )
    parser.add_argument(
        "--batch_size", type=int, default=4, metavar="INT", help="samples at a time (default: 4)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON instead of tables"
    )
    add_settings(parser, DataConfig, leave_out=DATA)
    given = vars(parser.parse_args())
    progress = make_console(stderr=True)
    try:
        comparison = compare_precision(
            given["model_name"],
            build(DataConfig, given),
            count=given["samples"],
            batch_size=given["batch_size"],
            variants=[v.strip() for v in given["variants"].split(",")],
            watch=lambda variant: (
                progress.print(f"{variant} ...") if progress.is_terminal else None
            ),
        )
    except NPTError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return error.exit_status
    if given["json"]:
        print(to_json(comparison.as_dict(), indent=2))
    else:
        print_precision(comparison, make_console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
