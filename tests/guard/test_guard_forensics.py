"""The guilty operation of a refused micro-batch is named, and naming it leaves no trace."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from guarded_loops import (
    MAX_NORM,
    Micro,
    World,
    assert_equal,
    assert_same_state,
    never_saw,
    plain_run,
)
from guarded_trainers import InOrder, small_llama, state_of, trainer_of
from torch import nn

from faults.row_faults import plant, row
from npt.errors import ConfigError, TooManyRefusalsError
from npt.guard import Guard, Outcome, TrainerMixin, protect
from npt.guard.forensics import StoredMicroBatch
from npt.guard.outcome import MicroBatch
from npt.guard.refusal import Refusal
from npt.guard.watching import Forensics

FAULTS = ("loss", "gradient", "inf", "overflow")


def traced_run(
    world: World, windows: list[list[Micro]], run: bool = False, **settings: Any
) -> tuple[Guard, list[Outcome]]:
    """Train with the loss computed in the loop; `run`: the tracer is told how."""
    torch.set_rng_state(world.random)
    guard = Guard(world.model, world.optimizer, world.scheduler, max_grad_norm=MAX_NORM, **settings)
    outcomes = []
    for window in windows:
        for micro in window:

            def again(micro: Micro = micro) -> None:
                world.forward_backward(None, micro, "sum")

            with guard.micro_batch(micro.tokens, [micro.seed], run=again if run else None) as told:
                world.forward_backward(told, micro, "sum")
        outcomes.append(guard.step())
    world.random = torch.get_rng_state()
    guard.close()
    return guard, outcomes


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("run", [False, True])
def test_tracing_leaves_no_trace(fault, run) -> None:
    windows = [[Micro(1), Micro(2, fault=fault)], [Micro(3, fault=fault)], [Micro(4, branch=True)]]
    traced, plain = World(), World()
    guard, outcomes = traced_run(traced, windows, run, trace=2)
    plain_run(plain, never_saw(windows), "sum")
    assert_same_state(traced, plain)
    assert [len(outcome.findings) for outcome in outcomes] == [1, 1, 0]
    assert [f.refusal for f in guard.findings] == [r for o in outcomes for r in o.refused]


def test_a_negative_number_of_traces_is_no_limit() -> None:
    model = nn.Linear(2, 1)
    forensics = Forensics(model, -1)
    micro_batches = [MicroBatch(None, 1, index=i) for i in range(2)]
    for micro in micro_batches:
        with forensics.watching(micro, StoredMicroBatch()):
            model(torch.full((1, 2), math.nan))
        micro.refusal = Refusal("loss", "not finite", micro.index)
    forensics.trace(micro_batches)
    assert [finding.refusal.micro_batch for finding in forensics.findings] == [0, 1]


def test_bad_data_is_named_by_its_place() -> None:
    guard, _ = traced_run(World(), [[Micro(1), Micro(2, fault="loss")]], trace=1)
    (finding,) = guard.findings
    assert finding.verdict is not None
    assert (finding.verdict.cause, finding.verdict.phase) == ("corrupt input", "data")
    assert str(finding).startswith("micro-batch 1 (samples 2): loss is ")


class Rooted(nn.Module):
    """A root of zero: a finite loss whose slope is not, in one line of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = nn.functional.dropout(self.inner(x), 0.5)
        return {"loss": hidden.abs().sum().sqrt()}


@pytest.mark.parametrize("autocast", [False, True])
def test_the_operation_is_named_from_the_models_own_call(autocast) -> None:
    model = Rooted()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), trace=1)
    for x in (torch.ones(1, 2), torch.zeros(1, 2), torch.zeros(1, 2)):
        with guard.micro_batch() as micro, torch.autocast("cpu", torch.bfloat16, autocast):
            micro.loss = loss = model(x)["loss"]
            loss.backward()
    assert len(guard.step().findings) == 1  # of two
    (finding,) = guard.findings
    assert finding.verdict is not None
    assert (finding.verdict.cause, finding.verdict.operation) == (
        "infinite slope",
        "div in SqrtBackward0",
    )
    assert "hidden.abs().sum().sqrt()" in finding.verdict.source


