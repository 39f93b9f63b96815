"""`--behaviour`: what a run measures at its end if it is asked to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from resumed_runs import Runs, events, records

import npt
from npt.errors import ConfigError, NumericalError
from npt.evaluation.behaviour.measure import Behaviour
from npt.train import run_writer
from npt.train.run_checks import check_samples_shown

pytestmark = pytest.mark.usefixtures("real_reports")


@pytest.fixture
def here(load_model: Any, tmp_path: Path) -> Runs:
    """Runs of six records."""
    return Runs(
        load_model(), tmp_path, lambda: records(6), eval_data=records(2, seed=7), report=True
    )


def made(*_: Any, **options: Any) -> Behaviour:
    options["between"]()
    return Behaviour("some text", None, None, None, None, ("this is a note",))


def text(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def test_it_is_measured_once_at_the_end_and_is_in_the_page(here, monkeypatch) -> None:
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        run_writer, "measure_behaviour", lambda *args, **o: given.append(args) or made(**o)
    )
    folder = here.run("run", max_steps=3, behaviour=True).folder
    found = json.loads((folder / "behaviour.json").read_text())
    assert found["step"] == 3 and found["text"] == "some text"
    ((_, _, samples, (name, documents)),) = given
    assert len(samples) == 2 and name == "builtin-prose" and documents
    assert "Teacher and student side by side" in text(folder)


def test_a_run_that_was_not_asked_does_not_measure_it(here, monkeypatch) -> None:
    monkeypatch.setattr(run_writer, "measure_behaviour", None)
    folder = here.run("run", max_steps=1).folder
    assert not (folder / "behaviour.json").exists() and not events(folder, "warning")


def test_a_failure_of_it_is_a_warning_and_the_run_is_done(here, monkeypatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise NumericalError("logits are not finite")

    monkeypatch.setattr(run_writer, "measure_behaviour", fail)
    folder = here.run("run", max_steps=1, behaviour=True).folder
    (said,) = [found["message"] for found in events(folder, "warning")]
    assert said.startswith("behaviour.json could not be written") and "not finite" in said
    assert events(folder, "done")
    assert "behaviour.json</code> says nothing: it is not there" in text(folder)


def test_a_sharded_base_is_refused_what_it_cannot_write() -> None:
    with pytest.raises(ConfigError, match="--behaviour needs answers"):
        check_samples_shown(npt.TrainConfig(behaviour=True))
