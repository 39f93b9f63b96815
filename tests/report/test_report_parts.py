"""Reading the files of a run: half lines, repeated steps, what was undone; and putting many steps
on few columns.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from made_runs import event, metrics, refusal, write_lines

from npt.report.buckets import Axis, buckets, coarser
from npt.report.charts import PALETTE, Scale, colour, heat_map, line_chart
from npt.report.events import read_events
from npt.report.lines import Lines
from npt.report.markup import clean, link, number, plus_minus, text
from npt.report.metrics import read_metrics


def test_lines_that_are_no_objects_are_counted_and_a_half_written_one_is_not(tmp_path) -> None:
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
# ---------------------------------------------------------------------------------------------------------


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
    assert found.layers == [7] and found.last("loss") == 0.5


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
# ----------------------------------------------------------------------------------------------------------


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
    # The refusal at step 11 stands in front of the save, so that the checkpoint has counted it; it
    # bears a later step all the same.
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


# --- columns
# ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 10**6), st.integers(0, 5000), st.integers(1, 500), st.data())
def test_every_step_lies_in_the_column_whose_steps_hold_it(first, span, columns, data) -> None:
    axis = Axis.of([first, first + span], columns)
    step = data.draw(st.integers(first, first + span))
    low, high = axis.steps(axis.column(step))
    assert low <= step <= high
    assert 0 <= axis.column(step) < axis.columns and 0 < axis.middle(axis.column(step)) < 1
    assert axis.shared == (axis.columns < span + 1)


values_of = st.lists(
    st.one_of(st.floats(-1e300, 1e300), st.just(math.inf), st.just(math.nan)),
    min_size=1,
    max_size=200,
)


@given(values_of, st.integers(1, 12), st.integers(1, 7))
def test_columns_lose_neither_the_extremes_nor_what_is_not_finite(values, columns, apart) -> None:
    steps = [5 + apart * i for i in range(len(values))]
    axis = Axis.of(steps, columns)
    found = buckets(axis, steps, values)
    finite = [value for value in values if math.isfinite(value)]
    assert sum(b.count for b in found.values()) == len(finite)
    assert sum(b.bad for b in found.values()) == sum(math.isinf(value) for value in values)
    if finite:
        assert min(b.low for b in found.values()) == min(finite)
        assert max(b.high for b in found.values()) == max(finite)
    assert list(found) == sorted(found)
    for bucket in found.values():
        assert not bucket.count or bucket.low <= bucket.mean <= bucket.high


@given(values_of, st.integers(1, 40))
def test_columns_of_columns_are_the_columns_of_all_values(values, columns) -> None:
    steps = list(range(1, len(values) + 1))
    fine, coarse = Axis.of(steps, 4 * columns), Axis.of(steps, columns)
    direct, merged = (
        buckets(coarse, steps, values),
        coarser(fine, coarse, buckets(fine, steps, values)),
    )
    assert list(direct) == list(merged)
    for column, bucket in direct.items():
        other = merged[column]
        assert (bucket.low, bucket.high, bucket.count, bucket.bad) == (
            other.low,
            other.high,
            other.count,
            other.bad,
        )


# --- pictures
# --------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5),
    st.sampled_from([None, False, True]),
)
@example([2e-79, 1e287], None)  # powers of ten at its upper end are no numbers any more
@example([8.6e21, 1e300], None)
@example([-4e-320], False)  # a tick's step has no digits left
@example([5.83e-320, 5.84e-320], True)
@example([1.0, 1.0000000000000002], True)
@example([-1.7e308, 1.7e308], None)  # their difference is no number
def test_a_scale_holds_its_numbers_and_has_a_few_ticks_within(values, log) -> None:
    scale = Scale.of(values, log if min(values) > 0 else None)
    assert scale is not None
    places = [scale.place(value) for value in values]
    assert all(0 <= place <= 1 for place in places)
    assert sorted(places) == [place for _, place in sorted(zip(values, places, strict=True))]
    ticks = scale.ticks()
    assert len(ticks) <= 12 and all(math.isfinite(tick) for tick in ticks)


@pytest.mark.parametrize(
    "numbers",
    [
        [0.01, 0.09],
        [1e-8, 1.0],
        [5.0],
        [0.0],
        [0.0, 1e-12],
        [1e-320, 1.0],
        [-3.0, 4.0],
        [3000, 3001],
        [7e20, 7.1e20],
    ],
)
def test_every_scale_shows_at_least_one_tick(numbers) -> None:
    assert Scale.of(numbers).ticks()


def test_a_spike_of_one_step_in_a_hundred_thousand_reaches_the_picture() -> None:
    steps = list(range(1, 100_001))
    values = [1.0] * len(steps)
    axis = Axis.of(steps)
    flat = line_chart(axis, [("first", buckets(axis, steps, values))], "flat")
    values[54_321] = 900.0
    spiked = line_chart(axis, [("first", buckets(axis, steps, values))], "spiked")
    assert "band" not in flat and "band" in spiked
    highest = [
        float(y)
        for pair in spiked.partition('class="band first" d="M')[2].partition("z")[0].split("L")
        for y in pair.split()[1:]
    ]
    assert min(highest) < 100  # near the upper end of a picture 1000 high
    assert len(spiked) < 30_000


def test_a_number_that_is_not_finite_breaks_the_line_and_is_marked() -> None:
    axis = Axis.of([1, 5])
    picture = line_chart(
        axis, [("first", buckets(axis, [1, 2, 3, 4, 5], [1.0, 2.0, math.inf, 2.0, 1.0]))], "broken"
    )
    assert picture.count("not finite at step 3") == 1
    assert picture.partition('class="line first" d="')[2].partition('"')[0].count("M") == 2


def test_a_heat_map_has_a_class_for_small_large_zero_and_broken_cells() -> None:
    axis = Axis.of([1, 4], 120)
    cells = {7: buckets(axis, [1, 2, 3, 4], [1e-6, 1.0, 0.0, math.inf])}
    picture, scale = heat_map(axis, [7], cells, "heat")
    for kind in ("c0", f"c{len(PALETTE) - 1}", "nought", "broken"):
        assert f'class="{kind}" d="M' in picture
    assert [colour(bucket, scale) for bucket in cells[7].values()] == [
        "c0",
        "c15",
        "nought",
        "broken",
    ]


def test_a_value_stands_until_the_next_one_is_logged() -> None:
    axis = Axis.of([1, 100], 100)
    picture, _ = heat_map(axis, [0], {0: buckets(axis, [1, 50, 100], [1.0, 2.0, 4.0])}, "heat")
    assert (
        "M0 0h49v1h-49z" in picture and "M49 0h50v1h-50z" in picture and "M99 0h1v1h-1z" in picture
    )


# --- text
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hostile",
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "' onload='x",
        "</title>",
        "&lt;",
        "a\x00b\u202ec\ud800",
    ],
)
def test_text_cannot_leave_its_place(hostile) -> None:
    shown = text(hostile)
    assert not set(shown) & set("<>\"'\x00\u202e\ud800")
    shown.encode("utf-8")


@given(st.text(), st.integers(1, 400))
def test_text_is_bounded_and_can_be_encoded(value, limit) -> None:
    text(value, limit).encode("utf-8")
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


def test_a_link_is_relative_and_can_be_no_other_kind_of_address(tmp_path) -> None:
    folder = tmp_path / "a" / 'javascript:alert(1)"<x>'
    folder.mkdir(parents=True)
    made = link(folder, tmp_path / "page.html", "x")
    assert made == '<a href="./a/javascript%3Aalert%281%29%22%3Cx%3E/">x</a>'
    assert (
        link(tmp_path / "b.txt", tmp_path / "a" / "page.html", "b") == '<a href="./../b.txt">b</a>'
    )
    assert link(Path("run/c"), Path("run/report.html"), "c") == '<a href="./c">c</a>'


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


def test_json_of_the_standard_library_writes_what_is_read_as_not_finite(tmp_path) -> None:
    (tmp_path / "m").write_text(
        json.dumps({"step": 1, "loss": math.nan, "grad_norm": -math.inf}) + "\n", encoding="utf-8"
    )
    found = read_metrics(Lines(tmp_path / "m"))
    assert math.isinf(found.columns["loss"][0]) and math.isinf(found.columns["grad_norm"][0])
