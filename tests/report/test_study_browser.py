"""A study's page in a browser: it is whole, it complains about nothing, and nothing on it runs off
the screen.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import Browser
from made_study import table

from npt.tools.sweep.page import page


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_a_studys_page_is_shown_without_complaint(
    browser: Browser, tmp_path: Path, width: int, dark: bool
) -> None:
    place = tmp_path / "report.html"
    place.write_text(page({"name": "made", "parts": {}}, table()), encoding="utf-8")
    browser.complaints.clear()
    browser.open(place, width=width, dark=dark)
    assert browser.complaints == []
    assert browser.evaluate("[...document.images].every(x => x.complete && x.naturalWidth > 100)")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
