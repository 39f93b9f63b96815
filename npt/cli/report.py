"""`npt report`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from npt.cli.arguments import tell
from npt.errors import ConfigError
from npt.files import check_file


def report(flags: dict[str, Any]) -> int:
    """Rebuild report.html for a run.

    It may have finished, stopped, been killed or still be running.
    """
    from npt.report.page import summary
    from npt.runs.run_folder import REPORT, is_run
    from npt.train.journal import write_report

    folder = Path(flags["folder"])
    output = Path(flags["output"] or folder / REPORT)
    if not is_run(folder):
        raise ConfigError(
            f"{folder} has no run: name a folder with run.json, metrics.jsonl or checkpoints"
        )
    check_file(output, "--output")
    figures = {"report": str(output), **summary(write_report(folder, output))}
    lines = [f"{figures['status']}; refusals: {figures['refused']:,}"]
    lines += [f"{name}: {why}" for name, why in figures["missing"].items()]
    tell(flags, figures, *lines, f"written to {output}")
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="run folder")
    text = "file to write (default: FOLDER/report.html)"
    parser.add_argument("--output", metavar="FILE", help=text)
