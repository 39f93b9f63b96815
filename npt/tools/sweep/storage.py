"""A study's storage, by Optuna: an SQLite file, or a server's database for workers on many
machines.

Each attempt at a trial is a trial of Optuna's; `key` says which trial of the design it is. A
trial's state is read off its attempts, so that no killed process can leave it half written. Optuna
gives a waiting attempt to one worker alone. Workers send Optuna's heartbeats; an attempt whose last
one is older than `grace` seconds by the database's clock has failed, and its trial waits again.
Optuna's own callback for that is not used: a process killed between the failure and the next
attempt would lose the trial, and errors are counted apart from silences here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from npt.errors import ConfigError, first_line
from npt.extras import install_command
from npt.files import finite_or_null
from npt.tools.sweep.spec import Trial

BEAT_SECONDS = 5
GRACE_SECONDS = 45
"""Silence after which a trial is run again: many beats, since a busy database may delay some."""

ATTEMPTS = 3  # errors of a trial, or workers that fall silent over it, after which it is left alone

TRIES = 5
TRY_SECONDS = 1.0
"""A database that cannot be reached is asked so often, with pauses that double from this one."""

_SILENT = "its worker {} was not heard of for {:.0f} s"
_LOCK_SECONDS = 60.0

P = ParamSpec("P")
T = TypeVar("T")


class Claim(NamedTuple):
    """A trial that this worker has taken. id: Optuna's, of this attempt."""

    key: str
    id: int


class Progress(NamedTuple):
    """Trials of a study by their state. lost: those that are left alone after ATTEMPTS."""

    finished: int
    running: int
    waiting: int
    lost: int

    @property
    def open(self) -> int:
        return self.running + self.waiting


class _Attempts:
    """The state of one trial of the design. trials: Optuna's, in the order of their numbers."""

    def __init__(self, trials: list[Any]):
        def of(*states: str) -> list[Any]:
            return [trial for trial in trials if trial.state.name in states]

        self.done: Any = next(iter(of("COMPLETE")), None)
        # of two that were added at once every worker takes the first
        self.current: Any = next(iter(of("WAITING", "RUNNING")), None)
        self.last = trials[-1]
        silent = [trial for trial in of("FAIL") if _fell_silent(trial)]
        anew = max((trial.number for trial in trials if trial.user_attrs.get("again")), default=0)
        self.silences = sum(trial.number >= anew for trial in silent)
        said = [trial.user_attrs.get("error") for trial in of("FAIL") if trial not in silent]
        self.errors = [error for error in said if error]

    @property
    def state(self) -> str:
        if self.done is not None:
            return "finished"
        if self.current is not None:
            return self.current.state.name.lower()
        return "lost" if max(len(self.errors), self.silences) >= ATTEMPTS else "waiting"


def _fell_silent(trial: Any) -> bool:
    # Optuna gives no reason; versions before this one wrote theirs
    return trial.user_attrs.get("error", _SILENT).startswith(_SILENT.partition("{")[0])


def _patiently(
    method: Callable[Concatenate[Storage, P], T],
) -> Callable[Concatenate[Storage, P], T]:
    """Wrap a method of a storage so that it outlasts a database that is out of reach for a moment.
    It may be run twice.
    """

    @functools.wraps(method)
    def wrapped(self: Storage, *arguments: P.args, **named: P.kwargs) -> T:
        for number in range(TRIES):
            if number:
                time.sleep(TRY_SECONDS * 2 ** (number - 1))
            try:
                return method(self, *arguments, **named)
            except self._passing as error:
                last = error
        raise ConfigError(
            f"the study's database {self._shown} cannot be reached: {_reason(last)}; run npt sweep"
            " again when it can be, which repeats no finished trial"
        ) from last

    return wrapped


def _reason(error: BaseException) -> str:
    return first_line(error.__cause__ or error)[:200]


