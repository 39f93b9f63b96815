"""Every picture of every page: XML of its own, numbers that are numbers, nothing outside its frame,
whatever it is drawn of.
"""

from __future__ import annotations

import math
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import Reader, event, fidelity, make_run, metrics, modulation, refusal

sys.path.append(str(Path(__file__).parents[1] / "sweep"))

from made_study import table

from npt.report.buckets import Axis, buckets
from npt.report.charts import (
    Mark,
    Point,
    Scale,
    Stop,
    dots,
    heat_map,
    histogram,
    lanes,
    line_chart,
    track,
)
from npt.report.page import page
from npt.report.run import read_run
from npt.tools.sweep import figures
from npt.tools.sweep.analysis import Cell, Map, stability_map
from npt.tools.sweep.effects import Analysis, Effect
from npt.tools.sweep.page import Study
from npt.tools.sweep.page import page as study_page

LETTER = 6.6
"""Width of a letter of 11 px at most, on average over a line of a common sans-serif font."""

ODD = st.one_of(
    st.none(), st.floats(), st.sampled_from([0.0, -0.0, 1e-300, 1e300, math.inf, math.nan])
)
"""Figures as rows may have them."""


def svgs(html: str) -> list[str]:
    """The outermost pictures of a page."""
    found, depth, start = [], 0, 0
    for tag in re.finditer(r"<svg\b|</svg>", html):
        if tag[0] == "<svg":
            start = tag.start() if depth == 0 else start
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                found.append(html[start : tag.end()])
    assert depth == 0
    return found


def check(svg: str) -> ET.Element:
    """Assert that it is sound."""
    root = ET.fromstring(svg)
    for element in root.iter():
        for name, value in element.attrib.items():
            if name in ("aria-label", "class"):
                continue
            assert not re.search(r"nan|inf", value, re.IGNORECASE), (element.tag, name, value)
            for share in re.findall(r"(-?[\d.]+)%", value):
                assert 0 <= float(share) <= 100, (element.tag, name, value)
    assert root.get("role") == "img" and len(root.get("aria-label") or "") > 3
    return root


def check_frame(svg: str) -> None:
    """Assert that a picture with a frame has everything within it."""
    root = check(svg)
    _, _, width, height = map(float, (root.get("viewBox") or "").split())

    def within(x: float, y: float, what: object) -> None:
        assert -0.5 <= x <= width + 0.5 and -0.5 <= y <= height + 0.5, (what, x, y, width, height)

    for element in root.iter():
        if element.tag == "rect":
            x, y, w, h = (float(element.get(name, "0")) for name in ("x", "y", "width", "height"))
            within(x, y, element.attrib), within(x + w, y + h, element.attrib)
            assert w >= 0 and h >= 0
        elif element.tag == "text":
            x, y, room = (
                float(element.get("x", "0")),
                float(element.get("y", "0")),
                LETTER * len(element.text or ""),
            )
            left = (
                x - room / 2
                if "mid" in element.get("class", "")
                else x - room
                if "end" in element.get("class", "")
                else x
            )
            within(
                max(left, 0.0) if "mid" in element.get("class", "") and left > -8 else left,
                y,
                element.text,
            )
            within(
                min(left + room, width) if left + room < width + 8 else left + room, y, element.text
            )
        elif element.tag == "path" and element.get("transform"):
            within(
                *map(float, re.findall(r"[-\d.]+", element.get("transform", ""))), element.attrib
            )
        elif element.tag == "path":
            for x, y in re.findall(r"M(-?[\d.]+) (-?[\d.]+)", element.get("d", "")):
                within(float(x), float(y), element.attrib)
            for x in re.findall(r"H(-?[\d.]+)", element.get("d", "")):
                within(float(x), 0, element.attrib)
            for y in re.findall(r"V(-?[\d.]+)", element.get("d", "")):
                within(0, float(y), element.attrib)


def ids_of(html: str) -> list[str]:
    return [found["id"] or "" for _, found in Reader(html).elements if "id" in found]


RUNS = {
    "finished": {},
    "nothing": dict.fromkeys(("run", "metrics", "events", "fidelity", "modulation")),
    "one step": {"metrics": [metrics(1)], "modulation": modulation(1)},
    "constant": {
        "metrics": [metrics(s, loss=1.0, grad_norm=0.0, lr=0.0) for s in range(1, 9)],
        "fidelity": fidelity(1.2),
    },
    "not finite": {
        "metrics": [
            metrics(s, loss=None, grad_norm=math.nan, lr=1e308, **{"layers.1.nmse": None})
            for s in (1, 2, 3)
        ],
        "fidelity": fidelity(None),
        "modulation": modulation(
            3,
            counts=[0] * 40,
            saturated=None,
            bad=1.0,
            mean=None,
            std=None,
            add_rms=None,
            product_rms=None,
        ),
    },
    "gave up": {
        "events": [
            event("start"),
            *(refusal(13, detail='<svg onload="x">&') for _ in range(3)),
            event("stopped", step=12, reason="x"),
        ]
    },
}


@pytest.mark.parametrize("kind", RUNS)
def test_every_picture_of_a_runs_page_is_sound(tmp_path, kind) -> None:
    folder = make_run(tmp_path / "run", **RUNS[kind])
    html = page(read_run(folder), folder / "report.html")
    assert len(ids_of(html)) == len(set(ids_of(html)))
    for svg in svgs(html):
        check(svg)


