"""A worker takes one trial after the other until none is left. It talks to others through the
storage alone.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from npt.errors import ConfigError, NPTError, StoppedError
from npt.runs.signals import StopOnSignal
from npt.tools.sweep.analysis import RATE, level_text
from npt.tools.sweep.lab import Lab
from npt.tools.sweep.run import Row, run_trial
from npt.tools.sweep.spec import Design, Trial
from npt.tools.sweep.storage import Claim, Progress, Storage

WAIT_SECONDS = 2.0
"""Between two claims while other workers have the last trials: one of them may be killed."""


class Worker:
    """One process's part in a study. say: told of every trial that has ended. parent: the process
    that this one ends with, if it has one.
    """

    def __init__(
        self, design: Design, storage: Storage, lab: Lab, say: Callable[[str], None],
        parent: int | None = None,
    ):  # fmt: skip
        self.storage, self.lab = storage, lab
        self._say, self._parent = say, parent
        self._trials = design.by_key
        self._stop = StopOnSignal()
        self.done = 0

    def work(self) -> Progress:
        """Run trials until all have ended, here or elsewhere. A signal or the parent's end raises
        StoppedError; the trial in flight waits again.
        """
        with self._stop:
            while True:
                self._check()
                claim = self.storage.claim(self._trials)
                if claim is not None:
                    self._run(claim, self._trials[claim.key])
                    continue
                progress = self.storage.progress(self._trials)
                if not progress.open:
                    return progress
                time.sleep(WAIT_SECONDS)

    def _run(self, claim: Claim, trial: Trial) -> None:
        try:
            with self.storage.alive(claim):  # until the outcome is on record
                self._try(claim, trial)
        except BaseException:  # of the worker and not of the trial
            # a storage out of reach: the trial is run again when it has been silent for long
            with contextlib.suppress(ConfigError), self.storage.reached():
                self.storage.give_back(claim, trial)
            raise

    def _try(self, claim: Claim, trial: Trial) -> None:
        try:
            row = run_trial(self.lab, trial, self._check)
        # its settings', its data's or the machine's: other trials may do
        except (NPTError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
            self.storage.fail(claim, said[:500])
            self._say(f"{label(trial)}: {said}")
            return
        if self.storage.finish(claim, row):
            self.done += 1
            self._say(f"{label(trial)}: {told(row)}")

    def _check(self) -> None:
        """Raise StoppedError if this process is to end."""
        self._stop.check()
        if self._parent is not None and os.getppid() != self._parent:
            raise StoppedError(15)


def label(trial: Trial) -> str:
    """Return a trial in a few words: its first place in the specification, and its seed."""
    place = trial.places[0]
    words = [place.part, place.arm] if place.arm else [place.part]
    words += [f"{'lr' if n == RATE else n} {level_text(x)}" for n, x in place.point.items()]
    return ", ".join([*words, f"seed {trial.settings.training.seed}"])


def told(row: Row) -> str:
    """Return the outcome in a few words."""

    def number(name: str) -> str:
        return "none" if row.get(name) is None else f"{row[name]:.4g}"

    words: list[Any] = [row["outcome"]]
    if row["outcome"] != "stable":
        at = f" at step {row['stopped_at']}" if row.get("stopped_at") else ""
        words[0] += f"{at} ({row['reason']})"
    if row.get("limit_low") is not None or row.get("limit_high") is not None:
        words.append(f"trains up to {number('limit_low')}, not at {number('limit_high')}")
    words.append(f"KL {number('kl')}")
    if row["refused"]:
        words.append(f"{row['refused']} refused")
    return ", ".join([*words, f"{row['seconds']:.1f} s"])
