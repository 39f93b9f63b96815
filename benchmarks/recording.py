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
from typing import Any

import torch

from guards import builtin_bench
from npt.data.batch import Batch
from npt.diagnostics import Recorder
from npt.recorder.recording import Recording


def measure(rounds: int, rows: int, length: int, folder: str) -> dict[str, Any]:
    """Return the figures over so many rounds, after one that is not counted."""
    untouched, watched = (builtin_bench("tiny", rows, length, 1) for _ in range(2))
    recording = Recording(folder, "1")

    def plain(window: list[Batch]) -> None:
        untouched.strategy(window[0])

    def after(window: list[Batch]) -> None:
        watched.strategy(window[0])

    def recorded(window: list[Batch]) -> None:
        with Recorder(watched.model) as recorder:
            after(window)
        recording.keep(recorder.record())

    seconds: dict[str, list[float]] = {"recorded": [], "after": [], "plain": []}
    for number in range(rounds + 1):
        window = untouched.windows[number % len(untouched.windows)]
        seconds["recorded"].append(watched.time(recorded, window))
        # each of the plain ones as often after the recorded one
        for name in ("after", "plain") if number % 2 else ("plain", "after"):
            bench, step = (watched, after) if name == "after" else (untouched, plain)
            seconds[name].append(bench.time(step, window))
    base = seconds["plain"][1:]
    ratio, ratio_after = (
        statistics.median(a / b for a, b in zip(seconds[name][1:], base, strict=True))
        for name in ("recorded", "after")
    )
    return {
        "ratio": round(ratio, 4),
        "ratio_after": round(ratio_after, 4),
        "plain_step_seconds": round(statistics.median(base), 4),
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
        print("recorded / plain {ratio:.3f}, plain after it {ratio_after:.3f}".format_map(figures))


if __name__ == "__main__":
    main()