ROWS = table()
STUDIES = {
    "whole": ROWS,
    "one trial": ROWS[:1],
    "all diverged": [{**row, "outcome": "diverged", "kl": None} for row in ROWS],
    "constant": [
        {**row, "kl": 0.5, "parameters": 10, "seconds_start": 0.0, "seconds_training": 0.0}
        for row in ROWS
    ],
    "zero": [{**row, "kl": 0.0, "kl_se": 0.0} for row in ROWS],
    "not finite": [{**row, "kl": math.inf, "kl_se": math.nan, "fault_harm": None} for row in ROWS],
    "hostile": [
        {**row, "arms": row["arms"] and f'<b a="1">&\x00{row["arms"]}' * 9} for row in ROWS
    ],
}


@pytest.mark.parametrize("kind", STUDIES)
def test_every_picture_of_a_studys_page_is_sound_in_the_page_and_as_a_file(kind) -> None:
    study = Study("made", STUDIES[kind])
    html = study_page(study)
    assert len(ids_of(html)) == len(set(ids_of(html)))
    assert sorted(svgs(html)) == sorted(study.pictures.values())
    for svg in study.pictures.values():
        check_frame(svg)
        assert svg.startswith("<svg") and "prefers-color-scheme: dark" in figures.standalone(svg)
        assert ET.fromstring(figures.standalone(svg)).tag == "{http://www.w3.org/2000/svg}svg"


def test_a_map_names_both_of_its_settings_and_what_its_colours_mean() -> None:
    found = stability_map(ROWS, "forms", ["mult_form", "learning_rate", "seed"])
    assert found is not None
    drawn = figures.map_figure(found)
    said = [text.text for text in ET.fromstring(drawn).iter("text")]
    assert (
        "rows: mult_form" in said and "columns: learning rate, one for each that was tried" in said
    )
    assert "colour and number: median KL in the end, nats, logarithmic" in said
    assert {
        "ended worse, of so many",
        "diverged, of so many",
        "the edge: from here on some trial failed",
    } <= set(said)


def test_a_standard_error_is_a_whisker_and_none_is_none() -> None:
    scale = Scale.of([0.01, 1.0], log=True)
    assert scale is not None
    drawn = dots(
        [("4", {"student": Point(0.1, 0.05), "floor": Point(0.5)})], scale, "NMSE", "one layer"
    )
    (whisker,) = re.findall(r'<line class="whisker student" x1="([\d.]+)%" x2="([\d.]+)%"', drawn)
    assert [float(end) for end in whisker] == pytest.approx(
        [100 * scale.place(x) for x in (0.05, 0.15)], abs=0.01
    )
    # a bar on a scale that does not begin at 0 has a length that says nothing
    assert "<rect" not in drawn


@settings(deadline=None, max_examples=40)
@given(st.lists(ODD, max_size=6), st.integers(1, 5))
def test_charts_of_a_run_are_sound_whatever_the_numbers(values, first) -> None:
    numbers = [math.nan if value is None else value for value in values]
    axis = Axis.of(range(first, first + len(values)))
    columns = buckets(
        axis, range(first, first + len(values)), [math.inf if math.isinf(x) else x for x in numbers]
    )
    check(line_chart(axis, [("first", columns)] if columns else [], "a line", unit="<nats>"))
    check(heat_map(axis, [0], {0: columns}, "a heat map", first)[0])
    check(lanes(axis, [("loss", "refusal", {0: Mark("x")})], "some lanes"))
    finite = [x for x in numbers if math.isfinite(x)]
    scale = Scale.of(finite)
    if scale is not None:
        check(
            dots([("0", {"student": Point(x, abs(x))}) for x in finite], scale, "NMSE", "some dots")
        )
    stops = [Stop("student", x, x, x, "x") for x in finite if abs(x) < 1e9]
    check(track(stops, "a track"))
    check(histogram([int(min(9, abs(x))) for x in finite], "a histogram"))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(ODD, ODD, ODD), min_size=1, max_size=5), st.booleans())
def test_pictures_of_a_study_are_sound_whatever_the_numbers(values, chance) -> None:
    check_frame(figures.limits_figure([("x" * 99, a, b) for a, b, _ in values], "learning_rate"))
    rows = [{"fault_harm": a, "fault_refused": chance, "kl": b, "kl_se": c} for a, b, c in values]
    check_frame(figures.faults_figure(rows, ["a fault"] * len(rows)))
    ends = [
        tuple(x if x is not None and math.isfinite(x) else 0.0 for x in each) for each in values
    ]
    if chance:
        ends = [tuple(min(1.0, abs(x)) for x in each) for each in ends]
    effects = tuple(
        Effect("rate", str(i), a, min(b, c), max(b, c), 3) for i, (a, b, c) in enumerate(ends)
    )
    check_frame(
        figures.effects_figure([Analysis("KL", 9, effects, {"rate": 0.5}, 0.5, None, chance)])
    )
    stable = [
        {
            "kl": abs(b) or 1.0,
            "kl_se": c,
            "parameters": 1 + abs(int(min(9.0, a))),
            "seconds_training": 1.0,
        }
        for a, b, c in ends
    ]
    check_frame(figures.pareto_figure(stable, dict.fromkeys(range(len(stable)), 1)))


@pytest.mark.parametrize("columns", [1, 3, 12])
def test_a_map_of_many_rates_is_as_wide_as_its_cells_need(columns) -> None:
    heads = tuple(f"{10.0**-i:.2g} to 1" for i in range(columns))
    cells = {(0, j): Cell(2, 0.5, 0.0, 0.1) for j in range(columns)}
    drawn = figures.map_figure(
        Map("forms", "mult_form", heads, ("sigmoid",), cells, ((None, None),), ((),))
    )
    check_frame(drawn)
    assert ('class="drawn wide"' in drawn) == (columns > 8)
