"""The simulated card itself: what fails on a card fails there."""

from __future__ import annotations

import pytest
import torch
from simulated_cuda import HostWaitError, Simulated, no_waits, simulated_cuda


def test_tensors_of_two_devices_do_not_mix() -> None:
    with simulated_cuda(devices=2):
        here, there = torch.ones(2, device="cuda"), torch.ones(2, device="cuda:1")
        assert isinstance(here, Simulated) and (here.device.index, there.device.index) == (0, 1)
        assert (here * 2 + torch.tensor(1.0)).held.tolist() == [3.0, 3.0]  # scalars may come along
        for other in (there, torch.ones(2)):
            with pytest.raises(RuntimeError, match=r"mul: tensors on two devices"):
                here * other


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.all()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
        lambda x: torch.linalg.eigh(x * torch.eye(3, device="cuda")),
        lambda x: torch.ones(3).to("cuda"),
        lambda x: torch.ones(3).to("cuda", non_blocking=True),  # from pageable memory
        lambda x: torch.tensor([1.0, 2.0], device="cuda"),
        lambda x: torch.cuda.synchronize(),
    ],
)
def test_what_makes_the_host_wait_is_noticed(read) -> None:
    with simulated_cuda() as simulation:
        x = torch.ones(3, device="cuda")
        read(x)
        assert simulation.waits
        with no_waits(), pytest.raises(HostWaitError):
            read(x)


def test_what_waits_for_nothing_is_left_alone() -> None:
    with simulated_cuda():
        x, pinned = torch.ones(3, device="cuda"), torch.ones(3).pin_memory()
        with no_waits():
            y = torch.where(x > 0, x * 2, 0.0) + pinned.to("cuda", non_blocking=True)
            target = torch.empty(3, pin_memory=True)
            target.copy_(y, non_blocking=True)
        assert y.device == torch.device("cuda", 0)


def test_a_copy_that_has_not_arrived_is_nan() -> None:
    with simulated_cuda():
        x = torch.full((3,), 2.0, device="cuda")
        target = torch.empty(3, pin_memory=True)
        target.copy_(x, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        assert target.isnan().all()
        assert not arrived.query()
        arrived.synchronize()
        assert target.tolist() == [2.0, 2.0, 2.0]


def test_gradients_are_those_of_the_cpu() -> None:
    weight, x = torch.randn(4, 3), torch.randn(5, 3)
    expected = weight.clone().requires_grad_()
    (x @ expected.T).sin().sum().backward()
    with simulated_cuda():
        found = weight.to("cuda").requires_grad_()
        (x.to("cuda") @ found.T).sin().sum().backward()
        assert torch.equal(found.grad.held, expected.grad)
