"""Plans: predicted memory is what is measured, at any depth and strategy; what fits is found; time
is carried from few layers to all.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import npt
from npt.base.random_base import random_base
from npt.config import NPTConfig, TrainConfig
from npt.errors import ConfigError
from npt.planning import plan
from npt.planning import timing as trial
from npt.planning.fake_device import FakeDevice
from npt.planning.measure import Peak
from npt.planning.memory import PHASES
from npt.planning.plan import Planner, remedies
from npt.planning.timing import StepTime, measure, predict_time
from npt.planning.workload import Depth, Workload
from npt.step import launched_window
from npt.step.gradient_window import IN_FLIGHT
from npt.step.splitting import MicroBatchSplitter
from npt.step.train_step import TrainStep

LENGTH = 48


def workload(
    layers: str = "upper_half", count: int = 6, vocab: int = 200, **training: Any
) -> Workload:
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=count,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    settings = TrainConfig(**{"batch_size": 4, **training})
    return Workload(
        config, NPTConfig(rank=8, layers=layers), settings, LENGTH, "nf4", torch.bfloat16
    )


COUNTS: dict[Any, dict[Any, int]] = {}


def counts_for(planned: Workload) -> dict[Any, int]:
    """Return the counts on the model of a workload by all its planners in this file; the strategies
    share their evaluations.
    """
    shape = (
        planned.config.vocab_size,
        planned.config.num_hidden_layers,
        planned.compute_dtype,
        planned.teacher_attention,
    )
    return COUNTS.setdefault(shape, {})


def planner_of(planned: Workload) -> Planner:
    return Planner(planned, counts=counts_for(planned))


def offered_to(planned: Workload, limit: int) -> list[tuple[str, int]]:
    return remedies(planned, limit, counts_for(planned))


@pytest.mark.parametrize(
    ("layers", "training"),
    [
        ("upper_half", {"strategy": "local"}),
        ("1,4", {"strategy": "propagated"}),
        ("all", {"strategy": "end_to_end", "logit_kl_weight": 0.5, "logit_loss": "jsd"}),
        ("0,3", {"strategy": "end_to_end", "logit_kl_weight": 0.5, "gradient_checkpointing": True}),
        ("0,3", {"strategy": "end_to_end", "logit_kl_weight": 0.5, "hidden_weight": 0.0}),
        ("2-4", {"stages": "local:0.5,end_to_end:0.5"}),
    ],
    ids=str,
)
def test_predicted_memory_is_what_is_measured(layers, training, monkeypatch) -> None:
    phases = PHASES
    if training != {"strategy": "local"}:  # an evaluation is the same whatever is trained
        phases = tuple(phase for phase in PHASES if phase != "evaluation")
        monkeypatch.setattr(Planner, "_evaluation", lambda planner, samples: [])
    planned = workload(layers, count=5, vocab=5000, **training)
    plan = planner_of(planned).plan()
    gc.collect()
    model = random_base(planned.config, quantization="nf4", device="cpu")
    npt.attach(model, planned.adapter)
    beside = torch.ones(2_000_000)  # of somebody else in this process, and no part of the run
    of_stages = [
        measure(model, planned, config, MicroBatchSplitter(4), 4, steps=1)
        for config in planned.stages.values()
    ]
    for phase in phases:
        measured = max(stage.phases[phase] for stage in of_stages)
        # Beside the attention kernel's own buffers, and the mask that full rows have none of:
        # hundreds of KiB of a few MiB.
        assert plan.of(phase) == pytest.approx(measured, rel=0.15), phase
    assert beside.sum() == 2_000_000


@pytest.fixture
def training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans without their evaluations, which these tests do not look at."""
    monkeypatch.setattr(Planner, "_evaluation", lambda planner, samples: [])


