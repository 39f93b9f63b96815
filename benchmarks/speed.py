"""Compare the speed, memory and arithmetic of a training step with alternatives, in one process.

    python benchmarks/speed.py [--shape cpu-0.2b] [--json] [--output FOLDER]

All runs have the same weights, tokens and rank; `speed_runs.py` describes them. Each run first
takes two steps: one with its matrix products counted, one with its memory followed. Then all runs
are timed in turn, every other round in reverse, so that a slow moment of the machine hits all.

    tokens_per_second   of a whole step with its optimizer step: the median of the rounds, with the
                        lowest and the highest
    speed_ratio         tokens/s over those of two_model in the same round, likewise
    peak_bytes          what the run holds before the step (models, adapters, moments, tokens) plus
                        the rise of live memory in the step, as if the run were alone
    memory_ratio        peak_bytes over those of two_model
    flops_per_token     counted, not calculated
    roofline_share      flops_per_token * tokens_per_second over the speed of square products,
                        measured before and after the rounds

Run it on an idle machine.
"""

from __future__ import annotations

import os

# the profiler warns of memory that was allocated before it started, as intended here
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flop_count import count_flops, matmul_roofline
from npt.adapters.fit import resolve_layers
from npt.base.load import COMPUTE
from npt.batch import Batch
from npt.console import complain, put
from npt.device import default_device, wait_for
from npt.doctor.measure import peak_bytes, storage_bytes, tensors_of
from npt.errors import ConfigError, NPTError
from npt.files import write_text
from speed_runs import RUNS, SHAPES, Run, Setting, make_batch, make_runs
from tables import speed as markdown
from this_machine import machine

BASELINE = "two_model"


