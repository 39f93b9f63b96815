"""`npt export`."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from npt.cli.arguments import add_adapter, tell
from npt.console import make_console


def export(flags: dict[str, Any]) -> int:
    """Write a student that transformers loads without npt.

    The folder holds base, adapter, tokenizer and code (trust_remote_code=True).
    """
    import npt

    with make_console(stderr=flags["json"]).status("writing"):
        done = npt.export(flags["adapter"], flags["output"], base_name=flags["model_name"])
    base = "4-bit" if done.packed else "16-bit or fp32"
    tell(
        flags,
        {**asdict(done), "folder": str(done.folder)},
        f"wrote {done.folder}: {base} base, {done.size / 1e6:,.1f} MB of weights (files:"
        f" {done.files})",
    )
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_adapter(parser)
    parser.add_argument(
        "--output", required=True, metavar="FOLDER", help="new or empty folder to write"
    )
    name = "base to use instead of the one recorded in the adapter"
    parser.add_argument("--model_name", metavar="NAME", help=name)
