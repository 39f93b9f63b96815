"""The simulated card itself: what fails on a card fails there."""

from __future__ import annotations

import math
import sys
import unittest
from types import SimpleNamespace

import pytest
import torch
from simulated_cuda import (
    LIBRARY,
    UNSUPPORTED,
    ExitedError,
    HostWaitError,
    Simulated,
    no_waits,
    round_to_tf32,
    simulated_cuda,
)
from students import load_student, make_batch

import npt
from npt.base.precision import fp32_products, matmul_precision, product_error, set_matmul_precision
from npt.distill.local import local
from npt.guard import Guard


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


def test_tf32_has_ten_bits_of_mantissa() -> None:
    ulp = 2.0**-10
    x = torch.tensor([1.0, 1 + ulp / 2, 1 + 1.5 * ulp, 1 + 0.49 * ulp, -1 - ulp, 3e38, torch.inf])
    expected = [1.0, 1.0, 1 + 2 * ulp, 1.0, -1 - ulp, float(round_to_tf32(x)[5]), torch.inf]
    assert round_to_tf32(x).tolist() == expected
    assert abs(expected[5] / 3e38 - 1) < ulp


@pytest.mark.parametrize(("capability", "chosen"), [((9, 0), "high"), ((7, 5), "highest")])
def test_tf32_rounds_products_where_a_card_has_it(capability, chosen) -> None:
    with simulated_cuda(capability=capability):
        model = load_student("cuda")
        exact, fast = (product_error(model, each) for each in ("highest", "high"))
        assert exact < 1e-6 and (fast > 1e-4) == (chosen == "high")
        with fp32_products("highest"):
            set_matmul_precision("auto", model)
            assert matmul_precision() == chosen


def test_autocast_casts_what_cuda_casts() -> None:
    with simulated_cuda():
        x = torch.ones(2, 2, device="cuda", requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") == torch.bfloat16
            y = torch.nn.functional.linear(x, x)
            assert (y.dtype, y.softmax(-1).dtype) == (torch.bfloat16, torch.float32)
            with torch.autocast("cuda", enabled=False):
                assert (x @ x).dtype == torch.float32
        assert not torch.is_autocast_enabled("cuda")
        y.sum().backward()
        assert x.grad is not None and x.grad.dtype == torch.float32


def test_a_loss_scale_that_overflows_is_halved() -> None:
    """A scale of 65,536 takes gradients of 1 beyond fp16."""
    with simulated_cuda():
        model = torch.nn.Linear(4, 1, device="cuda")
        optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
        guard, applied = Guard(model, optimizer, scaler=scaler), []
        for _ in range(3):
            with guard.micro_batch() as micro, torch.autocast("cuda", torch.float16):
                micro.loss = model(torch.ones(1, 4, device="cuda")).float().sum()
                scaler.scale(micro.loss).backward()
            applied.append(guard.step().applied)
        assert applied == [False, True, True] and scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": True}, {"capturable": True}])
def test_a_guarded_adam_steps_on_a_card_as_on_the_cpu(settings) -> None:
    """Its `step` lies on the host, unless it is fused or capturable."""

    def weights(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2).to(device)
        kwargs = settings if device == "cuda" or "capturable" not in settings else {}
        guard = Guard(model, torch.optim.AdamW(model.parameters(), lr=0.1, **kwargs))
        for value in (1.0, math.nan, 2.0):
            with guard.micro_batch() as micro:
                micro.loss = model(torch.full((1, 4), value, device=device)).square().sum()
                micro.loss.backward()
            assert guard.step().applied == (value == value)
        return [parameter.detach().cpu() for parameter in model.parameters()]

    expected = weights("cpu")
    with simulated_cuda():
        torch.testing.assert_close(weights("cuda"), expected, rtol=0.0, atol=5e-6)  # powers in fp32


def test_dtypes_that_cuda_lacks_are_refused() -> None:
    with simulated_cuda():
        x = torch.ones(2, 2, dtype=torch.int64, device="cuda")
        with pytest.raises(NotImplementedError, match=r"mm.*int64"):
            x @ x
        with pytest.raises(NotImplementedError, match=r"histc.*float16"):
            torch.histc(x.half())


@pytest.mark.slow
def test_the_dtypes_that_cuda_lacks_are_those_of_torch(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "expecttest", SimpleNamespace(TestCase=unittest.TestCase))
    from torch.testing._internal import common_cuda

    for name in ("SM53OrLater", "SM60OrLater", "SM70OrLater", "SM80OrLater"):
        monkeypatch.setattr(common_cuda, name, True)
    from torch.testing._internal.common_methods_invocations import op_db

    lacking: dict[str, set[torch.dtype]] = {}
    for operator in op_db:
        missing = set(operator.dtypes) - set(operator.dtypesIfCUDA)
        lacking.setdefault(operator.aten_name, set()).update(missing)
    assert {name: lacking[name] for name in UNSUPPORTED} == UNSUPPORTED


def test_packed_products_go_through_the_python_of_bitsandbytes_for_cuda() -> None:
    expected = load_student()
    batch, config = make_batch("right"), npt.TrainConfig()
    loss = local(expected, batch, config).loss
    LIBRARY.called.clear()
    with simulated_cuda() as card:
        model = load_student("cuda")
        assert torch.equal(local(model, batch.to("cuda"), config).loss.cpu(), loss)
        assert "cdequantize_blockwise_fp32_nf4" in LIBRARY.called
        batch = batch.to("cuda")
        card.lose_card(told=False)
        with pytest.raises(ExitedError):
            local(model, batch, config)
