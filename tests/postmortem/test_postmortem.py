"""The post-mortem bundle holds what it takes to see why a run stopped, and to compute it again;
nothing keeps it from being written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from stopped_runs import BAD, acting, good, stop
from torch import nn
from windows import StudentStep

import npt
from npt.adapters.converted import adapter_parameters
from npt.config import DataConfig, NPTConfig, TrainConfig
from npt.data.batch import Batch, Sample, collate
from npt.distill.strategies import STRATEGIES
from npt.errors import TooManyRefusalsError
from npt.guard.outcome import MicroBatchRecord, Outcome, Refusal
from npt.postmortem import write as postmortem
from npt.postmortem.bundle import read_bundle
from npt.postmortem.replay import replay
from npt.postmortem.write import Situation, suspect, write_postmortem
from npt.runs import run_folder
from npt.runs.run_folder import RunFolder
from npt.tracer import trace as tracer
from npt.tracer.passes import untouched
from npt.tracer.verdict import Verdict
from npt.train.run_context import Window
from npt.train.run_data import RunData

WINDOW = [
    collate([Sample("a", (5, 6, 7)), Sample("b", (8,))], 2),
    collate([Sample("c", (9, 999))], 2),
]
REFUSALS = [
    Refusal("loss", "loss is nan", 0, ("a", "b")),
    Refusal("data", "token id 999", 1, ("c",)),
    Refusal("norm", "inf"),
]
CONFIG = TrainConfig(learning_rate=0.1, warmup_steps=4, scheduler_type="linear")


@pytest.fixture
def student(load_model: Callable[..., nn.Module]) -> nn.Module:
    model = load_model()
    npt.attach(model, NPTConfig(rank=2, layers="3"))
    return model


def situation(
    model: Any, refusals: list[Refusal] = REFUSALS, window: list[Batch] = WINDOW, **more: Any
) -> Situation:
    """Twelve steps into a run of twenty, after one step of which something is in every moment."""
    parameters = adapter_parameters(model)
    step = StudentStep(model, STRATEGIES["local"], CONFIG, [0.1])
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    step.update.optimizer.step()
    step.window.clear()
    record = {
        "settings": {
            name: value
            for part in (NPTConfig(rank=2, layers="3"), DataConfig(), CONFIG)
            for name, value in vars(part).items()
        },
        **npt.base_identity(model).as_record(),
        "versions": {"torch": torch.__version__},
        "device": "cpu",
    }
    return Situation(
        **{
            "model": model,
            "gradients": step.window,
            "fill": step.forward_backward,
            "window": window,
            "result": Outcome(12, len(window), False, 12, refused=tuple(refusals)),
            "reason": "3 refusals in a row",
            "step": 12,
            "total_steps": 20,
            "config": CONFIG,
            "counters": {"steps": 12, "tokens": 345, "refused": {"loss": 1}},
            "record": record,
            **more,
        }
    )


def said(folder: Path, name: str = "postmortem.json") -> dict[str, Any]:
    return json.loads(
        (folder / name).read_text(), parse_constant=lambda word: pytest.fail(f"{word} in JSON")
    )


# --- what it holds
# --------------------------------------------------------------------------------------------------


def test_the_bundle_holds_adapters_moments_and_random_state(student, tmp_path) -> None:
    stopped = situation(student)
    folder = write_postmortem(tmp_path, stopped)
    assert folder == tmp_path / "postmortem" / "step-00000012"
    state = load_file(folder / "state.safetensors")
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    parameters = adapter_parameters(student)
    for name, parameter in parameters.items():
        assert torch.equal(adapter[f"base_model.model.{name}"], parameter.detach())
        kept = stopped.gradients.update.optimizer.state[parameter]
        assert set(kept) == {"step", "exp_avg", "exp_avg_sq"} and bool(kept["exp_avg"].any())
        for key, value in kept.items():
            assert torch.equal(state[f"optimizer.{name}.{key}"], value)
    assert torch.equal(state["rng.0.cpu"], torch.get_rng_state())
    devices = {f"rng.0.cuda.{index}" for index in range(torch.cuda.device_count())}
    assert len(state) == 3 * len(parameters) + 1 + len(devices)


def test_the_bundle_holds_the_window_as_collated_and_the_refusals(student, tmp_path) -> None:
    accepted = [collate([Sample(f"old-{i}", (5, 6, 7 + i))], 2) for i in range(6)]
    folder = write_postmortem(tmp_path, situation(student, accepted=accepted))
    tokens = load_file(folder / "window.safetensors")
    for place, batch in [
        ("0", WINDOW[0]),
        ("1", WINDOW[1]),
        *((f"accepted.{i}", accepted[i]) for i in range(4)),
    ]:
        for name, tensor in batch.row_tensors.items():
            assert torch.equal(tokens.pop(f"{place}.{name}"), tensor)
    assert not tokens
    record = said(folder)
    assert said(folder, "state.json")["step"] == 12 and record["reason"] == "3 refusals in a row"
    assert record["sample_ids"] == [["a", "b"], ["c"]]
    assert record["accepted_sample_ids"] == [["old-0"], ["old-1"], ["old-2"], ["old-3"]]
    assert [(r["kind"], r["micro_batch"], r["sample_ids"]) for r in record["refusals"]] == [
        ("loss", 0, ["a", "b"]),
        ("data", 1, ["c"]),
        ("norm", None, []),
    ]


def test_the_bundle_holds_schedule_settings_base_and_versions(student, tmp_path) -> None:
    folder = write_postmortem(tmp_path, situation(student))
    record, state = said(folder), said(folder, "state.json")
    schedule = record["schedule"]
    # eight of the sixteen steps after warm-up are done
    assert schedule.pop("next_rate") == pytest.approx(0.1 * (1 - 8 / 16))
    assert schedule == {
        "learning_rate": 0.1,
        "scheduler_type": "linear",
        "warmup_steps": 4,
        "total_steps": 20,
    }
    assert state["counters"] == {"steps": 12, "tokens": 345, "refused": {"loss": 1}}
    assert (
        record["settings"]["rank"] == 2
        and record["settings"]["max_length"] == 256
        and record["settings"]["learning_rate"] == 0.1
    )
    assert record["base"] == {
        "quantization": "nf4",
        "dtype": "float32",
        "matmul_precision": "highest",
    }
    assert record["base_hash_at_stop"] == state["base_hash"] == npt.base_hash(student)
    assert read_bundle(folder).base.name == student.config._name_or_path
    assert record["precision"]["compute_dtype"].keys() == {"float32"}
    assert state["versions"] == {"torch": torch.__version__} and record["device"] == "cpu"


def test_a_bundle_is_read_back_as_it_was_written(trainer, poisoned_folder) -> None:
    made = trainer(
        poisoned_folder,
        [*good(15), BAD],
        gradient_accumulation_steps=2,
        warmup_steps=3,
        weight_decay=0.1,
    )
    read = read_bundle(stop(made))
    setup = made.setup
    assert read.train_config == setup.config and read.adapter.config == setup.adapter_config
    assert (
        read.said["settings"] == json.loads((made.folder_path / "run.json").read_text())["settings"]
    )
    assert read.base.hash == npt.base_hash(setup.model)
    # the window was stepped on its other micro-batch
    counters = read.checkpoint.record["counters"]
    assert counters["steps"] == read.step + 1 and counters["refused"] == {"loss": 1}
    snapshot = read.snapshot(setup.model)
    for name, parameter in adapter_parameters(setup.model).items():
        value, state = snapshot[name]
        assert float(state["step"]) == read.step
        # and these are the adapters from before that step
        assert not torch.equal(value, parameter.detach())


def test_a_share_exceeded_at_a_clean_window_leaves_the_last_bad_one(
    trainer, poisoned_folder, monkeypatch
) -> None:
    """A share counts from the fiftieth micro-batch on, and that one was accepted."""
    bad, fine = (
        collate([Sample(name, ids)], 2) for name, ids in (("bad", (5, 99, 7)), ("fine", (5, 6, 7)))
    )
    windows = [Window(0, [bad])] * 3 + [Window(0, [fine])] * 60
    monkeypatch.setattr(RunData, "windows", lambda self: (window for window in windows))
    monkeypatch.setattr("npt.train.refusals.REFUSED_SHARE", 0.05)
    folder = stop(trainer(poisoned_folder, good(3), max_consecutive_bad=100))
    record = said(folder)
    assert record["reason"].startswith("3 of 50 micro-batches refused")
    assert record["sample_ids"] == [["bad"]] and record["refusals"][0]["kind"] == "loss"
    state = said(folder, "state.json")
    assert state["step"] == state["counters"]["steps"] == 47
    found = replay(folder)
    assert found.reproduced and found.classification == "data"


def test_a_poisoned_adapter_is_stored_and_named(student, tmp_path) -> None:
    with torch.no_grad():
        student.model.layers[3].npt.A[0, 0] = math.nan
    stopped = situation(student)
    name = "model.layers.3.npt.M.up"
    stopped.gradients.update.optimizer.state[adapter_parameters(student)[name]]["exp_avg"][
        0, 1
    ] = -math.inf
    folder = write_postmortem(tmp_path, stopped)
    state = load_file(folder / "state.safetensors")
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert adapter["base_model.model.model.layers.3.npt.A"][0, 0].isnan()
    assert state[f"optimizer.{name}.exp_avg"][0, 1] == -math.inf
    value, moments = read_bundle(folder).snapshot(student)[name]
    assert bool(value.isfinite().all()) and moments["exp_avg"][0, 1] == -math.inf
    findings = said(folder)["findings"]
    assert (
        "model.layers.3.npt.A[" in findings["adapters"]
        and f"exp_avg of {name}[0, 1] is -inf" in findings["moments"]
    )
    assert findings["base"] is None


def test_a_module_in_another_dtype_is_recorded_as_the_audits_words(student, tmp_path) -> None:
    student.model.layers[0].mlp.up_proj.compute_dtype = torch.float16
    precision = said(write_postmortem(tmp_path, situation(student)))["precision"]
    assert "model.layers.0.mlp.up_proj computes in float16" in precision


def test_the_verdict_and_the_record_are_of_the_refused_micro_batch(
    trainer, poisoned_folder, monkeypatch
) -> None:
    computed: list[Batch] = []

    def recorded(stopped: Situation, index: int) -> dict[str, Any]:
        computed.append(stopped.window[index])
        stopped.fill(stopped.window[index])
        return {"step": stopped.step + 1, "micro_batch": index, "rows": []}

    monkeypatch.setattr(postmortem, "_recorded", recorded)
    folder = stop(trainer(poisoned_folder, [*good(15), BAD], gradient_accumulation_steps=2))
    record = said(folder)
    (refusal,) = record["refusals"]
    assert record["micro_batch"] == record["record"]["micro_batch"] == refusal["micro_batch"]
    assert [batch.sample_ids for batch in computed] == [("bad@0",)]
    assert record["verdict"]["phase"] == "forward" and record["verdict"]["index"]
    assert record["failures"] == {}
    read_bundle(folder)


def test_nothing_is_computed_on_data_that_were_refused_unseen(
    student, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(postmortem, "_recorded", lambda *_: pytest.fail("computed"))
    monkeypatch.setattr(postmortem, "first_fault", lambda *_, **__: pytest.fail("computed"))
    record = said(
        write_postmortem(tmp_path, situation(student, [Refusal("data", "token id 999", 1, ("c",))]))
    )
    assert (record["micro_batch"], record["record"], record["verdict"], record["failures"]) == (
        None,
        None,
        None,
        {},
    )


def test_the_environment_stays_out_of_it(trainer, poisoned_folder, monkeypatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "not-for-the-bundle")
    folder = stop(trainer(poisoned_folder, [*good(3), BAD]))
    for file in (path for path in folder.rglob("*") if path.is_file()):
        assert b"not-for-the-bundle" not in file.read_bytes()


# --- what is looked into
# ---------------------------------------------------------------------------------------------


def traces(*norms: float) -> list[MicroBatchRecord]:
    return [MicroBatchRecord(7, index, (), 0.0, norm) for index, norm in enumerate(norms)]


@pytest.mark.parametrize(
    ("refusals", "computed", "expected"),
    [
        (
            [Refusal("data", "", 0), Refusal("gradient", "", 2), Refusal("loss", "", 3)],
            traces(1, 1, 1, 1),
            2,
        ),
        ([Refusal("spike", "")], traces(1, 5, 2), 1),
        ([Refusal("data", "", 0), Refusal("update", "")], traces(1, 5, 9), 2),
        ([Refusal("data", "", 0)], traces(1, 5, 9), None),
        ([Refusal("data", "", 0)], [], None),
        ([Refusal("norm", "")], [], None),
    ],
)
def test_the_first_refused_micro_batch_is_traced_or_else_the_loudest(
    refusals, computed, expected
) -> None:
    assert suspect(refusals, computed) == expected


def verdict(value: float) -> Verdict:
    return Verdict(
        cause="cause",
        phase="forward",
        operation="mul",
        tensor="output",
        index=(0,),
        value=value,
        reached="loss",
        explanation="",
        remedy="",
    )


@pytest.mark.parametrize(
    ("plain", "limited", "exploded", "expected"),
    [
        (math.nan, None, True, math.nan),
        (None, 1e20, True, 1e20),
        (None, 1e20, False, None),  # of a micro-batch that was accepted nothing has exploded
        (None, None, True, None),
    ],
)
def test_finite_numbers_are_searched_for_one_too_large_to_be_squared(
    student, batch, monkeypatch, plain, limited, exploded, expected
) -> None:
    def trace(model: Any, batch: Batch, *, run: Any, limit: float = math.inf) -> Verdict | None:
        value = plain if limit == math.inf else limited
        return None if value is None else verdict(value)

    monkeypatch.setattr(tracer, "trace", trace)
    found = tracer.first_fault(student, batch, lambda: None, exploded=exploded)
    assert (found is None) == (expected is None)
    assert (
        found is None
        or found.value == expected
        or (math.isnan(found.value) and math.isnan(expected))
    )


# --- what it leaves, and what cannot keep it from being written
# ---------------------------------------------------------


@pytest.mark.parametrize("applied", [False, True])
def test_writing_changes_no_weights_gradients_or_random_state(
    student, tmp_path, monkeypatch, applied
) -> None:
    stopped = situation(student)
    parameters = adapter_parameters(student)
    if applied:
        stopped.result.snapshot = stopped.gradients.update.snapshot()
        for value, _ in stopped.result.snapshot.values():
            value += 1

    def recorded(stopped: Situation, index: int) -> dict[str, Any]:
        with untouched(student, None):
            torch.rand(3)
            stopped.fill(stopped.window[index])
            raise RuntimeError("half way")

    monkeypatch.setattr(postmortem, "_recorded", recorded)
    weights = {name: p.detach().clone() for name, p in parameters.items()}
    gradients = {name: torch.full_like(p, 3.0) for name, p in parameters.items()}
    for name, p in parameters.items():
        p.grad = gradients[name]
    random_state = torch.get_rng_state()
    folder = write_postmortem(tmp_path, stopped)
    for name, p in parameters.items():
        assert torch.equal(p.detach(), weights[name])
        assert p.grad is gradients[name] and bool((p.grad == 3.0).all())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [p.name for p in (tmp_path / "postmortem").iterdir()] == ["step-00000012"]
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert torch.equal(
        adapter["base_model.model.model.layers.3.npt.A"], weights["model.layers.3.npt.A"] + applied
    )
    assert said(folder)["failures"] == {"record": "RuntimeError: half way"}


@pytest.mark.parametrize(
    "broken", ["first_fault", "base_fault", "base_hash", "audit_precision", "weights_of"]
)
def test_an_observer_that_fails_is_written_down_and_loses_nothing(
    student, tmp_path, monkeypatch, broken
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("of its own")

    monkeypatch.setattr(
        postmortem, "_recorded", lambda *_: {"step": 13, "micro_batch": 0, "rows": []}
    )
    monkeypatch.setattr(postmortem, broken, fail)
    folder = write_postmortem(tmp_path, situation(student))
    (failure,) = said(folder)["failures"].values()
    assert failure == "ZeroDivisionError: of its own"
    assert len(read_bundle(folder).window) == 2


def test_a_tracer_that_is_killed_leaves_a_bundle_that_can_be_read(
    student, tmp_path, monkeypatch
) -> None:
    def killed(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(postmortem, "first_fault", killed)
    with pytest.raises(KeyboardInterrupt):
        write_postmortem(tmp_path, situation(student))
    (folder,) = (tmp_path / "postmortem").iterdir()
    read = read_bundle(folder)
    assert len(read.window) == 2 and read.said["verdict"] is None


def no_space(*_: Any, **__: Any) -> Any:
    raise SafetensorError(
        "Error while serializing: I/O error: No space left on device (os error 28)"
    )


@pytest.mark.parametrize("where", ["save_file", "write_json"])
def test_a_disk_that_is_full_leaves_nothing_half_written(
    student, tmp_path, monkeypatch, where
) -> None:
    monkeypatch.setattr(postmortem, where, no_space)
    with pytest.raises(OSError, match="No space left on device"):
        write_postmortem(tmp_path, situation(student))
    assert list((tmp_path / "postmortem").iterdir()) == []


def test_a_disk_that_fills_up_behind_the_bundle_costs_the_extras_only(
    student, tmp_path, monkeypatch
) -> None:
    original, calls = postmortem.write_json, iter(range(9))

    def once(path: Path, value: Any) -> None:
        if next(calls):
            raise OSError(28, "No space left on device")
        original(path, value)

    monkeypatch.setattr(postmortem, "write_json", once)
    assert len(read_bundle(write_postmortem(tmp_path, situation(student))).window) == 2


def test_a_full_disk_does_not_hide_why_the_run_stopped(
    trainer, poisoned_folder, monkeypatch
) -> None:
    made = trainer(poisoned_folder, [*good(15), BAD])
    folders: list[RunFolder] = []
    original = RunFolder.__init__

    def kept(self: RunFolder, *arguments: Any, **more: Any) -> None:
        original(self, *arguments, **more)
        folders.append(self)

    def fill_up(model: Any, number: int) -> None:
        if number == 0:
            folders[0]._logs["events.jsonl"] = run_folder._Log(Path("/dev/full"))
            monkeypatch.setattr(postmortem, "save_file", no_space)
            monkeypatch.setattr("npt.adapters.files.adapter_files.save_file", no_space)

    monkeypatch.setattr(RunFolder, "__init__", kept)
    with pytest.raises(TooManyRefusalsError) as caught:
        acting(made, fill_up).train()
    assert caught.value.exit_status == 3
    for part in (
        "1 refusals in a row",
        "bad@0",
        "loss is nan",
        "No space left on device",
        "no post-mortem could be written",
    ):
        assert part in str(caught.value)
    assert not list((made.folder_path / "postmortem").iterdir())


def test_an_unwritable_place_is_said_with_the_reason_of_the_stop(trainer, poisoned_folder) -> None:
    made = trainer(poisoned_folder, [*good(3), BAD])

    def block(model: Any, number: int) -> None:
        (made.folder_path / "postmortem").touch()  # a file in its place stops root as well

    with pytest.raises(TooManyRefusalsError, match="1 refusals in a row") as caught:
        acting(made, block).train()
    assert "no post-mortem could be written" in str(caught.value) and os.strerror(17) in str(
        caught.value
    )
    (event,) = [
        json.loads(x)
        for x in (made.folder_path / "events.jsonl").read_text().splitlines()
        if '"stopped"' in x
    ]
    assert event["postmortem"] is None and "refusals in a row" in event["reason"]
