"""A study's storage, by Optuna: an SQLite file, or a server's database for workers on many
machines. Trials wait in it as Optuna's own, so that its tools can look at them.

What Optuna leaves open is settled here. Taking a waiting trial is no single operation in SQLite,
nor is filling a new study anywhere: both are done in turn, under a lock that the system takes from
a killed worker. A worker that runs a trial counts a number up in it; one whose number has stood
still for `grace` seconds, by the clock of whoever watches, is gone, and its trial waits again. No
two machines' clocks are compared.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from npt.errors import ConfigError, first_line
from npt.extras import install_command
from npt.files import finite_or_null
from npt.tools.sweep.spec import Trial

BEAT_SECONDS = 5.0
GRACE_SECONDS = 45.0
"""A trial whose worker has not been heard of for so long is taken up again: many beats, since a
busy database may delay some.
"""

ATTEMPTS = 3
"""Errors that a trial may end in, or workers that may fall silent over it, before it is left alone.
"""

TRIES = 5
TRY_SECONDS = 1.0
"""A database that is out of reach is asked so many times, with a pause that begins with this and
doubles.
"""

_ERROR, _SILENCE = "error", "silence"

_LOCK_SECONDS = 60.0

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Claim:
    """A trial that this worker has taken. number: Optuna's, of this attempt."""

    key: str
    settings: dict[str, Any]
    number: int
    id: int


@dataclass(frozen=True)
class Progress:
    """How far a study is. lost: given up after ATTEMPTS."""

    finished: int
    running: int
    waiting: int
    lost: int

    @property
    def open(self) -> int:
        return self.running + self.waiting


