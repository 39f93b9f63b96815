"""`npt import`."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from npt.cli.arguments import tell
from npt.console import make_console


def import_base(flags: dict[str, Any]) -> int:
    """Write the model in a GGUF file as a folder of 16-bit weights that transformers loads, as
    --model_name FILE.gguf does at every load into a temporary folder.
    """
    import npt

    with make_console(stderr=flags["json"]).status("unpacking and rounding"):
        done = npt.import_base(flags["file"], flags["folder"])
    size = f"{done.parameters:,} parameters in {done.dtype}, {done.size / 1e6:,.1f} MB"
    lines = [f"wrote {done.folder}: {size}"]
    if done.quantized:
        lines.append(
            f"{done.file} was quantised to {done.quantization}: what was written is that, not the"
            " original"
        )
    tell(flags, asdict(done), *lines)
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE.gguf", help="a GGUF file, as llama.cpp loads it")
    parser.add_argument("folder", metavar="FOLDER", help="a new or empty folder")
