"""Every chart of every page: XML of its own, numbers that are numbers, colours by role, nothing
outside its frame, whatever it is drawn of.
"""

from __future__ import annotations

import math
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import Reader, event, fidelity, make_run, metrics, modulation, refusal

from npt.report import charts
from npt.report.charts import LINE, Marks, columns, picture, rows_chart, scale
from npt.report.page import page
from npt.report.run import read_run

DOT = ("o", LINE, False)


def svgs(html: str) -> list[str]:
    return re.findall(r"<svg\b.*?</svg>", html, re.DOTALL)


def check(svg: str) -> ET.Element:
    """Assert that it is sound, and that its letters and marks lie within its frame."""
    root = ET.fromstring(svg)
    _, _, width, height = map(float, (root.get("viewBox") or "").split())
    for element in root.iter():
        for name, value in element.attrib.items():
            assert name != "style" and not name.startswith("on")
            if name not in ("aria-label", "href"):
                assert not re.search(r"nan|inf", value, re.IGNORECASE), (element.tag, name, value)
        if element.tag in ("text", "use"):
            x, y = float(element.get("x", "0")), float(element.get("y", "0"))
            assert -1 <= x <= width + 1 and -1 <= y <= height + 1, (element.tag, element.attrib)
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    used = re.findall(r'(?:url\(|href=")#([^)"]+)', svg)
    assert len(ids) == len(set(ids)) and set(used) <= set(ids)
    assert root.get("role") == "img" and len(root.get("aria-label") or "") > 3
    return root


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
def test_every_chart_of_a_runs_page_is_sound(tmp_path, kind) -> None:
    folder = make_run(tmp_path / "run", **RUNS[kind])
    html = page(read_run(folder), folder / "report.html")
    ids = [found["id"] for _, found in Reader(html).elements if "id" in found]
    assert len(ids) == len(set(ids))
    for svg in svgs(html):
        check(svg)


def test_colours_with_a_role_are_variables_of_the_style_sheet() -> None:
    svg = rows_chart(["a"], [Marks("one", DOT, [1.0], [0.5], [2.0])], "what", "a chart")
    style = (Path(charts.__file__).parent / "templates" / "style.css").read_text(encoding="utf-8")
    assert "var(--line)" in svg and "var(--soft)" in svg and LINE not in svg
    assert all(f"--{name}:" in style for name in re.findall(r"var\(--(\w+)\)", svg))


def test_charts_depend_on_their_numbers_and_on_no_users_settings() -> None:
    import matplotlib

    def drawn() -> str:
        return rows_chart(["4"], [Marks("one", DOT, [0.1], [0.05], [0.15])], "NMSE", "one layer")

    first = drawn()
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path", "axes.grid": False}):
        assert drawn() == first
        assert matplotlib.rcParams["font.size"] == 30
    assert "matplotlib.pyplot" not in sys.modules or "pyplot" not in charts.__dict__


def test_texts_of_a_chart_are_text_whatever_they_are() -> None:
    for name in ("</svg><script>alert(1)</script>", r"$\frac{1}$", "日本", "\ud800 half", "a\x00b"):
        root = check(rows_chart([name], [Marks("", DOT, [1.0])], "what", name * 2))
        assert {element.tag for element in root.iter()} <= {
            "svg", "g", "defs", "path", "text", "use", "clipPath", "rect"
        }  # fmt: skip


def test_a_standard_error_is_a_line_and_none_is_none() -> None:
    def lines(low: list[float | None]) -> int:
        svg = rows_chart(["4"], [Marks("", DOT, [0.1], low, [0.15])], "NMSE", "one layer")
        return svg.count('stroke-width="2"')

    assert lines([0.05]) == 1 and lines([None]) == 0


def test_a_number_that_is_not_finite_breaks_the_line_and_is_marked() -> None:
    with picture(180, "broken") as made:
        axes = made.axes(20, 120)
        values = [1.0, 2.0, math.inf, 2.0, 1.0]
        charts.paint_lines(axes, (1, 5), [("loss", [1, 2, 3, 4, 5], values)], "loss")
        assert np.isnan(axes.lines[0].get_ydata()).tolist() == [False, False, True, False, False]
    assert "<title>not finite at step 3</title>" in made.svg


