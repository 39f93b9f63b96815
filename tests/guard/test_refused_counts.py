"""What a Trainer logs of rows that were refused: nothing."""

import itertools
import math
from typing import Any

import pytest
import torch
from guarded_trainers import InOrder, small_llama, trainer_of

from faults.row_faults import plant, row
from npt.guard import Refusal, protect

WINDOW = {"gradient_accumulation_steps": 2, "max_steps": 3, "logging_steps": 3}


class Counting(InOrder):
    """Has a metric that each forward adds to, as TRL's trainers do."""

    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        self.__dict__.setdefault("_metrics", {"train": []})["train"].append(1.0)
        return super().compute_loss(*arguments, **named)


class Spoiling(torch.optim.AdamW):
    """Leaves a NaN in its third step."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.calls = itertools.count(1)  # a number would be taken back with the step

    def step(self, closure: Any = None) -> None:
        super().step()
        if next(self.calls) == 3:
            self.param_groups[0]["params"][0].data[0, 0] = math.nan


def counting(data: list[Any], folder: Any, fault: str | None, **rest: Any) -> Any:
    model = plant(small_llama(0.0), fault)
    return trainer_of(Counting, data, folder, model, **{**WINDOW, **rest})


@pytest.mark.parametrize("bad", [2, 3])
def test_the_metrics_of_a_refused_row_are_not_logged(bad, tmp_path) -> None:
    data = [row(i, "loss-nan" if i == bad else None) for i in range(6)]
    trainer = protect(counting(data, tmp_path, "loss-nan"))
    trainer.train()
    assert trainer._metrics == {"train": [1.0] * 5}


def test_a_window_that_is_taken_back_is_not_logged(tmp_path) -> None:
    """Neither its loss nor its metrics."""
    settings = {"learning_rate": 0.0, "lr_scheduler_type": "constant"}
    data = [row(i) for i in range(6)]
    guarded = counting(data, tmp_path, None, **settings)
    guarded.optimizer_cls_and_kwargs = (Spoiling, {"lr": 0.0})
    protect(guarded).train()
    assert (guarded.guard.counts.steps, guarded.guard.counts.refused) == (2, 1)
    stock = counting(data[:4], tmp_path, None, **{**settings, "max_steps": 2, "logging_steps": 2})
    stock.train()
    losses = [trainer.state.log_history[0]["loss"] for trainer in (guarded, stock)]
    # the mean of the others takes its place: one division and one addition more, in fp32
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert guarded._metrics == stock._metrics


def test_a_refusal_that_an_earlier_version_stored_is_read() -> None:
    refusal = Refusal("loss", "loss is nan", 1, ("a",))
    assert Refusal.from_dict({**refusal.as_dict(), "rows": ["3 tokens"]}) == refusal
