"""A guard that is given its rates and draws: outcomes in lists, late ones too, and no trace."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from npt.errors import ConfigError
from npt.guard import Guard, Outcome, Seeded

RATES = [0.05, 0.03, 0.02, 0.01]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))


def train(
    late: bool, bad: tuple[int, ...] = (), absent: tuple[int, ...] = (), **settings: Any
) -> tuple[dict[str, Tensor], list[Outcome]]:
    """Train four windows of three micro-batches, of which some are bad or never seen."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1.0, fused=True)
    with Guard(
        net, optimizer, rates=RATES, draws=Seeded(7), late=late, max_grad_norm=1.0, **settings
    ) as guard:
        outcomes = []
        for number in range(12):
            if number not in absent:
                x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
                if number in bad[::2]:
                    guard.refuse("told so", [number])
                else:
                    with guard.micro_batch(3, [number], offset=number, inputs=x) as micro:
                        micro.loss = loss = (net(x * (torch.nan if number in bad else 1))).sum()
                        loss.backward()
            if number % 3 == 2:
                outcomes += guard.step()
        outcomes += guard.flush()
        return {name: p.detach().clone() for name, p in net.named_parameters()}, outcomes


@pytest.mark.parametrize("late", [False, True])
def test_what_is_refused_leaves_no_trace(late) -> None:
    weights, outcomes = train(late, bad=(1, 4, 6, 7))
    expected, _ = train(False, absent=(1, 4, 6, 7))
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert [len(o.refused) for o in outcomes] == [1, 1, 2, 0]
    kinds = [(r.kind, r.sample_ids) for o in outcomes for r in o.refused]
    assert kinds == [("data", ("1",)), ("loss", ("4",)), ("data", ("6",)), ("loss", ("7",))]
    assert [o.rate for o in outcomes] == pytest.approx(RATES)
    assert [o.steps for o in outcomes] == [1, 2, 3, 4]


def test_late_outcomes_come_later_and_are_the_same() -> None:
    (weights, late), (others, once) = train(True, bad=(0, 5)), train(False, bad=(0, 5))
    assert late == once
    assert all(torch.equal(weights[name], value) for name, value in others.items())


@pytest.mark.parametrize("late", [False, True])
def test_a_refusal_is_traced_in_the_state_of_its_window(late) -> None:
    """A late one is traced after newer steps; the weights are the window's, and then the newest."""
    weights, outcomes = train(late, bad=(0, 5), trace=1)
    plain, _ = train(late, bad=(0, 5))
    (finding,) = [finding for outcome in outcomes for finding in outcome.findings]
    assert finding.refusal.sample_ids == ("5",) and finding.verdict is not None
    assert all(torch.equal(weights[name], value) for name, value in plain.items())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_guard_that_is_made_moves_no_weight(kind) -> None:
    net = model()
    before = net[0].weight.detach().clone()
    optimizer = kind(net.parameters(), lr=0.1, weight_decay=0.5)  # not fused
    Guard(net, optimizer, rates=RATES, draws=Seeded(7))
    assert torch.equal(net[0].weight, before) and not optimizer.state


def test_too_many_in_a_row_are_counted_over_windows() -> None:
    _, outcomes = train(False, bad=(0, 2, 1, 4, 3, 5), max_refused=100)
    assert [o.longest for o in outcomes[:2]] == [3, 6]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"late": True}, r"draws=Seeded\(seed\) must be passed together, and late=True"),
        ({"rates": RATES}, r"draws=Seeded\(seed\) must be passed"),
        ({"rates": RATES, "scheduler": object()}, "remove scheduler and scaler"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(settings, words) -> None:
    net = model()
    with pytest.raises(ConfigError, match=words) as refused:
        Guard(net, torch.optim.AdamW(net.parameters(), fused=True), **settings)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("late", [False, True])
def test_a_parameter_that_is_frozen_meanwhile_stays_as_it_is(late: bool) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    guard = Guard(model, optimizer, rates=[0.1] * 4, draws=Seeded(0), late=late)

    def window() -> None:
        with guard.micro_batch(ids=[0]) as micro:
            micro.loss = loss = model(torch.ones(1, 4)).square().sum()
            loss.backward()
        guard.step()

    window()
    model.weight.requires_grad_(False)
    before = model.weight.detach().clone()
    bias = model.bias.detach().clone()
    window()
    guard.flush()
    assert torch.equal(model.weight, before) and not torch.equal(model.bias, bias)
