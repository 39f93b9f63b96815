"""The records of a run: which steps are recorded and where the files go, for the training loop and
transformers' Trainer alike.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor, nn

from npt.config import parse_steps
from npt.files import to_json, write_text
from npt.recorder.ranking import worst
from npt.recorder.record import Record
from npt.recorder.recorder import Recorder

PICTURED = 6
"""Records that are drawn at most, evenly spread over the run, the first bad one among them."""


class Recording:
    """The records of a run: each chosen step once, a JSON file each, and pictures at the end.

    Between chosen steps no hook is on the model. The folder is made with the first record. A
    failure of recording or drawing is a line, and ends nothing. Arguments as of `RecorderCallback`.
    """

    def __init__(self, folder: str | Path, steps: str, say: Callable[[str], None] = print):
        self.folder, self.steps, self.say = Path(folder), steps, say
        self._ranges = parse_steps(steps, "steps")
        self._tried: set[int] = set()
        self._files: list[Path] = []
        self._bad: set[int] = set()  # index among the files of the first record that is not finite
        self._recorder: Recorder | None = None
        self._step = 0

    def __str__(self) -> str:
        return (
            f"recording steps {self.steps}, of each the first micro-batch on process 0 only, into"
            f" {self.folder}"
        )

    def wants(self, step: int) -> bool:
        """Tell if the step is chosen and was not begun before: if it is refused and tried again,
        the refused one counts.
        """
        return step not in self._tried and any(step in steps for steps in self._ranges)

    def start(self, model: nn.Module, step: int, valid: Tensor | None = None) -> None:
        """Put hooks on the model for one micro-batch of a step, whatever comes of it."""
        self.stop()
        self._tried.add(step)
        self._step = step
        with self._survived(f"step {step} could not be recorded"):
            self._recorder = Recorder(model, valid=valid).__enter__()

    def finish(self, micro_batch: int = 0) -> None:
        recorder = self.stop()
        if recorder is None:
            return
        failure = f"step {self._step} could not be recorded"
        with self._survived(failure), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sites that were skipped
            record = recorder.record(self._step, micro_batch)
            where = f"(micro-batch {micro_batch}, process 0) in {self.keep(record)}"
            self.say(f"recorded step {self._step} {where}: {worst(record)}")

    def stop(self) -> Recorder | None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.__exit__()
        return recorder

    def keep(self, record: Record) -> Path:
        """Write the record, as a whole or not at all, and return its file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{record.step:08d}.json"
        write_text(path, to_json(record.as_dict()) + "\n")
        if record.bad and not self._bad:
            self._bad = {len(self._files)}
        self._files.append(path)
        return path

    def draw(self) -> None:
        if not self._files:
            return
        last, gaps = len(self._files) - 1, PICTURED - 1 - len(self._bad)
        chosen = self._bad | {round(i * last / gaps) for i in range(gaps + 1)}
        files = self._files if last < PICTURED else [self._files[i] for i in sorted(chosen)]
        with self._survived(f"the records in {self.folder} could not be drawn"):
            from npt.recorder.picture import write_pictures  # loads matplotlib

            texts = (path.read_text(encoding="utf-8") for path in files)
            records = [Record.from_dict(json.loads(text)) for text in texts]
            pictures = ", ".join(map(str, write_pictures(records, self.folder)))
            self.say(f"pictures of the recorded steps: {pictures}")

    @contextlib.contextmanager
    def _survived(self, failure: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # an observer must not end the run that it looks at
            self.say(f"{failure}: {type(error).__name__}: {error}")
