"""A base that draws random numbers: what is refused, looked into, evaluated or resumed leaves
training's draws as they would have been.
"""

import functools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from process_work import drawn_by_name
from resumed_runs import RARE, Runs, at, events, records, with_faults
from several import several, values
from stopped_runs import BAD, good, make_trainer, stop
from torch import nn
from windows import add_filled, window_over

import npt
from faults.bench import SMALL, Run, Setting, clean_run, let_draw
from faults.runs import NoTokenizer
from npt.base.load import load_base
from npt.batch import Sample
from npt.config import DataConfig
from npt.data.samples import Loader, Samples
from npt.distill.step import student_guard
from npt.distill.strategies import STRATEGIES
from npt.evaluation.evaluate import reference_outputs
from npt.forensics.student import replay_student as replay
from npt.guard.outcome import MicroBatch
from npt.random_state import micro_batch_draws, random_state
from npt.train.loop import Loop
from npt.train.smoke import smoke_test

DRAWING = Setting(change=let_draw)


def drawn(generator_state: dict[str, torch.Tensor]) -> bool:
    """Return whether anything has been drawn since."""
    return any(
        not torch.equal(state, generator_state[name]) for name, state in random_state().items()
    )


# --- the names of random numbers
# ---------------------------------------------------------------------------------------


def test_equal_names_draw_equal_numbers_and_leave_the_random_state() -> None:
    before = random_state()
    found = []
    for name in ((1, ("a",), 0), (1, ("a",), 0), (1, ("a",), 2), (1, ("a2",), 0), (2, ("a",), 0)):
        torch.rand(3)  # wherever the state may be
        with micro_batch_draws(*name):
            found.append(torch.rand(4).tolist())
    assert found[0] == found[1] and len({tuple(numbers) for numbers in found}) == 4
    torch.set_rng_state(before["cpu"])
    with pytest.raises(KeyError), micro_batch_draws(1, ("a",), 0):
        torch.rand(1)
        raise KeyError
    assert not drawn(before)


def test_the_bench_draws_in_teacher_and_student() -> None:
    before = clean_run(SMALL).difference(clean_run(DRAWING))
    # another run than the same without dropout and noise
    assert before is not None and before.startswith(("model.", "exp_avg"))
    assert clean_run(DRAWING).difference(clean_run(DRAWING, frozenset({(1, 1)}))) is not None


# --- one transaction
# --------------------------------------------------------------------------------------------------


class Noisy:
    """One parameter, whose gradients are drawn."""

    def __init__(self, late: bool = False, seed: int = 0):
        self.parameters = {"p": nn.Parameter(torch.zeros(5))}
        optimizer = torch.optim.AdamW(self.parameters.values(), lr=0.1, fused=True)
        self.seed = seed
        self.transaction = window_over(self.parameters, optimizer, 1.0, [0.1], late=late)

    def micro_batch(self, name: str, bad: bool = False, offset: int = 0) -> None:
        def fill() -> Any:
            self.parameters["p"].grad += torch.randn(5) * (math.nan if bad else 1.0)
            return MicroBatch(torch.rand(()), 2)

        add_filled(self.transaction, fill, (name,), offset, self.seed)

    def value(self) -> list[float]:
        self.transaction.commit()
        self.transaction.flush()
        return self.parameters["p"].tolist()


@pytest.mark.parametrize("late", [False, True])
def test_a_refused_micro_batch_leaves_the_next_one_its_numbers(late) -> None:
    found = []
    for refused in (True, False):
        torch.manual_seed(5)
        noisy = Noisy(late)
        for number in range(5):
            bad = number in (1, 2)
            if refused or not bad:
                noisy.micro_batch(f"b{number}", bad)
        found.append((noisy.value(), torch.rand(1).item()))
    assert found[0] == found[1]


def test_every_batch_has_its_own_place_and_keeps_it_on_resume(tmp_path) -> None:
    samples = Samples(records(7), NoTokenizer(), DataConfig(max_length=12), seed=0, hold_out=False)
    loader = Loader(samples, 2, epochs=2)
    loaded = list(loader.batches())
    assert [batch.offset for batch, _ in loaded] == [0, 2, 4, 6, 7, 9, 11, 13]
    again = list(loader.batches(loaded[2][1]))
    assert [(batch.offset, batch.sample_ids) for batch, _ in again] == [
        (batch.offset, batch.sample_ids) for batch, _ in loaded[3:]
    ]


# --- whoever looks on
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def student() -> Run:
    return Run(DRAWING)


def samples_of(count: int, length: int) -> list[Sample]:
    numbers = random.Random(0)
    return [
        Sample(f"s{i}", tuple(numbers.randrange(3, 2000) for _ in range(length)))
        for i in range(count)
    ]


