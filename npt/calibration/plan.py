"""What a calibration is going to take, said before it starts, and a bar while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedConfig

from npt.base.device import wait_for
from npt.calibration.placement import HOST, PREFERENCES, Placement, placement_of
from npt.calibration.solve import CG_STEPS, CHUNK, RIDGES, round_share
from npt.config import NPTConfig
from npt.distill.logit_losses import LOGIT_CHUNK

OVERHEAD = 2.0
"""Time over that of the matrix products alone, as measured: activations, norms, reading rows."""

SHARE = 0.9
"""Share of a GPU's free memory that is planned with: what is freed comes back in pieces."""

HOST_KEEP = 1 << 30
"""Bytes of linearisations that are held on the host: memory must not grow with the tokens."""

FACTOR_MATRICES = 12
"""[D, D] fp64 alive in `solve.worth`: two inputs, both roots, eigenvectors, products, and the
workspace of the eigendecomposition, more than two of them."""

VECTORS = 12
"""Copies of a layer's parameters alive in a step of conjugate gradients."""

_PROBE_ROWS, _PROBE_COLUMNS = 1024, 4096
_PROBE_SIDE = 512


@dataclass(frozen=True)
class Seconds:
    """A forecast. products: on the model's device. factorisations: where they are made."""

    products: float
    factorisations: float

    @property
    def total(self) -> float:
        return self.products + self.factorisations


@dataclass(frozen=True)
class Plan:
    """A forecast of what a calibration takes beside the model.

    Bytes: `graph` of one batch through the teacher; `sums` of the Gram matrices of all layers;
    `waiting` of metrics and directions until their layer is solved; `factor` of the matrices of one
    layer while they are factorised; `solving` of one layer's weights, chunk and vectors; `rows` of
    the states of all tokens; `kept` of all linearisations of a round, if they are held.

    width: D. products: multiply-adds in all. factorisations: eigendecompositions of [D, D] fp64.
    """

    width: int
    products: float
    factorisations: int
    graph: int
    sums: int
    waiting: int
    factor: int
    solving: int
    rows: int
    kept: int

    def place(self, device: torch.device, free: int) -> Placement:
        """The first of `PREFERENCES` whose peak fits into a GPU's `free` bytes; the host
        for a CPU.
        """
        if device.type != "cpu":
            for names in PREFERENCES:
                placement = placement_of(device, names)
                if self.peak(device, placement) <= SHARE * free:
                    return placement
        return Placement()

    def keep(self, device: torch.device, placement: Placement, free: int) -> int:
        """Bytes of linearisations to hold: on a GPU what the rest leaves, on the host
        `HOST_KEEP`.
        """
        room = HOST_KEEP
        if device.type != "cpu":
            if placement.all_on_host:
                return 0  # there is no memory to spare
            room = int(SHARE * free) - self._phases(device, placement)["solving"]
        return max(0, min(room, self.kept))

    def peak(self, device: torch.device, placement: Placement) -> int:
        """Bytes on the model's device at the highest moment, without linearisations that
        are kept.
        """
        return max(self._phases(device, placement).values())

    def _phases(self, device: torch.device, placement: Placement) -> dict[str, int]:
        sums, factors = placement.sums == device, placement.factors == device
        gram = 4 * self.width**2
        factor = self.factor if factors else gram
        return {
            "measuring": self.graph + (self.sums if sums else gram),
            "factorising": factor + (self.sums if sums else 0),
            "solving": (
                self.solving
                + factor
                + (self.waiting if sums else gram)
                + (self.rows if placement.rows == device != HOST else 0)
            ),
        }

    def ram(self, device: torch.device, placement: Placement) -> int:
        """Bytes on the host, those of the model's work included if it is there."""
        if device.type == "cpu":
            return self.peak(device, placement) + self.keep(device, placement, 0)
        sums = self.sums if placement.sums == HOST else 0
        return sums + (self.factor if placement.factors == HOST else 0)

    def disk(self, placement: Placement) -> int:
        """Bytes of temporary files."""
        return self.rows if placement.rows == HOST else 0

    def seconds(self, device: torch.device, placement: Placement) -> Seconds:
        """About how long it takes here, from one product and one small eigendecomposition timed
        now.

        A layer that is hard may take more rounds. An eigendecomposition is scaled with the cube of
        its side, which is too much on a GPU, where a small one waits for launches.
        """
        width, columns = self.width, min(4 * self.width, _PROBE_COLUMNS)
        x = torch.ones(_PROBE_ROWS, width, device=device)
        w = torch.ones(width, columns, device=device)
        product = _fastest(lambda: x @ w, device, 10) / (_PROBE_ROWS * width * columns)
        side = min(width, _PROBE_SIDE)
        draw = torch.Generator().manual_seed(0)
        root = torch.randn(side, side, dtype=torch.float64, generator=draw).to(placement.factors)
        gram = root @ root.T
        eigh = _fastest(lambda: torch.linalg.eigh(gram), placement.factors, 2) * (width / side) ** 3
        return Seconds(OVERHEAD * self.products * product, self.factorisations * eigh)


