"""Lightning's manual optimisation, and Fabric, under a guard; skipped without Lightning."""

from typing import Any

import pytest
import torch
from guarded_loops import MAX_NORM, Micro, World, assert_equal, assert_same_state, plain_run

import npt
from npt.guard import Guard


def module_of(lightning: Any, micros: list[Micro]) -> Any:
    class Module(lightning.LightningModule):
        """Manual optimisation in windows of two."""

        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.world = World()
            self.model = self.world.model

        def configure_optimizers(self) -> Any:
            return [self.world.optimizer], [self.world.scheduler]

        def on_fit_start(self) -> None:
            self.guard = Guard(
                self.model, self.optimizers(), self.lr_schedulers(), max_grad_norm=MAX_NORM
            )

        def training_step(self, place: int, index: int) -> None:
            micro = micros[place]
            if index == 0:  # a data loader draws a seed when it begins
                torch.set_rng_state(self.world.random)
            with self.guard.micro_batch(micro.tokens, [micro.seed]) as told:
                told.loss = loss = (
                    self.model(micro.data(torch.float32), micro.branch).square().sum()
                )
                self.manual_backward(loss)
            if index % 2:
                self.guard.step()
            self.world.random = torch.get_rng_state()

    return Module()


def test_manual_optimisation_leaves_no_trace_of_a_refused_batch(tmp_path) -> None:
    lightning = pytest.importorskip("lightning")  # not before: importing it takes seconds
    micros = [Micro(1), Micro(2, fault="loss"), Micro(3, fault="loss"), Micro(4, fault="loss")]
    micros += [Micro(5), Micro(6)]
    module = module_of(lightning, micros)
    trainer = lightning.Trainer(
        default_root_dir=tmp_path, max_epochs=1, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(range(len(micros)), batch_size=None))
    plain = World()
    plain_run(plain, [[Micro(1)], [Micro(5), Micro(6)]], "sum")
    assert_equal(dict(module.model.state_dict()), dict(plain.model.state_dict()), "weights")
    assert_equal(module.world.optimizer.state_dict(), plain.optimizer.state_dict(), "moments")
    assert module.world.scheduler.state_dict() == plain.scheduler.state_dict()
    assert torch.equal(module.world.random, plain.random)
    assert (trainer.global_step, module.guard.counts.refused) == (2, 3)


class LogOfSum(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x).float().square().sum() - x.sum()).log()


def test_a_model_of_fabric_is_traced(tmp_path) -> None:
    """Fabric refuses a backward that it did not start, as in mixed precision."""
    fabric = pytest.importorskip("lightning.fabric")
    fabric = fabric.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    plain = LogOfSum()
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), 0.1))
    bad = torch.full((2, 4), 1e4)
    with torch.no_grad():
        plain.layer.weight.zero_()
    guard = Guard(model, optimizer, trace=1)
    with guard.micro_batch() as micro:
        micro.loss = model(bad)
        fabric.backward(micro.loss)
    guard.step()
    for verdict in (npt.trace(model, bad), guard.findings[0].verdict):
        assert verdict is not None and verdict.operation == "log"
    with pytest.raises(RuntimeError, match="requires you to call"):
        model(-bad).backward()


def test_a_loop_of_fabric_leaves_no_trace_of_a_refused_batch() -> None:
    fabric = pytest.importorskip("lightning").Fabric(accelerator="cpu", devices=1)
    world = World()
    model, optimizer = fabric.setup(world.model, world.optimizer)
    guard = Guard(model, optimizer, world.scheduler, max_grad_norm=MAX_NORM, trace=1)
    for window in ([Micro(1), Micro(2, fault="loss")], [Micro(3, fault="loss")], [Micro(4)]):
        for micro in window:
            with guard.micro_batch(micro.tokens, [micro.seed]) as told:
                output = model(micro.data(torch.float32), micro.branch)
                told.loss = loss = output.square().sum()
                fabric.backward(loss)
        guard.step()
    world.random = torch.get_rng_state()
    plain = World()
    plain_run(plain, [[Micro(1)], [Micro(4)]], "sum")
    assert_same_state(world, plain)
    assert guard.counts.refused == 2 and guard.findings
    assert set(guard.update.names) == set(dict(world.model.named_parameters()))
