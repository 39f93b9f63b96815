"""One cell of the table: a guard, a fault and a setting."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conformance_guards.difference import State, close, lost, same
from conformance_guards.faults import (
    FAULTS,
    Fault,
    Places,
    bad,
    clean,
    until_bad,
    windows_of,
    without,
)
from conformance_guards.run import Setting, trained

WAIT = 15.0
"""Seconds that a process waits for the other before it counts as hanging."""
LONGEST = 120.0
"""Seconds after which two processes are ended."""
HANGS = "hangs"
ENDED = "ended by "
"""How a run without an end is told, and one that an exception ended."""


class GuardError(Exception):
    """An adapter cannot be loaded, or fails without a fault."""


@dataclass(frozen=True)
class Entry:
    """A shipped adapter.

    Attributes:
        place: module and class of the adapter.
        package: what has to be installed besides torch, or "".
    """

    place: str
    package: str = ""


GUARDS = {
    "npt.guard": Entry("conformance_guards.adapters:NptGuard"),
    "npt.guard in Lightning": Entry("conformance_guards.trainers:GuardedLightning", "lightning"),
    "no guard": Entry("conformance_guards.adapters:NoGuard"),
    "isfinite(loss)": Entry("conformance_guards.adapters:FiniteLoss"),
    "error_if_nonfinite": Entry("conformance_guards.adapters:FiniteNorm"),
    "GradScaler": Entry("conformance_guards.adapters:ScalerAlone"),
    "accelerate": Entry("conformance_guards.adapters:Accelerate", "accelerate"),
    "Lightning": Entry("conformance_guards.trainers:Lightning", "lightning"),
    "transformers": Entry("conformance_guards.trainers:Transformers", "transformers"),
    "stabilityguard": Entry("conformance_guards.adapters:StabilityGuard", "stabilityguard"),
}
"""The shipped adapters, by name; the first is the one under test by default."""


@dataclass
class Cell:
    """The result of a trial.

    Attributes:
        verdict: "equal", "lost", "n/a" or "not claimed".
        lost: what the guard lost, or why the cell was not run.
    """

    guard: str
    fault: str
    setting: str
    verdict: str
    lost: list[str] = field(default_factory=list)


@cache
def load(guard: str) -> Any:
    """Return the class of a shipped guard, or of one given as FILE.py:Class.

    Raises:
        GuardError: there is none.
    """
    if guard in GUARDS:
        module, _, name = GUARDS[guard].place.partition(":")
        return getattr(importlib.import_module(module), name)
    file, _, name = guard.rpartition(":")
    if not file.endswith(".py"):
        shipped = ", ".join(GUARDS)
        raise GuardError(f"there is no guard {guard!r}; pass FILE.py:Class, or one of {shipped}")
    if not Path(file).is_file():
        raise GuardError(f"{guard}: the file {file} does not exist")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(loaded)
    except Exception as error:
        raise GuardError(f"{guard}: {_told(error)} while {file} was read") from None
    adapter = getattr(loaded, name, None)
    if not isinstance(adapter, type):
        raise GuardError(f"{guard}: {file} has no class {name}")
    if not hasattr(adapter, "step") and not hasattr(adapter, "train"):
        raise GuardError(f"{guard}: {name} has no method step(window), and no train(windows)")
    return adapter


def missing(guard: str) -> str | None:
    """Return the package that a shipped guard lacks, or None."""
    package = GUARDS[guard].package if guard in GUARDS else ""
    return package if package and importlib.util.find_spec(package) is None else None


def judged(guard: str, fault: Fault, setting: Setting, processes: Processes) -> Cell:
    """Run a cell.

    processes: of this guard, for cells of several ones.

    Raises:
        GuardError: the guard fails without a fault.
    """
    adapter = load(guard)
    cell = Cell(guard, fault.name, setting.name, "n/a")
    if setting.name not in fault.settings:
        return cell
    reason = getattr(adapter, "left_out", {}).get(setting.name)
    if reason is not None:
        cell.lost = [reason]
        return cell
    if fault.name == "spike" and not getattr(adapter, "handles_spikes", False):
        cell.verdict = "not claimed"
        return cell
    setting = replace(setting, batch_norm=setting.batch_norm or fault.batch_norm)
    if setting.processes > 1:
        cell.lost = processes.compared(fault, setting)
    else:
        cell.lost = compared(guard, fault, setting, 0)
    cell.verdict = "lost" if cell.lost else "equal"
    return cell


def compared(guard: str, fault: Fault, setting: Setting, process: int) -> list[str]:
    """Train with the fault and without it in this process, and return what is lost.

    Raises:
        GuardError: the guard fails without a fault.
    """
    # one reference more if the guard may choose, the one that it most likely chooses first
    wholes = (True, False) if fault.either else (fault.undone,)
    try:
        check_clean(guard, replace(setting, dropout=0.0), process)
        references = [
            good_state(guard, setting, process, everywhere(fault, setting, whole))
            for whole in wholes
        ]
    except Exception as error:
        raise GuardError(f"{guard}, without a fault, in {setting.name}: {_told(error)}") from error
    try:
        found = bad_state(guard, fault, setting, process)
    except Exception as error:
        return [_ended(error)]
    # Right after the bad window, what is lost has not spread to the weights yet. Every process
    # makes these runs, since another one may need them.
    cut = until_bad(fault)
    at_once = bad_state(guard, cut, setting, process)
    reference, no_window = (
        good_state(guard, setting, process, everywhere(cut, setting, whole))
        for whole in (wholes[0], True)
    )
    if any(same(found, each) for each in references):
        return []
    return lost(at_once, reference, no_window) or lost(found, references[0])


def everywhere(fault: Fault, setting: Setting, whole: bool) -> tuple[Places, ...]:
    """Return the data without the bad micro-batches, by process."""
    return tuple(without(fault, setting, each, whole) for each in range(setting.processes))


@cache
def check_clean(guard: str, setting: Setting, process: int) -> None:
    """Check that without a fault the guard trains what a plain loop trains, up to rounding.

    A guard that never steps would equal itself. Dropout is off, since trainers draw other numbers.

    Raises:
        GuardError: it does not.
    """
    places = (clean(FAULTS["loss"], setting),) * setting.processes
    found = good_state(guard, setting, process, places)
    if not close(found, good_state("no guard", setting, process, places)):
        raise GuardError("its weights are not those of a plain loop")


@cache
def good_state(guard: str, setting: Setting, process: int, places: tuple[Places, ...]) -> State:
    """Return the state after training on these micro-batches, none of which is bad.

    places: by process, so that either all processes make a run or all remember it.
    """
    with quiet():
        return trained(load(guard), setting, windows_of(places[process], process)).state()


def bad_state(guard: str, fault: Fault, setting: Setting, process: int) -> State:
    """Return the state after training with the fault."""
    places = clean(fault, setting)
    windows = windows_of(places, process, fault.name, bad(fault, setting, process))
    with quiet():
        return trained(load(guard), setting, windows).state()


@contextmanager
def quiet() -> Iterator[None]:
    """Drop what guards print."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def _told(error: BaseException) -> str:
    if isinstance(error, GuardError):
        return str(error)
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _ended(error: BaseException) -> str:
    text = str(error).lower()
    if "timed out" in text or "timeout" in text:
        return HANGS
    return f"{ENDED}{type(error).__name__}"


