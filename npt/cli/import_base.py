"""`npt import`."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from npt.cli.arguments import tell
from npt.console import make_console


def import_base(flags: dict[str, Any]) -> int:
    """Convert a GGUF file to a transformers folder of 16-bit weights.

    --model_name FILE.gguf makes the same conversion each time it loads the file.
    """
    import npt

    with make_console(stderr=flags["json"]).status("converting to 16 bits"):
        done = npt.import_base(flags["file"], flags["folder"])
    size = f"{done.parameters:,} parameters in {done.dtype}, {done.size / 1e6:,.1f} MB"
    lines = [f"wrote {done.folder}: {size}"]
    if done.quantized:
        lines.append(
            f"{done.file} is quantised to {done.quantization}, so the folder holds these rounded"
            " weights"
        )
    tell(flags, asdict(done), *lines)
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE.gguf", help="GGUF file, as llama.cpp loads it")
    parser.add_argument("folder", metavar="FOLDER", help="new or empty folder to write")