@pytest.mark.usefixtures("training_alone")
def test_the_memory_of_bf16_products_is_what_is_measured() -> None:
    planned = replace(workload("all", strategy="local"), compute_dtype=torch.bfloat16)
    model = random_base(
        planned.config, quantization="nf4", device="cpu", compute_dtype=torch.bfloat16
    )
    npt.attach(model, planned.adapter)
    measured = measure(model, planned, planned.training, MicroBatchSplitter(4), 4, steps=1)
    # as above
    assert planner_of(planned).plan().of("micro-batch") == pytest.approx(
        measured.phases["micro-batch"], rel=0.15
    )


@pytest.mark.parametrize(
    "training",
    [
        {"strategy": "local"},
        {"strategy": "end_to_end", "logit_kl_weight": 0.5, "gradient_checkpointing": True},
    ],
    ids=str,
)
def test_few_layers_say_what_all_of_them_take(training) -> None:
    """Compare the count of a whole model with the one carried to it from a few layers."""
    planned = workload("1,3,4", count=6, **training)
    carried = planner_of(planned).plan()
    whole = planner_of(planned)
    whole._by_depth = lambda run, name, samples, depth: (whole._count(run, name, samples, depth), 0)
    for phase in PHASES:
        # the tables of positions, but for which equal
        assert carried.of(phase) == pytest.approx(whole.plan().of(phase), rel=1e-3), phase


def test_depths_of_a_model_count_its_layers_by_where_they_lie() -> None:
    depth = Depth.of((2, 3, 6), 9)
    assert (depth.before, depth.converted, depth.between, depth.after) == (2, 3, 2, 2)
    assert depth.layers == 9 and depth.indices == (2, 5, 6)
    assert Depth.of((0,), 1) == Depth(0, 1, 0, 0)


@pytest.mark.usefixtures("training_alone")
def test_a_teacher_of_its_own_is_counted() -> None:
    alone = planner_of(workload("5")).plan()
    beside = planner_of(replace(workload("5"), teacher=torch.bfloat16)).plan()
    (term,) = [term for term in beside.terms if term.name == "teacher of its own"]
    assert beside.of("step") - alone.of("step") == term.bytes > 6 * 2 * 3 * 64 * 160


@pytest.mark.usefixtures("training_alone")
def test_a_teacher_of_its_own_is_counted_with_its_own_attention() -> None:
    """Eager scores of every pair of tokens, which the student under SDPA never has as a whole."""
    planned = replace(workload("all", strategy="local"), teacher=torch.float32, length=128)
    peaks = [
        planner_of(replace(planned, teacher_attention=own)).plan().of("micro-batch")
        for own in ("sdpa", "eager", None)
    ]
    assert peaks[0] == peaks[2] < peaks[1]


def test_a_measurement_has_as_many_windows_in_flight_as_a_run(monkeypatch) -> None:
    """On a device whose results arrive when it is waited for, and not before."""
    events: list[SimpleNamespace] = []
    made: list[TrainStep] = []
    seen: list[int] = []

    def to_host(record: torch.Tensor) -> tuple[torch.Tensor, Any]:
        event = SimpleNamespace(
            arrived=False, query=lambda: event.arrived, synchronize=lambda: None
        )
        events.append(event)
        return record, event

    def wait_for(device: torch.device) -> None:
        for event in events:
            event.arrived = True

    def peak(call: Any, device: torch.device) -> Peak:
        seen.append(made[-1].window.in_flight)
        call()
        return Peak(0, 1)

    monkeypatch.setattr(launched_window, "to_host", to_host)
    monkeypatch.setattr(
        trial, "TrainStep", lambda *a, **k: made.append(TrainStep(*a, late=True, **k)) or made[-1]
    )
    monkeypatch.setattr(trial, "wait_for", wait_for)
    monkeypatch.setattr(trial, "peak_bytes", peak)
    planned = workload("1,2", count=3, batch_size=1)
    model = random_base(planned.config, quantization="nf4", device="cpu")
    npt.attach(model, planned.adapter)
    measure(model, planned, planned.training, MicroBatchSplitter(1), 1, steps=1)
    assert seen[:2] == [IN_FLIGHT, IN_FLIGHT]  # in a micro-batch, and as the step after it begins