def calibrated(model: Any) -> None:
    npt.detach(model)
    npt.attach(model, npt.NPTConfig(rank=4, layers="1"))
    npt.calibrate(model, NoTokenizer(), samples_of(24, 16), tokens=384)


PASSES: dict[str, Callable[[Run], Any]] = {
    "the smoke test": lambda s: smoke_test(
        s.model, DRAWING.batch((0, 0)), STRATEGIES["local"], s.config
    ),
    "an evaluation": lambda s: npt.evaluate(s.model, NoTokenizer(), samples_of(2, 8)),
    "a reference": lambda s: reference_outputs(s.model, samples_of(2, 8)),
    "the calibration": lambda s: calibrated(s.model),
    "the tracer": lambda s: npt.trace(s.model, DRAWING.batch((0, 0))),
}


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_that_is_not_trainings_leaves_the_random_state(student, name) -> None:
    before = random_state()
    PASSES[name](student)
    assert not drawn(before)


def test_the_smoke_test_compares_losses_of_the_same_noise(student) -> None:
    """With other noise in its second loss than in its first, that loss would be larger about as
    often as not.
    """
    hooks = student.model.get_input_embeddings()
    hooks.register_forward_hook(
        lambda _module, _inputs, output: output + 0.2 * torch.randn_like(output)
    )
    for number in range(4):
        assert "passed" in smoke_test(
            student.model, DRAWING.batch((0, number)), STRATEGIES["local"], student.config
        )


# --- whole runs
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(poisoned_folder: Path, tmp_path: Path) -> Runs:
    """Windows of three on a base that draws, with refusals of data and of NaN, evaluations and
    checkpoints.
    """
    model = npt.load_base(str(poisoned_folder), quantization="nf4", device="cpu")[0]
    let_draw(model)
    settings = {
        "gradient_accumulation_steps": 3,
        "save_steps": 2,
        "eval_steps": 2,
        "num_epochs": 2,
        "batch_size": 1,
    }
    return Runs(model, tmp_path, data=lambda: with_faults(records(13)), settings=settings)


def test_a_run_that_refuses_and_diagnoses_is_the_run_that_passed_over(runs) -> None:
    own = Loop._own_batches

    def passed_over(loop: Loop, window: Any) -> Any:
        for _, batch in own(loop, window):
            ids = batch.input_ids
            if not bool(((ids == RARE) | (ids >= loop.setup.model.config.vocab_size)).any()):
                yield 0, batch

    with mock.patch("npt.train.trainer.student_guard", functools.partial(student_guard, late=True)):
        refused = runs.run("refused", num_epochs=1)
        with mock.patch.object(Loop, "_own_batches", passed_over):
            never = runs.run("never", num_epochs=1)
    assert set(refused.refused_by_kind) == {"data", "loss"} and not never.refused
    diagnoses = [event["message"] for event in events(runs.place / "refused", "diagnosis")]
    printed = runs.said.getvalue()
    assert diagnoses and "\\n" not in printed
    assert all(f"  {line}\n" in printed for line in diagnoses[0].splitlines()[1:])
    one, other = runs.outcome("refused"), runs.outcome("never")
    assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())
    assert one.fidelity == other.fidelity
    assert [line["loss"] for line in one.metrics] == [line["loss"] for line in other.metrics]


def test_a_resumed_drawing_run_equals_the_uninterrupted_one(runs) -> None:
    runs.run("whole")
    for process in range(20):
        if runs.run("parts", at(7 + process % 3), resume="auto").signal is None:
            break
    assert process > 1
    runs.outcome("parts").assert_equal(runs.outcome("whole"))


def test_several_processes_draw_what_one_process_draws(poisoned_folder) -> None:
    (alone,), both = values(several(1, drawn_by_name)), values(several(2, drawn_by_name))
    assert both[0] | both[1] == alone and both[0].keys().isdisjoint(both[1])


# --- post-mortems
# --------------------------------------------------------------------------------------------------


def test_a_replay_draws_what_the_run_drew(poisoned_folder, tmp_path, monkeypatch) -> None:
    honest = load_base

    def drawing(*arguments: Any, **more: Any) -> Any:
        model, tokenizer = honest(*arguments, **more)
        let_draw(model)
        return model, tokenizer

    made = make_trainer(
        poisoned_folder, [*good(15), BAD], tmp_path / "run", gradient_accumulation_steps=2
    )
    let_draw(made.setup.model)
    folder = stop(made)
    monkeypatch.setattr("npt.forensics.student.load_base", drawing)
    found = replay(folder)
    assert found.reproduced
    recorded = {(*t["sample_ids"],): t for t in found.postmortem.record["history"]}
    (trace,) = [trace for trace in found.records if math.isfinite(trace.loss)]
    assert (trace.loss, trace.grad_norm) == tuple(
        recorded[trace.sample_ids][key] for key in ("loss", "grad_norm")
    )
