"""Whether OpenMP's threads spin or sleep where they wait."""

from __future__ import annotations

import os

import pytest

from npt.cli import main as module


@pytest.mark.parametrize(
    ("load", "set_before", "expected"),
    [(0.1, None, None), (1.9, None, "PASSIVE"), (1.9, "ACTIVE", "ACTIVE")],
    ids=["alone", "with others", "somebody has said how"],
)
def test_they_sleep_where_others_compute_and_nobody_has_said_how(
    monkeypatch, load, set_before, expected
):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if set_before is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", set_before)
    module._share_cores()
    assert os.environ.get("OMP_WAIT_POLICY") == expected
