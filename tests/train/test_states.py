"""What a run keeps of text that it reads again: when it is used, and what may go wrong with it."""

import contextlib
import itertools
import math
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from resumed_runs import Runs, at, records
from students import load_student, make_batch
from torch import Tensor, nn

from npt.adapters.converted import adapter_parameters
from npt.batch import Batch
from npt.config import TrainConfig
from npt.distill.local import BatchSums
from npt.distill.strategies import STRATEGIES
from npt.train.states import STATES, KeptStates

LOGITS = {"strategy": "end_to_end", "hidden_weight": 0.0, "logit_kl_weight": 1.0}


def silent(_: str) -> None:
    pass


@pytest.fixture
def student() -> nn.Module:
    return load_student()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[KeptStates]:
    states = KeptStates(tmp_path / STATES, "a base", silent)
    yield states
    states.close()


def step(model: nn.Module, batch: Batch, **settings: Any) -> tuple[Tensor, list[Tensor]]:
    """The loss and the gradients of a micro-batch."""
    config = TrainConfig(**settings)
    loss = STRATEGIES[config.strategy](model, batch, config).loss
    gradients = [parameter.grad for parameter in adapter_parameters(model).values()]
    model.zero_grad()
    return loss, gradients


@contextlib.contextmanager
def calls_of(layer: nn.Module) -> Iterator[list[Any]]:
    """Count the calls of a layer that is not converted."""
    calls: list[Any] = []
    handle = layer.register_forward_hook(lambda *call: calls.append(call))
    yield calls
    handle.remove()


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["full", "right", "left", "packed"])
@pytest.mark.parametrize("settings", [LOGITS, {"strategy": "end_to_end"}, {"strategy": "local"}])
def test_kept_states_give_the_same_bits_without_the_layers_below(
    student, kept, kind, settings
) -> None:
    plain = make_batch(kind)
    expected = step(student, plain, **settings)
    assert_same(step(student, kept.of(plain), **settings), expected)
    kept.keep(kept.take())
    with calls_of(student.model.layers[0]) as calls:
        assert_same(step(student, kept.of(plain), **settings), expected)
    assert not calls and not kept.take()


def test_the_teachers_last_layers_do_not_run_again(student, kept) -> None:
    batch = kept.of(make_batch("full"))
    step(student, batch, **LOGITS)
    kept.keep(kept.take())
    modes = []
    for layer in student.model.layers[1:]:
        attention = layer.self_attn
        attention.register_forward_hook(lambda *_: modes.append(student.model.layers[1].npt.mode))
    step(student, batch, **LOGITS)
    assert modes and set(modes) == {"student"}


def test_a_text_is_known_in_another_batch_and_at_another_place(student, kept) -> None:
    one = make_batch("packed")
    step(student, kept.of(one), **LOGITS)
    kept.keep(kept.take())
    turned = {name: tensor.flip(0) for name, tensor in one.row_tensors.items()}
    other = Batch(**turned, sample_ids=one.sample_ids[::-1])
    with calls_of(student.model.layers[0]) as calls:
        step(student, kept.of(other), **LOGITS)
    assert not calls


def test_what_is_kept_holds_beside_a_text_that_is_new(kept) -> None:
    known = make_batch("full")
    states = torch.randn(2, 24, 8)
    assert_same(kept.of(known).states("below", lambda: states), states)
    kept.keep(kept.take())
    ids = known.input_ids.clone()
    ids[1] += 1
    both = Batch(ids, *(known.attention_mask, known.position_ids, known.labels), ("0", "1"))
    mixed = kept.of(both).states("below", lambda: torch.ones(2, 24, 8))
    assert_same(mixed, torch.stack([states[0], torch.ones(24, 8)]))
    assert len(kept.take()) == 1


def test_bad_states_are_not_kept(kept) -> None:
    batch = kept.of(make_batch("full"))
    states = torch.ones(2, 24, 8)
    states[1, 3, 2] = math.nan
    batch.states("below", lambda: states)
    assert len(kept.take()) == 1


def test_what_the_disk_changed_is_computed_again(kept) -> None:
    batch = kept.of(make_batch("full"))
    states = torch.randn(2, 24, 8)
    batch.states("below", lambda: states)
    kept.keep(kept.take())
    kept.close()
    with sqlite3.connect(kept.path) as database:
        database.execute("UPDATE kept SET states = substr(states, 1, 200) || zeroblob(1736)")
    database.close()
    again = KeptStates(kept.path, "a base", silent)
    assert_same(again.of(batch).states("below", lambda: states + 1), states + 1)
    again.close()


