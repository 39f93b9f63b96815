"""The cost of `npt.guard` in a plain loop: a LoRA step on a 4-bit base, guarded over unguarded.

    python benchmarks/guard_lora.py

Both loops run in one process, each on a copy of its own of the same model, steps interleaved
(guarded, plain, plain, guarded, ...), so that a slow moment of the machine hits both. Each step is
a window of two micro-batches. `ratio` is the median over pairs of guarded time / plain time, in
seconds of the processor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

import npt
from npt.guard import Guard

MICRO_BATCHES, MAX_NORM = 2, 1.0


def lora() -> tuple[Any, torch.optim.Optimizer]:
    """Return LoRA on the embedded model in NF4, and its optimizer."""
    torch.manual_seed(0)
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(npt.load_base("tiny")[0], config).train()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)


def plain(ids: torch.Tensor) -> Callable[[], None]:
    """Return a step without a guard."""
    model, optimizer = lora()
    parameters = [p for p in model.parameters() if p.requires_grad]

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            (model(input_ids=ids, labels=ids).loss / MICRO_BATCHES).backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return step


def guarded(ids: torch.Tensor) -> tuple[Callable[[], None], Guard]:
    """Return a step under a guard, and the guard."""
    model, optimizer = lora()
    guard = Guard(model, optimizer, max_grad_norm=MAX_NORM, loss="mean")

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            with guard.micro_batch() as micro:
                micro.loss = loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
        assert guard.step().applied

    return step, guard


def measure(pairs: int, rows: int, length: int) -> dict[str, Any]:
    """Return the figures over so many pairs of steps, after one of each that is not counted."""
    ids = torch.randint(0, 1000, (rows, length), generator=torch.Generator().manual_seed(0))
    without, (under, _), ratios = plain(ids), guarded(ids), []
    for pair in range(pairs + 1):
        times = {}
        for step in (under, without) if pair % 2 else (without, under):
            started = time.process_time()
            step()
            times[step] = time.process_time() - started
        ratios.append(times[under] / times[without])
    low, middle, high = statistics.quantiles(ratios[1:])
    return {"ratio": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=40, help="of steps (default %(default)s)")
    parser.add_argument("--rows", type=int, default=2, help="of a micro-batch")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(measure(args.pairs, args.rows, args.length), indent=2))


if __name__ == "__main__":
    main()
