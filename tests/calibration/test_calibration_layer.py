"""The benchmark of one layer: what it counts and what it prints, not how fast anything is."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "calibration_layer.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("calibration_layer", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_layer_is_calibrated_and_timed(benchmark, monkeypatch, capsys) -> None:
    sizes = {"hidden": 64, "ffn": 128, "rank": 8, "tokens": 2048}
    flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["calibration_layer", "--device", "cpu", "--json", *flags])
    benchmark.main()
    found = json.loads(capsys.readouterr().out)
    assert {name: found[name] for name in sizes} == sizes
    assert found["host_seconds"] == found["seconds"] > found["factorisation_seconds"] > 0
    assert found["device_seconds"] == 0 and found["peak_bytes"] is None
    assert found["factorisations"] == 3 + 4 * 3  # eigendecompositions, and four ridges of three B
    assert all(
        math.isfinite(found[name]) for name in ("forecast_seconds", "nmse_before", "nmse_after")
    )
