"""A browser for the tests that look at pages, and charts for those that look into them."""

from collections.abc import Iterator

import pytest
from browser import Browser, find

from npt.report import charts

LINES = charts.lines  # before any test has it patched


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real browser; a test is skipped without one."""
    program = find()
    if program is None:
        pytest.skip("NO BROWSER: the page was not looked at in one; install chromium")
    with Browser(program) as made:
        yield made


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts with their content, for a test of a module in which others need none."""
    monkeypatch.setattr(charts, "lines", LINES)