class Storage:
    """One study in a database, as one worker sees it; workers that name the same study share it.
    url: SQLAlchemy's address, as sqlite:///study.db. grace: seconds without a heartbeat after which
    a trial is run again. beat: seconds between heartbeats. Raise ConfigError if Optuna is not
    installed or the database cannot be opened.
    """

    def __init__(
        self, url: str, name: str, *, grace: Any = GRACE_SECONDS, beat: Any = BEAT_SECONDS
    ):
        try:
            import optuna
            import sqlalchemy
        except ImportError as error:
            raise ConfigError(
                f"a study needs {error.name}, which is not installed; {install_command('sweep')}"
            ) from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        logging.getLogger("alembic").setLevel(logging.ERROR)
        self._optuna, self._beat, self._grace = optuna, beat, grace
        self._states = optuna.trial.TrialState
        self._over = optuna.exceptions.UpdateFinishedTrialError
        self._passing = (optuna.exceptions.StorageInternalError, sqlalchemy.exc.OperationalError)
        self.worker = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(2)}"
        try:
            place = sqlalchemy.make_url(url)
        # a port that is no number is the latter
        except (sqlalchemy.exc.ArgumentError, ValueError) as error:
            raise ConfigError(
                f"--storage {url.split('://')[0]}... is no address of a database; write one like"
                " sqlite:///study.db"
            ) from error
        self._shown = place.render_as_string(hide_password=True)
        local = place.get_backend_name() == "sqlite"
        if local and place.database in (None, "", ":memory:"):
            raise ConfigError(
                "--storage names an SQLite database in memory, which no other worker can join; name"
                " a file"
            )
        failures = (OSError, ImportError, TypeError, ValueError, sqlalchemy.exc.SQLAlchemyError)
        try:
            if local:
                Path(str(place.database)).parent.mkdir(parents=True, exist_ok=True)
            self._storage = self._opened(url, local)
            self._study = optuna.create_study(
                storage=self._storage, study_name=name, load_if_exists=True, direction="minimize"
            )
        except (*failures, *self._passing) as error:
            raise ConfigError(
                f"the study's database {self._shown} cannot be opened: {_reason(error)}; check"
                " --study and --storage"
            ) from error

    def _opened(self, url: str, local: bool) -> Any:
        import sqlalchemy

        options: dict[str, Any] = {"pool_pre_ping": True}
        if local:
            options = {"connect_args": {"timeout": _LOCK_SECONDS, "isolation_level": None}}
        for number in range(TRIES):
            try:
                with self._quietly():
                    found = self._optuna.storages.RDBStorage(
                        url, options, heartbeat_interval=self._beat, grace_period=self._grace
                    )
                break
            # two workers that make the tables at once get into each other's way
            except (sqlalchemy.exc.SQLAlchemyError, *self._passing) as error:
                at_once = re.search("already exists|duplicate|unique", str(error), re.IGNORECASE)
                if not at_once or number == TRIES - 1:
                    raise
                time.sleep(0.1)
        if local:  # Optuna reads a state and then changes it, which only a server locks a row for
            sqlalchemy.event.listen(
                found.engine, "begin", lambda c: c.exec_driver_sql("begin immediate")
            )
        return found

    @_patiently
    def enqueue(self, trials: Iterable[Trial], again: bool = False) -> int:
        """Let these trials wait, but for those that the study has already, and count them. again:
        also those that were left alone because workers fell silent over them, which may have been
        killed for any reason.
        """
        attempts, count = self._attempts(), 0
        for trial in trials:
            own = attempts.get(trial.key)
            anew = own is not None and own.state == "lost" and len(own.errors) < ATTEMPTS
            if own is None or (again and anew):
                self._wait(trial, again=anew)
                count += 1
        return count

    @_patiently
    def claim(self, trials: Mapping[str, Trial], prefer: Iterable[str] = ()) -> Claim | None:
        """Take a waiting trial of these; None if none waits. Trials whose workers are gone wait
        again first. prefer: keys to take before others.
        """
        with self._quietly():
            self._optuna.storages.fail_stale_trials(self._study)
        attempts = self._attempts()
        for own in attempts.values():
            # taken by a version that sent no heartbeats: its grace begins now
            if own.state == "running" and own.current.user_attrs.get("sign"):
                self._storage.record_heartbeat(own.current._trial_id)
                self._storage.set_trial_user_attr(own.current._trial_id, "sign", None)
        gone = [k for k, own in attempts.items() if own.state == "waiting" and own.current is None]
        for key in (key for key in gone if key in trials):
            self._wait(trials[key])
        attempts = self._attempts() if gone else attempts
        for key in (*prefer, *trials):
            found = attempts.get(key)
            if found is not None and found.state == "waiting":
                id_ = found.current._trial_id
                if self._take(id_):
                    return Claim(key, id_)
        return None

    def _take(self, id_: int) -> bool:
        # first: what is running and has no heartbeat is never found silent
        self._storage.record_heartbeat(id_)
        try:
            taken = self._storage.set_trial_state_values(id_, self._states.RUNNING)
        except self._over:
            return False
        if taken:
            self._storage.set_trial_user_attr(id_, "worker", self.worker)
        return taken

    @contextlib.contextmanager
    def alive(self, claim: Claim) -> Iterator[None]:
        """Send heartbeats for the claim within the context. Optuna's own thread for that ends with
        the first one that does not arrive.
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

    @_patiently
    def finish(self, claim: Claim, row: Mapping[str, Any], value: float) -> bool:
        """Record the outcome: figures by name, and a value for Optuna's own tools, NaN if there is
        none. Return False if another worker has the trial by now, whose result counts.
        """
        with contextlib.suppress(self._over):
            self._storage.set_trial_user_attr(claim.id, "row", finite_or_null(dict(row)))
            value = math.inf if math.isnan(value) else value
            self._storage.set_trial_state_values(claim.id, self._states.COMPLETE, [value])
        return bool(self._storage.get_trial(claim.id).state == self._states.COMPLETE)

    @_patiently
    def give_back(self, claim: Claim, error: str | None = None) -> None:
        """Let an unfinished trial wait again; after ATTEMPTS errors it is left alone."""
        with contextlib.suppress(self._over):
            self._storage.set_trial_user_attr(claim.id, "error", error or "")
            self._storage.set_trial_state_values(claim.id, self._states.FAIL)

    @_patiently
    def progress(self, keys: Iterable[str]) -> Progress:
        """Count these trials by their state."""
        attempts = self._attempts()
        states = [attempts[key].state if key in attempts else "waiting" for key in keys]
        return Progress(*map(states.count, ("finished", "running", "waiting", "lost")))

    @_patiently
    def rows(self) -> dict[str, dict[str, Any]]:
        """Return the figures of the finished trials by key, and the reasons of those left alone."""
        found = {}
        for key, own in self._attempts().items():
            if own.state == "finished":
                row = {"worker": own.done.user_attrs.get("worker"), **own.done.user_attrs["row"]}
                found[key] = {**_times(own.done), **row}
            elif own.state == "lost":
                reason = _SILENT.format(own.last.user_attrs.get("worker"), self._grace)
                reason = own.errors[-1] if len(own.errors) >= ATTEMPTS else reason
                found[key] = {**_times(own.last), "outcome": "failed", "reason": reason}
        return found

    def _attempts(self) -> dict[str, _Attempts]:
        by_key: dict[str, list[Any]] = {}
        for trial in self._study.get_trials(deepcopy=False):
            if "key" in trial.user_attrs:
                by_key.setdefault(trial.user_attrs["key"], []).append(trial)
        return {key: _Attempts(trials) for key, trials in by_key.items()}

    def _wait(self, trial: Trial, again: bool = False) -> None:
        settings = {**trial.given, "seed": trial.settings.training.seed}
        self._study.enqueue_trial(settings, user_attrs={"key": trial.key, "again": again})

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        """Suppress Optuna's warning that heartbeats are experimental."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            yield


def _times(trial: Any) -> dict[str, Any]:
    moments = {"started": trial.datetime_start, "ended": trial.datetime_complete}
    shown = {name: at and at.isoformat(timespec="seconds") for name, at in moments.items()}
    return {"trial": trial.number, **shown}
