"""What a run keeps of text that it reads again: when it is used, and what may go wrong with it."""

import contextlib
import itertools
import math
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
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
from npt.distill.strategies import STRATEGIES
from npt.train.states import STATES, KeptStates

LOGITS = {"strategy": "end_to_end", "hidden_weight": 0.0, "logit_kl_weight": 1.0}


@pytest.fixture
def student() -> nn.Module:
    return load_student()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[KeptStates]:
    states = KeptStates(tmp_path / STATES, "a base", pytest.fail)
    yield states
    states.close()


@contextlib.contextmanager
def calls_of(layer: nn.Module) -> Iterator[list[Any]]:
    """Count the calls of a layer that is not converted."""
    calls: list[Any] = []
    handle = layer.register_forward_hook(lambda *call: calls.append(call))
    yield calls
    handle.remove()


def step(model: nn.Module, batch: Batch, **settings: Any) -> tuple[Tensor, list[Tensor]]:
    """The loss and the gradients of a micro-batch."""
    config = TrainConfig(**settings)
    loss = STRATEGIES[config.strategy](model, batch, config).loss
    gradients = [parameter.grad for parameter in adapter_parameters(model).values()]
    model.zero_grad()
    return loss, gradients


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def numbers_of(value: float, width: int = 8) -> Callable[[Batch], Tensor]:
    """Compute states of a text that are all this value."""
    return lambda batch: torch.full((*batch.input_ids.shape, width), float(value))


ALL = [LOGITS, {"strategy": "end_to_end"}, {"strategy": "local"}]


@pytest.mark.parametrize("kind", ["full", "right", "left", "packed"])
@pytest.mark.parametrize("settings", ALL)
def test_kept_states_are_those_that_are_computed(student, kept, kind, settings) -> None:
    plain = make_batch(kind)
    first = step(student, kept.of(plain), **settings)
    # the rows beside a text change the last bits of its states
    torch.testing.assert_close(first, step(student, plain, **settings), rtol=1e-4, atol=1e-5)
    with calls_of(student.model.layers[0]) as calls:
        assert_same(step(student, kept.of(plain), **settings), first)
    assert not calls


@pytest.mark.parametrize("settings", ALL)
def test_a_run_has_the_same_bits_whatever_became_of_the_database(student, kept, settings) -> None:
    batch = kept.of(make_batch("packed"))
    first = step(student, batch, **settings)
    kept.close()
    assert_same(step(student, batch, **settings), first)


def test_the_teachers_last_layers_do_not_run_again(student, kept) -> None:
    batch = kept.of(make_batch("full"))
    step(student, batch, **LOGITS)
    modes = []
    for layer in student.model.layers[1:]:
        attention = layer.self_attn
        attention.register_forward_hook(lambda *_: modes.append(student.model.layers[1].npt.mode))
    step(student, batch, **LOGITS)
    assert modes and set(modes) == {"student"}


def test_a_text_is_known_in_another_batch_and_at_another_place(student, kept) -> None:
    one = make_batch("packed")
    step(student, kept.of(one), **LOGITS)
    turned = {name: tensor.flip(0) for name, tensor in one.row_tensors.items()}
    other = Batch(**turned, sample_ids=one.sample_ids[::-1])
    with calls_of(student.model.layers[0]) as calls:
        step(student, kept.of(other), **LOGITS)
    assert not calls


def test_a_context_of_the_teacher_is_kept_too(student, kept) -> None:
    batch = kept.of(replace(make_batch("full"), teacher=make_batch("full", seed=1)))
    first = step(student, batch, **LOGITS)
    with calls_of(student.model.layers[0]) as calls:
        assert_same(step(student, batch, **LOGITS), first)
    assert not calls


def test_nothing_is_kept_where_the_first_layer_is_converted(tmp_path) -> None:
    kept = KeptStates(tmp_path / STATES, "a base", pytest.fail)
    room = kept.room
    step(load_student(layers="0-1"), kept.of(make_batch("full")), strategy="local")
    assert kept.room == room
    kept.close()


def noisy(batch: Batch) -> Tensor:
    return torch.rand(*batch.input_ids.shape, 8)


