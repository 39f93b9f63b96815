"""The simulated card itself: what fails on a card fails there."""

import math

import pytest
import torch
from simulated_cuda import LIBRARY, ExitedError, HostWaitError, no_waits, simulated_cuda
from students import load_student, make_batch

import npt
from npt.base.precision import fp32_products, matmul_precision, product_error, set_matmul_precision
from npt.distill.local import local
from npt.guard import Guard


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


@pytest.mark.parametrize(("capability", "chosen"), [((9, 0), "high"), ((7, 5), "highest")])
def test_tf32_rounds_products_where_a_card_has_it(capability, chosen) -> None:
    with simulated_cuda(capability=capability):
        model = load_student("cuda")
        exact, fast = (product_error(model, each) for each in ("highest", "high"))
        assert exact < 1e-6 and (fast > 1e-4) == (chosen == "high")
        with fp32_products("highest"):
            set_matmul_precision("auto", model)
            assert matmul_precision() == chosen


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
