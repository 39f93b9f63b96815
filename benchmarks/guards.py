"""Measure what the guard costs: the time of a guarded training step over that of a plain one.

    python benchmarks/guards.py [--json]          NPT's own step
    python benchmarks/guards.py --lora [--json]   npt.guard around a LoRA step in a plain loop
    python benchmarks/guards.py --layers [--json] npt.guard around steps of plain torch layers

Both loops run in one process on the same model, batches and strategy, with windows interleaved
(guarded, plain, plain, guarded, ...), so that a slow moment of the machine hits both. The plain
loop sums the gradients, divides, clips and steps. The guarded loop also checks the batch, keeps
gradients apart, and verifies the step. `ratio` is the median of guarded time / plain time.

`added_synchronisations` counts how often in a step the guarded loop makes the host wait for the
device and the plain loop does not (`host_waits`). For the count, the guarded loop reads its flags
one window late, as it does on a GPU. With --lora and --layers nothing is counted.

With --layers the steps are of `small`, 12 linear layers 256 wide and 64 rows, where little is
computed for each parameter, and of `many`, 448 matrices of 8 by 64 as a LoRA on 32 layers has them,
where Python's own time counts. `added_ms` is the CPU time that the guard adds, the median over
pairs; `calls` are Python's calls in a guarded step, and `plain_calls` in a plain one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import npt
from host_waits import count_waits
from npt.adapters.converted import adapter_parameters
from npt.batch import Batch, batch_from_tensors, batches, find_fault
from npt.console import put
from npt.data.samples import Samples
from npt.data.source import open_source
from npt.device import wait_for
from npt.distill.local import local
from npt.distill.step import student_guard, summed
from npt.guard import Guard


class Bench:
    """A model with adapters, and a guarded and a plain loop over windows of micro-batches."""

    def __init__(self, model: Any, windows: list[list[Batch]]):
        self.model = model
        # computes now what a batch caches about itself, which on a CPU would count as a wait
        self.windows = [[batch.to(torch.device("cpu")) for batch in window] for window in windows]
        self.device = next(model.parameters()).device
        self.config = npt.TrainConfig()
        self.parameters = adapter_parameters(model)

    def guarded(
        self, late: bool | None = None, check: bool = True
    ) -> Callable[[list[Batch]], None]:
        # computes a batch in one part, as the plain loop does
        config = replace(self.config, learning_rate=1e-4, skip_spikes=True, batch_size=1 << 20)
        guard = student_guard(self.model, config, [1e-4], late=late)

        def step(window: list[Batch]) -> None:
            for batch in window:
                if check:
                    assert find_fault(batch, self.model.config.vocab_size) is None
                compute = partial(summed, self.model, local, batch, config)
                ids, offset = batch.sample_ids, batch.offset
                with guard.micro_batch(batch.tokens, ids, batch, compute, offset=offset) as micro:
                    sums = compute()
                    micro.loss, micro.tokens, micro.report = sums.loss, sums.tokens, sums.report
            guard.step()

        return step

    def plain(self) -> Callable[[list[Batch]], None]:
        optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-4, fused=True)

        def step(window: list[Batch]) -> None:
            on_device = (batch.to(self.device) for batch in window)
            tokens = sum(local(self.model, batch, self.config).tokens for batch in on_device)
            gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
            torch._foreach_div_(gradients, tokens)
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def time(self, step: Callable[[list[Batch]], None], window: list[Batch]) -> float:
        self._clear()
        wait_for(self.device)
        started = time.perf_counter()
        step(window)
        wait_for(self.device)
        return time.perf_counter() - started

    def waits(self, step: Callable[[list[Batch]], None]) -> float:
        """Return how often a step makes the host wait for the device."""
        self._clear()
        step(self.windows[0])  # allocates the optimizer's state
        with count_waits(self.device) as found:
            for window in self.windows:
                step(window)
        return found.total() / len(self.windows)

    def _clear(self) -> None:
        """Drop gradients: the two loops share parameters."""
        for parameter in self.parameters.values():
            parameter.grad = None


class LayersBench(Bench):
    """Plain torch layers with AdamW and a schedule, a copy for each loop."""

    def __init__(self, make: Callable[[], nn.Module], rows: Tensor):
        self.device, self.parameters = torch.device("cpu"), {}
        self.make = make
        self.windows: list[Any] = [rows]

    def made(self) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        model = self.make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        return model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)

    def guarded(self, late: bool | None = None, check: bool = True) -> Callable[[Any], None]:
        model, optimizer, scheduler = self.made()
        guard = Guard(model, optimizer, scheduler, max_grad_norm=1.0, loss="mean")

        def step(rows: Any) -> None:
            with guard.micro_batch() as micro:
                micro.loss = loss = model(rows).square().mean()
                loss.backward()
            guard.step()

        return step

    def plain(self) -> Callable[[Any], None]:
        model, optimizer, scheduler = self.made()

        def step(rows: Any) -> None:
            model(rows).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        return step

    def time(self, step: Callable[[Any], None], window: Any) -> float:
        started = time.process_time()
        step(window)
        return time.process_time() - started


class Matrices(nn.Module):
    """The sum of products with each of 448 matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(8, 64) * 0.01 for _ in range(448))

    def forward(self, rows: Tensor) -> Tensor:
        return torch.stack([(rows @ matrix.t()).sum() for matrix in self.matrices])


def layers() -> dict[str, LayersBench]:
    def linears() -> nn.Module:
        return nn.Sequential(*[nn.Linear(256, 256) for _ in range(12)])

    return {
        "small": LayersBench(linears, torch.randn(64, 256)),
        "many": LayersBench(Matrices, torch.randn(4, 64)),
    }


