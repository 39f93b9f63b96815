"""`report.html` of a run, made from its folder alone, at its end or later."""

from __future__ import annotations

from pathlib import Path

from npt.files import write_text
from npt.report.page import page
from npt.report.run import RunRecord
from npt.runs.run_folder import REPORT


def write_report(run: Path, output: Path | None = None) -> RunRecord:
    """Read the run folder and write the page about it, by default as `report.html` in the folder;
    OSError if it cannot be written.
    """
    record = RunRecord(run)
    output = run / REPORT if output is None else output
    write_text(output, page(record, output))
    return record
