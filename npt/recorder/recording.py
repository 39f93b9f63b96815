"""The records of a run: which steps are recorded and where the files go, for the training loop and
transformers' Trainer alike.
"""

from __future__ import annotations

import json
from pathlib import Path

from npt.config import parse_steps
from npt.errors import ConfigError
from npt.files import to_json, write_text
from npt.recorder.ranking import worst
from npt.recorder.record import Record

PICTURED = 6
"""Records that are drawn at most, evenly spread over the run, the first bad one among them."""


class Recording:
    """The records of a run: each chosen step once, a JSON file each, and pictures at the end.

    Steps are counted from 1: `1,2,3`, `1-5` or a mix, and `every` so many steps; a `ConfigError`
    says that they cannot be read. The folder is made with the first record.
    """

    def __init__(self, folder: str | Path, steps: str | None = None, every: int | None = None):
        if every is not None and every < 1:
            raise ConfigError(f"every is {every}; record every first or later step, from 1 on")
        self.folder = Path(folder)
        self.steps, self.every = steps, every
        self._ranges = () if steps is None else parse_steps(steps, "steps")
        self._tried: set[int] = set()
        self._files: list[Path] = []
        self._bad: set[int] = set()  # index among the files of the first record that is not finite

    def __str__(self) -> str:
        parts = [] if self.steps is None else [f"steps {self.steps}"]
        often = "every step" if self.every == 1 else f"every {self.every} steps"
        parts += [] if self.every is None else [often]
        return (
            f"recording {' and '.join(parts) or 'no step'}, of each the first micro-batch on"
            f" process 0 only, into {self.folder}"
        )

    def wants(self, step: int) -> bool:
        """Tell if the step is chosen and was not begun before: if it is refused and tried again,
        the refused one counts.
        """
        chosen = any(step in steps for steps in self._ranges)
        chosen = chosen or (self.every is not None and step % self.every == 0)
        return chosen and step not in self._tried

    def begin(self, step: int) -> None:
        """Note that the step is being recorded, whatever comes of it."""
        self._tried.add(step)

    def keep(self, record: Record) -> Path:
        """Write the record, as a whole or not at all, and return its file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{record.step:08d}.json"
        write_text(path, to_json(record.as_dict()) + "\n")
        if record.bad and not self._bad:
            self._bad = {len(self._files)}
        self._files.append(path)
        return path

    def draw(self) -> list[Path]:
        """Draw the run's records, if any, and return the files."""
        if not self._files:
            return []
        from npt.recorder.picture import write_pictures  # loads matplotlib

        last, gaps = len(self._files) - 1, PICTURED - 1 - len(self._bad)
        chosen = self._bad | {round(i * last / gaps) for i in range(gaps + 1)}
        files = self._files if last < PICTURED else [self._files[i] for i in sorted(chosen)]
        texts = (path.read_text(encoding="utf-8") for path in files)
        return write_pictures([Record.from_dict(json.loads(text)) for text in texts], self.folder)


def describe(record: Record, path: Path) -> str:
    """Return the line that a run prints about a step that it recorded."""
    return (
        f"recorded step {record.step} (micro-batch {record.micro_batch}, process 0) in {path}:"
        f" {worst(record)}"
    )
