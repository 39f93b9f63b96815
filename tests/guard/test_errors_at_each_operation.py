"""An error at any operation of a guard's step: as if the window had never been."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from npt.guard import Guard, Outcome
from npt.guard.outcome import MicroBatch
from npt.guard.update import GuardedUpdate
from npt.guard.window import GradientWindow


class Failing(TorchDispatchMode):
    """Counts operations and fails in one of them, which it has not made."""

    def __init__(self, fails_at: int = -1):
        super().__init__()
        self.fails_at, self.count = fails_at, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if self.count == self.fails_at:
            self.count += 1
            raise MemoryError("planted")
        self.count += 1
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("row", "rate", "kinds"),
    [
        (1.0, 0.1, ["loss"]),
        (1e30, 0.1, ["gradient", "loss"]),
        (1.0, float("inf"), ["loss", "update"]),
    ],
)
def test_an_error_at_any_operation_takes_the_step_back(row, rate, kinds) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    guard = Guard(model, optimizer, scheduler, max_grad_norm=float("inf"))

    def step(row: float, fails_at: int = -1) -> tuple[Outcome, int]:
        for factor in (1.0, float("nan")):
            with guard.micro_batch() as micro:
                micro.loss = model(torch.full((1, 2), row)).sum() * factor
                micro.loss.backward()
        with Failing(fails_at) as counter:
            outcome = guard.step()
        return outcome, counter.count

    def state():
        return deepcopy(
            [
                dict(model.named_parameters()),
                optimizer.state_dict(),
                scheduler.state_dict(),
                guard.state_dict(),
                [guard.window.applied_steps, guard.window.known_steps],
            ]
        )

    step(1.0)
    optimizer.param_groups[0]["lr"] = rate
    before = state()
    place = 0
    while True:
        try:
            outcome, count = step(row, place)
        except MemoryError:
            torch.testing.assert_close(state(), before, rtol=0.0, atol=0.0)
            place += 1
        else:
            break
    assert place == count > 50
    assert sorted(refusal.kind for refusal in outcome.refused) == kinds


def test_an_error_never_leaves_a_late_step_that_is_not_counted() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    update = GuardedUpdate(dict(model.named_parameters()), optimizer, late=True)
    window: GradientWindow = GradientWindow(update, 1.0, [0.1, 0.05, 0.02])

    def commit(fails_at: int = -1) -> int:
        window.gradients.withdraw()
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        window.gradients.collect()
        window.add(MicroBatch(None, 1), loss)
        with Failing(fails_at) as counter:
            window.commit()
            window.flush()
        return counter.count

    def state():
        return deepcopy([dict(model.named_parameters()), optimizer.state_dict()["state"]])

    commit()
    before = state()
    place = 0
    while True:
        try:
            count = commit(place)
        except MemoryError:
            window.clear()
            assert window.applied_steps == window.known_steps == 1
            torch.testing.assert_close(state(), before, rtol=0.0, atol=0.0)
            place += 1
        else:
            break
    assert place == count > 50
    assert window.known_steps == 2
