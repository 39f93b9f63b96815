"""A window that is computed twice finds what a faulty machine changed, and repairs it."""

import math
import random
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from students import load_student, make_batch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from windows import StudentStep

from npt.adapters.converted import adapter_parameters
from npt.config import TrainConfig
from npt.distill.strategies import drive
from npt.errors import ConfigError
from npt.guard import Guard, Outcome, protect

KINDS = ("activation", "gradient", "sum", "weight", "moment")


def flip(tensor: Tensor, generator: random.Random) -> None:
    """Flip a bit in memory, as a faulty machine does: torch does not count it as a write."""
    words = tensor.detach().numpy().reshape(-1).view("uint32")
    words[generator.randrange(len(words))] ^= 1 << generator.randrange(32)


class World:
    """A small training run with dropout, a buffer that changes, and accumulation."""

    def __init__(self, recheck: int):
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.guard = Guard(
            self.model, self.optimizer, max_grad_norm=1.0, loss="mean", recheck=recheck
        )
        self.rows = torch.randn(12, 4, 6)

    def window(self, number: int, between: Callable[[int], None] = lambda place: None) -> Outcome:
        for place in range(2):
            compute = partial(self.loss, self.rows[(2 * number + place) % len(self.rows)])
            with self.guard.micro_batch(tokens=3 + place, run=compute) as micro:
                micro.loss = loss = compute()
                loss.backward()
            between(place)
        outcome: Outcome = self.guard.step()
        return outcome

    def loss(self, rows: Tensor) -> Tensor:
        return self.model(rows).square().mean()

    def state(self) -> list[Tensor]:
        moments = [v for s in self.optimizer.state.values() for v in s.values()]
        return deepcopy([*self.model.state_dict().values(), *moments, torch.get_rng_state()])


def plant(world: World, kind: str, generator: random.Random) -> Callable[[int], None]:
    """Flip one bit in the next window; return what to call after each of its micro-batches."""
    at = generator.randrange(2)
    if kind == "activation":
        calls = 0

        def spoil(_module: Any, _args: Any, output: Tensor) -> None:
            nonlocal calls
            if calls == at:
                flip(output, generator)
            calls += 1

        world.model[0].register_forward_hook(spoil)
    if kind == "gradient":
        weight, passes = world.model[4].weight, 0

        def spoilt(gradient: Tensor) -> Tensor:
            nonlocal passes
            passes += 1
            changed = gradient.clone()
            if passes == at + 1:
                flip(changed, generator)
            return changed

        weight.register_hook(spoilt)

    def between(place: int) -> None:
        if place != at:
            return
        if kind == "sum":
            flip(world.guard.window.gradients.sum_views[1], generator)
        if kind == "weight":
            flip(world.model[4].weight, generator)
        if kind == "moment":
            flip(world.optimizer.state[world.model[0].weight]["exp_avg"], generator)

    return between