class OfSamples(nn.Module):
    """Take a list of samples of several lengths, or one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def forward(self, samples: Any) -> torch.Tensor:
        samples = samples if isinstance(samples, list) else [samples]
        return sum(self.inner(sample).square().sum() for sample in samples)  # type: ignore[return-value]


GOOD, BAD = torch.ones(5, 4), torch.ones(3, 4)
BAD[1, 2] = math.nan
ROWS = torch.stack([GOOD[:3], BAD])
# what the micro-batch computes, what it is said to read, and the name of the bad tensor
LISTS: dict[str, tuple[Any, Any, str]] = {
    "a list": (lambda model: model([GOOD, BAD]), None, "input 0.1"),
    "a list, given": (lambda model: model([GOOD, BAD]), [GOOD, BAD], "input 1"),
    "calls": (lambda model: model(GOOD) + model(BAD), None, "input 1.0"),
    "rows": (lambda model: model(ROWS), None, "input 0"),
    "as a data loader gives": (lambda model: model(ROWS), [ROWS, torch.zeros(2)], "input 0"),
}


@pytest.mark.parametrize("case", LISTS)
def test_the_bad_sample_of_a_list_is_named(case: str) -> None:
    compute, inputs, name = LISTS[case]
    model = OfSamples()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), trace=1)
    with guard.micro_batch(ids=["a", "b"], inputs=inputs) as micro:
        micro.loss = compute(model)
        micro.loss.backward()
    (finding,) = guard.step().findings
    assert finding.verdict is not None
    assert finding.verdict.tensor.startswith(f"{name} [") and finding.verdict.sample == "b"
    assert "sample b; it reached loss" in finding.told


def test_a_call_for_each_sample_has_no_row_of_the_first() -> None:
    """Neither for a fault that is computed nor for a bad token id, whose sample is named."""
    model = small_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, trace=2, refuse=(IndexError,))
    good, bad = torch.ones(1, 5, dtype=torch.int64), torch.tensor([[1, 2, 10**6, 3, 4]])
    doubled = iter([1.0, math.inf] * 9)
    model.model.norm.register_forward_hook(lambda _m, _i, out: out * next(doubled))
    with guard.micro_batch(ids=["a", "b"]) as micro:
        micro.loss = (
            model(input_ids=good, labels=good).loss + model(input_ids=good, labels=good).loss
        )
        micro.loss.backward()
    with guard.micro_batch(ids=["a", "b"]):
        model(input_ids=good, labels=good)
        model(input_ids=bad, labels=bad)
    computed, token = guard.step().findings
    assert computed.verdict is not None and computed.verdict.row is None
    assert token.verdict is not None and token.verdict.cause == "token id"
    assert (token.verdict.row, token.verdict.sample) == (None, "b")


def test_without_a_reason_to_trace_nothing_is_kept() -> None:
    model = Rooted()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not model._forward_pre_hooks
    with pytest.raises(ConfigError, match="trace is -1"):
        Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), trace=-1)
    traced = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), trace=1)
    for each, hooks in ((guard, 0), (traced, 1)):
        with each.micro_batch():
            assert len(model._forward_pre_hooks) == hooks


def test_a_copy_of_the_model_drags_no_guard_along() -> None:
    model = Rooted()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), trace=1)
    with guard.micro_batch(run=lambda: (_ for _ in ())) as micro:  # not to be copied or stored
        others = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for other in others:
            other(torch.zeros(1, 2))["loss"].backward()
        model(torch.ones(1, 2))["loss"].backward()
    for other in others:
        (hook,) = other._forward_pre_hooks.values()
        assert hook._note is None
    assert not model._forward_pre_hooks
    assert micro.stored is not None and len(micro.stored.calls) == 1
    assert micro.stored.inputs[0].sum() == 2.0


def test_an_outcome_holds_no_graph_and_no_copies() -> None:
    torch.manual_seed(0)  # of which dropout leaves something
    model = Rooted()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with guard.micro_batch() as micro:
        micro.loss = loss = model(torch.ones(1, 2))["loss"]
        micro.report = loss.view(1) * 2.0
        loss.backward()
    outcome = guard.step()
    assert outcome.applied and outcome.update is None and outcome.snapshot is None
    assert not any(each.report.requires_grad for each in outcome.own)


def test_what_cannot_be_repeated_is_said() -> None:
    world = World()
    calls = []

    def once(module: Any, _inputs: Any, value: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return value * math.nan if len(calls) == 1 else value

    world.model.first.register_forward_hook(once)
    guard, _ = traced_run(world, [[Micro(1)]], run=True, trace=1)
    (finding,) = guard.findings
    assert finding.verdict is None and "everything was finite" in finding.why


def test_an_exception_that_recurs_is_told_with_its_line() -> None:
    world = World()
    windows = [[Micro(1, fault="exception"), Micro(2)]]
    guard, outcomes = traced_run(world, windows, run=True, trace=1)
    said = guard.findings[0].why
    assert said.startswith("the micro-batch raises the same again: guarded_loops.py:"), said
    assert said.endswith('FloatingPointError("planted"); no NaN or Inf came before it'), said
    assert outcomes[0].applied


class Raising(nn.Linear):
    """Divides by a Python number that is 0 if its output is not finite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x).log()
        mean = hidden.mean()
        return mean / 1 if 1 / int(mean.isfinite()) else mean


