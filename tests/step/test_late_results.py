"""Results that are on their way from a device: when the host waits for one, and that waiting
decides nothing.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from resumed_runs import Runs, events, records
from torch import Tensor, nn
from windows import add_filled, window_over

import npt
from npt.adapters.converted import adapter_parameters
from npt.batch import Batch
from npt.distill.step import student_guard
from npt.errors import NoMemoryError, TooManyRefusalsError
from npt.guard import window as window_module
from npt.guard.guard import Guard
from npt.guard.outcome import MicroBatch, send_record
from npt.guard.spikes import SpikeGuard
from npt.guard.window import IN_FLIGHT, GradientWindow
from npt.train import journal as journal_module
from npt.train import loop as loop_module
from npt.train import trainer as trainer_module


@dataclass
class Device:
    """Records arrive here when their turn in `slow` says so: after that many further looks, or when
    they are waited for.
    """

    slow: list[int]
    waits: int = 0
    events: list["Event"] = field(default_factory=list)

    def send(self, window: Any) -> None:
        send_record(window)
        window.arrived = Event(self, self.slow[len(self.events) % len(self.slow)])
        self.events.append(window.arrived)


@dataclass
class Event:
    device: Device
    looks: int

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def synchronize(self) -> None:
        self.device.waits += not self.query()


NEVER = 10**9


def run(
    windows: list[str], *, late: bool = True, slow: list[int] | None = None, **arguments: Any
) -> tuple[Any, ...]:
    """Weights, results in order, how many results came at each commit, snapshots alive at most,
    waits.
    """
    parameters = {"a": nn.Parameter(torch.arange(6.0).view(2, 3)), "b": nn.Parameter(torch.ones(4))}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1.0, fused=True)
    transaction = window_over(parameters, optimizer, 0.5, [0.1, 0.05], late=late, **arguments)
    device, results, came, kept = Device(slow or [0]), [], [], 0
    with pytest.MonkeyPatch.context() as patched:
        if late:
            patched.setattr(window_module, "send_record", device.send)
        for number, kind in enumerate(windows):

            def fill(number: int = number, kind: str = kind) -> MicroBatch:
                for parameter in parameters.values():
                    parameter.grad += torch.full_like(
                        parameter, float("nan") if kind == "bad" else 1.0 + number
                    )
                return MicroBatch(torch.tensor(1.0 + number), 5)

            add_filled(transaction, fill, (str(number),))
            new = transaction.commit()
            came.append(len(new))
            kept = max(
                kept, sum(window.update.snapshot is not None for window in transaction._launched)
            )
            results += new
        in_flight, waited = transaction.in_flight, device.waits
        results += transaction.flush()
    said = attrgetter("index", "applied", "steps", "rate", "loss", "grad_norm")
    told = [(*said(r), [str(refusal) for refusal in r.refused]) for r in results]
    weights = {n: p.detach().clone() for n, p in parameters.items()}
    return weights, told, came, kept, waited, in_flight


def test_nothing_is_waited_for_while_few_windows_are_in_flight():
    _, told, came, kept, waits, in_flight = run(["good"] * IN_FLIGHT, slow=[NEVER])
    assert (came, waits, in_flight, kept) == ([0] * IN_FLIGHT, 0, IN_FLIGHT, IN_FLIGHT)
    assert [index for index, *_ in told] == list(range(IN_FLIGHT))


def test_the_oldest_is_waited_for_where_more_would_be_in_flight():
    _, _, came, kept, waits, in_flight = run(["good"] * (IN_FLIGHT + 4), slow=[NEVER])
    assert (came, waits, in_flight, kept) == ([0] * IN_FLIGHT + [1] * 4, 4, IN_FLIGHT, IN_FLIGHT)


def test_a_late_one_holds_back_those_behind_it():
    """Results come in their order, whichever record arrives first."""
    _, told, came, _, waits, _ = run(["good"] * 5, slow=[2, 0, 0, 0, 0])
    assert waits == 0 and came == [0, 0, 0, 3, 1]
    assert [index for index, *_ in told] == list(range(5))


@pytest.mark.parametrize(
    "shared",
    [{"spikes": SpikeGuard(10.0)}, {"processes": SimpleNamespace(size=2)}],
    ids=["spike guard", "processes"],
)
def test_where_waiting_could_decide_something_it_is_one_window(shared):
    parameters = {"a": nn.Parameter(torch.ones(2))}
    optimizer = torch.optim.AdamW(parameters.values(), fused=True)
    transaction = window_over(parameters, optimizer, 0.5, [0.1], late=True, **shared)
    transaction._launched.extend([object()] * 3)  # type: ignore[list-item]
    assert transaction._unread() == 1


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from(["good", "good", "bad"]), min_size=1, max_size=8),
    st.lists(st.integers(0, 4), min_size=1, max_size=8),
)
def test_results_read_late_equal_results_read_at_once(windows, slow):
    weights, told, *_ = run(windows, late=False)
    late_weights, late_told, *_ = run(windows, slow=slow)
    assert late_told == told
    assert all(torch.equal(weights[name], late_weights[name]) for name in weights)


# --- runs
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def late_runs(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Runs, list[GradientWindow]]]:
    """Runs of eight windows of one sample, whose records arrive when `slow` says so, and the
    transactions that they made.
    """

    def make(slow: list[int]) -> tuple[Runs, list[GradientWindow]]:
        made: list[GradientWindow] = []

        def making(*arguments: Any, **named: Any) -> Guard:
            guard = student_guard(*arguments, late=True, **named)
            made.append(guard.window)
            return guard

        monkeypatch.setattr(trainer_module, "student_guard", making)
        monkeypatch.setattr(window_module, "send_record", Device(slow).send)
        model = npt.load_base(str(tiny_folder), quantization="nf4", device="cpu")[0]
        return (
            Runs(model, tmp_path, data=lambda: records(8), settings={"scheduler_type": "constant"}),
            made,
        )

    return make


def poisoning(model: nn.Module, call: int) -> Callable[[int, Batch], None]:
    """One call of the strategy finds a gradient that is not a number."""

    def act(number: int, batch: Batch) -> None:
        if number == call:
            first = next(iter(adapter_parameters(model).values()))
            first.grad = torch.full_like(first, float("nan"))

    return act


def test_a_run_that_gives_up_saves_the_step_of_its_weights(late_runs, monkeypatch):
    """The record of the second window arrives with those of the third and the fourth, while the
    fifth is on its way.
    """
    runs, _ = late_runs([0, 2, 0, 0, 0, 0])
    saved: list[tuple[int, int, int, int]] = []
    write = journal_module.write_checkpoint

    def writing(
        path: Path, model: Any, transaction: GradientWindow, record: dict[str, Any], *others: Any
    ) -> None:
        saved.append(
            (
                record["step"],
                transaction.applied_steps,
                record["micro_batches"],
                record["position"]["drawn"],
            )
        )
        write(path, model, transaction, record, *others)

    monkeypatch.setattr(journal_module, "write_checkpoint", writing)
    with pytest.raises(TooManyRefusalsError, match="stopped at step 4: 1 refusals in a row"):
        runs.run("run", poisoning(runs.model, 1), max_consecutive_bad=1)
    assert saved == [(4, 4, 5, 5)]
    (stopped,) = events(runs.place / "run", "stopped")
    assert stopped["step"] == 4


def test_an_error_between_late_results_loses_none_of_them(late_runs, monkeypatch):
    runs, made = late_runs([0, 2, 0, 0, 0, 0])
    after_step, seen = loop_module.Loop._after_step, []

    def failing(loop: Any, outcome: Any) -> None:
        seen.append(loop)
        after_step(loop, outcome)
        if loop.progress.step == 2:
            raise ZeroDivisionError

    monkeypatch.setattr(loop_module.Loop, "_after_step", failing)
    with pytest.raises(ZeroDivisionError):
        runs.run("run")
    assert seen[0].progress.step == made[0].applied_steps == 5
    assert runs.outcome("run").state["step"] == 5


def test_one_sample_too_large_ends_the_run_with_every_step_saved(late_runs):
    runs, made = late_runs([NEVER])

    def act(number: int, batch: Batch) -> None:
        if number >= 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(NoMemoryError):
        runs.run("run", act)
    assert runs.outcome("run").state["step"] == made[0].applied_steps == 2


@pytest.mark.parametrize("slow", [[2, 0, 0, 1], [NEVER]])
def test_logging_reads_nothing_but_what_came_with_the_window_s_record(late_runs, monkeypatch, slow):
    """Once a window is launched its sums cannot be read any more: after them there may be windows
    that nobody has waited for.
    """
    lines = {}
    step = GradientWindow._step

    def stepping(transaction: GradientWindow, window: Any, go: Tensor) -> None:
        step(transaction, window, go)
        for micro, judged in window.ran:
            micro.judged = replace(judged, loss=judged.loss.to("meta"), norm=judged.norm.to("meta"))
            micro.report = micro.report.to("meta")

    settings = {
        "log_steps": 1,
        "strategy": "end_to_end",
        "logit_kl_weight": 0.5,
        "gradient_accumulation_steps": 2,
    }
    for name in ("readable", "away"):
        runs, made = late_runs(slow)
        if name == "away":
            monkeypatch.setattr(GradientWindow, "_step", stepping)
        runs.run(name, **settings)
        found = (runs.place / name / "metrics.jsonl").read_text().splitlines()
        lines[name] = [
            {k: v for k, v in json.loads(line).items() if k != "tokens_per_second"}
            for line in found
        ]
        assert made and made[-1].update.late
    assert lines["away"] == lines["readable"] and len(lines["away"]) == 4
