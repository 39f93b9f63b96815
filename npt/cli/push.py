"""`npt push`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from npt.console import make_console


def push(given: dict[str, Any]) -> int:
    """Put a saved adapter into a repository of the model hub."""
    import npt
    from npt.errors import DataError
    from npt.files import to_json
    from npt.stored import read_json

    fidelity = (
        read_json(Path(given["fidelity"]), DataError) if given["fidelity"] is not None else None
    )
    options = {name: given[name] for name in ("private", "revision", "message")}
    address = npt.push_to_hub(given["adapter"], given["repo_id"], fidelity=fidelity, **options)
    if given["json"]:
        print(to_json({"repo_id": given["repo_id"], "commit": address}, indent=2))
    else:
        make_console().print(
            f"pushed {given['adapter']} to {given['repo_id']}: {address}", soft_wrap=True
        )
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
        help="repository; made where it does not exist",
    )
    parser.add_argument(
        "--private", action="store_true", help="make the repository private, where it is made"
    )
    parser.add_argument(
        "--revision", metavar="BRANCH", help="branch to push to (default: the main one)"
    )
    parser.add_argument(
        "--fidelity", metavar="FILE.json", help="a run's fidelity.json, for the model card"
    )
    parser.add_argument(
        "--message",
        default="NPT adapter",
        metavar="TEXT",
        help="of the commit (default: 'NPT adapter')",
    )
    parser.add_argument("--json", action="store_true", help="print the commit's address as JSON")