def test_a_spike_of_one_step_in_a_hundred_thousand_reaches_the_chart() -> None:
    steps, values = list(range(1, 100_001)), [1.0] * 100_000
    values[54_321] = 900.0
    with picture(180, "spiked") as made:
        axes = made.axes(20, 120)
        charts.paint_lines(axes, (1, 100_000), [("loss", steps, values)], "loss")
        (band,) = axes.collections
        assert band.get_paths()[0].vertices[:, 1].max() == 900.0
    assert len(made.svg) < 60_000


def test_a_heat_map_tells_zero_broken_and_unknown_from_numbers() -> None:
    with picture(100, "heat") as made:
        axes = made.axes(0, 80)
        cells = np.array([[1e-6, 1.0, 0.0, math.inf, math.nan]])
        assert charts.paint_heat(axes, cells, (0, 5)) == (1e-6, 1.0)
        numbers, special = (image.get_array() for image in axes.images)
    assert np.ma.filled(numbers, -1)[0, :2].tolist() == [1e-6, 1.0]
    assert np.ma.filled(special, -1)[0, 2:4].tolist() == [0, 1]
    assert np.isnan(np.ma.filled(numbers, np.nan)[0, 2:]).all()


values_of = st.lists(
    st.one_of(st.floats(-1e300, 1e300), st.just(math.inf), st.just(math.nan)),
    min_size=1,
    max_size=200,
)


@given(values_of, st.integers(1, 7))
def test_columns_lose_neither_the_extremes_nor_what_is_not_finite(values, apart) -> None:
    steps = [5 + apart * i for i in range(len(values))]
    x, mean, low, high, bad = columns(steps, values, 5, steps[-1])
    finite = [value for value in values if math.isfinite(value)]
    assert bad.sum() == sum(math.isinf(value) for value in values)
    assert len(x) <= charts.COLUMNS and (np.diff(x) > 0).all()
    assert ((x >= 4.5) & (x <= steps[-1] + 0.5)).all()
    there = np.isfinite(low)
    assert (there == np.isfinite(mean)).all()
    assert (low[there] <= mean[there]).all() and (mean[there] <= high[there]).all()
    if finite:
        assert (low[there].min(), high[there].max()) == (min(finite), max(finite))


@pytest.mark.parametrize(
    ("values", "log"),
    [
        ([2e-79, 1e287], None),
        ([-4e-320], False),
        ([5.83e-320, 5.84e-320], True),
        ([1.0, 1.0000000000000002], True),
        ([-1.7e308, 1.7e308], None),
        ([0.01, 0.09], None),
        ([5.0], None),
        ([0.0], None),
        ([0.0, 1e-12], None),
        ([3000, 3001], None),
        ([7e20, 7.1e20], True),
        ([1e-8, 1.0], None),
    ],
)
def test_a_scale_holds_its_numbers_and_has_a_few_ticks(values, log) -> None:
    with picture(100, "a scale") as made:
        axes = made.axes(0, 50)
        logarithmic = scale(axes, "x", values, log if min(values) > 0 else None)
        low, high = axes.get_xlim()
        held = charts.drawable(values)
        held = np.maximum(held, charts.SMALLEST) if logarithmic else held
        assert ((low <= held) & (held <= high)).all()
        assert 1 <= len([tick for tick in axes.get_xticks() if low <= tick <= high]) <= 12


ODD = [None, 0.0, -0.0, 1e-300, 1e300, math.inf, math.nan, -1.7e308, -5.0, 2.0]
"""Figures as rows may have them."""

MIXTURES = [ODD, [None], [0.0, 0.0], [1e-300, 1e300], [1e300], [math.inf, math.nan], [-5.0, 2.0]]


@pytest.mark.parametrize("values", MIXTURES, ids=range(len(MIXTURES)))
def test_charts_are_sound_whatever_the_numbers(values) -> None:
    numbers = [math.nan if value is None else value for value in values]
    span = (3, 2 + len(values))
    with picture(180, "a line") as made:
        series = [("<nats>", range(3, 3 + len(values)), numbers)]
        charts.paint_lines(made.axes(20, 120), span, series, "<nats>")
    check(made.svg)
    with picture(100, "a heat map") as made:
        charts.paint_heat(made.axes(0, 60), np.array([numbers]), (0, len(numbers)))
    check(made.svg)
    check(rows_chart(["x"] * len(values), [Marks("", DOT, values, values, values)], "x", "rows"))