def in_turns(
    steps: Mapping[str, Callable[[], Any]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Return the seconds of each step in every round; every other round runs in reverse."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in list(steps) if number % 2 == 0 else reversed(list(steps)):
            wait_for(device)
            started = time.perf_counter()
            steps[name]()
            wait_for(device)
            seconds[name].append(time.perf_counter() - started)
    return seconds


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def instrumented(run: Run, batch: Batch, note: Callable[[str], None]) -> dict[str, Any]:
    """Measure operations and memory in two steps; the second has the optimizer's moments."""
    losses: list[torch.Tensor] = []

    def step() -> None:
        losses[:] = [run.step(batch)]

    started = time.perf_counter()
    flops = count_flops(step)
    held = storage_bytes(tensors_of(*run.holds, batch))
    peak = held + peak_bytes(step, batch.input_ids.device)
    note(
        f"{run.name}: {flops / batch.tokens / 1e6:.1f} MFLOP/token, peak {peak / 2**20:.0f} MiB"
        f" ({time.perf_counter() - started:.0f} s)"
    )
    return {
        "held_bytes": held,
        "peak_bytes": peak,
        "flops_per_token": flops / batch.tokens,
        "trainable_parameters": sum(p.numel() for p in run.trainable),
        "loss": losses[0].item(),
    }


def measure(
    setting: Setting, names: tuple[str, ...], rounds: int, note: Callable[[str], None]
) -> dict[str, Any]:
    """Return the figures of a comparison."""
    device = torch.device(setting.device)
    batch = make_batch(setting)
    runs, missing = make_runs(setting, names)
    rows: dict[str, dict[str, Any]] = {}
    for run in runs:
        try:
            rows[run.name] = {"name": run.name, **instrumented(run, batch, note)}
        except torch.OutOfMemoryError:
            run.forget()
            missing[run.name] = "out of memory next to the other runs' bases"
    for name, reason in missing.items():
        note(f"{name} is not measured: {reason}")
    dtype = COMPUTE[setting.compute_dtype]
    before = matmul_roofline(device, dtype=dtype)
    note(f"roofline {before.flops_per_second / 1e9:.0f} GFLOP/s; timing {rounds} rounds")
    steps = {run.name: partial(run.step, batch) for run in runs if run.name in rows}
    seconds = in_turns(steps, rounds, device)
    after = matmul_roofline(device, dtype=dtype)
    roofline = max(before, after, key=lambda r: r.flops_per_second)
    for name, row in rows.items():
        speeds = spread([batch.tokens / s for s in seconds[name]])
        row["tokens_per_second"] = speeds["median"]
        row["tokens_per_second_range"] = [speeds["low"], speeds["high"]]
        row["step_seconds"] = seconds[name]
        row["roofline_share"] = (
            row["flops_per_token"] * speeds["median"] / roofline.flops_per_second
        )
        if BASELINE in rows:
            pairs = zip(seconds[name], seconds[BASELINE], strict=True)
            row["speed_ratio"] = spread([theirs / s for s, theirs in pairs])
            row["memory_ratio"] = row["peak_bytes"] / rows[BASELINE]["peak_bytes"]
    return {
        "shape": setting.shape,
        "setting": {**asdict(setting), "tokens": setting.tokens, "rounds": rounds},
        "sizes": asdict(SHAPES[setting.shape]),
        "machine": machine(device),
        "roofline": asdict(roofline),
        "runs": list(rows.values()),
        "missing": missing,
    }


def make_setting(args: argparse.Namespace) -> Setting:
    """Read the flags.

    Raises:
        ConfigError: two flags contradict each other.
    """
    if args.tokens < 1 or args.length < 2 or args.tokens % args.length:
        raise ConfigError(
            f"--tokens {args.tokens} is not a multiple of --length {args.length}, or --length is"
            " below 2: a step has full rows of at least 2 tokens"
        )
    if args.repeats < 1:
        raise ConfigError(f"--repeats {args.repeats} is below 1")
    shape = SHAPES[args.shape]
    resolve_layers(args.layers, shape.layers)
    if not 1 <= args.rank <= shape.hidden:
        raise ConfigError(
            f"--rank {args.rank} is not between 1 and the hidden size, {shape.hidden}"
        )
    return Setting(
        args.shape,
        args.layers,
        args.rank,
        batch_size=args.tokens // args.length,
        length=args.length,
        quantization=None if args.quantization == "none" else args.quantization,
        device=args.device or default_device().type,
        seed=args.seed,
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--shape", default="cpu-0.2b", choices=list(SHAPES))
    parser.add_argument(
        "--tokens", type=int, default=1024, help="tokens per step, in rows of --length"
    )
    parser.add_argument("--length", type=int, default=1024, help="tokens per row")
    parser.add_argument(
        "--layers", default="all", help="layers to convert: all, upper_half, 8-15 or 3,5,7"
    )
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds")
    parser.add_argument("--runs", default=",".join(RUNS), help="comma-separated runs")
    parser.add_argument("--quantization", default="nf4", choices=["nf4", "fp4", "none"])
    parser.add_argument(
        "--matmul_precision",
        default="highest",
        choices=["highest", "high"],
        help="precision of fp32 products; high: TF32",
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--device", help="torch device (default: the first GPU, else the CPU)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder to write SHAPE.json to")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        setting = make_setting(args)
        if args.output is not None:
            args.output.mkdir(parents=True, exist_ok=True)
        names = tuple(name.strip() for name in args.runs.split(","))
        unknown = [name for name in names if name not in RUNS]
        if unknown:
            raise ConfigError(f"--runs has no run {unknown[0]!r}: choose from {', '.join(RUNS)}")
    except (NPTError, OSError) as error:
        complain(str(error))
        return getattr(error, "exit_status", 2)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision(args.matmul_precision)

    def note(line: str) -> None:
        complain(line)

    figures = measure(setting, names, args.repeats, note)
    # printed first, so that a later failure does not lose them
    put(json.dumps(figures) if args.json else markdown(figures))
    if args.output is not None:
        write_text(args.output / f"{args.shape}.json", json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
