"""What the guards cost: a training step through the transaction over the same step without any guard.

    python benchmarks/guards.py [--json]

Both loops run in one process on the same model, the same batches and the same strategy, windows interleaved (guarded,
plain, plain, guarded, ...), so that a slow moment of the machine hits both. The plain loop is what one writes without
guards: sum the gradients, divide, clip, step. The guarded one is the product's: host check of the batch, scratch gradients,
flags, history, spike limits, verification and restore. `ratio` is the median over pairs of guarded time / plain time.

`added_synchronisations` counts, per step, how often the guarded loop makes the host wait for the device and the plain one
does not: synchronising CUDA calls as the profiler sees them, or on a CPU, where nothing waits, the reads of single tensor
values (`aten::_local_scalar_dense`) of the loop as it runs on a GPU, flags one window late.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import npt
from npt.adapters.attach import adapter_parameters
from npt.data.batch import Batch, batches, pad_id_of
from npt.data.samples import Samples
from npt.data.source import open_source
from npt.distill.loop import try_micro_batch
from npt.distill.spikes import SpikeGuard
from npt.distill.strategies import STRATEGIES, MicroBatch
from npt.distill.transaction import Transaction

SYNCHRONISING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


class ScalarReads(TorchDispatchMode):
    """Counts tensor values read one by one, each of which waits for the device where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class Bench:
    """One model and its batches, with a guarded and a plain loop over windows of K micro-batches."""

    def __init__(self, model_name: str, batch_size: int, length: int, accumulation: int, windows: int):
        self.model, tokenizer = npt.load_base(model_name, quantization="nf4")
        npt.attach(self.model, npt.NPTConfig())
        self.device = next(self.model.parameters()).device
        self.config = npt.TrainConfig()
        data = npt.DataConfig(max_length=length)
        samples = Samples(open_source(data), tokenizer, data, seed=0)
        full = (s for s in samples.epoch(0) if len(s.input_ids) == length)
        stream = batches(full, batch_size, pad_id_of(tokenizer))
        self.windows = [[next(stream) for _ in range(accumulation)] for _ in range(windows)]
        self.parameters = adapter_parameters(self.model)

    def optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.parameters.values(), lr=1e-4, fused=True)

    def strategy(self, batch: Batch) -> MicroBatch:
        return STRATEGIES["local"](self.model, batch.to(self.device), self.config)

    def guarded(self, late: bool | None = None, check: bool = True) -> Callable[[list[Batch]], None]:
        transaction: Transaction[MicroBatch] = Transaction(
            self.parameters, self.optimizer(), 0.5, [1e-4], spikes=SpikeGuard(10.0), late=late
        )

        def step(window: list[Batch]) -> None:
            for batch in window:
                fill = partial(self.strategy, batch)
                if check:
                    try_micro_batch(transaction, batch, self.model.config.vocab_size, fill)
                else:
                    transaction.micro_batch(fill, batch.sample_ids)
            transaction.commit()

        return step

    def plain(self) -> Callable[[list[Batch]], None]:
        optimizer = self.optimizer()

        def step(window: list[Batch]) -> None:
            tokens = 0
            for batch in window:
                tokens += self.strategy(batch).tokens
            gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
            torch._foreach_div_(gradients, tokens)
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def time(self, step: Callable[[list[Batch]], None], window: list[Batch]) -> float:
        self._clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        step(window)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def waits(self, step: Callable[[list[Batch]], None]) -> float:
        """Waits of the host for the device, per step, over all windows."""
        self._clear()
        step(self.windows[0])  # allocations and the optimizer's state
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                for window in self.windows:
                    step(window)
            count = sum(event.count for event in profiler.key_averages() if event.key in SYNCHRONISING)
        else:
            with ScalarReads() as reads:
                for window in self.windows:
                    step(window)
            count = reads.count
        return count / len(self.windows)

    def _clear(self) -> None:
        """The two loops share parameters, so neither may find the other's gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--model_name", default="tiny")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=40, help="timed pairs of windows")
    args = parser.parse_args()
    bench = Bench(args.model_name, args.batch_size, args.max_length, args.gradient_accumulation_steps, windows=8)

    guarded, plain = bench.guarded(), bench.plain()
    for window in bench.windows[:2]:
        bench.time(guarded, window)
        bench.time(plain, window)
    ratios, plain_times = [], []
    for pair in range(args.pairs):
        window = bench.windows[pair % len(bench.windows)]
        first, second = (guarded, plain) if pair % 2 == 0 else (plain, guarded)
        times = {first: bench.time(first, window), second: bench.time(second, window)}
        ratios.append(times[guarded] / times[plain])
        plain_times.append(times[plain])
    # The check of a batch reads tensors that are on the host anyway; on a CPU that cannot be told from a wait, so it is left out.
    added = bench.waits(bench.guarded(late=True, check=False)) - bench.waits(bench.plain())
    quartiles = statistics.quantiles(ratios, n=4)
    figures = {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)],
        "added_synchronisations": added,
        "plain_step_seconds": round(statistics.median(plain_times), 4),
        "pairs": args.pairs,
        "device": torch.cuda.get_device_name() if bench.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }
    if args.json:
        print(json.dumps(figures))
    else:
        low, high = figures["ratio_quartiles"]
        print(f"guarded step / plain step: {figures['ratio']:.3f} (quartiles {low:.3f} to {high:.3f}, {args.pairs} pairs)")
        print(f"host waits added per step: {added:g}")
        print(f"plain step: {figures['plain_step_seconds']:.3f} s on {figures['device']}, {figures['threads']} threads")


if __name__ == "__main__":
    main()
