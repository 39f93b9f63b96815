"""A small training loop, guarded and plain, whose micro-batches may have faults."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bitsandbytes.optim import AdamW8bit
from torch import Tensor, nn

from npt.guard import Guard, MicroBatch, Outcome

MAX_NORM = 1.0
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adam-loop": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False, amsgrad=True),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adamw-8bit": lambda p: AdamW8bit(p, lr=0.01, min_8bit_size=1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}

FAULTS = ("loss", "told", "gradient", "inf", "overflow", "exception")


@dataclass(frozen=True)
class Micro:
    """A micro-batch. branch: a part of the model takes part that others leave out."""

    seed: int
    tokens: int = 5
    fault: str | None = None
    branch: bool = False
    scale: float = 1.0

    def data(self, dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        data = torch.randn(self.tokens, 6, generator=generator)
        if self.fault == "loss":
            data[0, 0] = math.nan
        return data.to(dtype)


class Net(nn.Module):
    """Dropout draws random numbers; the branch gets a gradient in some micro-batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
        self.last, self.branch = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, data: Tensor, branch: bool) -> Tensor:
        hidden = nn.functional.dropout(self.norm(self.first(data)), 0.25)
        return self.last(hidden) + (self.branch(hidden.tanh()) if branch else 0.0)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


class World:
    """A model, its optimizer and scheduler, and the global random state."""

    def __init__(
        self,
        optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
        dtype: torch.dtype = torch.float32,
    ):
        torch.manual_seed(0)
        self.model, self.dtype = Net().to(dtype), dtype
        self.optimizer = optimizer(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.random = torch.get_rng_state()

    def forward_backward(
        self, told: MicroBatch | None, micro: Micro, loss: str, scale: float = 1.0
    ) -> None:
        """Backward of a summed or mean loss, with the micro-batch's fault."""
        output = self.model(micro.data(self.dtype), micro.branch).float()
        each = micro.scale * output.square().sum(1)
        value = each.sum() if loss == "sum" else each.mean()
        handle = None
        if micro.fault in ("gradient", "inf", "overflow"):
            bad = {"gradient": math.nan, "inf": math.inf, "overflow": 1e30}[micro.fault]
            handle = self.model.norm.weight.register_hook(lambda g: torch.full_like(g, bad))
        if told is not None:
            told.loss = value.detach() * (math.nan if micro.fault == "told" else 1.0)
        elif micro.fault == "told":
            value = value * math.nan
        (value * scale).backward()
        if handle is not None:
            handle.remove()
        if micro.fault == "exception":
            raise FloatingPointError("planted")


def guarded_run(
    world: World,
    windows: Sequence[Sequence[Micro]],
    loss: str = "sum",
    scaler: Any = None,
    **settings: Any,
) -> list[Outcome]:
    """Train under a guard; the outcome of each window."""
    torch.set_rng_state(world.random)
    arguments = {"max_grad_norm": MAX_NORM, "loss": loss, **settings}
    outcomes = []
    model, optimizer = world.model, world.optimizer
    with Guard(model, optimizer, world.scheduler, scaler, **arguments) as guard:
        try:
            for window in windows:
                for micro in window:
                    with guard.micro_batch(micro.tokens, [micro.seed]) as told:
                        scale = 1.0 if scaler is None else float(scaler.scale(torch.ones(())))
                        world.forward_backward(told, micro, loss, scale)
                outcomes.append(guard.step())
        finally:
            world.random = torch.get_rng_state()
    return outcomes


def plain_run(world: World, windows: Sequence[Sequence[Micro]], loss: str) -> None:
    """Train as anybody does: no guard, and nothing of it."""
    torch.set_rng_state(world.random)
    parameters = list(world.model.parameters())
    for window in windows:
        world.optimizer.zero_grad()
        total: list[Tensor | None] = [None] * len(parameters)
        for micro in window:
            world.forward_backward(None, micro, loss)
            if loss == "mean":  # weighted by tokens
                for place, parameter in enumerate(parameters):
                    if parameter.grad is not None:
                        weighted = parameter.grad * micro.tokens
                        old = total[place]
                        total[place] = weighted if old is None else old + weighted
                        parameter.grad = None
        tokens = torch.tensor(float(sum(micro.tokens for micro in window)))
        for place, parameter in enumerate(parameters):
            if loss == "mean":
                parameter.grad = total[place]
            if parameter.grad is not None:
                parameter.grad.div_(tokens)
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        world.optimizer.step()
        world.scheduler.step()
    world.random = torch.get_rng_state()


def never_saw(windows: Sequence[Sequence[Micro]]) -> list[list[Micro]]:
    """The windows without their bad micro-batches, and without those of which nothing is left."""
    left = [[micro for micro in window if micro.fault is None] for window in windows]
    return [window for window in left if window]


def state_of(world: World) -> dict[str, Any]:
    """Weights, moments, schedule and random state."""
    parts = {name: getattr(world, name) for name in ("model", "optimizer", "scheduler")}
    states = {name: part.state_dict() for name, part in parts.items()}
    return copy.deepcopy({**states, "random": world.random})


def assert_same_state(one: World, other: World) -> None:
    assert_equal(state_of(one), state_of(other), "state")


def assert_equal(one: Any, other: Any, place: str) -> None:
    """Compare nested state bit for bit."""
    if isinstance(one, Tensor):
        assert torch.equal(one, other), place
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), f"{place}: {one.keys()} {other.keys()}"
        for key in one:
            assert_equal(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), place
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, f"{place}[{index}]")
    else:
        assert one == other, f"{place}: {one} {other}"
