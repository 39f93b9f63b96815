"""Short forms of the campaigns in `benchmarks/`: kills at random instants, flipped bits, files that nobody wrote."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def benchmark(name: str) -> ModuleType:
    """A script of `benchmarks/` as a module."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))  # where it finds its other half, and its children do
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


COMPUTES = """
import pathlib, sys, npt, crash
if __name__ == "__main__":
    npt.load_base("tiny", quantization="nf4", device="cpu")  # from here on this process has OpenMP's threads
    print(crash.wait(crash.forked_process(pathlib.Path(sys.argv[1]), 2), 300))
"""


def test_a_run_in_a_child_of_a_process_with_openmp_comes_to_its_end(tmp_path: Path) -> None:
    """With as many threads as there are by default; forked behind them it would wait for ever."""
    script = tmp_path / "computes.py"
    script.write_text(COMPUTES)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    path = os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, script, tmp_path / "run"], env={**environment, "PYTHONPATH": path}, capture_output=True, text=True, timeout=400
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    assert (tmp_path / "run" / "fidelity.json").is_file()


def test_nothing_forks_a_process_that_computes() -> None:
    """Threads are not forked: where OpenMP has some, a child that computes waits for them. Tests fork, and have one thread."""
    forks = re.compile(
        r"os\.fork|preexec_fn|ProcessPoolExecutor|DataLoader\(|multiprocessing\.(Process|Pool|Queue)|get_context\((?!\"forkserver\"|\"spawn\")"
    )
    root = BENCHMARKS.parent
    files = [root / "pretrain_npt_safe.py", *(path for name in ("npt", "benchmarks", "debug") for path in (root / name).rglob("*.py"))]
    assert [path.name for path in files if forks.search(path.read_text())] == []
    assert os.environ["OMP_NUM_THREADS"] == "1" and torch.get_num_threads() == 1
