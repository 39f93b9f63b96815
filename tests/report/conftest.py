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
