"""Every chart of a run's page: a file of its own, with numbers that are numbers and nothing outside
its frame, whatever it is drawn of.
"""

import math
import re
import xml.etree.ElementTree as ET
from urllib.parse import unquote

import numpy as np
import pytest
from made_runs import Reader, event, fidelity, make_run, metrics, refusal

from npt.report import charts
from npt.report.charts import lines
from npt.report.page import page
from npt.report.run import RunRecord

STEPS = [1, 2, 3, 4, 5]
SVG = "{http://www.w3.org/2000/svg}"


def check(svg: str) -> ET.Element:
    """Assert that it is sound, and that its letters and marks lie within its frame."""
    root = ET.fromstring(svg)
    _, _, width, height = map(float, (root.get("viewBox") or "").split())
    for element in root.iter():
        for name, value in element.attrib.items():
            assert not name.startswith("on")
            assert not re.search(r"\b(nan|inf)\b", value, re.IGNORECASE), (element.tag, name, value)
        if element.tag in (f"{SVG}text", f"{SVG}use"):
            x, y = float(element.get("x", "0")), float(element.get("y", "0"))
            assert -1 <= x <= width + 1 and -1 <= y <= height + 1, (element.tag, element.attrib)
    return root


def test_charts_depend_on_their_numbers_and_on_no_users_settings() -> None:
    import matplotlib

    def drawn() -> str:
        return lines("one layer", "NMSE", [("one", STEPS, [0.1] * 5)]).svg

    first = drawn()
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path", "axes.grid": False}):
        assert drawn() == first
        assert matplotlib.rcParams["font.size"] == 30


@pytest.mark.parametrize(
    "name", ["</svg><script>alert(1)</script>", r"$\frac{1}$", "日本", "\ud800 half", "a\x00b"]
)
def test_texts_of_a_chart_are_text_whatever_they_are(name) -> None:
    made = lines(name, "nats", [("one", STEPS, [1.0] * 5)])
    assert not [e for e in check(made.svg).iter() if e.tag.endswith("script")]
    assert unquote(made.address) == f"data:image/svg+xml,{made.svg}" and '"' not in made.address


def test_what_is_not_finite_breaks_the_line_and_is_marked_as_are_refusals() -> None:
    made = lines("loss", "nats", [("loss", STEPS, [1.0, 2.0, math.inf, 2.0, 1.0])], marks=[3, 4])
    line, crosses, refused = made.figure.axes[0].lines
    assert np.isnan(line.get_ydata()).tolist() == [False, False, True, False, False]
    assert list(crosses.get_xdata()) == [3] and list(refused.get_xdata()) == [3, 4]
    words = "loss: first 1, last 1, 1 to 2, 1 times not finite; 2 refusals"
    assert made.label == words


def test_a_spike_of_one_step_in_a_hundred_thousand_reaches_the_chart() -> None:
    values = [1.0] * 100_000
    values[54_321] = 900.0
    made = lines("loss", "nats", [("loss", range(1, 100_001), values)])
    assert max(made.figure.axes[0].lines[0].get_ydata()) == 900.0
    assert len(made.svg) < 60_000


@pytest.mark.parametrize(
    ("values", "log"),
    [
        ([2e-79, 1e287], None), ([-4e-320], False), ([5.83e-320, 5.84e-320], True),
        ([1.0, 1.0000000000000002], True), ([-1.7e308, 1.7e308], None), ([0.01, 0.09], None),
        ([5.0], None), ([0.0], None), ([0.0, 1e-12], None), ([3000, 3001], None),
        ([7e20, 7.1e20], True), ([1e-8, 1.0], None),
    ],
)  # fmt: skip
def test_a_scale_holds_its_numbers_and_has_a_few_ticks(values, log) -> None:
    axes = lines("one", "nats", [("one", range(len(values)), values)], log=log).figure.axes[0]
    low, high = axes.get_ylim()
    held = charts.drawable(values)
    held = np.maximum(held, charts.SMALLEST) if axes.get_yscale() == "log" else held
    assert ((low <= held) & (held <= high)).all()
    assert 1 <= len([tick for tick in axes.get_yticks() if low <= tick <= high]) <= 12


@pytest.mark.parametrize(
    ("steps", "values"),
    [
        ([1], [0.002]),
        ([1, 2], [0.0020170, 0.0020171]),
        ([10, 20], [2e-5, 2.00001e-5]),
        ([1, 2, 3], [3000.0, 3001.0, 3008.0]),
        ([1, 2], [1.0, 1.0]),
    ],
)
def test_no_two_ticks_have_the_same_label(steps, values) -> None:
    figure = lines("one", "nats", [("one", steps, values)]).figure
    figure.canvas.draw()
    for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis):
        labels = [label.get_text() for label in axis.get_ticklabels()]
        shown = [label for label in labels if label]
        assert shown and len(set(shown)) == len(shown) and max(map(len, shown)) <= 8


ODD = [math.nan, 0.0, -0.0, 1e-300, 1e300, math.inf, math.nan, -1.7e308, -5.0, 2.0]
"""Figures as files may have them."""


@pytest.mark.parametrize(
    "values",
    [ODD, [math.nan], [0.0, 0.0], [1e-300, 1e300], [1e300], [math.inf, math.nan], [-5.0, 2.0]],
)
@pytest.mark.parametrize("log", [False, True])
def test_charts_are_sound_whatever_the_numbers(values, log) -> None:
    steps = list(range(3, 3 + len(values)))
    check(lines("a line", "<nats>", [("<nats>", steps, values)] * 2, log=log).svg)


RUNS = {
    "finished": {},
    "two steps": {"metrics": [metrics(1), metrics(2)]},
    "constant": {
        "metrics": [metrics(s, loss=1.0, grad_norm=0.0, lr=0.0) for s in range(1, 9)],
        "fidelity": fidelity(1.2),
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
    images = Reader(page(RunRecord(folder), folder / "report.html")).of("img", class_="chart")
    assert len(images) > 4
    for image in images:
        check(unquote(image["src"] or "").removeprefix("data:image/svg+xml,"))
