"""A worker takes one trial after the other until none is left. It talks to others through the
storage alone.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from npt.errors import ConfigError, NPTError, StoppedError
from npt.runs.signals import StopOnSignal
from npt.tools.sweep.run import Bases, run_trial
from npt.tools.sweep.spec import Design, Trial
from npt.tools.sweep.storage import Claim, Progress, Storage
from npt.tools.sweep.table import Row

WAIT_SECONDS = 2.0
"""Between two claims while other workers have the last trials: one of them may be killed."""


class Worker:
    """One process's part in a study.

    Args:
        say: told of every trial that has ended.
        parent: the process that this one ends with, if it has one.
    """

    def __init__(
        self, design: Design, storage: Storage, bases: Bases, say: Callable[[str], None],
        parent: int | None = None,
    ):  # fmt: skip
        self.storage, self._bases, self._say, self._parent = storage, bases, say, parent
        self._trials = design.by_key
        self._stop = StopOnSignal()

    def work(self) -> Progress:
        """Run trials until all have ended, here or elsewhere.

        Raises:
            StoppedError: a signal came, or the parent has ended; the trial in flight waits again.
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
                try:
                    row = run_trial(self._bases, trial, self._check)
                # its settings', its data's or the machine's: other trials may do
                except (NPTError, RuntimeError) as error:
                    message = f"{type(error).__name__}: {error}"
                    self.storage.fail(claim, message[:500])
                    self._say(f"{trial}: {message}")
                else:
                    if self.storage.finish(claim, row):
                        self._say(f"{trial}: {described(row)}")
        except BaseException:  # of the worker and not of the trial
            # a storage out of reach: the trial is run again when it has been silent for long
            with contextlib.suppress(ConfigError), self.storage.reached():
                self.storage.give_back(claim, trial)
            raise

    def _check(self) -> None:
        """Raise StoppedError if this process is to end."""
        self._stop.check()
        if self._parent is not None and os.getppid() != self._parent:
            raise StoppedError(15)


def described(row: Row) -> str:
    """Return the outcome of a trial in a few words."""
    words = [row["outcome"]]
    if row["outcome"] != "stable":
        words[0] += f" at step {row['steps']} ({row['reason']})"
    for name in ("limit_low", "limit_high", "kl"):
        if row.get(name) is not None:
            words.append(f"{name} {row[name]:.4g}")
    return ", ".join([*words, f"{row['refused']} refused", f"{row['seconds']:.1f} s"])
