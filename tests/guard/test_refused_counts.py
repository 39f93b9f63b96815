"""What a Trainer counts and logs of rows that were refused: nothing."""

import itertools
import math
from typing import Any

import pytest
import torch
from guarded_trainers import InOrder, small_llama, trainer_of
from several import several, values
from torch import Tensor

from faults.row_faults import LENGTH, plant, row
from npt.errors import TooManyRefusalsError
from npt.guard import Refusal, protect

WINDOW = {"gradient_accumulation_steps": 2, "max_steps": 3, "logging_steps": 3}
COUNTED = ("loss", "num_input_tokens_seen", "total_flos")


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


def counting(data: list[Any], folder: Any, fault: str | None, tokens: str, **rest: Any) -> Any:
    model = plant(small_llama(0.0), fault)
    arguments = {**WINDOW, "include_num_input_tokens_seen": tokens, **rest}
    return trainer_of(Counting, data, folder, model, **arguments)


def counts_of(trainer: Any) -> dict[str, Any]:
    trainer.train()
    logged = {name: entry[name] for entry in trainer.state.log_history for name in entry}
    counts = {name: logged[name] for name in COUNTED if name in logged}
    state = trainer.state.num_input_tokens_seen, trainer.state.total_flos
    return {**counts, "state": state, "metrics": trainer._metrics}


@pytest.mark.parametrize("tokens", ["all", "non_padding", "no"])
@pytest.mark.parametrize("bad", [2, 3])
def test_a_refused_row_is_not_counted(bad, tokens, tmp_path) -> None:
    data = [row(i, "loss-nan" if i == bad else None) for i in range(6)]
    found = counts_of(protect(counting(data, tmp_path, "loss-nan", tokens)))
    good = [row(i) for i in range(6) if i != bad]
    wanted = counts_of(counting(good, tmp_path, None, tokens))
    for counts in (found, wanted):
        counts.pop("loss")
    assert found == wanted
    assert found["state"][0] == (0 if tokens == "no" else 5 * LENGTH)


def test_a_window_that_is_taken_back_is_not_counted(tmp_path) -> None:
    """Nor are its loss and its metrics logged."""
    settings = {"learning_rate": 0.0, "lr_scheduler_type": "constant"}
    data = [row(i) for i in range(6)]
    guarded = counting(data, tmp_path, None, "all", **settings)
    guarded.optimizer_cls_and_kwargs = (Spoiling, {"lr": 0.0})
    found = counts_of(protect(guarded))
    assert (guarded.guard.counts.steps, guarded.guard.counts.refused) == (2, 1)
    left = {**settings, "max_steps": 2, "logging_steps": 2}
    wanted = counts_of(counting(data[:4], tmp_path, None, "all", **left))
    # the mean of the others takes its place: one division and one addition more, in fp32
    assert found.pop("loss") == pytest.approx(wanted.pop("loss"), rel=1e-6)
    assert found == wanted


def test_the_rows_that_end_a_run_are_not_counted(tmp_path) -> None:
    data = [row(i, "loss-nan" if i > 1 else None) for i in range(6)]
    trainer = protect(counting(data, tmp_path, "loss-nan", "all"), max_refused=3)
    with pytest.raises(TooManyRefusalsError):
        trainer.train()
    assert trainer.state.num_input_tokens_seen == 2 * LENGTH


def test_processes_leave_out_the_same_rows(tmp_path) -> None:
    data = [row(i, "loss-nan" if i == 3 else None) for i in range(8)]
    data[2] = {name: torch.cat([ids, ids[-1:]]) for name, ids in data[2].items()}
    ended = values(several(2, tokens_seen, data, tmp_path))
    assert ended == [[7 * LENGTH + 1, ended[0][1]]] * 2
    assert ended[0][1] > 0


def tokens_seen(_processes: Any, data: list[dict[str, Tensor]], folder: Any) -> list[float]:
    trainer = protect(counting(data, folder, "loss-nan", "all", max_steps=2))
    trainer.train()
    return [trainer.state.num_input_tokens_seen, trainer.state.total_flos]


def test_a_refusal_that_an_earlier_version_stored_is_read() -> None:
    refusal = Refusal("loss", "loss is nan", 1, ("a",))
    assert Refusal.from_dict({**refusal.as_dict(), "rows": ["3 tokens"]}) == refusal
