"""Every verb begins with a base, which these tests read and pack once."""

import math

import pytest

from npt.tools.editing import write


@pytest.fixture
def any_gain(monkeypatch):
    """Let an update be written whatever it teaches: tests of the rest use a student of no fact."""
    monkeypatch.setattr(write, "LEAST_GAIN", -math.inf)


@pytest.fixture(autouse=True, scope="module")
def _quick(copied_bases: None, undrawn_charts: None) -> None: ...
