"""What metrics.jsonl and events.jsonl hold of a run's last step and of its refusals."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from resumed_runs import Runs, Stream, events, lines, records
from torch import nn

import npt
from npt.errors import CheckpointError, TooManyRefusalsError
from npt.report.run import RunRecord
from npt.runs.checkpoint import read_checkpoint
from npt.runs.run_folder import RunFolder
from npt.runs.trackers import Trackers
from npt.train.journal import Journal
from npt.train.start import run_record


@pytest.fixture
def here(load_model: Callable[..., nn.Module], tmp_path: Path) -> Runs:
    return Runs(load_model(), tmp_path, lambda: Stream(records(6)))


def faulty(count: int, *bad: int) -> list[dict]:
    """Return records, some of which have a token outside the vocabulary."""
    found = records(count)
    for i in bad:
        found[i]["input_ids"][1] = 999
    return found


def steps_of(folder: Path) -> list[int]:
    return [line["step"] for line in lines(folder, "metrics")]


@pytest.mark.parametrize(("every", "logged"), [(4, [1, 4, 6]), (3, [1, 3, 6]), (10, [1, 6])])
def test_the_last_step_of_a_stream_is_logged(here, every, logged) -> None:
    result = here.run("run", log_steps=every)
    assert result.steps == 6 and steps_of(result.folder) == logged
    assert all("loss" in line for line in lines(result.folder, "metrics"))
    assert here.said.getvalue().count("step 6  loss") == 1


def test_a_run_whose_last_windows_were_refused_logs_its_last_step(here) -> None:
    """A list has a known length, which a refused window shortens."""
    result = here.run("run", data=lambda: faulty(6, 2), log_steps=10)
    assert result.steps == 5 and steps_of(result.folder) == [1, 5]
    last = lines(result.folder, "metrics")[-1]
    assert (last["refused_total"], last["refused.data"]) == (1, 1)


def stopped(here: Runs, good: int, monkeypatch: pytest.MonkeyPatch, **settings: int) -> Path:
    """Return the folder of a run that ends because all micro-batches after `good` are refused."""
    numbers = itertools.count()
    monkeypatch.setattr(
        "npt.train.loop.find_fault", lambda *_: "it is bad" if next(numbers) >= good else None
    )
    with pytest.raises(TooManyRefusalsError):
        here.run("run", max_consecutive_bad=2, **settings)
    return here.place / "run"


@pytest.mark.parametrize("every", [1, 10])
def test_a_run_that_stops_on_refusals_logs_their_number(here, monkeypatch, every) -> None:
    logged: list[tuple[dict, int]] = []
    monkeypatch.setattr(Trackers, "log", lambda _, metrics, step: logged.append((metrics, step)))
    folder = stopped(here, 3, monkeypatch, log_steps=every)
    (event,) = events(folder, "stopped")
    assert (event["step"], event["refused"]) == (3, 2)
    assert event["refused_by_kind"] == {"data": 2}
    assert event["refused_by_epoch"] == {"0": 2}
    record = RunRecord(folder)
    assert record.steps[-1] == 3 and record.last("loss")[0] == 3
    # a line of metrics.jsonl is that of a step; the trackers are told the rest
    counts = {"refused_total": 2, "refused.data": 2, "epoch": 0, "refused_in_epoch": 2}
    told, step = logged[-1]
    assert counts.items() <= told.items() and step == 3


def test_a_journal_needs_no_loop(here) -> None:
    trainer = here.trainer("run")
    base = npt.base_identity(here.model)
    path = here.place / "run"
    journal = Journal(
        setup=trainer.setup,
        data=trainer.data,
        folder=RunFolder(path),
        trackers=Trackers(trainer.setup.config, path),
        record=run_record(trainer.setup, trainer.data, base, None),
        base=base,
        measure=trainer.evaluate,
        initial=trainer.evaluate(),
    )
    journal.begin()
    journal.progress.step = 2
    journal.evaluate()
    journal.finish(trainer.evaluate(), seconds=1.0)
    journal.folder.close()
    (evaluation,) = events(path, "evaluation")
    (done,) = events(path, "done")
    assert (evaluation["step"], done["steps"], done["refused"]) == (2, 2, 0)
    assert (path / "run.json").is_file() and (path / "adapter").is_dir()


def test_a_run_without_a_step_logs_its_refusals_too(here, monkeypatch) -> None:
    folder = stopped(here, 0, monkeypatch)
    (event,) = events(folder, "stopped")
    assert (event["step"], event["refused"]) == (0, 2)
    assert RunRecord(folder).steps == []


def test_refusals_are_counted_by_epoch_also_after_a_resume(here) -> None:
    data = Stream(faulty(6, 1, 4))
    settings = {"data": lambda: data, "save_steps": 3, "log_steps": 2}
    whole = here.run("whole", num_epochs=2, **settings)
    (done,) = events(whole.folder, "done")
    assert done["refused_by_epoch"] == {"0": 2, "1": 2}
    assert "refused: 2 in epoch 0, 2 in epoch 1 (the first is 0)" in here.said.getvalue()
    by_epoch = {n["epoch"]: n["refused_in_epoch"] for n in lines(whole.folder, "metrics")}
    assert by_epoch == {0: 2, 1: 1}  # the last one came after the last step
    here.run("cut", num_epochs=1, **settings)
    resumed = here.run("cut", num_epochs=2, resume="auto", **settings)
    assert events(resumed.folder, "done")[-1]["refused_by_epoch"] == {"0": 2, "1": 2}


@pytest.mark.parametrize("value", [[1], {"x": 1}, {"0": -1}, {"0": "many"}, {"-1": 1}, 3])
def test_counts_by_epoch_that_are_none_are_a_damaged_checkpoint(here, monkeypatch, value) -> None:
    result = here.run("run")
    checkpoint = max((result.folder / "checkpoints").iterdir())
    state = checkpoint / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "refused_by_epoch": value}))
    monkeypatch.setattr("npt.runs.checkpoint.verify_checkpoint", lambda folder: None)
    with pytest.raises(
        CheckpointError, match=r"refused_by_epoch is .*, expected (counts by epoch|dict)"
    ):
        read_checkpoint(checkpoint)