def python_calls(step: Callable[[Any], None], window: Any) -> int:
    """Return how many functions of Python a step calls."""
    found = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal found
        found += event == "call"

    sys.setprofile(count)
    try:
        step(window)
    finally:
        sys.setprofile(None)
    return found


def measure_layers(bench: LayersBench, pairs: int) -> dict[str, Any]:
    """Return the figures of plain torch layers."""
    guarded, plain = bench.guarded(), bench.plain()
    (rows,) = bench.windows
    for _ in range(5):
        bench.time(guarded, rows)
        bench.time(plain, rows)
    ratios, added = [], []
    for pair in range(pairs):
        first, second = (guarded, plain) if pair % 2 == 0 else (plain, guarded)
        times = {first: bench.time(first, rows), second: bench.time(second, rows)}
        ratios.append(times[guarded] / times[plain])
        added.append(times[guarded] - times[plain])
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratio_quartiles": [round(quartiles[0], 3), round(quartiles[2], 3)],
        "added_ms": round(1000 * statistics.median(added), 2),
        "calls": python_calls(guarded, rows),
        "plain_calls": python_calls(plain, rows),
        "pairs": pairs,
        "threads": torch.get_num_threads(),
    }


class LoraBench(Bench):
    """LoRA on the embedded model in NF4, a copy for each loop."""

    def __init__(self, rows: int, length: int, accumulation: int):
        self.device, self.parameters = torch.device("cpu"), {}
        ids = torch.randint(0, 1000, (rows, length), generator=torch.Generator().manual_seed(0))
        self.windows: list[Any] = [[ids] * accumulation]

    def adapted(self) -> tuple[Any, torch.optim.Optimizer]:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
        model: Any = get_peft_model(npt.load_base("tiny", device="cpu")[0], config).train()
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def guarded(self, late: bool | None = None, check: bool = True) -> Callable[[Any], None]:
        model, optimizer = self.adapted()
        guard = Guard(model, optimizer, max_grad_norm=1.0, loss="mean")

        def step(window: Any) -> None:
            for ids in window:
                with guard.micro_batch() as micro:
                    micro.loss = loss = model(input_ids=ids, labels=ids).loss
                    loss.backward()
            assert guard.step().applied

        return step

    def plain(self) -> Callable[[Any], None]:
        model, optimizer = self.adapted()
        parameters = [p for p in model.parameters() if p.requires_grad]

        def step(window: Any) -> None:
            for ids in window:
                (model(input_ids=ids, labels=ids).loss / len(window)).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step


def builtin_bench(
    model_name: str, batch_size: int, length: int, accumulation: int, windows: int = 8
) -> Bench:
    """Return a bench with a named base on full rows of the built-in text."""
    model, tokenizer = npt.load_base(model_name, quantization="nf4")
    npt.attach(model, npt.NPTConfig(targets=("gate", "up", "down")))
    data = npt.DataConfig(max_length=length)
    samples = Samples(open_source(data), tokenizer, data, seed=0)
    full = (s for s in samples.epoch(0) if len(s.input_ids) == length)
    stream = batches(full, batch_size)
    return Bench(model, [[next(stream) for _ in range(accumulation)] for _ in range(windows)])


def random_bench(
    model: Any, batch_size: int, length: int, accumulation: int, windows: int = 4
) -> Bench:
    """Return a bench with random weights on random tokens."""
    npt.attach(model, npt.NPTConfig(targets=("gate", "up", "down")))
    generator = torch.Generator().manual_seed(0)

    def batch() -> Batch:
        ids = torch.randint(model.config.vocab_size, (batch_size, length), generator=generator)
        return batch_from_tensors(ids, torch.ones_like(ids))

    return Bench(model, [[batch() for _ in range(accumulation)] for _ in range(windows)])


def measure(bench: Bench, pairs: int) -> dict[str, Any]:
    """Return the figures of a bench from so many timed pairs of windows."""
    guarded, plain = bench.guarded(), bench.plain()
    for window in bench.windows[:2]:
        bench.time(guarded, window)
        bench.time(plain, window)
    ratios, plain_times = [], []
    for pair in range(pairs):
        window = bench.windows[pair % len(bench.windows)]
        first, second = (guarded, plain) if pair % 2 == 0 else (plain, guarded)
        times = {first: bench.time(first, window), second: bench.time(second, window)}
        ratios.append(times[guarded] / times[plain])
        plain_times.append(times[plain])
    # without the check of the batch, which reads host tensors: on a CPU that counts as a wait
    added = None
    if not isinstance(bench, LoraBench):
        added = bench.waits(bench.guarded(late=True, check=False)) - bench.waits(bench.plain())
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)],
        "added_synchronisations": added,
        "plain_step_seconds": round(statistics.median(plain_times), 4),
        "pairs": pairs,
        "device": torch.cuda.get_device_name() if bench.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print the figures on one line")
    parser.add_argument("--lora", action="store_true", help="measure npt.guard around a LoRA step")
    parser.add_argument("--layers", action="store_true", help="measure steps of plain layers")
    parser.add_argument("--model_name", default="tiny", help="the base")
    parser.add_argument("--batch_size", type=int, default=4, help="rows per batch")
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=40, help="pairs of windows to time")
    args = parser.parse_args()
    if args.layers:
        torch.set_num_threads(1)  # another would wait for work, which counts as CPU time
        each = {name: measure_layers(bench, args.pairs) for name, bench in layers().items()}
        put(json.dumps(each, indent=None if args.json else 2))
        return
    sizes = args.batch_size, args.max_length, args.gradient_accumulation_steps
    bench = LoraBench(*sizes) if args.lora else builtin_bench(args.model_name, *sizes)
    figures = measure(bench, args.pairs)
    put(json.dumps(figures, indent=None if args.json else 2))


if __name__ == "__main__":
    main()