def _patiently(
    method: Callable[Concatenate[Storage, P], T],
) -> Callable[Concatenate[Storage, P], T]:
    """A method of a storage that outlasts a database which is out of reach for a moment. What it
    does may be done twice.
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
        said = f"the study's database {self._shown} cannot be reached: {_reason(last)}"
        raise ConfigError(
            f"{said}; run npt sweep again when it can be, which repeats no finished trial"
        ) from last

    return wrapped


def _reason(error: BaseException) -> str:
    return first_line(error.__cause__ or error)[:200]


class Storage:
    """One study in a database, as one worker sees it.

    Args:
        url: SQLAlchemy's address of the database: sqlite:///study.db, postgresql://..., mysql://...
        name: of the study; workers that name the same one share it.
        grace: seconds without a sign of life after which a trial is taken up again.
        beat: seconds between signs of life.

    Raises:
        ConfigError: Optuna is not installed, or the database cannot be opened.
    """

    def __init__(
        self, url: str, name: str, *, grace: float = GRACE_SECONDS, beat: float = BEAT_SECONDS
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
        self._state = optuna.trial.TrialState
        self._grace, self._beat = grace, beat
        self.worker = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(2)}"
        # by trial, its last sign of life and when it was new to this worker
        self._seen: dict[int, tuple[str | None, float]] = {}
        try:
            place = sqlalchemy.make_url(url)
        # a port that is no number is the latter
        except (sqlalchemy.exc.ArgumentError, ValueError) as error:
            raise ConfigError(
                f"--storage {url.split('://')[0]}... is no address of a database; write one like"
                " sqlite:///study.db"
            ) from error
        shown = place.render_as_string(hide_password=True)
        local = place.get_backend_name() == "sqlite"
        if local and place.database in (None, "", ":memory:"):
            raise ConfigError(
                "--storage names an SQLite database in memory, which no other worker can join; name"
                " a file"
            )
        self._passing = (optuna.exceptions.StorageInternalError, sqlalchemy.exc.OperationalError)
        self._shown = shown
        options: dict[str, Any] = (
            {"connect_args": {"timeout": _LOCK_SECONDS}} if local else {"pool_pre_ping": True}
        )
        try:
            self._turns: _FileTurns | _RowTurns = (
                _FileTurns(Path(str(place.database))) if local else _RowTurns(url, name)
            )
            # two workers that make the tables at once get into each other's way
            with self._turns.turn():
                self._storage = optuna.storages.RDBStorage(url, engine_kwargs=options)
                self._study = optuna.create_study(
                    storage=self._storage,
                    study_name=name,
                    load_if_exists=True,
                    direction="minimize",
                )
        except (
            OSError,
            ImportError,
            TypeError,
            ValueError,
            sqlalchemy.exc.SQLAlchemyError,
            *self._passing,
        ) as error:
            raise ConfigError(
                f"the study's database {shown} cannot be opened: {_reason(error)}; check --study"
                " and --storage"
            ) from error
        self._name, self._create = name, optuna.create_trial

    @_patiently
    def enqueue(self, trials: Iterable[Trial], again: bool = False) -> int:
        """Let these trials wait, but for those that the study has already.

        Args:
            trials: of the design.
            again: also those that were left alone because workers fell silent over them, which may
                have been killed for any reason.

        Returns:
            How many wait that did not.
        """
        with self._turns.turn():
            known = {
                trial.user_attrs["key"]
                for trial in self._trials()
                if not (again and self._fell_silent(trial))
            }
            new = [trial for trial in trials if trial.key not in known]
            for trial in new:
                self._wait(trial.key, {**trial.given, "seed": trial.settings.training.seed})
            return len(new)

    def _fell_silent(self, trial: Any) -> bool:
        """An attempt that is nothing to anyone but by its successor, or that has none because its
        workers fell silent.
        """
        return trial.state == self._state.FAIL and trial.user_attrs.get("left") != _ERROR

    @_patiently
    def claim(self, keys: Mapping[str, Any], prefer: Iterable[str] = ()) -> Claim | None:
        """Take a waiting trial; None where none waits. Trials whose workers are gone wait again
        first.

        Args:
            keys: of the trials that this worker knows how to run.
            prefer: keys to take before others, in this order.
        """
        with self._turns.turn():
            trials = self._trials()
            self._revive(trials)
            waiting = {
                trial.user_attrs["key"]: trial
                for trial in self._trials()
                if trial.state == self._state.WAITING and _of(trial, keys)
            }
            first = next(
                (key for key in prefer if key in waiting),
                next((key for key in keys if key in waiting), None),
            )
            if first is None:
                return None
            trial = waiting[first]
            if not self._storage.set_trial_state_values(trial._trial_id, self._state.RUNNING):
                return None
            self._storage.set_trial_user_attr(trial._trial_id, "worker", self.worker)
            self._storage.set_trial_user_attr(trial._trial_id, "sign", f"{self.worker}:0")
            return Claim(first, dict(trial.user_attrs["settings"]), trial.number, trial._trial_id)

    @contextlib.contextmanager
    def alive(self, claim: Claim) -> Iterator[None]:
        """Within the context a thread gives signs of life for the claim."""
        over = threading.Event()

        def beat() -> None:
            count = 0
            while not over.wait(self._beat):
                count += 1
                # a beat that is lost is made good by the next; a trial that is not ours any more
                with contextlib.suppress(Exception):
                    self._storage.set_trial_user_attr(claim.id, "sign", f"{self.worker}:{count}")

        thread = threading.Thread(target=beat, name="npt-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @_patiently
    def finish(self, claim: Claim, row: Mapping[str, Any], value: float) -> bool:
        """Record what came out; False where the trial was given to another worker meanwhile, whose
        result counts.

        Args:
            row: figures by name.
            value: what Optuna's own tools are to show; NaN where there is none.
        """
        with self._turns.turn():
            if self._storage.get_trial(claim.id).state != self._state.RUNNING:
                return False
            self._storage.set_trial_user_attr(claim.id, "row", finite_or_null(dict(row)))
            self._storage.set_trial_state_values(
                claim.id, self._state.COMPLETE, [value if value == value else math.inf]
            )
            return True

    @_patiently
    def give_back(self, claim: Claim, error: str | None = None) -> None:
        """Let a trial that did not come to an end wait again.

        Args:
            error: what was wrong, where something was; after ATTEMPTS of them the trial is left
                alone.
        """
        with self._turns.turn():
            trial = self._storage.get_trial(claim.id)
            if trial.state == self._state.RUNNING:
                self._again(trial, error or "", errors=int(error is not None))

    @_patiently
    def progress(self, keys: Iterable[str]) -> Progress:
        """How many of these trials stand how."""
        states = dict.fromkeys(keys, "waiting")
        order = ("lost", "waiting", "running", "finished")
        names = {
            self._state.COMPLETE: "finished",
            self._state.RUNNING: "running",
            self._state.WAITING: "waiting",
            self._state.FAIL: "lost",
        }
        found: dict[str, str] = {}
        for trial in self._trials():
            key, state = trial.user_attrs.get("key"), names.get(trial.state, "lost")
            if key in states and order.index(state) >= order.index(found.get(key, "lost")):
                found[key] = state
        counts = {name: sum(found.get(key, "waiting") == name for key in states) for name in order}
        return Progress(counts["finished"], counts["running"], counts["waiting"], counts["lost"])

    @_patiently
    def rows(self) -> dict[str, dict[str, Any]]:
        """What came out of the finished trials, by key; of those that were left alone, why."""
        found: dict[str, dict[str, Any]] = {}
        trials = self._trials()
        open_ = {
            trial.user_attrs["key"]
            for trial in trials
            if trial.state in (self._state.WAITING, self._state.RUNNING)
        }
        for trial in trials:
            key = trial.user_attrs["key"]
            times = {
                "started": _time(trial.datetime_start),
                "ended": _time(trial.datetime_complete),
            }
            if trial.state == self._state.COMPLETE:
                row = {"trial": trial.number, "worker": trial.user_attrs.get("worker"), **times}
                found[key] = {**row, **trial.user_attrs["row"]}
            elif (
                trial.state == self._state.FAIL
                and key not in found
                and key not in open_
                and trial.user_attrs.get("left")
            ):
                found[key] = {
                    "trial": trial.number,
                    **times,
                    "outcome": "failed",
                    "reason": trial.user_attrs.get("error"),
                }
        return found

    def _trials(self) -> list[Any]:
        return [
            trial for trial in self._study.get_trials(deepcopy=False) if "key" in trial.user_attrs
        ]

    def _wait(
        self, key: str, settings: Mapping[str, Any], errors: int = 0, silences: int = 0
    ) -> None:
        plain = json.loads(json.dumps(settings))
        attributes = {"key": key, "settings": plain, "errors": errors, "silences": silences}
        system = {
            "fixed_params": {
                name: value
                for name, value in plain.items()
                if isinstance(value, int | float | str | bool)
            }
        }
        self._study.add_trial(
            self._create(state=self._state.WAITING, user_attrs=attributes, system_attrs=system)
        )

    def _again(self, trial: Any, error: str, errors: int = 0, silences: int = 0) -> None:
        """Let an attempt's trial wait again, with one more error or silence; or leave it alone."""
        errors += int(trial.user_attrs.get("errors", 0))
        silences += int(trial.user_attrs.get("silences", 0))
        self._storage.set_trial_user_attr(trial._trial_id, "error", error)
        if max(errors, silences) >= ATTEMPTS:
            self._storage.set_trial_user_attr(
                trial._trial_id, "left", _ERROR if errors >= ATTEMPTS else _SILENCE
            )
        # in front of giving it up: a worker that is killed between the two leaves it twice, of
        # which one is never taken
        else:
            self._wait(trial.user_attrs["key"], trial.user_attrs["settings"], errors, silences)
        self._storage.set_trial_state_values(trial._trial_id, self._state.FAIL)

    def _revive(self, trials: list[Any]) -> None:
        """Let the trials wait again whose workers have not been heard of for long; drop what waits
        beside a trial that does not need it.
        """
        now = time.monotonic()
        running = [trial for trial in trials if trial.state == self._state.RUNNING]
        for trial in running:
            sign = trial.user_attrs.get("sign")
            last, since = self._seen.get(trial._trial_id, (None, -1.0))
            if since < 0 or sign != last:
                self._seen[trial._trial_id] = (sign, now)
            elif now - since > self._grace:
                self._again(
                    trial,
                    f"its worker {trial.user_attrs.get('worker')} was not heard of for"
                    f" {self._grace:.0f} s",
                    silences=1,
                )
        taken = {
            trial.user_attrs["key"]
            for trial in trials
            if trial.state in (self._state.RUNNING, self._state.COMPLETE)
        }
        seen: set[str] = set()
        for trial in trials:
            if trial.state != self._state.WAITING:
                continue
            key = trial.user_attrs["key"]
            if key in taken or key in seen:
                self._storage.set_trial_state_values(trial._trial_id, self._state.FAIL)
            seen.add(key)