@pytest.mark.parametrize("run", [False, True])
def test_what_was_not_finite_before_an_exception_is_traced(run) -> None:
    model = Raising(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, trace=1, refuse=(ZeroDivisionError,))
    x = torch.tensor([[1.0, math.nan]])
    again = (lambda: model(x)) if run else None
    with guard.micro_batch(run=again) as micro:
        micro.loss = model(x)
    said = str(guard.step().findings[0]).splitlines()
    assert said[0].endswith("ZeroDivisionError: division by zero")
    assert said[1].startswith("the micro-batch raises the same again: test_guard_forensics.py:")
    assert said[1].endswith("in Raising.forward: 1 / int(mean.isfinite())")
    assert said[2].startswith("corrupt input: input 0 held nan before the pass"), said


def test_an_error_in_the_tracer_costs_the_finding_only() -> None:
    model = Rooted()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), trace=1)

    def other() -> None:
        raise RuntimeError("not on the tracer's pass")

    for x in (torch.zeros(1, 2), torch.ones(1, 2)):
        with guard.micro_batch(run=other) as micro:
            micro.loss = loss = model(x)["loss"]
            loss.backward()
    assert guard.step().applied
    said = "the tracer failed with RuntimeError: not on the tracer's pass"
    assert guard.findings[0].why == said