# --- what fits
# --------------------------------------------------------------------------------------------------


def test_what_fits_is_the_most_that_does_and_parts_are_even(counted_by_a_formula) -> None:
    planner = Planner(workload("5", batch_size=5, max_memory="1GiB"))
    peaks = {samples: planner.plan(samples).peak for samples in (1, 2, 4, 5)}
    assert sorted(peaks.values()) == list(peaks.values())
    for samples, peak in peaks.items():
        found = planner.fitting(peak)
        passes = -(-5 // samples)
        assert found.samples_at_once == -(-5 // passes) and found.peak <= peak
        assert found.evaluated_at_once <= found.samples_at_once


def test_if_one_sample_does_not_fit_the_largest_term_is_named(counted_by_a_formula) -> None:
    planner = Planner(workload("5", batch_size=2, max_memory="100KB"))
    with pytest.raises(
        ConfigError, match=r"--max_memory is 100KB, but one sample of 48 tokens .*most of it"
    ) as caught:
        planner.fitting(100_000)
    assert "\n" not in str(caught.value)


def test_settings_that_would_fit_do() -> None:
    planned = replace(
        workload("5", batch_size=1),
        quantization=None,
        stored=torch.float32,
        adapter=NPTConfig(rank=1, layers="5"),
    )
    limit = planner_of(planned).plan(1).peak - 1
    ((flag, peak),) = offered_to(planned, limit)
    assert flag == "--use_quantization" and peak <= limit
    assert offered_to(planned, 1000) == []


def looking_at(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    """Of the settings that could be offered only these are tried from now on; each of the others
    would cost its counts.
    """
    every = plan._less_memory
    monkeypatch.setattr(
        plan,
        "_less_memory",
        lambda *arguments: [tried for tried in every(*arguments) if tried[0].startswith(flags)],
    )


@pytest.mark.usefixtures("training_alone")
def test_checkpointing_is_offered_if_it_makes_the_graphs_fit(monkeypatch) -> None:
    looking_at(monkeypatch, "--gradient_checkpointing", "--strategy")
    planned = workload("0-2", batch_size=1, strategy="end_to_end")
    limit = planner_of(planned).plan(1).peak - 1
    offered = dict(offered_to(planned, limit))
    assert offered["--gradient_checkpointing"] <= limit and "--strategy local" in offered
    checkpointed = replace(planned, training=replace(planned.training, gradient_checkpointing=True))
    found = planner_of(checkpointed).plan(1).peak
    assert found == offered["--gradient_checkpointing"]
    again = dict(offered_to(checkpointed, found - 1))
    assert "--gradient_checkpointing" not in again and "--strategy local" in again


def offered_if_anything_would_do(monkeypatch: pytest.MonkeyPatch, planned: Workload) -> set[str]:
    """Flags of all that could be offered, whatever it takes: nothing is counted."""
    with monkeypatch.context() as patch:
        patch.setattr(Planner, "peak_within", lambda planner, limit: limit)
        return {flag for flag, _ in remedies(planned, 1)}


def test_local_training_is_not_offered_to_a_run_on_the_logits_alone(monkeypatch) -> None:
    for weight, offered in ((0.0, False), (1.0, True)):
        planned = workload(
            "0,3", batch_size=1, strategy="end_to_end", logit_kl_weight=1.0, hidden_weight=weight
        )
        assert ("--strategy local" in offered_if_anything_would_do(monkeypatch, planned)) is offered


def test_no_setting_is_offered_that_would_be_refused(monkeypatch) -> None:
    """Without its teacher what keeps the residual has nothing to learn, and a list of weights has
    one for each converted layer.
    """
    kept = replace(
        workload("all", batch_size=1, layer_weights="1,1,1,1,1,2"), teacher=torch.float32
    )
    kept = replace(kept, adapter=replace(kept.adapter, residual="keep"))
    free = replace(
        kept,
        adapter=replace(kept.adapter, residual="modulate"),
        training=replace(kept.training, layer_weights="linear"),
    )
    offered = [
        {flag.rsplit(" ", 1)[0] for flag in offered_if_anything_would_do(monkeypatch, planned)}
        for planned in (kept, free)
    ]
    refused = {"no", "--layers"}
    assert offered[0] & refused == set() and offered[1] & refused == refused


@pytest.mark.usefixtures("training_alone")
def test_an_unspent_budget_is_planned_evenly_and_halved_as_a_remedy(
    counted_by_a_formula, monkeypatch
) -> None:
    looking_at(monkeypatch, "--rank_budget", "--adapter_rank")
    budget = workload("1,3,4", rank_budget=50)
    assert budget.approximate and budget.ranks == (17, 17, 17)
    spent = replace(budget, adapter=replace(budget.adapter, ranks=(40, 5, 5)))
    assert not spent.approximate and spent.ranks == (40, 5, 5)
    (planned,) = {
        planner_of(w).plan(1)
        for w in (budget, replace(workload("1,3,4"), adapter=NPTConfig(rank=17, layers="1,3,4")))
    }
    flags = [flag for flag, _ in offered_to(budget, planned.peak - 1)]
    assert "--rank_budget 25" in flags and not any(
        flag.startswith("--adapter_rank") for flag in flags
    )


@pytest.mark.parametrize(
    ("device", "training", "processes", "expected"),
    [
        ("cpu", {}, 1, 0),
        ("cuda", {}, 1, IN_FLIGHT),
        ("cuda", {"skip_spikes": True}, 1, 1),
        ("cuda", {}, 2, 1),
    ],
)
def test_states_are_counted_of_as_many_steps_as_may_be_in_flight(
    monkeypatch, device, training, processes, expected
) -> None:
    """As many as the transaction leaves unread; what is counted without numbers needs none."""
    planned = replace(workload(**training), processes=processes)
    monkeypatch.setattr(plan, "FakeDevice", lambda device: FakeDevice(torch.device("cpu")))
    found = Planner(replace(planned, device=torch.device(device)), base_bytes=0)
    sizes = {term.name: term.bytes for term in found._fixed}
    assert sizes.get("states before steps in flight", 0) == expected * 3 * sizes["adapters"]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return every count from now on."""
    counts: list[int] = []
    peak_of = FakeDevice.peak_of
    monkeypatch.setattr(
        FakeDevice, "peak_of", lambda self, act: counts.append(peak_of(self, act)) or counts[-1]
    )
    return counts


def test_what_its_weights_alone_keep_from_fitting_is_not_counted(
    counted_by_a_formula, monkeypatch
) -> None:
    planned = replace(workload("11", count=12), quantization=None, stored=torch.float32)
    limit = Planner(planned)._fixed[0].bytes - 1
    packed = Planner(replace(planned, quantization="nf4", stored=torch.bfloat16)).plan(1).peak
    counts = counted(monkeypatch)
    assert dict(remedies(planned, limit)) == {"--use_quantization": packed}
    # of the packed base: the logits, and training and evaluation at two depths
    assert len(counts) <= 5


def test_no_count_is_made_twice_for_the_remedies_of_a_run(
    counted_by_a_formula, monkeypatch
) -> None:
    planned = workload("2-5", batch_size=1, strategy="propagated")
    planner = Planner(planned)
    limit = planner.plan(1).peak - 1
    counts = counted(monkeypatch)
    assert "--adapter_rank 4" in dict(remedies(planned, limit, planner.counts))
    assert len(counts) <= 2 + 5  # training in the other way, and all of it with half the ranks


# --- time
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "training", "expected"),
    [
        ("all", {"strategy": "local", "gradient_accumulation_steps": 3}, 3 * 2 * (0.5 + 12 * 2.0)),
        ("4-11", {"strategy": "local"}, 2 * (0.5 + 4 * 1.0 + 8 * 2.0)),
        ("4,7,9", {"strategy": "propagated"}, 2 * (0.5 + 4 * 1.0 + 3 * 2.0 + 3 * 1.5)),
        ("0,1", {"strategy": "end_to_end", "logit_kl_weight": 0.5}, 2 * (0.5 + 2 * 2.0 + 10 * 1.5)),
    ],
    ids=str,
)
def test_time_is_carried_from_few_layers_to_all(monkeypatch, layers, training, expected) -> None:
    """On a clock of half a second outside the layers, two for a converted layer, one for a layer
    before these and one and a half for any other.
    """

    def clock(windows: dict[str, Any], seconds: float) -> tuple[dict[str, float], dict[str, float]]:
        trials = {"one": (0, 1, 0), "three": (0, 3, 0), "before": (2, 1, 0), "others": (0, 2, 2)}
        cost = {
            name: 0.5 + u * 1.0 + c * 2.0 + o * 1.5
            for name, (u, c, o) in trials.items()
            if name in windows
        }
        return cost, {name: 0.25 + trials[name][1] * 0.125 for name in windows}

    monkeypatch.setattr(trial, "_fastest", clock)
    monkeypatch.setattr(trial, "_window", lambda *arguments: None)
    planned = workload(layers, count=12, batch_size=4, **training)
    (found,) = predict_time(planned, 2).values()
    step = 0.25 + planned.depth.converted * 0.125
    assert found.seconds == pytest.approx(expected + step) and sum(
        found.parts.values()
    ) == pytest.approx(found.seconds)


@pytest.mark.parametrize("layers", ["all", "4-11", "4,7,9"])
def test_wide_layers_are_timed_narrower_and_scaled_by_arithmetic(monkeypatch, layers) -> None:
    """On a clock that knows arithmetic alone: the time of each layer is then exactly that of its
    full width.
    """
    speed, widths = 1e6, []

    def clock(windows: dict[str, Any], seconds: float) -> tuple[dict[str, float], dict[str, float]]:
        costs = {
            name: 2 * LENGTH * trial._flops(tried, config, {name: depth})[name] / speed
            for name, (tried, config, depth) in windows.items()
        }
        return costs, dict.fromkeys(windows, 0.25)

    def window(tried: Workload, config: TrainConfig, depth: Depth, samples: int) -> Any:
        widths.append(tried.config.hidden_size)
        return tried, config, depth

    monkeypatch.setattr(trial, "_fastest", clock)
    monkeypatch.setattr(trial, "_window", window)
    monkeypatch.setattr(trial, "NARROWEST", 8)
    planned = workload(layers, count=12, batch_size=2, strategy="propagated")
    (whole,) = predict_time(planned, 2, seconds=0.0).values()
    monkeypatch.setattr(
        trial, "matmul_roofline", lambda *a, **k: SimpleNamespace(flops_per_second=speed)
    )
    (found,) = predict_time(planned, 2, seconds=1e-3).values()
    # four heads cannot be divided further
    assert (whole.narrowed, found.narrowed) == (1, 4) and set(widths) == {64, 16}
    assert found.parts.keys() == whole.parts.keys()
    for name, seconds in whole.parts.items():
        if "layers (" in name or "layers before" in name:
            assert found.parts[name] == pytest.approx(seconds), name


def test_every_stage_is_tried_with_what_it_drives() -> None:
    found = predict_time(
        workload("2,4", stages="local:0.5,end_to_end:0.5", logit_kl_weight=0.5), 2, seconds=0.0
    )
    assert list(found) == ["local", "end_to_end"]
    assert all(
        isinstance(time, StepTime) and time.seconds > 0 and min(time.parts.values()) >= 0
        for time in found.values()
    )
    assert (
        "layers before them (2)" in found["local"].parts
        and "other layers (2)" in found["end_to_end"].parts
    )
