"""`npt push`."""

from __future__ import annotations

import argparse
from typing import Any

from npt.cli.arguments import add_switch, print_json
from npt.console import make_console


def push(given: dict[str, Any]) -> int:
    """Put a saved adapter into a repository of the model hub."""
    import npt

    address = npt.push_to_hub(
        given["adapter"], given["repo_id"], private=given["private"], revision=given["revision"]
    )
    if given["json"]:
        print_json({"repo_id": given["repo_id"], "commit": address})
    else:
        make_console().say(f"pushed {given['adapter']} to {given['repo_id']}: {address}")
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Log in with `hf auth login`, or set HF_TOKEN. Exit status: 0 done, 2 wrong arguments or"
        " the hub refuses, 5 adapter unusable."
    )
    parser.add_argument(
        "--adapter", required=True, metavar="FOLDER", help="folder that an adapter was saved to"
    )
    parser.add_argument(
        "--repo_id",
        required=True,
        metavar="USER/NAME",
        help="repository; created if it does not exist",
    )
    add_switch(parser, "private", "make the repository private if it is created")
    parser.add_argument(
        "--revision", metavar="BRANCH", help="branch to push to (default: the main one)"
    )
