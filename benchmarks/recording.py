"""What recording costs: a training step under the recorder over the same step without it.

    python benchmarks/recording.py [--json]

Steps of the local strategy (forward and backward of one micro-batch) on the embedded model in NF4,
one process, the same batches, one thread. Three kinds of step are timed in turn, so that a slow
moment of the machine hits all of them: plain on a model that no recorder has been on, recorded on
another copy of it (the recorder's hooks put on, the step, hooks taken off, the numbers read and
written to a file, as a run does at a chosen step), and plain on that copy after it. `ratio` is the
median of recorded / plain, `ratio_after` that of plain after a recording / plain, and `hooks_left`
counts what is still on the copy's modules and parameters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import nn

import npt
from npt.adapters.converted import adapter_parameters
from npt.data.batch import Batch, batches
from npt.data.samples import Samples
from npt.data.source import open_source
from npt.diagnostics import Recorder
from npt.diagnostics.recorder.recording import Recording
from npt.distill.strategies import STRATEGIES


class Bench:
    """One student and its batches.

    Args:
        strategy: of the steps.
        folder: for records.
    """

    def __init__(self, model_name: str, batch_size: int, length: int, strategy: str, folder: str):
        self.model, tokenizer = npt.load_base(model_name, quantization="nf4")
        npt.attach(self.model, npt.NPTConfig(targets=("gate", "up", "down")))
        self.device = next(self.model.parameters()).device
        self.config = npt.TrainConfig(strategy=strategy)
        data = npt.DataConfig(max_length=length)
        samples = Samples(open_source(data), tokenizer, data, seed=0)
        full = (s for s in samples.epoch(0) if len(s.input_ids) == length)
        stream = batches(full, batch_size)
        self.batches = [next(stream).to(self.device) for _ in range(4)]
        self.recording = Recording(folder)
        self.rows = 0

    def plain(self, batch: Batch) -> None:
        for parameter in adapter_parameters(self.model).values():
            parameter.grad = None
        STRATEGIES[self.config.strategy](self.model, batch, self.config)

    def recorded(self, batch: Batch) -> None:
        with Recorder(self.model) as recorder:
            self.plain(batch)
        record = recorder.record()
        self.recording.keep(record)
        self.rows = len(record.rows)

    def time(self, step: Callable[[], None]) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started


def hooks_left(model: nn.Module) -> int:
    """Hooks on modules and parameters, and observers of NPT layers."""
    modules = sum(
        len(module._forward_hooks)
        + len(module._forward_pre_hooks)
        + (getattr(module, "observer", None) is not None)
        for module in model.modules()
    )
    return modules + sum(len(parameter._backward_hooks or ()) for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--model_name", default="tiny")
    parser.add_argument("--strategy", default="local", choices=sorted(STRATEGIES))
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds of the three steps")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ratios, after, plain_times = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        shape = args.model_name, args.batch_size, args.max_length, args.strategy
        untouched, watched = (Bench(*shape, folder) for _ in range(2))
        for number in range(args.rounds + 1):
            batch = untouched.batches[number % len(untouched.batches)]
            steps = [
                lambda batch=batch: untouched.plain(batch),
                lambda batch=batch: watched.recorded(batch),
                lambda batch=batch: watched.plain(batch),
            ]
            times = [0.0] * 3
            # each of the plain ones as often after the recorded one
            for i in (1, 2, 0) if number % 2 == 0 else (1, 0, 2):
                times[i] = watched.time(steps[i])
            if number:  # the first round makes allocations and imports
                ratios.append(times[1] / times[0])
                after.append(times[2] / times[0])
                plain_times.append(times[0])
    quartiles, quartiles_after = statistics.quantiles(ratios, n=4), statistics.quantiles(after, n=4)
    figures = {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)],
        "ratio_after": round(statistics.median(after), 4),
        "ratio_after_quartiles": [round(quartiles_after[0], 4), round(quartiles_after[2], 4)],
        "hooks_left": hooks_left(watched.model),
        "rows": watched.rows,
        "plain_step_seconds": round(statistics.median(plain_times), 4),
        "rounds": args.rounds,
        "strategy": args.strategy,
        "device": torch.cuda.get_device_name() if watched.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }
    if args.json:
        print(json.dumps(figures))
    else:
        low, high = figures["ratio_quartiles"]
        print(
            f"recorded step / plain step: {figures['ratio']:.3f} (quartiles {low:.3f} to"
            f" {high:.3f}, {args.rounds} rounds)"
        )
        low, high = figures["ratio_after_quartiles"]
        print(
            f"plain step after a recording / plain step: {figures['ratio_after']:.3f} (quartiles"
            f" {low:.3f} to {high:.3f})"
        )
        print(f"hooks left: {figures['hooks_left']}; rows of a record: {figures['rows']}")
        print(
            f"plain step: {figures['plain_step_seconds']:.3f} s on {figures['device']},"
            f" {figures['threads']} threads"
        )


if __name__ == "__main__":
    main()
