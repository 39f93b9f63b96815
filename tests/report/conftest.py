"""A browser for the tests that look at pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Browser, find


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real browser; a test is skipped without one."""
    program = find()
    if program is None:
        pytest.skip("NO BROWSER: the page was not looked at in one; install chromium")
    with Browser(program) as made:
        yield made


@pytest.fixture
def drawn() -> None:
    """Asked for by tests that look into charts where `plain_charts` is used."""


@pytest.fixture
def plain_charts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give charts their words and no content, which takes most of their time."""
    if "drawn" not in request.fixturenames:
        from matplotlib.figure import Figure

        empty = '<svg xmlns="http://www.w3.org/2000/svg"><g/></svg>'
        monkeypatch.setattr(Figure, "savefig", lambda self, stream, **more: stream.write(empty))
