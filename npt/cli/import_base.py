"""`npt import`."""

from __future__ import annotations

import argparse
from typing import Any

from npt.cli.arguments import print_json
from npt.console import make_console


def import_base(given: dict[str, Any]) -> int:
    """Write the model in a GGUF file as a folder of 16-bit weights that transformers loads."""
    import npt

    console = make_console(stderr=given["json"])
    with console.status("unpacking and rounding"):
        done = npt.import_base(given["file"], given["folder"])
    if given["json"]:
        print_json(done.as_dict())
        return 0
    console.say(
        f"wrote {done.folder}: {done.parameters:,} parameters in {done.dtype},"
        f" {done.size / 1e6:,.1f} MB"
    )
    if done.quantized:
        console.say(
            f"{done.file} was quantised to {done.quantization}: what was written is that, not the"
            " original"
        )
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "--model_name FILE.gguf does the same at every load, into a temporary folder. Exit status:"
        " 0 done, 2 wrong arguments or file (nothing is left)."
    )
    parser.add_argument("file", metavar="FILE.gguf", help="a GGUF file, as llama.cpp loads it")
    parser.add_argument("folder", metavar="FOLDER", help="a new or empty folder")
