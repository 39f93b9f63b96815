"""The modulation along a text in a real browser: it fits, and values come by pointer and key."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import Browser
from made_runs import make_run, modulation, refusal
from test_token_view import HOSTILE, TOKENS_SHOWN, made, passage

from npt.report.page import page
from npt.report.run import read_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two texts over many layers, with attacks in their tokens."""
    path = tmp_path_factory.mktemp("pages") / "page.html"
    tokens = [*TOKENS_SHOWN, *(" word" for _ in range(150)), "-" * 200]
    one, other = passage(tokens, 32, start=4, parts=9), passage(tokens[:60], 32, start=4, parts=9)
    path.write_text(made(one, other, titles=("The teacher's text", "The student's text")))
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_view_fits_and_the_browser_says_nothing(browser, generated, width, dark) -> None:
    browser.complaints.clear()
    browser.open(generated, width=width, dark=dark)
    assert browser.complaints == []
    assert browser.evaluate("document.title") == "Modulation, token by token"
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    sizes = browser.evaluate(
        "[...document.querySelectorAll('.tokens .token')].map((x) =>"
        " parseFloat(getComputedStyle(x).fontSize))"
    )
    assert len(sizes) > 200 and min(sizes) >= 13


def told(browser: Browser) -> str:
    return str(browser.evaluate("document.getElementById('cell').innerText"))


def test_pointing_at_a_token_shows_its_values_as_text(browser, generated) -> None:
    browser.open(generated)
    browser.evaluate(
        "document.querySelectorAll('.tokens .token')[4]"
        ".dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))"
    )
    assert HOSTILE in told(browser) and "token 5 of" in told(browser)
    assert "teacher" in told(browser) and "KL" in told(browser)
    assert browser.evaluate("document.title") == "Modulation, token by token"
    rows = browser.evaluate("document.querySelectorAll('#cell tbody tr').length")
    columns = browser.evaluate("document.querySelectorAll('#cell thead th').length")
    assert (rows, columns) == (6, 33)
    assert browser.evaluate("document.querySelectorAll('.on').length") == 2


def test_the_keyboard_reaches_every_token_and_cell(browser, generated) -> None:
    browser.open(generated)
    browser.evaluate("document.querySelectorAll('.tokens .token')[3].focus()")
    assert "token 4 of" not in told(browser)  # one token alone takes the focus by tab
    browser.evaluate("document.querySelectorAll('.tokens .token')[3].click()")
    assert "token 4 of" in told(browser)
    browser.press("ArrowLeft")
    assert "token 3 of" in told(browser)
    browser.evaluate("document.querySelectorAll('.map tbody td')[5].click()")
    assert "layer 4" in told(browser)
    browser.press("ArrowLeft")
    assert "layer 3" in told(browser)


def choose(browser: Browser, name: str, value: str) -> None:
    browser.evaluate(
        f"(() => {{ const it = document.getElementById('{name}'); it.value = '{value}';"
        " it.dispatchEvent(new Event('change')) })()"
    )


def classes(browser: Browser) -> list[str]:
    return list(
        browser.evaluate(
            "[...document.querySelectorAll('.tokens .token, .map td')].map((x) => [...x.classList]"
            ".filter((name) => /^[hk][0-9n]/.test(name)).join(' '))"
        )
    )


def test_the_script_colours_as_the_page_does_and_by_choice(browser, generated) -> None:
    browser.open(generated)
    before = classes(browser)
    choose(browser, "quantity", "kl")
    assert classes(browser) != before and "k" in classes(browser)[1]
    choose(browser, "quantity", "gate")
    choose(browser, "layer", "7")
    assert classes(browser) != before
    choose(browser, "quantity", "change")
    choose(browser, "layer", "")
    again = classes(browser)
    # numbers of three digits may fall on the other side of a step
    same = sum(one == other for one, other in zip(before, again, strict=True))
    assert same > 0.98 * len(before)


@pytest.mark.parametrize("width", [1280, 400])
def test_a_report_with_the_view_and_an_anatomy_fits(browser, tmp_path, width) -> None:
    events = [
        {"event": "start"},
        refusal(3, "gradient", "gradient of " + "x" * 150 + " has norm nan"),
    ]
    folder = make_run(
        tmp_path / "run", events=events, modulation={**modulation(12), "passage": passage()}
    )
    (folder / "report.html").write_text(page(read_run(folder), folder / "report.html"))
    browser.complaints.clear()
    browser.open(folder / "report.html", width=width)
    assert browser.complaints == []
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate("document.querySelectorAll('.flow > li').length") == 4
    browser.evaluate("document.querySelectorAll('.tokens .token')[1].click()")
    assert "token 2 of" in told(browser)
