"""The page in a real browser, from a file, without a network: no complaint, no foreign script,
readable at every width and by keyboard.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import event, fidelity, make_run, metrics, modulation, refusal

from npt.report.page import page
from npt.report.run import read_run

HOSTILE = (
    '</script><script>document.title = "taken"</script><img src=x onerror="document.title ='
    " 'taken'\">"
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page about a long run of many layers, with attacks in its texts."""
    lines = [
        metrics(step, layers=32, loss=50.0 if step == 700 else 1.0 / step)
        for step in range(1, 1500, 3)
    ]
    happened = [
        event("start"),
        *(refusal(step, detail=HOSTILE) for step in range(5, 1400, 60)),
        event("warning", message=HOSTILE),
        event("done", steps=1499),
    ]
    folder = make_run(
        tmp_path_factory.mktemp("runs") / "run",
        metrics=lines,
        events=happened,
        fidelity=fidelity(layers=32),
        modulation=modulation(1499, layers=32),
    )
    (folder / "checkpoints" / "step-00000500").mkdir(parents=True)
    (folder / "report.html").write_text(
        page(read_run(folder), folder / "report.html"), encoding="utf-8"
    )
    return folder / "report.html"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_fits_and_the_browser_has_nothing_to_say(browser, report, width, dark) -> None:
    browser.complaints.clear()
    browser.open(report, width=width, dark=dark)
    assert browser.complaints == []
    assert browser.evaluate("document.title") == "run: report of a run"
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    widths = browser.evaluate(
        "[...document.querySelectorAll('svg')].map((x) => x.getBoundingClientRect().width)"
    )
    assert len(widths) >= 10 and min(widths) > 0.6 * min(width, 600)
    ink, paper = browser.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert (sum(map(int, ink[4:-1].split(","))) > sum(map(int, paper[4:-1].split(",")))) == dark


def test_labels_keep_their_size_and_stay_on_the_screen(browser, report) -> None:
    browser.open(report, width=400)
    boxes = browser.evaluate(
        "[...document.querySelectorAll('svg text')].map((x) => x.getBoundingClientRect()).map((x)"
        " => [x.left, x.right, x.height])"
    )
    assert len(boxes) > 30
    assert all(left >= 0 and right <= 400 and height >= 10 for left, right, height in boxes)


def test_the_policy_stops_a_script_that_got_in(browser, tmp_path, report) -> None:
    """The escaping is not the only guard."""
    spoilt = tmp_path / "spoilt.html"
    text = report.read_text(encoding="utf-8").replace(
        "<main>",
        '<main><script>document.title = "taken"</script><img src="https://example.org/x.png">',
    )
    spoilt.write_text(text, encoding="utf-8")
    browser.complaints.clear()
    browser.open(spoilt)
    assert browser.evaluate("document.title") == "run: report of a run"
    assert sum("Content Security Policy" in complaint for complaint in browser.complaints) == 2
    browser.complaints.clear()
