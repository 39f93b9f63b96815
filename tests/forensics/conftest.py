"""Every run and every replay begins with a base, which these tests read and pack once."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _quick(copied_bases: None, undrawn_charts: None) -> None: ...
