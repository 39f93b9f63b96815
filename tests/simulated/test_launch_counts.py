"""The count of launches: what is counted, and once for each."""

from __future__ import annotations

import pytest
import torch
from launches import Launches
from simulated_cuda import simulated_cuda


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda x: x.view(-1).t().detach(), 0),
        (lambda x: torch.empty_like(x), 0),
        (lambda x: (x * 2).clone(), 2),
        (lambda x: float(x.sum()), 2),
        (lambda x: torch._foreach_mul([x] * 64, [x] * 64), 1),
        (lambda x: torch._foreach_mul([x] * 65, [x] * 65), 2),
        (lambda x: torch._foreach_mul_([x.new_empty(321 << 16)], 2.0), 2),
        (lambda x: torch._foreach_norm([x, x]), 3),
        (lambda x: x.clone().requires_grad_().sin().sum().backward(), 6),
    ],
)
def test_launches_are_counted(act, expected) -> None:
    x = torch.ones(2, 2)
    with Launches() as count:
        act(x)
    assert count.total == expected, count.by_name


def test_a_fused_step_is_one_launch_on_the_simulated_card_too() -> None:
    def launches(device: str) -> int:
        parameters = [torch.ones(3, device=device, requires_grad=True) for _ in range(36)]
        optimizer = torch.optim.AdamW(parameters, fused=True)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            with Launches() as count:
                optimizer.step()
        assert count.by_name["_fused_adamw_"] == 1
        return count.total

    expected = launches("cpu")
    with simulated_cuda():
        assert launches("cuda") == expected
