"""`npt export`."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from npt.cli.arguments import add_adapter, tell
from npt.console import make_console


def export(flags: dict[str, Any]) -> int:
    """Write a student as a folder that transformers loads without npt: base, adapter, tokenizer and
    the code that joins them.
    """
    import npt

    with make_console(stderr=flags["json"]).status("writing"):
        done = npt.export(flags["adapter"], flags["output"], base_name=flags["model_name"])
    base = "4 bit" if done.packed else "16 bit or fp32"
    tell(
        flags,
        {**asdict(done), "folder": str(done.folder)},
        f"wrote {done.folder}: base in {base}, files of weights: {done.files},"
        f" {done.size / 1e6:,.1f} MB",
    )
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_adapter(parser)
    parser.add_argument("--output", required=True, metavar="FOLDER", help="a new or empty folder")
    name = "of the base, if it is not under the name that the adapter knows"
    parser.add_argument("--model_name", metavar="NAME", help=name)