class Grown(nn.Module):
    """Its gradient is as large as the numbers in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.small(x.clamp(max=1.0)).sum() + self.large(x * 1.0).sum()}


def windows_of(model: nn.Module, guard: Guard, *windows: tuple[float, ...]) -> Outcome:
    """Step once for each of these windows, of micro-batches of one number; return the last."""
    for window in windows:
        for size in window:
            with guard.micro_batch() as micro:
                micro.loss = loss = model(torch.full((1, 2), size))["loss"]
                loss.backward()
        outcome = guard.step()
    return outcome


def test_of_a_window_that_is_too_large_the_largest_tensor_is_named() -> None:
    model = Grown()
    before = copy.deepcopy(model.state_dict())
    guard = Guard(model, torch.optim.AdamW(model.parameters()), trace=1, loss="share")
    outcome = windows_of(model, guard, (1.0, 1.2e19, 1.1e19))
    assert_equal(dict(model.state_dict()), dict(before), "weights")
    (refusal,) = outcome.refused
    assert (refusal.kind, refusal.tensor, refusal.micro_batch) == ("norm", "large.weight", None)
    assert not outcome.applied and not outcome.findings  # no operation made it, but their sum
    given = {"trace": 1, "spike_sigmas": 8.0}
    guard = Guard(model, torch.optim.AdamW(model.parameters()), **given)
    steady = [(1.0, 1.0 + window / 100) for window in range(23)]
    (refusal,) = windows_of(model, guard, *steady, (1.0, 1e4)).refused
    assert (refusal.kind, refusal.tensor) == ("spike", "large.weight")
    assert refusal.detail.endswith("; large.weight has the largest gradient")


def test_a_step_that_spoils_a_moment_names_it() -> None:
    model = Grown()

    class Spoiling(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            super().step()
            if len(guard.findings) == 0 and guard.counts.steps == 1:
                self.state[model.large.weight]["exp_avg_sq"][0, 0] = math.inf

    guard = Guard(model, Spoiling(model.parameters()), trace=1)
    for _ in range(2):
        with guard.micro_batch() as micro:
            micro.loss = loss = model(torch.full((1, 2), 3.0))["loss"]
            loss.backward()
        outcome = guard.step()
    (refusal,) = outcome.refused
    assert (refusal.kind, refusal.tensor) == ("update", "exp_avg_sq of large.weight")
    assert not outcome.findings
    assert refusal.detail == (
        "exp_avg_sq of large.weight was not finite after the step; the state before it was restored"
    )


class Safe(TrainerMixin, InOrder):
    """As anybody writes it."""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("loss-nan", "forward: mul in model.layers.1.mlp.act_fn"),
        ("gradient-inf", "backward: "),
        ("tensor-1e20", "backward: "),
        ("id-large", "data: embedding"),
    ],
)
def test_a_trainer_logs_the_guilty_operation(fault, said, tmp_path, caplog) -> None:
    def run(kind: Any, rows: list[Any], fault: str | None) -> Any:
        window = {"gradient_accumulation_steps": 4}
        trainer = trainer_of(kind, rows, tmp_path, plant(small_llama(), fault), **window)
        trainer.train()
        return trainer

    guarded = run(Safe, [row(i, fault if i == 5 else None) for i in range(8)], fault)
    (traced,) = [r.message for r in caplog.records if r.message.startswith("traced")]
    assert said in traced, traced
    after = state_of(guarded)
    stock = run(InOrder, [row(i) for i in range(8) if i != 5], None)
    assert_equal(after, state_of(stock), "state")


def test_metrics_do_not_count_what_the_tracer_computes(tmp_path) -> None:
    class Counting(Safe):
        """As TRL's trainers do."""

        _metrics: list[int]

        def compute_loss(self, *arguments: Any, **named: Any) -> Any:
            self._metrics.append(1)
            return super().compute_loss(*arguments, **named)

    def counted(trace: int) -> int:
        data = [row(i, "loss-nan" if i == 1 else None) for i in range(3)]
        trainer = trainer_of(Counting, data, tmp_path, plant(small_llama(), "loss-nan"))
        trainer._metrics = []
        trainer.guard_settings = {"trace": trace}
        trainer.train()
        assert len(trainer.guard.findings) == trace
        return len(trainer._metrics)

    assert counted(1) == counted(0) == 2  # nor what was refused


def test_the_last_refusals_of_a_lost_run_are_logged_too(tmp_path, caplog) -> None:
    model = plant(small_llama(), "loss-nan")
    trainer = protect(trainer_of(InOrder, [row(0, "loss-nan")], tmp_path, model), max_refused=1)
    with pytest.raises(TooManyRefusalsError):
        trainer.train()
    assert len(trainer.guard.findings) == 1
    said = [r.message.split(" in step 1")[0] for r in caplog.records if r.name == "npt.guard"]
    assert said == ["refused", "traced"]
