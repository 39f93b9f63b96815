"""Reading the files of a run: half lines, repeated steps, what was undone; and values as words."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import event, figures, make_run, metrics, refusal, write_lines

from npt.report.run import RunRecord
from npt.report.words import address, as_number, clean, figure, number


def read_metrics(folder: Path, *lines: dict[str, Any]) -> RunRecord:
    write_lines(folder / "metrics.jsonl", list(lines))
    return RunRecord(folder)


def read_events(folder: Path, *lines: dict[str, Any]) -> RunRecord:
    write_lines(folder / "events.jsonl", list(lines))
    return RunRecord(folder)


def test_lines_that_are_no_object_are_counted_but_for_half_a_last_one(tmp_path) -> None:
    lines = b'\xff\xfe\n{"step": 1}\n\n[2]\n' + b"[" * 100_000 + b'\n{"step": 3}\n{"step": 4'
    (tmp_path / "metrics.jsonl").write_bytes(lines)
    record = RunRecord(tmp_path)
    assert record.steps == [1, 3]
    assert record.notes["metrics.jsonl"] == "damaged lines skipped: 3"


def test_steps_that_were_made_again_replace_those_before(tmp_path) -> None:
    first = [metrics(step, loss=1.0) for step in range(1, 9)]
    record = read_metrics(tmp_path, *first, *(metrics(step, loss=2.0) for step in range(5, 11)))
    assert record.steps == list(range(1, 11))
    assert list(record.columns["loss"]) == [1.0] * 4 + [2.0] * 6
    assert all(len(column) == 10 for column in record.columns.values())


def test_null_is_not_finite_and_a_missing_key_is_nothing(tmp_path) -> None:
    record = read_metrics(
        tmp_path,
        {"step": 1, "loss": None, "grad_norm": -math.inf},
        {"step": 2},
        {"step": 3, "loss": 0.5, "layers.7.nmse": math.nan},
        {"step": 4, "loss": "x"},
    )
    loss = record.columns["loss"]
    assert math.isinf(loss[0]) and math.isnan(loss[1]) and loss[2] == 0.5 and math.isnan(loss[3])
    assert [math.isinf(x) for x in record.columns["layers.7.nmse"]] == [False, False, True, False]
    assert math.isinf(record.columns["grad_norm"][0])
    assert record.layers("nmse") == [7] and record.last("loss") == (3, 0.5)


def test_columns_are_those_that_a_run_writes_in_the_order_of_the_file(tmp_path) -> None:
    line = metrics(1, layers=2)
    record = read_metrics(tmp_path, {**line, "layers.01.nmse": 1, "<script>": 2})
    assert list(record.columns) == [key for key in line if key not in ("step", "refused_total")]


@pytest.mark.parametrize("step", [None, "3", -1, 2.5, True, 1e400, 2**60, [1]])
def test_a_line_without_a_step_is_left_out(tmp_path, step) -> None:
    assert read_metrics(tmp_path, {"step": step, "loss": 1.0}).steps == []


def save(step: int) -> dict[str, Any]:
    return event("save", step=step, folder=f"checkpoints/step-{step:08d}")


def resume(step: int, checkpoint: bool = True) -> dict[str, Any]:
    path = f"/some/where/checkpoints/step-{step:08d}" if checkpoint else None
    return event("resume", step=step, checkpoint=path, changed={})


START = event("start")
SAVED = [START, refusal(3), refusal(11), save(10), refusal(11), refusal(14), save(20), refusal(22)]


@pytest.mark.parametrize(
    ("lines", "steps"),
    [
        # the first refusal at step 11 comes before the save, so the checkpoint has counted it
        ([*SAVED, START, resume(10), refusal(12)], [3, 11, 12]),
        ([START, refusal(3), START, resume(0, checkpoint=False), refusal(4)], [4]),
    ],
)
def test_what_lies_between_a_save_and_the_resume_from_it_is_left_out(
    tmp_path, lines, steps
) -> None:
    record = read_events(tmp_path, *lines)
    assert [event["step"] for event in record.of("refusal")] == steps
    assert len(record.of("start")) == 2


@pytest.mark.parametrize(
    ("lines", "state"),
    [
        ([], "unknown"),
        ([START], "open"),
        ([START, event("done", steps=3)], "done"),
        ([START, event("done", steps=3), START, resume(3)], "open"),
        ([START, event("signal", number=15, step=3)], "signal"),
        ([START, event("stopped", step=3), event("error", message="not saved")], "stopped"),
        ([START, event("error", error="DataError", message="x")], "error"),
    ],
)
def test_the_end_is_that_of_the_last_start(tmp_path, lines, state) -> None:
    assert read_events(tmp_path, *lines).end[0] == state


def test_events_of_odd_forms_are_read(tmp_path) -> None:
    odd = [{"event": 3}, {}, {"event": "start", "step": "x"}, {"event": "resume", "step": -7}]
    events = read_events(tmp_path, *odd).events
    assert [(e["event"], e["step"]) for e in events] == [("start", None), ("resume", None)]


def test_links_are_not_followed_out_of_the_folder(tmp_path) -> None:
    folder = make_run(tmp_path / "run")
    for name in ("step-00000008", "step-00000012.broken", "not-one", ".step-00000016.abc.partial"):
        (folder / "checkpoints" / name).mkdir(parents=True)
    (folder / "checkpoints" / "step-00000004").symlink_to(tmp_path)
    names = [path.name for path in RunRecord(folder).checkpoints]
    assert names == ["step-00000008", "step-00000012.broken"]


def test_reading_changes_nothing_in_the_folder(tmp_path) -> None:
    folder = make_run(tmp_path / "run")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    RunRecord(folder)
    assert before == {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}


@given(st.text(), st.integers(1, 400))
def test_text_is_bounded_and_can_be_encoded(value, limit) -> None:
    clean(value, limit).encode("utf-8")
    # a letter that cannot be seen is shown by its number, of ten letters at most
    assert len(clean(value, limit)) <= 10 * limit


@pytest.mark.parametrize(
    ("secret", "shown"),
    [
        ("https://me:hunter2@host/data.json", "https://…@host/data.json"),
        ("token hf_abcdefghijklmnopqrstuvwxyz is bad", "token hf_… is bad"),
        ("GET /x?api_key=123456&y=1", "GET /x?api_key=…&y=1"),
        ("a plain path/with:colons@8", "a plain path/with:colons@8"),
    ],
)
def test_what_looks_like_a_secret_is_left_out(secret, shown) -> None:
    assert clean(secret) == shown


def test_an_address_is_relative_and_of_no_other_kind(tmp_path) -> None:
    folder = tmp_path / "a" / 'javascript:alert(1)"<x>'
    folder.mkdir(parents=True)
    made = address(folder, tmp_path / "page.html")
    assert made == "./a/javascript%3Aalert%281%29%22%3Cx%3E/"
    assert address(tmp_path / "b.txt", tmp_path / "a" / "page.html") == "./../b.txt"
    assert address(Path("run/c"), Path("run/report.html")) == "./c"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"), (0.123456, "0.1235"), (1234567.0, "1.235e6"), (59996, "59,996"),
        (1e-7, "1e−7"), (-0.5, "−0.5"), (None, "–"), (math.nan, "–"), (math.inf, "not finite"),
    ],
)  # fmt: skip
def test_numbers_read_well(value, shown) -> None:
    assert number(value) == shown


def test_a_figure_has_its_standard_error() -> None:
    assert figure(figures(0.02), "kl") == "0.0200 ± 0.0010"
    assert figure({"agreed": 31.5, "agreed_se": 4.0}, "agreed") == "31.5 ± 4"
    assert figure({"kl": None}, "kl") == "not finite" and figure({}, "kl") == "–"
    assert all(math.isnan(as_number({"kl": odd}, "kl")) for odd in ({}, "x", [1], 10**400))
    assert math.isnan(as_number({}, "kl")) and math.isinf(as_number({"kl": math.nan}, "kl"))


def test_pipes_in_place_of_files_are_noted_and_not_waited_for(tmp_path: Path) -> None:
    names = ("run.json", "fidelity.json", "metrics.jsonl", "events.jsonl")
    for name in names:
        os.mkfifo(tmp_path / name)
    record = RunRecord(tmp_path)
    assert all("not a regular file" in record.notes[name] for name in names)