class Regression(nn.Module):
    """A model that returns its loss, as transformers' do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.inner(x).square().mean()}


NAMED = {"sum": "0.bias", "weight": "4.weight", "moment": "exp_avg of 0.weight"}


def run(
    kind: str = "", seed: int = 0, recheck: int = 1, windows: int = 4
) -> tuple[list[Outcome], list[Tensor]]:
    """Train; a bit flips in the third window."""
    world = World(recheck)
    generator = random.Random(f"{kind} {seed}")
    outcomes = []
    for number in range(windows):
        between = plant(world, kind, generator) if kind and number == 2 else lambda _: None
        outcomes.append(world.window(number, between))
    return outcomes, world.state()


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_found_and_repaired(kind: str, seed: int) -> None:
    """200 of them: the run then equals the one whose memory never failed, bit for bit. A lowest bit
    may be gone once gradients are weighted and summed; which ones are, depends on the processor.
    """
    outcomes, state = run(kind, seed)
    clean = run()[1]
    assert all(map(torch.equal, state, clean))
    assert not any(outcome.repaired for outcome in (*outcomes[:2], outcomes[3]))
    found = " ".join(outcomes[2].repaired)
    if not found and kind in ("gradient", "sum"):
        assert all(map(torch.equal, run(kind, seed, recheck=0)[1], clean))  # it was gone
    else:
        assert NAMED.get(kind, "gradient of") in found


def test_rechecked_windows_change_nothing_and_find_nothing() -> None:
    """In 1,000 steps, each computed twice."""
    outcomes, state = run(windows=1000)
    assert len(outcomes) == 1000 and all(outcome.applied for outcome in outcomes)
    assert not any(outcome.repaired for outcome in outcomes)
    assert all(map(torch.equal, state, run(recheck=0, windows=1000)[1]))


def test_a_model_that_computes_other_bits_each_time_is_told_so() -> None:
    world = World(recheck=1)
    generator = torch.Generator().manual_seed(0)
    world.loss = lambda rows: (  # type: ignore[method-assign]
        world.model(rows).square().mean() * (1 + torch.rand((), generator=generator))
    )
    (told,) = world.window(0).repaired
    assert told.endswith("the model does not compute the same bits twice, so leave recheck at 0")


def test_a_loss_that_cannot_be_computed_again_is_refused() -> None:
    world = World(recheck=1)
    with world.guard.micro_batch() as micro:
        micro.loss = loss = world.loss(world.rows[0])
        loss.backward()
    with pytest.raises(ConfigError, match=r"pass micro_batch\(run=\.\.\.\)"):
        world.guard.step()
    assert world.window(0).applied


def test_an_operation_on_a_weight_is_no_fault() -> None:
    """A forward or a loop may write to weights."""
    world = World(recheck=1)

    def write(place: int) -> None:
        with torch.no_grad():
            world.model[4].weight.mul_(1.0 if place else 0.5)

    world.window(0)
    assert "4.weight changed" not in " ".join(world.window(1, write).repaired)


def test_a_trainer_logs_what_it_repaired(tmp_path, caplog) -> None:
    def weights(recheck: int, spoil: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Regression()
        passes = 0

        def spoilt(_module: Any, _args: Any, output: Tensor) -> None:
            nonlocal passes
            passes += 1
            if spoil and passes == 3:
                words = output.detach().numpy().reshape(-1).view("uint32")
                words[0] ^= 1 << 22

        model.inner.register_forward_hook(spoilt)
        arguments = TrainingArguments(
            str(tmp_path), max_steps=4, report_to=[], use_cpu=True, disable_tqdm=True,
            save_strategy="no", per_device_train_batch_size=2,
        )  # fmt: skip
        rows = [{"x": torch.full((3,), 0.1 * number)} for number in range(8)]
        protect(Trainer(model, arguments, train_dataset=rows), recheck=recheck).train()
        return list(model.parameters())

    clean = weights(0, False)
    assert all(map(torch.equal, weights(1, False), clean))
    assert not [record for record in caplog.records if "repaired" in record.message]
    assert all(map(torch.equal, weights(1, True), clean))
    (told,) = [record.message for record in caplog.records if "repaired" in record.message]
    assert told.startswith("repaired in step 2: the gradient of inner.bias differed")


@pytest.mark.parametrize("kind", ["packed", "right"])
def test_a_students_step_is_repaired(kind: str) -> None:
    """The loop's own windows: seeded draws, and a `run` that computes the gradients as well."""

    def trained(recheck: int, spoil: bool) -> tuple[list[str], dict[str, Tensor]]:
        model = load_student()
        parameters = adapter_parameters(model)
        calls = 0

        def spoilt(gradient: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            changed = gradient.clone()
            if spoil and calls == 3:
                changed.view(-1)[0] += 0.5
            return changed

        next(iter(parameters.values())).register_hook(spoilt)
        config = TrainConfig(learning_rate=1e-2, recheck=recheck)
        step = StudentStep(model, drive, config, [1e-2] * 3)
        told: list[str] = []
        for number in range(3):
            (outcome,) = step.run([make_batch(kind, 2 * number + i) for i in range(2)])
            told += outcome.repaired
        return told, {name: p.detach().clone() for name, p in parameters.items()}

    nothing, clean = trained(0, False)
    told, weights = trained(1, True)
    assert not nothing and len(told) == 1
    assert all(torch.equal(weights[name], value) for name, value in clean.items())


def test_a_window_that_is_finite_once_and_then_not_keeps_what_recurs() -> None:
    """The second computation is the faulty one: its gradients are refused, and nothing is lost."""
    states = []
    for spoil in (False, True):
        world, calls = World(recheck=1), 0
        plain = world.loss

        def loss(rows: Tensor, spoil: bool = spoil, plain: Any = plain) -> Tensor:
            nonlocal calls
            calls += 1
            return plain(rows) * (math.nan if spoil and calls in (7, 8) else 1.0)

        world.loss = loss  # type: ignore[method-assign]
        told = [world.window(number).repaired for number in range(3)]
        assert [bool(faults) for faults in told] == [False, spoil, False]
        states.append(world.state())
    assert all(map(torch.equal, *states))


def test_a_loss_beside_the_models_is_refused_and_not_repaired() -> None:
    model = Regression()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), recheck=1)
    with guard.micro_batch() as micro:
        micro.loss = loss = model(torch.ones(2, 3))["loss"] + model.inner.weight.square().sum()
        loss.backward()
    with pytest.raises(ConfigError, match=r"other gradients than the loop: .*pass micro_batch"):
        guard.step()


def test_gradients_of_minus_zero_are_no_difference() -> None:
    torch.manual_seed(0)
    model = Regression()
    model.inner.weight.register_hook(lambda gradient: torch.full_like(gradient, -0.0))
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), loss="mean", recheck=1)
    for _ in range(3):
        with guard.micro_batch() as micro:
            micro.loss = loss = model(torch.ones(1, 3))["loss"]
            loss.backward()
        assert not guard.step().repaired
