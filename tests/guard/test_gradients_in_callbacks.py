"""A callback sees the gradients before a step that it sees in a plain Trainer."""

from typing import Any

import pytest
import torch
from guarded_loops import assert_equal
from guarded_trainers import InOrder, small_llama, state_of, trainer_of
from torch import nn
from transformers import Adafactor, TrainerCallback
from transformers.optimization import AdafactorSchedule

from faults.row_faults import plant, row
from npt.guard import protect

WINDOW = {"gradient_accumulation_steps": 3, "max_grad_norm": 0.1, "max_steps": 2}


class Looking(TrainerCallback):
    """Notes every gradient before each step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        self.seen.append({n: None if each is None else each.clone() for n, each in found.items()})


def seen_by(prepared: Any, data: list[Any], folder: Any, fault: str | None = None) -> Any:
    """Return what a callback saw in a run, and the state that the run left."""
    torch.manual_seed(0)
    model = plant(small_llama(), fault)
    model.unused = nn.Linear(2, 2)  # never gets a gradient
    trainer = trainer_of(InOrder, data, folder, model, **WINDOW)
    looking = Looking()
    trainer.add_callback(looking)
    prepared(trainer).train()
    return looking.seen, state_of(trainer)


def test_gradients_before_a_step_are_a_plain_trainers(tmp_path) -> None:
    data = [row(i) for i in range(6)]
    (plain, left), (guarded, after) = (
        seen_by(prepared, data, tmp_path) for prepared in (lambda trainer: trainer, protect)
    )
    assert len(guarded) == 2
    assert_equal(guarded, plain, "gradients")
    assert_equal(after, left, "state")


def test_no_callback_sees_the_gradient_of_a_refused_row(tmp_path) -> None:
    """Nor that of a window of nothing else, which leaves none."""
    data = [row(i, "gradient-inf" if i in (1, 3, 4, 5) else None) for i in range(6)]
    (first, second), _ = seen_by(protect, data, tmp_path, "gradient-inf")
    assert all(bool(torch.isfinite(each).all()) for each in first.values() if each is not None)
    assert set(second.values()) == {None}


def test_a_change_in_place_before_the_step_is_stepped(tmp_path) -> None:
    class Halving(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)

    states = []
    for prepared in (lambda trainer: trainer, protect):
        trainer = trainer_of(InOrder, [row(i) for i in range(6)], tmp_path, **WINDOW)
        trainer.add_callback(Halving())
        torch.manual_seed(0)
        prepared(trainer).train()
        states.append(state_of(trainer))
    assert_equal(states[1], states[0], "state")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_rate_that_an_optimizer_chooses_is_logged(tmp_path) -> None:
    rates = []
    for prepared in (lambda trainer: trainer, protect):
        model = small_llama()
        optimizer = Adafactor(model.parameters())
        trainer = trainer_of(InOrder, [row(i) for i in range(6)], tmp_path, model, **WINDOW)
        trainer.optimizer, trainer.lr_scheduler = optimizer, AdafactorSchedule(optimizer)
        torch.manual_seed(0)
        prepared(trainer).train()
        rates.append([entry["learning_rate"] for entry in trainer.state.log_history[:-1]])
    assert rates[1] == rates[0]
    assert rates[0][-1] > 0
