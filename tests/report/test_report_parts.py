"""Reading the files of a run: half lines, repeated steps, what was undone; and values as words."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import event, metrics, refusal, write_lines

from npt.report.logs import Lines, read_events, read_metrics
from npt.report.words import address, clean, number, plus_minus


def test_unreadable_lines_are_counted_but_for_half_a_last_one(tmp_path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n\n[2]\nnonsense\n{"a": 3}\n{"a": 4', encoding="utf-8")
    lines = Lines(path)
    assert [line["a"] for line in lines] == [1, 3]
    assert lines.unreadable == 2


def test_lines_of_any_bytes_are_read(tmp_path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'\xff\xfe\n{"a": 1}\n' + b"[" * 100_000 + b"\n" + b'{"a": 2}\n')
    assert [line["a"] for line in Lines(path)] == [1, 2]


# --- metrics
# --------------------------------------------------------------------------------------------------


def test_steps_that_were_made_again_replace_those_before() -> None:
    lines = [metrics(step, loss=1.0) for step in range(1, 9)] + [
        metrics(step, loss=2.0) for step in range(5, 11)
    ]
    found = read_metrics(lines)
    assert found.steps == list(range(1, 11))
    assert list(found.columns["loss"]) == [1.0] * 4 + [2.0] * 6
    assert found.again == 4
    assert all(len(column) == 10 for column in found.columns.values())


def test_null_is_not_finite_and_a_missing_key_is_nothing() -> None:
    found = read_metrics(
        [
            {"step": 1, "loss": None},
            {"step": 2},
            {"step": 3, "loss": 0.5, "layers.7.nmse": math.nan},
            {"step": 4, "loss": "x"},
        ]
    )
    loss = list(found.columns["loss"])
    assert math.isinf(loss[0]) and math.isnan(loss[1]) and loss[2] == 0.5 and math.isnan(loss[3])
    assert [math.isinf(x) for x in found.columns["layers.7.nmse"]] == [False, False, True, False]
    assert found.layers == [7] and found.last("loss") == (3, 0.5)


def test_columns_are_in_the_order_of_the_file_in_every_process() -> None:
    line = metrics(1, layers=2)
    assert list(read_metrics([line]).columns) == [key for key in line if key != "step"]


@pytest.mark.parametrize("step", [None, "3", -1, 2.5, True, 1e400, 2**60, [1]])
def test_a_line_without_a_step_is_left_out(step) -> None:
    assert read_metrics([{"step": step, "loss": 1.0}]).steps == []


def test_keys_that_no_run_writes_are_not_read() -> None:
    found = read_metrics(
        [
            {
                "step": 1,
                **{f"layers.{i}.nmse": 0.1 for i in range(5000)},
                "layers.01.nmse": 1,
                "<script>": 2,
                "x" * 5000: 3,
            }
        ]
    )
    assert len(found.columns) < 600
    assert "<script>" not in found.columns and "layers.01.nmse" not in found.columns


# --- events
# --------------------------------------------------------------------------------------------------


def save(step: int) -> dict:
    return event("save", step=step, folder=f"checkpoints/step-{step:08d}")


def resume(step: int, checkpoint: bool = True) -> dict:
    return event(
        "resume",
        step=step,
        checkpoint=f"/some/where/checkpoints/step-{step:08d}" if checkpoint else None,
        changed={},
    )


def test_what_lies_between_a_save_and_the_resume_from_it_was_undone() -> None:
    # The first refusal at step 11 comes before the save, so the checkpoint has counted it.
    lines = [
        event("start"),
        refusal(3),
        refusal(11),
        save(10),
        refusal(11),
        refusal(14),
        save(20),
        refusal(22),
        event("start"),
        resume(10),
    ]
    events = read_events([*lines, refusal(12)])
    assert [e.undone for e in events.of("refusal", None)] == [False, False, True, True, True, False]
    assert [e.undone for e in events.of("save", None)] == [False, True]
    assert not any(e.undone for e in events.of("start", None))


def test_of_a_checkpoint_that_no_save_speaks_of_the_step_decides() -> None:
    events = read_events([event("start"), refusal(3), refusal(11), event("start"), resume(10)])
    assert [e.undone for e in events.of("refusal", None)] == [False, True]


def test_a_start_without_a_checkpoint_undoes_everything() -> None:
    events = read_events(
        [event("start"), refusal(3), event("start"), resume(0, checkpoint=False), refusal(4)]
    )
    assert [e.undone for e in events.of("refusal", None)] == [True, False]


@pytest.mark.parametrize(
    ("lines", "state"),
    [
        ([], "unknown"),
        ([event("start")], "open"),
        ([event("start"), event("done", steps=3)], "done"),
        ([event("start"), event("done", steps=3), event("start"), resume(3)], "open"),
        ([event("start"), event("signal", number=15, step=3)], "signal"),
        (
            [
                event("start"),
                event("stopped", step=3, reason="x"),
                event("error", message="not saved"),
            ],
            "stopped",
        ),
        ([event("start"), event("error", error="DataError", message="x")], "error"),
    ],
)
def test_the_end_is_that_of_the_last_start(lines, state) -> None:
    assert read_events(lines).end[0] == state


def test_events_of_odd_forms_are_read(tmp_path) -> None:
    write_lines(
        tmp_path / "e",
        [
            {"event": 3},
            {},
            {"event": "refusal", "step": "x", "time": "y"},
            {"event": "resume", "checkpoint": 7},
        ],
    )
    events = read_events(Lines(tmp_path / "e"))
    assert [(e.kind, e.step, e.time) for e in events.all] == [
        ("refusal", None, None),
        ("resume", None, None),
    ]


# --- text
# --------------------------------------------------------------------------------------------------


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
        (0.0, "0"),
        (0.123456, "0.1235"),
        (1234567.0, "1.235e6"),
        (59996, "59,996"),
        (1e-7, "1e−7"),
        (-0.5, "−0.5"),
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "not finite"),
    ],
)
def test_numbers_read_well(value, shown) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("value", "error", "shown"),
    [
        (0.1214, 0.004, "0.1214 ± 0.0040"),
        (759.2, 186.3, "759 ± 186"),
        (1.00000015, 2e-8, "1"),
        (0.5, None, "0.5"),
        (0.5, math.nan, "0.5"),
        (None, 0.1, "–"),
    ],
)
def test_a_standard_error_has_two_digits(value, error, shown) -> None:
    assert plus_minus(value, error) == shown


def test_nan_and_infinity_of_the_json_module_are_not_finite(tmp_path) -> None:
    (tmp_path / "m").write_text(
        json.dumps({"step": 1, "loss": math.nan, "grad_norm": -math.inf}) + "\n", encoding="utf-8"
    )
    found = read_metrics(Lines(tmp_path / "m"))
    assert math.isinf(found.columns["loss"][0]) and math.isinf(found.columns["grad_norm"][0])
