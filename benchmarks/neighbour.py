#!/usr/bin/env python
"""What a busy neighbour costs a run on the CPU, with waiting threads that spin and with threads
that sleep.

    python benchmarks/neighbour.py --rounds 2

A few steps of the embedded model, each time in a process of its own: alone, and next to a process
that keeps one core busy; with OpenMP's threads as they wait by default, and asleep
(OMP_WAIT_POLICY=PASSIVE), as `npt` lets them next to others. Tokens a second, the best
of the rounds, and their ratios. Small products wait often: a wider model loses less by sleeping.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN = (
    "--use_quantization",
    "--init",
    "random",
    "--max_steps",
    "16",
    "--eval_samples",
    "2",
    "--log_steps",
    "4",
    "--no_smoke_test",
)


START = (
    "import torch, sys; from npt.cli.main import main; sys.exit(main(['pretrain', *sys.argv[1:]]))"
)
"""OpenMP loads before `npt` could say anything."""

POLICIES: dict[str, dict[str, str]] = {"by default": {}, "asleep": {"OMP_WAIT_POLICY": "PASSIVE"}}


def speed(policy: str, busy: bool) -> float:
    """Tokens a second at the end of one run."""
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", START, *RUN, "--output_dir", f"{folder}/run"]
            environment = {
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("OMP_", "GOMP_"))
            }
            done = subprocess.run(
                command,
                env={**environment, **POLICIES[policy]},
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=True,
            )
    finally:
        if neighbour is not None:
            neighbour.kill()
            neighbour.wait()
    return float(re.findall(r"([\d,]+) tokens/s", done.stdout)[-1].replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=2, metavar="INT", help="runs of each kind (default: 2)"
    )
    rounds = parser.parse_args().rounds
    for busy in (False, True):
        found = {policy: max(speed(policy, busy) for _ in range(rounds)) for policy in POLICIES}
        usual, asleep = found["by default"], found["asleep"]
        where = "next to a busy process" if busy else "alone"
        print(
            f"{where}: {usual:,.0f} tokens/s as threads wait by default, {asleep:,.0f} asleep,"
            f" {asleep / usual:.2f} times",
            flush=True,
        )


if __name__ == "__main__":
    main()
