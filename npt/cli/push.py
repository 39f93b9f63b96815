"""`npt push`."""

from __future__ import annotations

import argparse
from typing import Any

from npt.cli.arguments import add_switch, tell


def push(flags: dict[str, Any]) -> int:
    """Upload an adapter to the Hugging Face Hub.

    Log in first with `hf auth login`, or set HF_TOKEN.
    """
    import npt

    adapter = flags["adapter"]
    to = flags["repo_id"]
    address = npt.push_to_hub(adapter, to, private=flags["private"], revision=flags["revision"])
    figures = {"repo_id": to, "commit": address}
    tell(flags, figures, f"pushed {adapter} to {to}: {address}")
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--adapter", required=True, metavar="FOLDER", help="folder of the saved adapter")
    new = "repository to push to; created if it does not exist"
    add("--repo_id", required=True, metavar="USER/NAME", help=new)
    add_switch(parser, "private", "create the repository as private")
    add("--revision", metavar="BRANCH", help="branch to push to (default: main)")
