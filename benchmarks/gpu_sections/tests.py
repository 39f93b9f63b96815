"""Section 13: the GPU's tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpu_sections.runner import Bench, Findings, Section

ROOT = Path(__file__).resolve().parents[2]


def run_tests(bench: Bench, findings: Findings) -> None:
    """Run `pytest -m gpu tests/gpu`; without a GPU only collect the tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=", "tests/gpu"]
    if not bench.cuda:
        command.append("--collect-only")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
    answer = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    lines = answer.stdout.splitlines()
    closing = next(
        (line.strip("= ") for line in reversed(lines) if line.strip()), answer.stderr[-200:]
    )
    nothing_ran = 5  # pytest's status if it deselects all tests
    findings.check(
        "pytest -m gpu tests/gpu", answer.returncode == (0 if bench.cuda else nothing_ran), closing
    )
    findings.figures["pytest"] = {"status": answer.returncode, "tail": lines[-40:]}
    findings.notes.append(f"tests/gpu: {closing}" + ("" if bench.cuda else " (needs CUDA)"))


TESTS = Section(13, "tests/gpu", run_tests)
