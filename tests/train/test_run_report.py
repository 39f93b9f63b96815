"""The report that a run writes at its end: whichever end that is, and whatever goes wrong with
it.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from resumed_runs import Runs, at, events, records

from npt.errors import TooManyRefusalsError
from npt.report.run import RunRecord
from npt.train.journal import write_report


@pytest.fixture
def here(load_model: Any, tmp_path: Path) -> Runs:
    """Runs of six records."""
    return Runs(
        load_model(), tmp_path, lambda: records(6), eval_data=records(2, seed=7), report=True
    )


def text(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def test_a_finished_run_has_a_report_and_what_it_is_made_of(here) -> None:
    folder = here.run("run", max_steps=3, save_steps=2).folder
    assert "Finished at step 3" in text(folder)
    assert text(folder).count('href="./checkpoints/step-') == 2
    before = text(folder)
    write_report(folder)
    assert text(folder) == before  # the folder alone is enough


def test_a_run_that_gives_up_has_a_report_with_its_refusals(here) -> None:
    def poisoned() -> list[dict[str, Any]]:
        made = records(6)
        for record in made[1:]:
            record["input_ids"][1] = 999
        return made

    with pytest.raises(TooManyRefusalsError):
        here.run("run", data=poisoned, max_consecutive_bad=3)
    folder = here.place / "run"
    assert "Stopped in step" in text(folder) and "3 refusals in a row" in text(folder)
    assert "token id 999 outside the vocabulary" in text(folder)
    assert 'href="./postmortem/step-' in text(folder)


def test_a_run_stopped_by_a_signal_has_a_report_and_its_status(here) -> None:
    result = here.run("run", at(3))
    assert result.exit_status == 128 + signal.SIGTERM
    assert "Ended by signal 15" in text(result.folder)


def test_a_run_that_ends_with_an_error_has_a_report_and_raises_it(here) -> None:
    def broken(count: int, batch: Any) -> None:
        if count == 2:
            raise ZeroDivisionError("by <b>design</b>")

    with pytest.raises(ZeroDivisionError):
        here.run("run", broken)
    assert "Ended with an error at step 2: ZeroDivisionError: by &lt;b&gt;design&lt;/b&gt;" in text(
        here.place / "run"
    )


def test_a_resumed_run_has_one_report_of_all_its_steps(here) -> None:
    here.killed("run", at(3, signal.SIGKILL), save_steps=2)
    assert not (here.place / "run" / "report.html").exists()
    write_report(here.place / "run")
    assert "Still running or killed" in text(here.place / "run")
    folder = here.run("run", resume="auto").folder
    assert "Finished at step 6" in text(folder) and "<td>resume</td>" in text(folder)
    assert RunRecord(folder).steps == list(range(1, 7))


def test_an_unwritable_report_is_warned_of_and_changes_nothing(here, monkeypatch) -> None:
    whole = here.run("whole", max_steps=3)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no ink")

    monkeypatch.setattr("npt.train.journal.write_report", fail)
    result = here.run("run", max_steps=3)
    assert result.exit_status == 0 and result.fidelity == whole.fidelity
    (warning,) = (event["message"] for event in events(result.folder, "warning"))
    assert warning.startswith("cannot write report.html") and "RuntimeError: no ink" in warning
    assert warning in here.said.getvalue()
    assert not (result.folder / "report.html").exists()


@pytest.mark.usefixtures("obeyed_signals")
def test_a_second_signal_does_not_wait_for_a_report(here) -> None:
    def twice(count: int, batch: Any) -> None:
        if count == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        here.run("run", twice)
    assert not (here.place / "run" / "report.html").exists()
