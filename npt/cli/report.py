"""`npt report`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from npt.console import make_console


def report(given: dict[str, Any]) -> int:
    """Make report.html of a run or a study anew from its folder: a finished, stopped or killed one,
    or one that is under way.
    """
    from npt.errors import ConfigError
    from npt.files import to_json
    from npt.report.page import summary
    from npt.runs.run_folder import REPORT, is_run
    from npt.tools.sweep.study import is_study
    from npt.train.run_report import write_report

    folder = Path(given["folder"])
    output = folder / REPORT if given["output"] is None else Path(given["output"])
    try:
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}; name the one that a run wrote")
        if output.is_dir():
            raise ConfigError(f"--output {output} is a folder; name a file")
        if is_study(folder):
            return _study(folder, output, given["json"])
        if not is_run(folder):
            raise ConfigError(
                f"{folder} holds no run and no study; name a folder with run.json, metrics.jsonl,"
                " checkpoints or study.json"
            )
        record = write_report(folder, output)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or output} cannot be read or written: {error.strerror}; check its"
            " rights"
        ) from error
    found = summary(record)
    if given["json"]:
        print(to_json({"report": str(output), **found}, indent=2))
        return 0
    console = make_console()
    console.print(f"{found['status']}; refused: {found['refused']:,}", soft_wrap=True)
    for name, why in found["missing"].items():
        console.print(f"{name}: {why}", soft_wrap=True)
    console.print(f"written to {output}", soft_wrap=True)
    return 0


def _study(folder: Path, output: Path, json: bool) -> int:
    from npt.extras import require
    from npt.files import to_json

    for package in ("pandas", "pyarrow", "scipy"):
        require(package, "the page about a study")
    from npt.tools.sweep.page import write_study_report

    found = write_study_report(folder, output)
    if json:
        print(to_json(found, indent=2))
        return 0
    console = make_console()
    console.print(
        ", ".join(f"{count} {name}" for name, count in found["outcomes"].items()), soft_wrap=True
    )
    console.print(
        f"written to {output}, and {len(found['pictures'])} pictures in {folder / 'figures'}",
        soft_wrap=True,
    )
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="the folder of a run or a study")
    parser.add_argument(
        "--output", metavar="FILE", help="where to write the page (default: FOLDER/report.html)"
    )
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
