"""`npt report`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from npt.cli.arguments import tell
from npt.errors import ConfigError
from npt.extras import require


def report(flags: dict[str, Any]) -> int:
    """Write report.html of a run or a study anew from its folder, whether it has ended or not."""
    from npt.report.page import summary
    from npt.runs.run_folder import REPORT, is_run
    from npt.tools.sweep.study import is_study
    from npt.train.run import write_report

    folder = Path(flags["folder"])
    output = Path(flags["output"] or folder / REPORT)
    if output.is_dir():
        raise ConfigError(f"--output {output} is a folder; name a file")
    if is_study(folder):
        require("optuna", "the page about a study")
        from npt.tools.sweep.page import write_study_report

        figures = write_study_report(folder, output)
        lines = [", ".join(f"{count} {name}" for name, count in figures["outcomes"].items())]
    elif is_run(folder):
        figures = {"report": str(output), **summary(write_report(folder, output))}
        lines = [f"{figures['status']}; refused: {figures['refused']:,}"]
        lines += [f"{name}: {why}" for name, why in figures["missing"].items()]
    else:
        raise ConfigError(
            f"{folder} holds no run and no study; name a folder with run.json, metrics.jsonl,"
            " checkpoints or study.json"
        )
    tell(flags, figures, *lines, f"written to {output}")
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="the folder of a run or a study")
    text = "where to write the page (default: FOLDER/report.html)"
    parser.add_argument("--output", metavar="FILE", help=text)
