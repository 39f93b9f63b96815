"""Record chosen steps of a run, for the training loop and for transformers' Trainer."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor, nn

from npt.config import parse_steps
from npt.files import to_json, write_text
from npt.recorder.ranking import worst, worst_rows
from npt.recorder.record import Record
from npt.recorder.recorder import Recorder

PICTURED = 6
"""The most records drawn: evenly spread over the run, and always the first bad one."""


class Recording:
    """Writes a JSON file for each chosen step, and pictures at the end.

    Between chosen steps the model has no hooks. The folder is created with the first record. A
    failure to record or draw prints a line and does not end the run. For the arguments, see
    `RecorderCallback`.

    Attributes:
        refused: how many micro-batches the guard has refused so far, for the page.
    """

    def __init__(self, folder: str | Path, steps: str, say: Callable[[str], None] = print):
        self.folder = Path(folder)
        self.steps = steps
        self.say = say
        self._ranges = parse_steps(steps, "steps")
        self._tried: set[int] = set()
        self._files: list[Path] = []
        self._bad: set[int] = set()  # index of the file of the first non-finite record
        self._recorder: Recorder | None = None
        self._step = 0
        self.refused = 0

    def __str__(self) -> str:
        return (
            f"recording the first micro-batch of steps {self.steps} on process 0 into {self.folder}"
        )

    def wants(self, step: int) -> bool:
        """Return True if the step is chosen and was not recorded before. If a step is refused and
        tried again, only its first attempt is recorded.
        """
        return step not in self._tried and any(step in steps for steps in self._ranges)

    def start(self, model: nn.Module, step: int, valid: Tensor | None = None) -> None:
        """Put hooks on the model for one micro-batch of a step."""
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
            warnings.simplefilter("ignore")  # about skipped tensors
            record = recorder.record(self._step, micro_batch)
            where = f"(micro-batch {micro_batch}, process 0) in {self.keep(record)}"
            self.say(f"recorded step {self._step} {where}: {worst(record)}")
            for row in worst_rows(record):
                self.say(f"  {row}")

    def stop(self) -> Recorder | None:
        recorder = self._recorder
        self._recorder = None
        if recorder is not None:
            recorder.__exit__()
        return recorder

    def keep(self, record: Record) -> Path:
        """Write the record atomically and return its path."""
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
        files = self._files
        last = len(files) - 1
        if last >= PICTURED:
            gaps = PICTURED - 1 - len(self._bad)
            spread = {round(i * last / gaps) for i in range(gaps + 1)}
            files = [files[i] for i in sorted(spread | self._bad)]
        with self._survived(f"the records in {self.folder} could not be drawn"):
            from npt.recorder.picture import write_pictures  # loads matplotlib

            texts = (path.read_text(encoding="utf-8") for path in files)
            records = [Record.from_dict(json.loads(text)) for text in texts]
            paths = write_pictures(records, self.folder, refused=self.refused)
            self.say(f"pictures of the recorded steps: {', '.join(map(str, paths))}")

    @contextlib.contextmanager
    def _survived(self, failure: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # recording must not end the run
            self.say(f"{failure}: {type(error).__name__}: {error}")
