"""`npt import`."""

from __future__ import annotations

import argparse
from typing import Any

from npt.cli.arguments import tell
from npt.console import make_console


def import_base(given: dict[str, Any]) -> int:
    """Write the model in a GGUF file as a folder of 16-bit weights that transformers loads."""
    import npt

    with make_console(stderr=given["json"]).status("unpacking and rounding"):
        done = npt.import_base(given["file"], given["folder"])
    lines = [
        f"wrote {done.folder}: {done.parameters:,} parameters in {done.dtype},"
        f" {done.size / 1e6:,.1f} MB"
    ]
    if done.quantized:
        lines.append(
            f"{done.file} was quantised to {done.quantization}: what was written is that, not the"
            " original"
        )
    tell(given, done.as_dict(), *lines)
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "--model_name FILE.gguf does the same at every load, into a temporary folder. Exit status:"
        " 0 done, 2 wrong arguments or file (nothing is left)."
    )
    parser.add_argument("file", metavar="FILE.gguf", help="a GGUF file, as llama.cpp loads it")
    parser.add_argument("folder", metavar="FOLDER", help="a new or empty folder")
