"""These runs write reports, whose charts nobody looks at here."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _quick(undrawn_charts: None) -> None: ...