@pytest.mark.parametrize("about", ["a base", "another base"])
def test_states_of_another_base_are_not_used(kept, about) -> None:
    batch = make_batch("full")
    kept.of(batch).states("below", lambda: torch.ones(2, 24, 8))
    kept.keep(kept.take())
    other = KeptStates(kept.path, about, silent)
    found = other.of(batch).states("below", lambda: torch.zeros(2, 24, 8))
    assert found.mean() == (about == "a base")
    other.close()


def test_a_file_that_is_no_database_is_said_and_left(tmp_path, student) -> None:
    path = tmp_path / STATES
    path.write_bytes(b"no database" * 1000)
    said: list[str] = []
    kept = KeptStates(path, "a base", said.append)
    batch = make_batch("full")
    assert_same(step(student, kept.of(batch), **LOGITS), step(student, batch, **LOGITS))
    assert said == [f"warning: {path} is not used any more: file is not a database"]


def test_no_more_is_kept_than_there_is_room_for(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=40_000))
    said: list[str] = []
    kept = KeptStates(tmp_path / STATES, "a base", said.append)
    batch = kept.of(make_batch("full"))
    batch.states("below", lambda: torch.ones(2, 24, 100))
    kept.keep(kept.take())
    batch.states("below", lambda: torch.zeros(2, 24, 100))
    assert len(kept.take()) == 1  # of the two texts, of 9,600 bytes each, one is kept
    assert said[0].endswith("up to 0.0 GiB")
    kept.close()


# --- in a run


@pytest.fixture
def runs(load_model: Callable[[], nn.Module], tmp_path: Path) -> Runs:
    settings = {"num_epochs": 2, "gradient_accumulation_steps": 3, "save_steps": 1}
    return Runs(load_model(), tmp_path, lambda: records(6), settings)


def test_a_second_epoch_reads_them_and_a_run_leaves_no_file(runs, monkeypatch) -> None:
    with calls_of(runs.model.model.layers[0]) as calls:
        # or the hook that counts would see every pass
        monkeypatch.setattr("npt.train.loop.may_change", lambda module: False)
        counts = []
        result = runs.run("run", lambda *_: counts.append(len(calls)))
    within_run = [after - before for before, after in itertools.pairwise(counts)]
    assert within_run == [1] * 6 + [0] * 5
    assert not (result.folder / STATES).exists()


def test_a_refused_micro_batch_leaves_nothing_and_the_others_of_its_window_do(runs) -> None:
    held: list[int] = []

    def look(_: int, batch: Batch) -> None:
        if batch.kept is not None:  # not to find the refused one's fault
            with contextlib.closing(sqlite3.connect(batch.kept.path)) as database:
                held.extend(database.execute("SELECT count(*) FROM kept").fetchone())

    trainer = runs.trainer("run", look)
    strategy = trainer.strategy
    calls = iter(range(100))

    def refused(*given: Any) -> BatchSums:
        sums = strategy(*given)
        return sums._replace(loss=sums.loss * math.nan) if next(calls) == 1 else sums

    trainer.strategy = refused
    assert trainer.train().refused == 1
    assert held[:9] == [0, 0, 0, 2, 2, 2, 5, 5, 5]


def test_a_run_that_was_stopped_goes_on_with_them_to_the_same_bits(runs) -> None:
    runs.run("whole")
    stopped = runs.run("run", at(7))
    assert (stopped.folder / STATES).exists()
    resumed = runs.run("run", resume=str(stopped.folder))
    runs.outcome("run").assert_equal(runs.outcome("whole"))
    assert not (resumed.folder / STATES).exists()


@pytest.mark.parametrize(
    ("changed", "used"),
    [
        ({}, True),
        ({"num_epochs": 1}, False),
        ({"max_steps": 2}, False),
        ({"max_steps": 3}, True),
        ({"recheck": 1}, False),
        ({"trace_steps": "1-9"}, False),  # whose first micro-batch is recorded
    ],
)
def test_only_a_run_that_reads_text_again_keeps_any(runs, changed, used) -> None:
    seen: list[bool] = []
    runs.run("run", lambda _, batch: seen.append(batch.kept is not None), **changed)
    assert set(seen[::3]) == {used}


def test_a_hook_on_the_base_sees_every_pass(runs) -> None:
    handle = runs.model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    seen: list[Any] = []
    runs.run("run", lambda _, batch: seen.append(batch.kept))
    handle.remove()
    assert seen == [None] * 12
