"""The pages in a real browser, from a file, without a network: no complaint, no foreign script,
readable at every width.
"""

from pathlib import Path

import pytest
from browser import Browser
from made_runs import event, fidelity, make_run, metrics, refusal
from test_generated_page import TOKENS_SHOWN, passage

from npt.report.generated import page as generated_page
from npt.report.page import page
from npt.report.run import RunRecord

HOSTILE = (
    '</script><script>document.title = "taken"</script><img src=x onerror="document.title ='
    " 'taken'\">"
)
ON_SCREEN = """[...document.querySelectorAll('SELECTOR')].every((cell) => {
    const box = cell.getBoundingClientRect()
    return box.left >= 0 && box.right <= innerWidth
})"""
FITS = "document.documentElement.scrollWidth"

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
    folder = tmp_path_factory.mktemp("runs") / "run"
    make_run(folder, metrics=lines, events=happened, fidelity=fidelity(layers=32))
    (folder / "checkpoints" / "step-00000500").mkdir(parents=True)
    text = page(RunRecord(folder), folder / "report.html")
    (folder / "report.html").write_text(text, encoding="utf-8")
    return folder / "report.html"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_fits_and_the_browser_has_nothing_to_say(browser, report, width, dark) -> None:
    browser.complaints.clear()
    browser.open(report, width=width, dark=dark)
    assert browser.complaints == []
    assert browser.evaluate("document.title") == "run: run report"
    assert browser.evaluate(FITS) == width
    sizes = browser.evaluate("[...document.images].map((x) => [x.naturalWidth, x.width])")
    assert len(sizes) >= 6 and {natural for natural, _ in sizes} == {400}
    assert min(shown for _, shown in sizes) > (550 if width == 1280 else 11 / 12 * 400)
    # the KL is the first figure of the first table
    assert browser.evaluate(ON_SCREEN.replace("SELECTOR", "table:first-of-type .n:nth-child(2)"))
    ink, paper = browser.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert (sum(map(int, ink[4:-1].split(","))) > sum(map(int, paper[4:-1].split(",")))) == dark


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
    assert browser.evaluate("document.title") == "run: run report"
    assert sum("Content Security Policy" in complaint for complaint in browser.complaints) == 2
    browser.complaints.clear()


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (400, False)])
def test_the_page_about_a_text_fits_and_is_shown_without_complaint(
    browser: Browser, tmp_path: Path, width: int, dark: bool
) -> None:
    place = tmp_path / "page.html"
    tokens = [*TOKENS_SHOWN, *(" word" for _ in range(150)), "-" * 200]
    passages = [(name, passage(tokens, 32, start=4, parts=9)) for name in ("one", "other")]
    place.write_text(generated_page("Said", [], [], passages), encoding="utf-8")
    browser.complaints.clear()
    browser.open(place, width=width, dark=dark)
    assert browser.complaints == [] and browser.evaluate(FITS) <= width
    browser.evaluate("document.querySelectorAll('.scroll').forEach((x) => x.scrollLeft = 1e6)")
    assert browser.evaluate(ON_SCREEN.replace("SELECTOR", ".grid:first-of-type .kl"))
    tops = browser.evaluate("[...document.querySelectorAll('.grid')].map(x => x.offsetTop)")
    assert (tops[0] == tops[1]) == (width == 1280)  # side by side, row by row
    hint = "getComputedStyle(document.querySelector('.scroll')).backgroundImage"
    assert "gradient" in browser.evaluate(hint)  # a shadow where a table is cut
