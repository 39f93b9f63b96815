"""The time that calibrating one layer of a given shape takes, on the host and on the device.

The base has one decoder layer, random weights and a small vocabulary, so that a D = 4,096 layer of
the 8B shape fits on any card. The tokens are random too: times mean something, the errors only that
every number was finite.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import npt
from npt.base.device import wait_for
from npt.base.quantization_error import fp32_products
from npt.base.random_base import random_base
from npt.calibration.placement import Placement, free_bytes
from npt.calibration.plan import Plan, plan
from npt.config import NPTConfig
from npt.data.batch import Sample
from npt.planning.shape import Shape, llama_config

LENGTH, VOCAB, HEAD = 256, 512, 64
BATCH_SIZE = 8


class Clock:
    """Wall seconds of calls, by the type of device that their first argument is on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"cpu": 0.0, "cuda": 0.0}
        self.calls = 0

    @contextmanager
    def watching(self, owner: Any, *names: str) -> Iterator[None]:
        """Time the functions `names` of `owner` within the context, the device's work included."""
        before = {name: getattr(owner, name) for name in names}
        for name, act in before.items():
            setattr(owner, name, self._timed(act))
        try:
            yield
        finally:
            for name, act in before.items():
                setattr(owner, name, act)

    def _timed(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def run(matrix: torch.Tensor, *arguments: Any) -> Any:
            wait_for(matrix.device)
            started = time.perf_counter()
            found = act(matrix, *arguments)
            wait_for(matrix.device)
            self.seconds[matrix.device.type] += time.perf_counter() - started
            self.calls += 1
            return found

        return run


def measure(
    device: torch.device | str,
    hidden: int = 4096,
    ffn: int = 14336,
    rank: int = 1024,
    tokens: int = 16384,
    *,
    rounds: int = 1,
    on_host: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Calibrate one layer on random tokens and time it.

    Args:
        device: of the base.
        hidden, ffn: D, a multiple of 64, and F.
        rank: of the adapter.
        tokens: to calibrate on, at least 5 times the rank.
        rounds: over the tokens after the linear start.
        on_host: keep matrices and rows on the host, as without memory for them.
        seed: of weights and tokens.

    Returns:
        Settings and figures. `seconds` is the wall time of `npt.calibrate`; `host_seconds` of it
        are factorisations and solves on the host, `device_seconds` the rest, 0 on a
        CPU. `cpu_seconds` is the processor time of all threads.
    """
    heads = hidden // HEAD
    kv_heads = heads // 4 if heads % 4 == 0 else heads
    shape = Shape(1, hidden, ffn, heads, kv_heads, HEAD, VOCAB)
    config = llama_config(shape, LENGTH)
    model = random_base(config, device=device, seed=seed)
    form = NPTConfig(layers="0", rank=rank, init="calibrated")
    npt.attach(model, form)
    draw = random.Random(seed)
    data = [
        Sample(f"random-{n}", tuple(draw.randrange(VOCAB) for _ in range(LENGTH)))
        for n in range(-(-tokens // LENGTH))
    ]
    batch_size = max(1, min(BATCH_SIZE, len(data) // 2))  # one batch at least is held out
    place: torch.device = next(model.parameters()).device
    work = plan(form, config, (0,), (rank,), tokens, rounds, batch=(batch_size, LENGTH))
    free = free_bytes(place) if place.type == "cuda" else 0
    placement = Placement() if on_host else work.place(place, free)
    with fp32_products("highest"):
        forecast = work.seconds(place, placement)
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
        before = torch.cuda.memory_allocated(place)
    clock = Clock()
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=0)
    with (
        clock.watching(torch.linalg, "eigh", "solve"),
        mock.patch.object(Plan, "place", lambda *_: placement),
        mock.patch.object(Plan, "seconds", lambda *_: forecast),  # which would be timed as well
    ):
        wait_for(place)
        processor, started = time.process_time(), time.perf_counter()
        found = npt.calibrate(
            model, tokenizer, data, tokens, rounds=rounds, batch_size=batch_size, seed=seed
        )
        wait_for(place)
        seconds, processor = time.perf_counter() - started, time.process_time() - processor
    on_gpu = place.type == "cuda"
    host = clock.seconds["cpu"] if on_gpu else seconds
    (layer,) = found.layers.values()
    return {
        "device": str(place),
        "hidden": hidden,
        "ffn": ffn,
        "rank": rank,
        "tokens": found.tokens,
        "rounds": layer.rounds,
        "threads": torch.get_num_threads(),
        "placement": str(placement),
        "seconds": seconds,
        "host_seconds": host,
        "device_seconds": seconds - host,
        "cpu_seconds": processor,
        "factorisations": clock.calls,
        "factorisation_seconds": sum(clock.seconds.values()),
        "forecast_seconds": forecast.total,
        "forecast_peak_bytes": work.peak(place, placement) if on_gpu else None,
        "peak_bytes": torch.cuda.max_memory_allocated(place) - before if on_gpu else None,
        "nmse_before": layer.nmse_before,
        "nmse_after": layer.nmse_after,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--ffn", type=int, default=14336)
    parser.add_argument("--rank", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--on_host", action="store_true", help="keep matrices and rows on the host")
    args = parser.parse_args()
    found = measure(
        args.device,
        args.hidden,
        args.ffn,
        args.rank,
        args.tokens,
        rounds=args.rounds,
        on_host=args.on_host,
    )
    if args.json:
        print(json.dumps(found))
        return
    print(
        f"one layer, D {found['hidden']}, F {found['ffn']}, rank {found['rank']}, "
        f"{found['tokens']:,} tokens on {found['device']}; {found['placement']}"
    )
    print(
        f"{found['seconds']:.1f} s (forecast {found['forecast_seconds']:.1f}): "
        f"{found['host_seconds']:.1f} s host, {found['device_seconds']:.1f} s device; "
        f"{found['factorisations']} factorisations, {found['factorisation_seconds']:.1f} s"
    )


if __name__ == "__main__":
    main()
