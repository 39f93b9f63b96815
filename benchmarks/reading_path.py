#!/usr/bin/env python
"""What a newcomer reads to follow one batch from its file to the weight update.

    python benchmarks/reading_path.py          a table of the files on the way, and their sum
    python benchmarks/reading_path.py --json

Two steps of a 4-bit run on the embedded model are watched with `sys.setprofile`, from the request
for the first window to the end of the second step. A file of npt is on the way if one of its
functions is called in between; its lines are all its lines, whatever part of it ran. The depth is
the largest number of npt's functions that were active at once, the training loop's included. What
the loop does before its first window and after a step, such as counting and logging, is left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import npt
from npt.files import to_json
from npt.train.loop import Loop

LOOP = Loop.run.__code__
OTHER = (":_account", ":_evaluate_if_due", ":say", ":raise_together")
"""Functions of the loop that are not on the way to the update."""
PACKAGE = str(Path(npt.__file__).parent)


@dataclass
class ReadingPath:
    """The files and the call depth of what ran. calls: by file, how often it was entered."""

    calls: dict[str, int] = field(default_factory=dict)
    deepest: list[str] = field(default_factory=list)

    def watch(self, frame: FrameType, event: str, _: Any) -> None:
        """Count one call; given to `sys.setprofile`."""
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(PACKAGE) or frame.f_code.co_name == "<module>":
            return
        file = str(Path(name).relative_to(PACKAGE))
        stack = _stack(frame)
        if any(place.endswith(OTHER) for place in stack):
            return
        self.calls[file] = self.calls.get(file, 0) + 1
        if len(stack) > len(self.deepest):
            self.deepest = stack

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        lines = {file: _lines(file) for file in sorted(self.calls)}
        return {
            "files": len(lines),
            "lines": sum(lines.values()),
            "depth": len(self.deepest),
            "lines_by_file": lines,
            "deepest": self.deepest,
        }


def _stack(frame: FrameType | None) -> list[str]:
    """Functions of npt from the loop to this frame, comprehensions left out."""
    names = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            names.append(f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_name}")
            if code is LOOP:
                break
        frame = frame.f_back
    return names[::-1]


def _lines(file: str) -> int:
    return len((Path(PACKAGE) / file).read_text(encoding="utf-8").splitlines())


def watched_run(data: str) -> ReadingPath:
    """Train two steps of the embedded model on `data` and watch them."""
    found = ReadingPath()
    run: Callable[..., None] = Loop.run

    def watched(self: Loop, windows: Any) -> None:
        threading.setprofile(found.watch)
        sys.setprofile(found.watch)
        try:
            run(self, windows)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    model, tokenizer = npt.load_base("tiny", quantization="nf4")
    npt.attach(model, npt.NPTConfig(rank=4, layers="upper_half"))
    with tempfile.TemporaryDirectory() as folder:
        config = npt.TrainConfig(
            output_dir=folder,
            max_steps=2,
            eval_samples=1,
            log_steps=1000,
            smoke_test=False,
            batch_size=2,
        )
        setattr(Loop, "run", watched)  # noqa: B010
        try:
            npt.Trainer(
                model,
                tokenizer,
                None,
                config,
                data_config=npt.DataConfig(dataset_name=data, max_length=64),
            ).train()
        finally:
            setattr(Loop, "run", run)  # noqa: B010
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--data", type=Path, help="JSON lines; default some made here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = given.data or Path(folder) / "data.jsonl"
        if given.data is None:
            text = "A sentence that is long enough to be a sample of its own. " * 8
            data.write_text((to_json({"text": text}) + "\n") * 16, encoding="utf-8")
        figures = watched_run(str(data)).as_dict()
    if given.json:
        print(to_json(figures))
        return 0
    for file, lines in figures["lines_by_file"].items():
        print(f"{lines:6d}  npt/{file}")
    print(
        f"{figures['lines']:6d}  lines in {figures['files']} files, {figures['depth']} calls deep:"
    )
    for place in figures["deepest"]:
        print(f"        {place}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
