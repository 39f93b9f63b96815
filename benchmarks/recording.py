"""What recording costs: a training step under the recorder over the same step without it.

    python benchmarks/recording.py [--json]

Steps of the local strategy (forward and backward of one micro-batch) on the embedded model in NF4,
one process, the same batches, one thread. Three kinds of step are timed in turn, so that a slow
moment of the machine hits all of them: plain on a model that no recorder has been on, recorded on
another copy of it (the recorder's hooks put on, the step, hooks taken off, the numbers read and
written to a file, as a run does at a chosen step), and plain on that copy after it. `ratio` is the
median of recorded / plain, `ratio_after` that of plain after a recording / plain.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import npt
from guards import builtin_bench
from npt.adapters.converted import adapter_parameters
from npt.base.device import wait_for
from npt.data.batch import Batch
from npt.diagnostics import Recorder
from npt.distill.strategies import STRATEGIES
from npt.recorder.recording import Recording


def plain(model: Any, batch: Batch) -> None:
    """Make a step without a recorder."""
    for parameter in adapter_parameters(model).values():
        parameter.grad = None
    STRATEGIES["local"](model, batch, npt.TrainConfig())


def measure(rounds: int, rows: int, length: int, folder: str) -> dict[str, Any]:
    """Return the figures over so many rounds, after one that is not counted."""
    untouched, watched = (builtin_bench("tiny", rows, length, 1) for _ in range(2))
    device, recording = untouched.device, Recording(folder)

    def recorded(batch: Batch) -> None:
        with Recorder(watched.model) as recorder:
            plain(watched.model, batch)
        recording.keep(recorder.record())

    def seconds(step: Callable[[Batch], None], batch: Batch) -> float:
        wait_for(device)
        started = time.perf_counter()
        step(batch)
        wait_for(device)
        return time.perf_counter() - started

    times: dict[str, list[float]] = {"recorded": [], "after": [], "plain": []}
    steps = {
        "recorded": recorded,
        "after": lambda batch: plain(watched.model, batch),
        "plain": lambda batch: plain(untouched.model, batch),
    }
    for number in range(rounds + 1):
        batch = untouched.windows[number % len(untouched.windows)][0].to(device)
        # each of the plain ones as often after the recorded one
        for name in ("recorded", *(("after", "plain") if number % 2 else ("plain", "after"))):
            times[name].append(seconds(steps[name], batch))
    ratios = {
        name: [x / y for x, y in zip(times[name][1:], times["plain"][1:], strict=True)]
        for name in ("recorded", "after")
    }
    return {
        "ratio": round(statistics.median(ratios["recorded"]), 4),
        "ratio_after": round(statistics.median(ratios["after"]), 4),
        "plain_step_seconds": round(statistics.median(times["plain"][1:]), 4),
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds of the three steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(args.rounds, args.batch_size, args.max_length, folder)
    if args.json:
        print(json.dumps(figures))
    else:
        print(f"recorded step / plain step: {figures['ratio']:.3f}")
        print(f"plain step after a recording / plain step: {figures['ratio_after']:.3f}")
        print(f"plain step: {figures['plain_step_seconds']:.3f} s")


if __name__ == "__main__":
    main()