def _of(trial: Any, keys: Mapping[str, Any]) -> bool:
    return trial.user_attrs["key"] in keys


def _time(moment: Any) -> str | None:
    return None if moment is None else moment.isoformat(timespec="seconds")


class _FileTurns:
    """One worker at a time, by a lock on a file beside the database; the system lifts it where its
    holder is killed.
    """

    def __init__(self, database: Path):
        database.parent.mkdir(parents=True, exist_ok=True)
        self._path = database.with_name(database.name + ".lock")
        self._own = threading.RLock()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        with self._own, self._path.open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield


class _RowTurns:
    """One worker at a time, by a row of the database that a transaction holds; the server lifts it
    where the connection is lost.
    """

    def __init__(self, url: str, name: str):
        import sqlalchemy as sql

        self._engine = sql.create_engine(url, pool_pre_ping=True)
        table = sql.Table(
            "npt_turns", sql.MetaData(), sql.Column("study", sql.String(512), primary_key=True)
        )
        # another worker may be making it at this moment
        with contextlib.suppress(sql.exc.SQLAlchemyError):
            table.create(self._engine, checkfirst=True)
        with contextlib.suppress(sql.exc.IntegrityError), self._engine.begin() as connection:
            connection.execute(table.insert().values(study=name))
        self._hold = sql.select(table).where(table.c.study == name).with_for_update()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        with self._engine.begin() as connection:
            connection.execute(self._hold).all()
            yield
