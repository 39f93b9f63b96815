"""Results that are on their way from a device: when the host waits for one, and that waiting decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from npt.distill import transaction as module
from npt.distill.spikes import SpikeGuard
from npt.distill.transaction import IN_FLIGHT, Transaction


@dataclass
class Sums:
    loss: Tensor
    tokens: int


@dataclass
class Device:
    """Records arrive here when their turn in `slow` says so: after that many further looks, or when they are waited for."""

    slow: list[int]
    waits: int = 0
    events: list[Event] = field(default_factory=list)

    def to_host(self, record: Tensor) -> tuple[Tensor, Any]:
        event = Event(self, self.slow[len(self.events) % len(self.slow)])
        self.events.append(event)
        return record, event


@dataclass
class Event:
    device: Device
    looks: int

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def synchronize(self) -> None:
        self.device.waits += not self.query()


NEVER = 10**9


def run(windows: list[str], *, late: bool = True, slow: list[int] | None = None, **arguments: Any) -> tuple[Any, ...]:
    """Weights, results in order, how many results came at each commit, snapshots alive at most, waits."""
    parameters = {"a": nn.Parameter(torch.arange(6.0).view(2, 3)), "b": nn.Parameter(torch.ones(4))}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1.0, fused=True)
    transaction: Transaction[Sums] = Transaction(parameters, optimizer, 0.5, [0.1, 0.05], late=late, **arguments)
    device, results, came, kept = Device(slow or [0]), [], [], 0
    with pytest.MonkeyPatch.context() as patched:
        if late:
            patched.setattr(module, "_to_host", device.to_host)
        for number, kind in enumerate(windows):

            def fill(number: int = number, kind: str = kind) -> Sums:
                for parameter in parameters.values():
                    parameter.grad += torch.full_like(parameter, float("nan") if kind == "bad" else 1.0 + number)
                return Sums(torch.tensor(1.0 + number), 5)

            transaction.micro_batch(fill, (str(number),))
            new = transaction.commit()
            came.append(len(new))
            kept = max(kept, sum(window.before is not None for window in transaction._launched))
            results += new
        in_flight, waited = transaction.in_flight, device.waits
        results += transaction.flush()
    told = [(r.index, r.applied, r.steps, r.rate, r.loss, r.grad_norm, [str(refusal) for refusal in r.refusals]) for r in results]
    return {n: p.detach().clone() for n, p in parameters.items()}, told, came, kept, waited, in_flight


def test_nothing_is_waited_for_while_few_windows_are_in_flight():
    _, told, came, kept, waits, in_flight = run(["good"] * IN_FLIGHT, slow=[NEVER])
    assert (came, waits, in_flight, kept) == ([0] * IN_FLIGHT, 0, IN_FLIGHT, IN_FLIGHT)
    assert [index for index, *_ in told] == list(range(IN_FLIGHT))


def test_the_oldest_is_waited_for_where_more_would_be_in_flight():
    _, _, came, kept, waits, in_flight = run(["good"] * (IN_FLIGHT + 4), slow=[NEVER])
    assert (came, waits, in_flight, kept) == ([0] * IN_FLIGHT + [1] * 4, 4, IN_FLIGHT, IN_FLIGHT)


def test_what_has_arrived_is_read_and_only_the_newest_left():
    _, _, came, kept, waits, in_flight = run(["good"] * 6, slow=[0])
    assert (came, waits, in_flight, kept) == ([0, 1, 1, 1, 1, 1], 0, 1, 1)


def test_a_late_one_holds_back_those_behind_it():
    """Results come in their order, whichever record arrives first."""
    _, told, came, _, waits, _ = run(["good"] * 5, slow=[2, 0, 0, 0, 0])
    assert waits == 0 and came == [0, 0, 0, 3, 1]
    assert [index for index, *_ in told] == list(range(5))


@pytest.mark.parametrize("shared", [{"spikes": SpikeGuard(10.0)}, {"ranks": SimpleNamespace(size=2)}], ids=["spike guard", "ranks"])
def test_where_waiting_could_decide_something_it_is_one_window(shared):
    parameters = {"a": nn.Parameter(torch.ones(2))}
    optimizer = torch.optim.AdamW(parameters.values(), fused=True)
    transaction: Transaction[Sums] = Transaction(parameters, optimizer, 0.5, [0.1], late=True, **shared)
    transaction._launched.extend([object()] * 3)  # type: ignore[list-item]
    assert transaction._unread() == 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["good", "good", "bad"]), min_size=1, max_size=8), st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_however_late_results_are_read_bits_and_results_are_those_of_results_read_at_once(windows, slow):
    weights, told, *_ = run(windows, late=False)
    late_weights, late_told, *_ = run(windows, slow=slow)
    assert late_told == told
    assert all(torch.equal(weights[name], late_weights[name]) for name in weights)
