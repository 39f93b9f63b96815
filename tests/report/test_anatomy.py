"""The anatomy of one refused batch, from the events of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_runs import Reader, event, make_run, refusal

from npt.report.anatomy import BOXES, anatomy
from npt.report.page import page
from npt.report.run import read_run

GRADIENT = "gradient of model.layers.6.npt.B.up has norm nan (1 of 28 tensors)"


def run_of(place: Path, *happened: dict[str, Any], of: int = 4, processes: int = 1) -> Path:
    events = [
        event("start", total_steps=12, processes=processes),
        *happened,
        event("done", steps=12),
    ]
    folder = make_run(place / "run", events=events)
    text = (folder / "run.json").read_text()
    settings = f'"settings": {{"gradient_accumulation_steps": {of}, '
    (folder / "run.json").write_text(text.replace('"settings": {', settings))
    return folder


def found_in(folder: Path) -> Any:
    return anatomy(read_run(folder))


def test_a_run_without_refusals_has_none(tmp_path) -> None:
    folder = run_of(tmp_path)
    assert found_in(folder) is None
    assert "Anatomy" not in page(read_run(folder), folder / "report.html")


def test_a_micro_batch_is_kept_out_and_the_others_step(tmp_path) -> None:
    said = event("diagnosis", step=5, micro_batch=1, message="student logits: 3 NaN")
    found = found_in(run_of(tmp_path, refusal(5, "gradient", GRADIENT, micro_batch=1), said))
    assert [state for _, state in found["boxes"]] == ["kept", "refused", "kept", "kept"]
    assert dict(found["facts"])["tensor"] == "model.layers.6.npt.B.up"
    assert dict(found["facts"])["looked at again"] == "student logits: 3 NaN"
    assert dict(found["facts"])["samples"] == "a.txt@0, b.txt@64"
    assert found["made"] and "the other 3 micro-batches" in found["end"]
    assert "torch.where" in found["kept_out"]


def test_a_refused_window_steps_not_at_all(tmp_path) -> None:
    whole = refusal(5, "norm", f"gradient norm of the window is inf: {GRADIENT}", micro_batch=None)
    found = found_in(run_of(tmp_path, whole))
    assert {state for _, state in found["boxes"]} == {"refused"} and not found["made"]
    assert found["where"] == "the whole window" and "A later window made step 5" in found["end"]


def test_a_window_without_survivors_steps_not_at_all(tmp_path) -> None:
    found = found_in(run_of(tmp_path, *(refusal(5, micro_batch=i) for i in range(4))))
    assert not found["made"] and found["others"] == 3


def test_what_was_restored_is_said(tmp_path) -> None:
    detail = "exp_avg of layers.0.npt.A was not finite after the step; the state before it was"
    found = found_in(run_of(tmp_path, refusal(5, "update", detail, micro_batch=None)))
    assert "restored" in found["kept_out"]
    assert dict(found["facts"])["tensor"] == "exp_avg of layers.0.npt.A"


def test_refusals_of_one_step_may_be_of_several_windows(tmp_path) -> None:
    """A step is tried again with the next window."""
    tried = [refusal(5, micro_batch=i) for i in (0, 1, 0, 1)]
    assert found_in(run_of(tmp_path, *tried, of=2))["of"] == 2


def test_the_refusal_that_says_most_is_shown(tmp_path) -> None:
    data = refusal(2, "data", "token id 999 outside the vocabulary")
    named = refusal(7, "gradient", GRADIENT, micro_batch=2)
    found = found_in(run_of(tmp_path, data, refusal(4), named, refusal(9)))
    assert found["step"] == 7 and found["of"] == 4


def test_what_never_came_to_a_step_says_so(tmp_path) -> None:
    events = [event("start", processes=1), refusal(13, micro_batch=None, kind="spike")]
    folder = make_run(tmp_path / "run", events=[*events, event("stopped", step=12)])
    assert "step 13 was never made" in found_in(folder)["end"]


@pytest.mark.parametrize(("of", "processes", "count"), [(4, 2, 8), (64, 1, 64), (1, 1, 3)])
def test_the_window_has_the_micro_batches_of_all_processes(tmp_path, of, processes, count) -> None:
    made = found_in(run_of(tmp_path, refusal(5, micro_batch=2), of=of, processes=processes))
    assert len(made["boxes"]) == min(count, BOXES) and len(made["boxes"]) + made["more"] == count


def test_an_event_may_hold_anything(tmp_path) -> None:
    hostile = "</script><script>alert(1)</script> gradient of <b>x</b> has norm nan"
    odd = refusal(5, {"a": 1}, hostile, micro_batch="x", sample_ids={"<i>": 1})  # type: ignore[arg-type]
    folder = run_of(tmp_path, odd, refusal(6, "gradient", hostile, sample_ids=["<img src=x>"]))
    reader = Reader(page(read_run(folder), folder / "report.html"))
    assert not reader.of("script") and not reader.of("img") and not reader.of("b")
    assert "Anatomy of one refused batch" in reader.text and "<img src=x>" in reader.text
