"""The cost of `npt.guard` in a plain loop: a LoRA step on a 4-bit base, guarded over unguarded.

    python benchmarks/guard_lora.py [--fsdp whole|sharded]

Both loops run in one process, each on a copy of its own of the same model, steps interleaved
(guarded, plain, plain, guarded, ...), so that a slow moment of the machine hits both. Each step is
a window of two micro-batches. `ratio` is the median over pairs of guarded time / plain time, in
seconds of the processor.

With `--fsdp` two processes do so in step, over gloo, with a base that FSDP2 shards; what is trained
is whole on each, or sharded too. The time is then the clock's, of process 0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn

import npt
from npt.guard import Guard
from random_base import shard

MICRO_BATCHES, MAX_NORM = 2, 1.0


def lora(fsdp: str | None = None) -> tuple[Any, torch.optim.Optimizer]:
    """Return LoRA on the embedded model in NF4, sharded or not, and its optimizer."""
    torch.manual_seed(0)
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    model: Any = get_peft_model(npt.load_base("tiny")[0], config).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    if fsdp is not None:
        shard(model, trained if fsdp == "whole" else [])
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)


def plain(ids: torch.Tensor, fsdp: str | None = None) -> Callable[[], None]:
    """Return a step without a guard."""
    model, optimizer = lora(fsdp)
    parameters = [p for p in model.parameters() if p.requires_grad]
    together = MICRO_BATCHES * (1 if fsdp is None else dist.get_world_size())

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            (model(input_ids=ids, labels=ids).loss / together).backward()
        if fsdp == "whole":
            gradients: list[Any] = [p.grad for p in parameters]
            flat = nn.utils.parameters_to_vector(gradients)
            dist.all_reduce(flat)
            nn.utils.vector_to_parameters(flat, gradients)
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return step


def guarded(ids: torch.Tensor, fsdp: str | None = None) -> tuple[Callable[[], None], Guard]:
    """Return a step under a guard, and the guard."""
    model, optimizer = lora(fsdp)
    guard = Guard(model, optimizer, max_grad_norm=MAX_NORM, loss="mean")

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            with guard.micro_batch() as micro:
                micro.loss = loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
        assert guard.step().applied

    return step, guard


def measure(pairs: int, rows: int, length: int, fsdp: str | None = None) -> dict[str, Any]:
    """Return the figures over so many pairs of steps, after one of each that is not counted."""
    ids = torch.randint(0, 1000, (rows, length), generator=torch.Generator().manual_seed(0))
    clock = time.process_time if fsdp is None else time.perf_counter
    without = plain(ids, fsdp)
    under, _ = guarded(ids, fsdp)
    ratios = []
    for pair in range(pairs + 1):
        times = {}
        for step in (under, without) if pair % 2 else (without, under):
            started = clock()
            step()
            times[step] = clock() - started
        ratios.append(times[under] / times[without])
    low, middle, high = statistics.quantiles(ratios[1:])
    return {"ratio": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)]}


def process(index: int, folder: str, *arguments: Any) -> None:
    """Measure as one of two processes."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, rank=index, world_size=2)
    figures = measure(*arguments)
    if index == 0:
        Path(folder, "figures").write_text(json.dumps(figures))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=40, help="of steps (default %(default)s)")
    parser.add_argument("--rows", type=int, default=2, help="of a micro-batch")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--fsdp", choices=("whole", "sharded"), help="on two processes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    given = args.pairs, args.rows, args.length, args.fsdp
    if args.fsdp is None:
        figures = measure(*given)
    else:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(process, (folder, *given), nprocs=2)
            figures = json.loads(Path(folder, "figures").read_text())
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
