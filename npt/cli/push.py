"""`npt push`."""

from __future__ import annotations

import argparse
from typing import Any

from npt.cli.arguments import add_switch, tell


def push(given: dict[str, Any]) -> int:
    """Put a saved adapter into a repository of the model hub."""
    import npt

    to = given["repo_id"]
    address = npt.push_to_hub(
        given["adapter"], to, private=given["private"], revision=given["revision"]
    )
    figures = {"repo_id": to, "commit": address}
    tell(given, figures, f"pushed {given['adapter']} to {to}: {address}")
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Log in with `hf auth login`, or set HF_TOKEN. Exit status: 0 done, 2 wrong arguments or"
        " the hub refuses, 5 adapter unusable."
    )
    add = parser.add_argument
    add("--adapter", required=True, metavar="FOLDER", help="folder that an adapter was saved to")
    new = "repository; created if it does not exist"
    add("--repo_id", required=True, metavar="USER/NAME", help=new)
    add_switch(parser, "private", "make the repository private if it is created")
    add("--revision", metavar="BRANCH", help="branch to push to (default: the main one)")
