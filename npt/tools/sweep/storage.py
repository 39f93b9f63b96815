"""The storage of a study, by Optuna: an SQLite file, or a database server for workers on many
machines.

Each trial is stored as an Optuna trial with an attribute `key`, and Optuna gives it to only one
worker. If that worker sends no heartbeat for `grace` seconds, by the database's clock, the trial
waits again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import optuna
import sqlalchemy
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from npt.errors import ConfigError, first_line, printable
from npt.files import finite_or_null
from npt.stored import shown
from npt.tools.sweep.spec import Trial

BEAT_SECONDS = 5
GRACE_SECONDS = 45
"""Silence after which a trial runs again: many beats, since a busy database may delay some."""

RETRIES = 2  # reruns of a trial whose worker falls silent, before it counts as failed

_UNREACHED = (optuna.exceptions.StorageInternalError, sqlalchemy.exc.OperationalError)
_OVER = optuna.exceptions.UpdateFinishedTrialError

_LOCK_SECONDS = 60.0
_OPENINGS = 5  # tries to open a database while other workers make its tables
_STATES = ("COMPLETE", "RUNNING", "WAITING", "FAIL")
"""If a trial has several attempts, the one with the first of these states counts."""


class Claim(NamedTuple):
    """A trial that this worker has taken; `id` is Optuna's id of the attempt."""

    key: str
    id: int


class Progress(NamedTuple):
    """Number of trials in each state."""

    finished: int
    running: int
    waiting: int
    failed: int

    @property
    def open(self) -> int:
        return self.running + self.waiting


