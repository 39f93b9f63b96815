"""A worker runs one trial after another. Workers communicate only through the storage."""

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
"""Wait between two claims while other workers run the last trials, since one may be killed."""


def work(
    design: Design, storage: Storage, bases: Bases, say: Callable[[str], None],
    parent: int | None = None,
) -> Progress:  # fmt: skip
    """Run trials until all have ended, here or elsewhere, and report each with `say`.

    Raises:
        StoppedError: a signal came or the process `parent` ended; the current trial waits again.
    """
    trials = design.by_key
    with StopOnSignal() as stop:

        def check() -> None:
            stop.check()
            if parent is not None and os.getppid() != parent:
                raise StoppedError(15)

        while True:
            check()
            claim = storage.claim(trials)
            if claim is not None:
                work_on(storage, claim, trials[claim.key], bases, say, check)
                continue
            progress = storage.progress(trials)
            if not progress.open:
                return progress
            time.sleep(WAIT_SECONDS)


def work_on(
    storage: Storage, claim: Claim, trial: Trial, bases: Bases, say: Callable[[str], None],
    check: Callable[[], None],
) -> None:  # fmt: skip
    """Run a claimed trial and record its outcome; let it wait again if `check` raises."""
    try:
        with storage.alive(claim):  # until the outcome is recorded
            try:
                row = run_trial(bases, trial, check)
            # due to settings, data or the machine: other trials may succeed
            except (NPTError, RuntimeError) as error:
                message = f"{type(error).__name__}: {error}"
                storage.fail(claim, message[:500])
                say(f"{trial}: {message}")
            else:
                if storage.finish(claim, row):
                    say(f"{trial}: {described(row)}")
    except BaseException:  # the worker failed, not the trial
        # if the storage cannot be reached, the trial runs again once it has been silent too long
        with contextlib.suppress(ConfigError), storage.reached():
            storage.give_back(claim, trial)
        raise


def described(row: Row) -> str:
    """Return a summary of a trial's outcome."""
    words = [row["outcome"]]
    if row["outcome"] != "stable":
        words[0] += f" at step {row['steps']} ({row['reason']})"
    for name, label in {"limit_low": "trains at", "limit_high": "fails at", "kl": "KL"}.items():
        if row.get(name) is not None:
            words.append(f"{label} {row[name]:.4g}")
    return ", ".join([*words, f"{row['refused']} refused", f"{row['seconds']:.1f} s"])
