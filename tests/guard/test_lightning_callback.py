"""Lightning's automatic optimisation with `LightningGuard`; skipped if Lightning is missing."""

import copy
import logging
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from guarded_loops import assert_equal
from torch import Tensor, nn

from npt.errors import ConfigError, TooManyRefusalsError

QUIET = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def lightning() -> Any:
    found = pytest.importorskip("lightning")  # not before: importing it takes seconds
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return found


def good(seed: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def bad(seed: int = 0) -> Tensor:
    return good(seed).index_fill(0, torch.tensor([1]), math.nan)


RAISES = torch.full((4, 6), 1e9)
NONE = torch.full((4, 6), -1e9)


def module_of(optimizer: Any = torch.optim.AdamW, **schedule: Any) -> Any:
    from lightning import LightningModule

    class Module(LightningModule):
        """Has what a refused batch may change: dropout, running statistics, metrics."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(
                nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.25), nn.Linear(8, 1)
            )
            self.before_step: list[float] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            loss = self.net(batch).square().mean()
            self.log("loss", loss, on_step=True, on_epoch=True)
            if batch[0, 0] > 1e8:
                raise FloatingPointError("planted")
            return None if batch[0, 0] < -1e8 else loss

        def on_before_optimizer_step(self, _: Any) -> None:
            norm = nn.utils.get_total_norm([p.grad for p in self.parameters()])
            self.before_step.append(float(norm))

        def configure_optimizers(self) -> Any:
            made = optimizer(self.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
            entry = {"scheduler": scheduler, "interval": "step", **schedule}
            return {"optimizer": made, "lr_scheduler": entry}

    return Module()


def fitted(batches: Sequence[Tensor], module: Any = None, **arguments: Any) -> Any:
    """Fit; return the module, and what the run left behind."""
    from lightning import Trainer

    module = module_of() if module is None else module
    trainer = Trainer(**{**QUIET, "max_epochs": 1, **arguments})
    data: Any = list(batches)
    torch.manual_seed(1)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    return module, {
        "weights": dict(module.state_dict()),
        "moments": trainer.optimizers[0].state_dict(),
        "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "random": torch.get_rng_state(),
        "global_step": trainer.global_step,
        "logged": dict(trainer.callback_metrics),
        "before_step": module.before_step,
    }


def guard_of(**settings: Any) -> Any:
    from npt.guard import LightningGuard

    return LightningGuard(**{"trace": 0, "postmortem": None, **settings})


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.1, "precision": "bf16-mixed"},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"precision": "bf16-true"},
        {"max_epochs": 2},
    ],
)
def test_a_refused_batch_leaves_no_trace(arguments: dict[str, Any]) -> None:
    left = [good(1), good(2), good(3)]
    _, plain = fitted(left, **arguments)
    _, unharmed = fitted(left, callbacks=[guard_of()], **arguments)
    assert_equal(unharmed, plain, "without a refusal")
    for fault in (bad(), RAISES, NONE):
        batches = [good(1), fault, good(2), good(3), fault]
        callback = guard_of()
        _, state = fitted(batches, callbacks=[callback], **arguments)
        assert_equal(state, plain, "state")
        assert callback.guard.counts.refused == 2 * arguments.get("max_epochs", 1)


class Every(dict):
    """`accumulate_grad_batches` by batch_idx, which Lightning itself can only change by epoch."""

    def callback(self) -> Any:
        from lightning.pytorch import Callback

        sizes = self

        class Change(Callback):
            def on_train_batch_start(self, trainer: Any, _: Any, __: Any, index: int) -> None:
                trainer.accumulate_grad_batches = sizes.get(index, trainer.accumulate_grad_batches)

        return Change()


def test_the_survivors_of_a_window_count_with_their_mean() -> None:
    batches = [good(1), good(2), bad(), good(3), bad(), bad()]
    guarded = {"callbacks": [guard_of()], "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    _, state = fitted(batches, **guarded)
    arguments = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    _, plain = fitted(
        [good(1), good(2), good(3)], callbacks=[Every({2: 1}).callback()], **arguments
    )
    assert_equal(state, plain, "state")
    # 3 of 4 survive: a quarter of each, divided by 3/4, is a third but for rounding
    sgd = module_of(torch.optim.SGD)
    _, state = fitted(
        [good(1), bad(), good(2), good(3)], sgd, callbacks=[guard_of()], accumulate_grad_batches=4
    )
    sgd = module_of(torch.optim.SGD)
    _, plain = fitted([good(1), good(2), good(3)], sgd, accumulate_grad_batches=3)
    for name, weight in plain["weights"].items():
        torch.testing.assert_close(state["weights"][name], weight)


def test_the_host_reads_as_many_flags_for_each_micro_batch_of_a_long_window(monkeypatch) -> None:
    reads: list[int] = []
    read = Tensor.__bool__

    def counting(tensor: Tensor) -> bool:
        reads[-1] += 1
        return read(tensor)

    monkeypatch.setattr(Tensor, "__bool__", counting)
    for size in (2, 4, 8):
        reads.append(0)
        fitted([good(place) for place in range(size)], callbacks=[guard_of()],
               accumulate_grad_batches=size)  # fmt: skip
    assert reads[2] - reads[1] == 2 * (reads[1] - reads[0]), reads


def test_a_micro_batch_that_a_recheck_brings_back_counts_like_the_others() -> None:
    """A fault of the machine makes one gradient NaN, once; computed again it is finite."""
    batches = [good(seed) for seed in range(1, 5)]
    _, plain = fitted(batches, accumulate_grad_batches=2)
    module, calls = module_of(), 0

    def spoil(gradient: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return gradient * math.nan if calls == 5 else gradient  # the first window has four

    module.net[3].weight.register_hook(spoil)
    callback = guard_of(recheck=1)
    _, state = fitted(batches, module, accumulate_grad_batches=2, callbacks=[callback])
    assert callback.guard.counts.refused == 0 and callback.guard.outcome.repaired
    for part in ("weights", "moments", "global_step"):
        assert_equal(state[part], plain[part], part)


def test_windows_without_a_refusal_are_those_of_an_unguarded_run() -> None:
    """The last window of an epoch too, whose losses Lightning divides by the full size."""
    batches = [good(place) for place in range(4)]
    _, plain = fitted(batches, accumulate_grad_batches=3, max_epochs=2)
    _, state = fitted(batches, accumulate_grad_batches=3, max_epochs=2, callbacks=[guard_of()])
    assert_equal(state, plain, "state")


def test_loggers_see_no_step_and_no_metric_of_a_refused_batch() -> None:
    from lightning.pytorch.loggers import Logger

    class Rows(Logger):
        name = version = None
        experiment = None

        def __init__(self) -> None:
            super().__init__()
            self.rows: dict[int | None, dict[str, float]] = {}

        def log_hyperparams(self, *_: Any, **__: Any) -> None:
            pass

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.rows.setdefault(step, {}).update(metrics)

    given = {"log_every_n_steps": 1, "max_epochs": 2}
    plain, guarded = Rows(), Rows()
    fitted([good(1), good(2)], logger=plain, **given)
    fitted([bad(), good(1), RAISES, good(2)], logger=guarded, callbacks=[guard_of()], **given)
    assert list(plain.rows) == [0, 1, 2, 3]
    assert guarded.rows == plain.rows


def test_a_refusal_is_logged_and_traced_without_changing_the_run(caplog) -> None:
    callback = guard_of(trace=1)
    batches = [good(1), bad(), good(2)]
    module, state = fitted(batches, callbacks=[callback], gradient_clip_val=0.1)
    _, plain = fitted([good(1), good(2)], gradient_clip_val=0.1)
    assert_equal(state, plain, "state")
    said = [record.message for record in caplog.records if record.name == "npt.guard"]
    assert said[0].startswith("refused: epoch 0, batch_idx 1: loss is nan")
    assert said[1].startswith("traced: epoch 0, batch_idx 1") and "net.0" in said[1]
    assert "log" not in vars(module) and "lr_scheduler_step" not in vars(module)


def test_a_run_gives_up_with_a_post_mortem_that_can_be_replayed(tmp_path) -> None:
    from npt.guard import replay

    callback = guard_of(max_refused=2, postmortem=tmp_path / "postmortem")
    module = module_of()
    with pytest.raises(TooManyRefusalsError, match="2 refusals in a row"):
        fitted([good(1), bad(), bad(), good(2)], module, callbacks=[callback])
    (folder,) = (tmp_path / "postmortem").iterdir()
    loss = lambda model, batch: model.training_step(batch, 0)  # noqa: E731
    assert replay(folder, module_of(), loss=loss).reproduced


def test_a_run_continues_from_a_checkpoint_after_a_refusal(tmp_path) -> None:
    from lightning import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    batches = [good(1), bad(), good(2)]
    whole, resumed = guard_of(), guard_of()
    _, state = fitted(batches, callbacks=[whole], max_epochs=2)
    saved = ModelCheckpoint(tmp_path, save_last=True)
    fitted(batches, callbacks=[guard_of(), saved], enable_checkpointing=True)
    module = module_of()
    trainer = Trainer(**{**QUIET, "max_epochs": 2, "callbacks": [resumed]})
    data: Any = list(batches)
    loader = torch.utils.data.DataLoader(data, batch_size=None)
    trainer.fit(module, loader, ckpt_path=str(tmp_path / "last.ckpt"))
    assert trainer.global_step == state["global_step"] == 4
    assert resumed.guard.counts == whole.guard.counts
    assert trainer.lr_scheduler_configs[0].scheduler.state_dict() == state["schedule"]


def test_an_error_that_is_not_refused_leaves_the_trainer_as_it_was() -> None:
    module = module_of()
    before = copy.deepcopy(module.state_dict())
    wide = torch.randn(4, 7)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fitted([wide], module, callbacks=[guard_of()])
    assert_equal(dict(module.state_dict()), dict(before), "weights")
    assert "training_step" not in vars(module.trainer.strategy)
    assert all(p.grad is None for p in module.parameters())


def test_schedules_by_epoch_step_after_a_refused_window() -> None:
    arguments = {"max_epochs": 2}
    _, plain = fitted([good(1)], module_of(interval="epoch"), **arguments)
    module = module_of(interval="epoch")
    _, state = fitted([good(1), bad()], module, callbacks=[guard_of()], **arguments)
    assert_equal(state, plain, "state")


def test_what_cannot_be_guarded_is_refused_before_training() -> None:
    from lightning import Trainer
    from lightning.pytorch.plugins import MixedPrecision

    half = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    for arguments, said in (
        ({"strategy": "ddp"}, "on one device, not with DDPStrategy; pass devices=1"),
        ({"plugins": [half]}, "precision='16-mixed'; pass precision='bf16-mixed'"),
    ):
        trainer = Trainer(**{**QUIET, **arguments})
        trainer.strategy.connect(module_of())  # `fit` would start process groups
        with pytest.raises(ConfigError, match=said):
            guard_of().on_fit_start(trainer, trainer.lightning_module)


def test_an_optimizer_that_computes_in_its_step_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^LBFGS computes a batch several times"):
        fitted([good(1)], module_of(torch.optim.LBFGS), callbacks=[guard_of()])


def test_an_optimizer_step_that_makes_no_step_is_refused() -> None:
    module = module_of()
    module.optimizer_step = lambda _, __, optimizer, closure: closure()
    with pytest.raises(ConfigError, match="optimizer_step of the LightningModule left out"):
        fitted([good(1), good(2)], module, callbacks=[guard_of()])


def test_manual_optimisation_is_refused_and_settings_are_checked() -> None:
    module = module_of()
    module.automatic_optimization = False
    with pytest.raises(ConfigError, match=r"use npt\.guard\.Guard in training_step"):
        fitted([good(1)], module, callbacks=[guard_of()])
    with pytest.raises(ConfigError, match="gradient_clip_val"):
        guard_of(max_grad_norm=1.0)
