"""Signals: in whatever phase one comes, the run ends with 128 + its number, in a state that it can
be taken up from exactly.
"""

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import status_of
from resumed_runs import Runs, events, records
from torch import nn

import npt
from npt import manifest as manifest_module
from npt.cli.main import main
from npt.errors import StoppedError
from npt.evaluation import evaluate as evaluate_module
from npt.runs.run_folder import RunFolder
from npt.runs.signals import SIGNALS, StopOnSignal
from npt.runs.trackers import Trackers
from npt.train import start
from npt.train import trainer as trainer_module

NUMBERS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]
each_signal = pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)


def with_signals(name: str, values: Iterable[Any]) -> pytest.MarkDecorator:
    """Each value with one of the signals, which take turns."""
    return pytest.mark.parametrize((name, "number"), list(zip(values, itertools.cycle(NUMBERS))))


def handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in SIGNALS}


@pytest.fixture(autouse=True)
def _handlers_are_put_back(obeyed_signals: None) -> Iterator[None]:
    before = handlers()
    yield
    assert handlers() == before


def raised(number: int) -> None:
    os.kill(os.getpid(), number)


@each_signal
def test_a_signal_is_noted_and_the_handlers_are_restored(number) -> None:
    before = handlers()
    with StopOnSignal() as stop:
        stop.check()
        assert handlers() != before
        raised(number)
        assert stop.number == number and handlers() == before
        with pytest.raises(StoppedError, match=f"stopped by signal {int(number)}") as caught:
            stop.check()
    assert caught.value.exit_status == 128 + number


@each_signal
def test_at_once_raises_on_arrival_and_no_library_can_swallow_it(number) -> None:
    with pytest.raises(StoppedError), StopOnSignal(at_once=True):
        try:
            raised(number)
        except Exception as error:  # as libraries do
            raise AssertionError("swallowed") from error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_second_signal_ends_the_process_as_it_would_have_outside(number) -> None:
    def twice() -> None:
        with StopOnSignal(at_once=True), StopOnSignal():
            raised(number)
            raised(number)

    assert status_of(twice) == -number


def test_what_the_process_ignores_it_goes_on_ignoring() -> None:
    """`nohup` asks a run to outlive its terminal in this way."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopOnSignal(at_once=True) as stop:
            raised(signal.SIGHUP)
            assert stop.number is None
            with pytest.raises(StoppedError):
                raised(signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_it_does_nothing() -> None:
    found: list[int | None] = []

    def work() -> None:
        with StopOnSignal() as stop:
            found.append(stop.number)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [None]


@pytest.fixture(scope="module")
def base(load_model: Any) -> nn.Module:
    return load_model()


def runs_in(place: Path, base: nn.Module) -> Runs:
    """Of four steps; two samples to evaluate on, one at a time."""
    settings = {
        "gradient_accumulation_steps": 2,
        "warmup_steps": 2,
        "save_steps": 2,
        "eval_steps": 2,
        "smoke_test": True,
    }
    return Runs(base, place, lambda: records(8), settings=settings, eval_data=records(2, seed=7))


@pytest.fixture
def here(base: nn.Module, tmp_path: Path) -> Runs:
    return runs_in(tmp_path, base)


@pytest.fixture(scope="module")
def whole(base: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = runs_in(tmp_path_factory.mktemp("whole"), base)
    made.run("whole")
    return made


def in_front_of(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, call: int = 0
) -> None:
    """A signal before one call of a function."""
    original, calls = getattr(owner, name), iter(range(10**6))

    def function(*arguments: Any, **more: Any) -> Any:
        if next(calls) == call:
            raised(number)
        return original(*arguments, **more)

    monkeypatch.setattr(owner, name, function)


BEFORE: dict[str, tuple[Any, str, int]] = {
    "the check of the base": (trainer_module, "base_fault", 0),
    "the base's hash": (trainer_module, "base_identity", 0),
    "the smoke test": (trainer_module, "smoke_test", 0),
    "the first evaluation": (evaluate_module, "compare_pairs", 0),
    "the middle of the first evaluation": (evaluate_module, "compare_pairs", 1),
    "the audit": (start, "audit_precision", 0),
    "the folder": (RunFolder, "__init__", 0),
    "its first file": (RunFolder, "write", 0),
    "the trackers": (Trackers, "__init__", 0),
}


@with_signals("phase", BEFORE)
def test_before_training_a_signal_ends_the_run_and_nothing_is_left(
    here, monkeypatch, phase, number
) -> None:
    owner, name, call = BEFORE[phase]
    in_front_of(monkeypatch, owner, name, number, call)
    with pytest.raises(StoppedError) as caught:
        here.run("run")
    assert caught.value.exit_status == 128 + number
    assert list(here.place.iterdir()) == []


WITHIN: dict[str, tuple[Any, str, int, int]] = {
    "the end of the first evaluation inside the run": (evaluate_module, "compare_pairs", 3, 2),
    "the best adapters": (RunFolder, "save_best", 0, 2),
    "the check of a save": (manifest_module, "_sums", 7, 2),
    "the last save": (RunFolder, "save_checkpoint", 1, 4),
    "the end": (Trackers, "close", 0, 4),
}
"""The function that is called, at which call of it, and the step that the run is at."""


@with_signals("phase", WITHIN)
def test_a_signal_in_any_phase_leaves_a_run_that_resumes_exactly(
    here, whole, monkeypatch, phase, number
) -> None:
    owner, name, call, step = WITHIN[phase]
    with monkeypatch.context() as patched:
        in_front_of(patched, owner, name, number, call)
        trainer = here.trainer("run", smoke_test=False)
        result = trainer.train()
    assert trainer.setup.stop.number == number, "the phase was not met"
    assert result.steps == step
    if phase != "the end":
        assert result.exit_status == 128 + number and result.fidelity is None
        assert events(here.place / "run", "signal")[0]["number"] == number
    here.run("run", resume="auto", smoke_test=False)
    here.outcome("run").assert_equal(whole.outcome("whole"))


def test_a_source_that_never_answers_does_not_hold_a_signal_up(base, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        "npt.data.samples._CLOSE_SECONDS", 0.1
    )  # for which the thread is waited for
    answered = threading.Event()

    class Stalled:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            yield from records(40)
            threading.Timer(0.4, raised, [signal.SIGTERM]).start()
            answered.wait()

    here = Runs(
        base,
        tmp_path,
        Stalled,
        data_settings={"streaming": True},
        settings={"batch_size": 20, "max_steps": 9},
    )
    try:
        started = time.monotonic()
        result = here.run("run")
        # half a second of it for the signal; the rest is spare
        assert result.exit_status == 143 and time.monotonic() - started < 30
    finally:
        answered.set()
    assert events(tmp_path / "run", "save")


@each_signal
def test_the_program_ends_in_one_line_and_128_and_the_number(
    tmp_path, monkeypatch, capsys, number
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raised(number)
        raise AssertionError("kept loading")

    monkeypatch.setattr(npt, "load_base", interrupted)
    assert (
        main(["pretrain", "--use_quantization", "--output_dir", str(tmp_path / "run")])
        == 128 + number
    )
    assert capsys.readouterr().err == f"npt: stopped by signal {int(number)}\n"
    assert not (tmp_path / "run").exists()