def _checked(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the figures of a trial; TypeError or ValueError if they are none."""
    for name, value in row.items():
        if value is not None and not isinstance(value, str | int | float):
            raise TypeError(f"{name} is {shown(value)}")
        str(value).encode()  # for the table
    if not isinstance(row.get("outcome"), str):
        raise TypeError(f"outcome is {shown(row.get('outcome'))}")
    return row


def _moment(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat(timespec="seconds")


def _reason(error: BaseException) -> str:
    return first_line(error.__cause__ or error)[:200]


class Storage:
    """One worker's connection to a study; workers that name the same study share it.

    Args:
        url: SQLAlchemy address, such as sqlite:///study.db.
        name: name of the study.
        grace: seconds without a heartbeat after which a trial runs again.
        beat: seconds between heartbeats.

    Raises:
        ConfigError: the database cannot be opened.
    """

    def __init__(
        self, url: str, name: str, *, grace: Any = GRACE_SECONDS, beat: Any = BEAT_SECONDS
    ):
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        logging.getLogger("alembic").setLevel(logging.ERROR)
        # Optuna's heartbeats are experimental
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        self._beat = beat
        self._grace = grace
        self.worker = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(2)}"
        try:
            address = sqlalchemy.make_url(url)
        # SQLAlchemy raises ValueError for a bad port
        except (sqlalchemy.exc.ArgumentError, ValueError) as error:
            raise ConfigError(
                f"--storage {url.split('://')[0]}... is not a database address; write one like"
                " sqlite:///study.db"
            ) from error
        self._shown = address.render_as_string(hide_password=True)
        local = address.get_backend_name() == "sqlite"
        file = address.database or ":memory:"
        if local and file == ":memory:":
            raise ConfigError(
                "--storage is an in-memory SQLite database, which other workers cannot join; use a"
                " file, like sqlite:///study.db"
            )
        # Optuna raises RuntimeError for tables of another version
        failures = (OSError, ImportError, LookupError, RuntimeError, TypeError, ValueError)
        try:
            if local:
                Path(file).parent.mkdir(parents=True, exist_ok=True)
            self._storage = self._opened(url, local)
            self._study = optuna.create_study(
                storage=self._storage, study_name=name, load_if_exists=True, direction="minimize"
            )
        except (*failures, sqlalchemy.exc.SQLAlchemyError, *_UNREACHED) as error:
            raise ConfigError(
                f"cannot open the study's database {self._shown}: {_reason(error)}; check --study"
                " and --storage"
            ) from error

    def _opened(self, url: str, local: bool) -> RDBStorage:
        options: dict[str, Any] = {"pool_pre_ping": True}
        if local:
            options = {"connect_args": {"timeout": _LOCK_SECONDS, "isolation_level": None}}
        retry = optuna.storages.RetryHeartbeatStaleTrialCallback(max_retry=RETRIES)
        for number in range(_OPENINGS):
            try:
                storage = RDBStorage(
                    url, options, heartbeat_interval=self._beat, grace_period=self._grace,
                    heartbeat_stale_trial_callback=retry,
                )  # fmt: skip
                break
            # two workers that make the tables at the same time conflict
            except (sqlalchemy.exc.SQLAlchemyError, *_UNREACHED) as error:
                at_once = re.search("already exists|duplicate|unique", str(error), re.IGNORECASE)
                if not at_once or number == _OPENINGS - 1:
                    raise
                time.sleep(0.1)
        if local:  # Optuna reads a state, then changes it; SQLite has no row lock for that
            sqlalchemy.event.listen(
                storage.engine, "begin", lambda c: c.exec_driver_sql("begin immediate")
            )
        return storage

    @contextlib.contextmanager
    def reached(self) -> Iterator[None]:
        """Raise ConfigError if the database cannot be reached within the context."""
        try:
            yield
        except _UNREACHED as error:
            raise ConfigError(
                f"cannot reach the study's database {self._shown}: {_reason(error)}; once it is"
                " back, run npt sweep again: finished trials are kept"
            ) from error

    @contextlib.contextmanager
    def _sound(self) -> Iterator[None]:
        """Raise ConfigError if what the database holds proves to be damaged within the context."""
        try:
            yield
        except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the study's database {self._shown} is damaged ({type(error).__name__}:"
                f" {_reason(error)}): restore it, or choose another --study folder"
            ) from error

    def enqueue(self, trials: Iterable[Trial]) -> int:
        """Add the trials that are not waiting, running or finished; return their number."""
        attempts = self._attempts()
        kept = {key for key, a in attempts.items() if a.state != TrialState.FAIL}
        new = [trial for trial in trials if trial.key not in kept]
        for trial in new:
            self._wait(trial)
        return len(new)

    def claim(self, trials: Mapping[str, Trial]) -> Claim | None:
        """Put abandoned trials back to waiting, then take the first of these that waits, if any."""
        with self._sound():
            optuna.storages.fail_stale_trials(self._study)
        attempts = self._attempts()
        for key in trials:
            attempt = attempts.get(key)
            if attempt is None or attempt.state != TrialState.WAITING:
                continue
            if self._take(attempt._trial_id):  # else another worker was faster
                return Claim(key, attempt._trial_id)
        return None

    def _take(self, id_: int) -> bool:
        # before it runs, since Optuna never retries a running trial without heartbeats
        self._storage.record_heartbeat(id_)
        try:
            taken = self._storage.set_trial_state_values(id_, TrialState.RUNNING)
        except _OVER:
            return False
        if taken:
            self._storage.set_trial_user_attr(id_, "worker", self.worker)
        return taken

    @contextlib.contextmanager
    def alive(self, claim: Claim) -> Iterator[None]:
        """Send heartbeats for the claim within the context. Optuna's own thread would end at the
        first one that fails.
        """
        over = threading.Event()

        def beat() -> None:
            while not over.wait(self._beat):
                with contextlib.suppress(Exception):
                    self._storage.record_heartbeat(claim.id)

        thread = threading.Thread(target=beat, name="npt-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def finish(self, claim: Claim, row: Mapping[str, Any]) -> bool:
        """Record the figures of a trial, and its KL for Optuna's own tools. Return False if the
        trial has passed to another worker.
        """
        kl = row.get("kl")
        with contextlib.suppress(_OVER):
            self._storage.set_trial_user_attr(claim.id, "row", finite_or_null(dict(row)))
            value = math.inf if kl is None or math.isnan(kl) else kl
            self._storage.set_trial_state_values(claim.id, TrialState.COMPLETE, [value])
        return bool(self._storage.get_trial(claim.id).state == TrialState.COMPLETE)

    def fail(self, claim: Claim, error: str) -> None:
        """Record why a trial failed."""
        with contextlib.suppress(_OVER):
            self._storage.set_trial_user_attr(claim.id, "error", error)
            self._storage.set_trial_state_values(claim.id, TrialState.FAIL)

    def give_back(self, claim: Claim, trial: Trial) -> None:
        """Let an unfinished trial wait again."""
        with contextlib.suppress(_OVER):
            self._storage.set_trial_state_values(claim.id, TrialState.FAIL)
            self._wait(trial)

    def progress(self, keys: Iterable[str]) -> Progress:
        """Count these trials by state."""
        attempts = self._attempts()
        states = [attempts[key].state.name if key in attempts else "WAITING" for key in keys]
        return Progress(*map(states.count, _STATES))

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return by key the figures of finished trials, and why others failed."""
        rows = {}
        silent = f"its worker sent no heartbeat for {self._grace:.0f} s"
        for key, attempt in self._attempts().items():
            attributes = attempt.user_attrs
            row: dict[str, Any] = {
                "trial": attempt.number,
                "worker": str(attributes.get("worker", "")),
                "started": _moment(attempt.datetime_start),
                "ended": _moment(attempt.datetime_complete),
            }
            if attempt.state == TrialState.COMPLETE:
                with self._sound():
                    rows[key] = {**row, **_checked(attributes["row"])}
            elif attempt.state == TrialState.FAIL:
                reason = str(attributes.get("error", silent))
                rows[key] = {**row, "outcome": "failed", "reason": printable(reason)}
        return rows

    def _attempts(self) -> dict[str, FrozenTrial]:
        """Return by key the attempt that counts. If two wait, because two workers added them at
        once, every worker takes the first. If two failed, the last has the reason.
        """

        def rank(attempt: FrozenTrial) -> tuple[int, int]:
            order = _STATES.index(attempt.state.name)
            number = attempt.number
            if attempt.state == TrialState.FAIL:
                number = -number
            return order, number

        attempts: dict[str, FrozenTrial] = {}
        with self._sound():
            stored = self._study.get_trials(deepcopy=False)
            by_rank = sorted(stored, key=rank)
            for attempt in by_rank:
                key = attempt.user_attrs.get("key")
                if key is not None:
                    attempts.setdefault(key, attempt)
        return attempts

    def _wait(self, trial: Trial) -> None:
        self._study.enqueue_trial(dict(trial.flags), user_attrs={"key": trial.key})
