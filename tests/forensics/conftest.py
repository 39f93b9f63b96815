"""Every run and every replay begins with a base, which these tests read and pack once."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _copied_bases(copied_bases: None) -> None: ...