@cache
def forking() -> Any:
    """Return a context that forks processes from one that has imported torch and npt and has
    computed nothing: a fork after OpenMP hangs.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["conformance_guards.trial", "npt.guard"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # where it finds them
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


class Processes:
    """The processes in which a guard runs its cells of several processes, started when needed.

    A cell that ends one of them leaves the other waiting, so that the next cell gets new ones.
    """

    def __init__(self, guard: str):
        self.guard = guard
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.pipes: list[Connection] = []
        self.started: list[Any] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def compared(self, fault: Fault, setting: Setting) -> list[str]:
        """Run a cell, and return what is lost on any process.

        Raises:
            GuardError: the guard fails without a fault.
        """
        if not self.started:
            self._start(setting.processes)
        try:
            for pipe in self.pipes:
                pipe.send((fault, setting))
            results = [self._received(pipe) for pipe in self.pipes]
        except OSError as error:
            self.end()
            return [f"processes {ENDED}{type(error).__name__}"]
        words = [word for result in results for word in result.lost]
        if any(result.error or result.ended for result in results):
            self.end()
        for result in results:
            if result.error:
                raise GuardError(result.error)
        if HANGS in words:
            return [HANGS]  # the other process ends because of it
        return list(dict.fromkeys(words))

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for one in self.started:
            one.join(1.0)
            one.kill()
            one.join()
        if self.folder is not None:
            self.folder.cleanup()
        self.folder = None
        self.pipes = []
        self.started = []

    def _start(self, size: int) -> None:
        context = forking()
        self.folder = tempfile.TemporaryDirectory()
        for process in range(size):
            here, there = context.Pipe()
            arguments = (there, self.guard, process, size, self.folder.name)
            one = context.Process(target=_process, args=arguments, daemon=True)
            one.start()
            there.close()
            self.pipes.append(here)
            self.started.append(one)

    @staticmethod
    def _received(pipe: Connection) -> Result:
        try:
            return pipe.recv() if pipe.poll(LONGEST) else Result([HANGS], ended=True)
        except EOFError:
            return Result(["the process ended"], ended=True)


@dataclass
class Result:
    """What a process says of a cell.

    Attributes:
        ended: the run ended early, so that the processes are out of step.
        error: why the guard fails without a fault, or "".
    """

    lost: list[str]
    ended: bool = False
    error: str = ""


def _process(pipe: Connection, guard: str, process: int, size: int, folder: str) -> None:
    prepare()
    # for accelerate, which uses the existing group
    os.environ |= {"RANK": f"{process}", "LOCAL_RANK": f"{process}", "WORLD_SIZE": f"{size}"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    store = dist.FileStore(str(Path(folder, "store")), size)
    store.set_timeout(timedelta(seconds=LONGEST))
    wait = timedelta(seconds=WAIT)
    dist.init_process_group("gloo", store=store, rank=process, world_size=size, timeout=wait)
    result = Result([])
    while not result.ended and not result.error:
        try:
            fault, setting = pipe.recv()
        except EOFError:
            break
        try:
            words = compared(guard, fault, setting, process)
            result = Result(words, ended=any(ENDED in word or word == HANGS for word in words))
        except GuardError as error:
            result = Result([], error=str(error))
        except Exception as error:
            result = Result([_ended(error)], ended=True)
        pipe.send(result)
    os._exit(0)  # a group whose other process hangs cannot be destroyed


def prepare() -> None:
    """Set this process up: one thread, and no warnings of trainers."""
    torch.set_num_threads(1)  # fastest at this size, and one order of summation
    warnings.simplefilter("ignore")