@pytest.mark.parametrize("compute", [numbers_of(math.nan), noisy])
def test_bad_states_and_random_ones_are_not_kept(kept, compute) -> None:
    batch = kept.of(make_batch("full"))
    batch.kept.states(batch, "below", compute)
    assert_same(batch.kept.states(batch, "below", numbers_of(1)), torch.ones(2, 24, 8))


def test_what_the_disk_changed_is_computed_again(kept) -> None:
    batch = kept.of(make_batch("full"))
    kept.states(batch, "below", numbers_of(0))
    kept.close()
    with contextlib.closing(sqlite3.connect(kept.path)) as database, database:
        (one, first), (other, second) = database.execute("SELECT key, checksum FROM kept")
        # the first has lost its end, and the second is another text's
        database.execute("UPDATE kept SET states = substr(states, 1, 200) WHERE key = ?", (one,))
        database.execute("UPDATE kept SET checksum = ? WHERE key = ?", (first, other))
    assert first != second
    again = KeptStates(kept.path, "a base", pytest.fail)
    assert_same(again.states(batch, "below", numbers_of(1)), torch.ones(2, 24, 8))
    again.close()


@pytest.mark.parametrize("about", ["a base", "another base"])
def test_states_of_another_base_are_not_used(kept, about) -> None:
    batch = make_batch("full")
    kept.states(batch, "below", numbers_of(1))
    other = KeptStates(kept.path, about, pytest.fail)
    assert other.states(batch, "below", numbers_of(0)).mean() == (about == "a base")
    other.close()


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_path_that_is_no_database_is_told_and_training_goes_on(tmp_path, what) -> None:
    path = tmp_path / STATES
    if what == "file":
        path.write_bytes(b"no database" * 1000)
    else:
        path.mkdir()
    told: list[str] = []
    kept = KeptStates(path, "a base", told.append)
    batch = make_batch("full")
    assert kept.states(batch, "below", numbers_of(1)).mean() == 1
    reason = {"file": "file is not a database", "folder": "unable to open database file"}[what]
    assert told == [f"{path} is not used any more: {reason}"]


def test_no_more_is_kept_than_there_is_room_for(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=40_000))
    kept = KeptStates(tmp_path / STATES, "a base", pytest.fail)
    batch = make_batch("full")
    kept.states(batch, "below", numbers_of(1, width=100))
    # of the two texts, of 9,600 bytes each, one is kept
    assert kept.states(batch, "below", numbers_of(0, width=100)).mean() == 0.5
    kept.close()


def test_a_full_disk_is_told_once_and_what_is_kept_is_read(tmp_path) -> None:
    told: list[str] = []
    kept = KeptStates(tmp_path / STATES, "a base", told.append)
    known = make_batch("full")
    kept.states(known, "below", numbers_of(1))
    kept._database.execute("PRAGMA max_page_count = 1")  # that is: no page more
    kept.states(make_batch("full", seed=1), "below", numbers_of(1, width=9000))
    assert told == [f"{kept.path} keeps no more states: database or disk is full"]
    assert kept.states(known, "below", numbers_of(0)).mean() == 1
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


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("settings", [{}, LOGITS])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(runs, lost, settings) -> None:
    """With copies of a text in one window, beside others, and with or without the states."""
    runs.data = lambda: [*records(5), *records(3)]
    runs.settings |= {**settings, "batch_size": 2}
    runs.run("whole")
    stopped = runs.run("run", at(7))
    assert (stopped.folder / STATES).exists()
    if lost:
        (stopped.folder / STATES).unlink()
    resumed = runs.run("run", resume=str(stopped.folder))
    runs.outcome("run").assert_equal(runs.outcome("whole"))
    assert not (resumed.folder / STATES).exists()


def test_a_run_that_reads_no_more_text_again_leaves_no_file(runs) -> None:
    stopped = runs.run("run", at(7))
    resumed = runs.run("run", resume=str(stopped.folder), num_epochs=1)
    assert not (resumed.folder / STATES).exists()


@pytest.mark.parametrize(
    ("changed", "used"),
    [
        ({}, True),
        ({"num_epochs": 1}, False),
        ({"max_steps": 2}, False),
        ({"max_steps": 3}, True),
        ({"max_steps": 1, "data_settings": {"num_samples": 2}}, True),
        ({"max_steps": 2, "data": lambda: [{"input_ids": [*range(3, 90)]}]}, False),
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
