"""Short forms of the campaigns in `benchmarks/`: kills at random instants, flipped bits, files that nobody wrote."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def benchmark(name: str) -> ModuleType:
    """A script of `benchmarks/` as a module."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their own module
    spec.loader.exec_module(module)
    return module


def test_killed_at_random_instants_a_run_loses_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    status = benchmark("crash").main(["--kills", "5", "--bit_flips", "60", "--fresh_every", "0", "--steps", "10", "--json"])
    out, error = capfd.readouterr()
    figures = json.loads(out)
    assert status == 0, (figures["problems"], error)
    assert {name: figures[name] for name in ("kills", "resumed", "bit_equal", "lost", "bit_flips", "bit_flips_found")} == {
        "kills": 5,
        "resumed": 5,
        "bit_equal": 5,
        "lost": 0,
        "bit_flips": 60,
        "bit_flips_found": 60,
    }


def test_files_changed_at_random_are_read_or_refused_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    status = benchmark("fuzz").main(["--inputs", "900", "--seed", "1", "--json"])
    out, error = capfd.readouterr()
    figures = json.loads(out)
    assert status == 0, error
    assert figures["inputs"] == 900 == figures["read"] + figures["refused"] and figures["failures"] == 0
    outcomes = {name: set(found) for name, found in figures["by_loader"].items()}
    assert outcomes == {name: {"read", "refused"} for name in ("adapter", "checkpoint", "bundle")}


def test_the_campaigns_find_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A loader that stumbles, and sums that nobody compares."""
    fuzz, crash = benchmark("fuzz"), benchmark("crash")
    monkeypatch.setattr(
        fuzz, "read_bundle", lambda folder: json.loads((folder / "postmortem.json").read_text()) and pytest.fail("stumbled")
    )
    with pytest.raises(pytest.fail.Exception):
        fuzz.main(["--inputs", "3"])  # at once, on the valid bundle
    monkeypatch.setattr(crash, "verify_checkpoint", lambda folder: None)
    assert crash.main(["--kills", "0", "--bit_flips", "6", "--steps", "4", "--json"]) == 1
    assert json.loads(capfd.readouterr().out)["bit_flips_found"] == 0