def plan(
    config: NPTConfig,
    model: PreTrainedConfig,
    layers: Sequence[int],
    ranks: Sequence[int],
    tokens: int,
    rounds: int,
    *,
    inputs: str = "teacher",
    rank_budget: int | None = None,
    batch: tuple[int, int] = (8, 256),
) -> Plan:
    """Forecast a calibration of `layers` with `ranks` on `tokens` tokens.

    Args:
        config: form of the adapters.
        model: configuration of the base.
        layers: that are converted.
        ranks: one each.
        tokens: N.
        rounds: of Gauss-Newton.
        inputs: as of `calibrate`; `propagated` keeps the student's stream too.
        rank_budget: as of `calibrate`; until it is spent every direction is kept.
        batch: rows and length of the largest batch.
    """
    width, ffn = model.hidden_size, model.intermediate_size
    kinds = config.additive + config.multiplicative
    attention = 4 * width * width
    base = model.num_hidden_layers * (attention + 3 * width * ffn) + width * model.vocab_size
    total = 3.0 * base + (max(layers) + 1) * (attention + 3 * width * ffn)
    outputs = sum(width if target == "down" else ffn for target in config.targets)
    kept = 4 * tokens * ((1 + config.multiplicative) * (2 * ffn + 2 * width) + max(ranks))
    held = min(1.0, HOST_KEEP / kept)  # on a GPU it may be more
    for rank in ranks:
        codes = kinds * rank * outputs
        once = 3 * width * ffn + rank * width + codes
        linear = 4 * width * ffn + rank * width + codes + len(RIDGES) * 1.125 * once
        derivative = 2 * (width * ffn + rank * width + 2 * codes)
        rounds_in_all = sum(round_share(number, rounds) for number in range(rounds))
        steps = once + CG_STEPS * (1 - held) * once + (CG_STEPS + 1) * derivative
        total += 4 * width**2 + linear + rounds_in_all * steps
    converted, rank = len(layers), max(ranks)
    directions = width if rank_budget is not None else rank
    parameters = 4 * rank * (width + kinds * outputs)
    behind = model.num_hidden_layers - min(layers)
    return Plan(
        width=width,
        products=total * tokens,
        factorisations=(2 + bool(rounds)) * converted,
        graph=_graph(model, behind, *batch),
        sums=3 * 8 * width**2 * converted,
        waiting=4 * (width + directions) * width * converted,
        factor=FACTOR_MATRICES * 8 * width**2,
        solving=4 * CHUNK * (12 * ffn + 8 * width)
        + 4 * 3 * width * ffn
        + VECTORS * parameters
        + 2 * 8 * rank * outputs,
        rows=4 * tokens * width * (4 if inputs == "propagated" else 3),
        kept=kept,
    )


class Display:
    """A bar on a terminal, a line per layer elsewhere."""

    def __init__(self, console: Console, steps: int):
        self.console = console
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("calibrating"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[stage]}"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("calibrate", total=steps, stage="")
            self._bar.start()

    def stage(self, name: str, done: int) -> None:
        """What is done now, and how many steps of the whole are counted as done before it: rounds
        may end early.
        """
        if self._bar is not None:
            self._bar.update(self._task, stage=name, completed=done)

    def tick(self, steps: int = 1) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, steps)

    def say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _graph(model: PreTrainedConfig, layers: int, rows: int, length: int) -> int:
    """Bytes of a batch's graph through the last `layers` layers, its gradients and logits included.

    The factors are counts of fp32 states that were measured on small models. Attention weights are
    in it, which only the kernel for shared heads in fp32 keeps.
    """
    width, ffn, tokens = model.hidden_size, model.intermediate_size, rows * length
    layer = 5 * width + 3 * ffn + 2 * model.num_attention_heads * length
    logits = 5 * min(tokens * model.vocab_size, LOGIT_CHUNK)
    return 4 * (tokens * (layers * layer + 7 * width + 3 * ffn) + logits + 2 * width * ffn)


def _fastest(act: Callable[[], object], device: torch.device, times: int) -> float:
    best = float("inf")
    for _ in range(times):
        wait_for(device)
        started = time.perf_counter()
        act()
        wait_for(device)
        best = min(best, time.perf_counter() - started)
    return best
