"""Cases that need a whole run with its folder, files, audits and trackers."""

from __future__ import annotations

import functools
import itertools
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor

from faults.bench import Setting, Student, difference, embedded, module_of, whole_window
from faults.verdict import Verdict, verdict_of
from npt.adapters.files.adapter_files import WEIGHTS_NAME, save_adapter
from npt.base.precision import audit_precision, policy_dtype
from npt.batch import Batch
from npt.config import DataConfig, TrainConfig
from npt.console import silent_console
from npt.data.samples import Window
from npt.distill.local import BatchSums
from npt.distill.step import MicroBatchSplitter, student_guard
from npt.distill.strategies import STRATEGIES, Strategy
from npt.errors import AdapterFileError, PrecisionError, TooManyRefusalsError
from npt.files import to_json
from npt.forensics.bundle import MOMENTS, WEIGHTS
from npt.forensics.student import read_student
from npt.guard.schedule import rate_table
from npt.runs.resume import RunOrigin
from npt.runs.run_folder import RunFolder
from npt.runs.trackers import Trackers
from npt.tracer.watchdogs import tensor_fault
from npt.train.journal import Journal
from npt.train.loop import Loop
from npt.train.setup import RunSetup
from npt.train.trainer import Trainer

BAD_ID = 2048
"""The smallest id outside the embedded model's vocabulary."""


class NoTokenizer:
    """The special ids of a tokenizer, which is all that records of token ids need."""

    bos_token_id, eos_token_id, pad_token_id = 0, 1, 2


def saving_goes_wrong(student: Student, name: str) -> list[str]:
    """Return complaints unless saving is refused for the tensor `name` and leaves no file."""
    with tempfile.TemporaryDirectory() as folder:
        message = error_of(AdapterFileError, save_adapter, student.model, Path(folder) / "adapter")
        refused = message is not None and name in message
        complaints = [] if refused else [f"saving says: {message}"]
        return complaints + [f"saving left {path.name}" for path in Path(folder).iterdir()]


def error_of(kind: type[Exception], act: Callable[..., Any], *arguments: Any) -> str | None:
    """Return the message of the error that `act` raises, or None."""
    try:
        act(*arguments)
    except kind as error:
        return str(error)
    return None


def audit_message(model: Any) -> str | None:
    return error_of(PrecisionError, audit_precision, model, policy_dtype(model))


def dtype_flipped(setting: Setting) -> tuple[str | None, str]:
    """Set a 4-bit layer to fp16: the audit before every save must name this layer only."""
    student, name = Student(setting), "model.layers.3.self_attn.k_proj"
    module_of(student, name).compute_dtype = torch.float16
    message = audit_message(student.model)
    return message, f"{name} computes in float16 forward, float32 backward: load"


def autocast(setting: Setting) -> Verdict:
    """Train under a caller's autocast: the loop must switch it off in its micro-batches, and the
    audit must report it.
    """
    states = []
    messages = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            states.append(_looped(setting))
            messages.append(audit_message(embedded(setting.base_layers)))
    different = difference(states[0], states[1])
    complaints = [] if different is None else [f"autocast changed {different}"]
    plain, message = messages
    if plain is not None or "autocast to bfloat16 is on for cpu" not in (message or ""):
        complaints.append(f"the audit says {messages}")
    return verdict_of("unharmed", complaints)


def _looped(setting: Setting) -> dict[str, Tensor]:
    """Return the state after three windows of the training loop."""
    places = [whole_window(setting, window) for window in range(setting.windows)]
    windows = [[setting.batch(place) for place in window] for window in places]
    student = Student(setting)
    looped(student, windows, late=setting.late)
    return student.state()


def looped(
    student: Student,
    windows: Sequence[list[Batch]],
    strategy: Strategy | None = None,
    late: bool | None = None,
) -> tuple[Loop, list[dict[str, Any]]]:
    """Train a student in the training loop and log every step.

    Args:
        student: gets the loop's optimizer.
        windows: micro-batches of each window.
        strategy: default: the one of the student's settings.
        late: read results late (default: on CUDA).

    Returns:
        The loop, and the lines of its metrics file.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name) / "run")
        config = replace(student.config, log_steps=1)
        strategy = strategy if strategy is not None else STRATEGIES[config.strategy]
        rates = rate_table(student.setting.learning_rate, "constant", 0, None)
        guard = student_guard(student.model, config, rates, late=late, trace=1)
        console, splitter = silent_console(), MicroBatchSplitter(config.batch_size)
        processes = guard.window.processes
        setup = RunSetup(
            student.model,
            None,
            None,
            config,
            DataConfig(),
            processes,
            console,
            RunOrigin(folder.path),
            splitter=splitter,
        )
        trackers = Trackers(config, folder.path)
        data: Any = SimpleNamespace(total_steps=len(windows))
        nothing: Any = None  # to evaluate, or to save
        journal = Journal(setup, data, folder, trackers, {}, nothing, nothing, nothing)
        loop = Loop(journal, guard, strategy)
        loop.train(Window(batches) for batches in windows)
        folder.close()
        lines = _lines(folder.path / "metrics.jsonl")
    student.optimizer = loop.guard.update.optimizer
    return loop, lines


@contextmanager
def reading(late: bool) -> Iterator[None]:
    """Make the loop's guarded steps read their flags one window late, or at once."""
    with mock.patch("npt.train.trainer.student_guard", functools.partial(student_guard, late=late)):
        yield


@contextmanager
def trainer(
    setting: Setting, records: list[dict[str, Any]], *, packing: bool = False, **settings: Any
) -> Iterator[Trainer]:
    """Yield a trainer of a new student on records of token ids, with a temporary run folder."""
    with tempfile.TemporaryDirectory() as folder, reading(setting.late):
        usual = {"batch_size": 1, "log_steps": 1, "smoke_test": False}
        config = TrainConfig(**{**usual, "output_dir": f"{folder}/run", **settings})
        yield Trainer(
            Student(replace(setting, layers="1", targets=("gate",))).model,
            NoTokenizer(),
            records,
            config,
            data_config=DataConfig(max_length=16, packing=packing),
            eval_data=[{"input_ids": list(range(5, 15))}],
            console=silent_console(),
        )


def records(good: int, bad: int) -> list[dict[str, Any]]:
    """Return records of eight token ids; those named `bad-...` have one outside the vocabulary."""
    ids = {f"good-{i}": [3 + (7 * i + j) % 2000 for j in range(8)] for i in range(good)}
    ids |= {f"bad-{i}": [4, 5, 6, BAD_ID, 7, 8, 9, 10 + i] for i in range(bad)}
    return [{"id": id, "input_ids": input_ids} for id, input_ids in ids.items()]


def stopped(
    trainer: Trainer, reason: str, step: int | None, check: Callable[[Path], list[str]]
) -> Verdict:
    """Train. The run must stop for `reason` with exit status 3 and a complete bundle that passes
    `check`.
    """
    run = trainer.setup.origin.folder
    try:
        trainer.train()
    except TooManyRefusalsError as error:
        expected = reason in str(error) and error.exit_status == 3
        complaints = [] if expected else [f"stopped with {error}"]
    else:
        return Verdict("continued", False, False, detail="the run was not stopped")
    bundles = sorted((run / "postmortem").iterdir()) if (run / "postmortem").is_dir() else []
    if len(bundles) != 1 or (step is not None and bundles[0].name != f"step-{step:08d}"):
        complaints.append(f"bundles: {[b.name for b in bundles]}")
        return verdict_of("stopped", complaints, located=False)
    events = _lines(run / "events.jsonl")
    stops = [event for event in events if event["event"] == "stopped"]
    if len(stops) != 1 or reason not in stops[0]["reason"]:
        complaints.append(f"the log has the events {stops}")
    files = {path.name for path in bundles[0].iterdir()}
    wanted = {"weights.safetensors", "moments.safetensors", "window.safetensors", "postmortem.json"}
    missing = wanted - files
    if missing:
        complaints.append(f"the bundle lacks {sorted(missing)}")
        return verdict_of("stopped", complaints, located=False)
    if not any(key.startswith("exp_avg of ") for key in load_file(bundles[0] / MOMENTS)):
        complaints.append("the bundle lacks the moments")
    for file in run.glob("checkpoints/*/adapter/*.safetensors"):
        finding = tensor_fault(load_file(file))
        if finding is not None:
            complaints.append(f"{file.relative_to(run)} was saved: {finding}")
    strangers = [e for e in events if e["event"] == "refusal" and not _planted(e)]
    return verdict_of("stopped", complaints + check(bundles[0]), false_alarms=len(strangers))


def _planted(event: dict[str, Any]) -> bool:
    """Return whether a refusal names a bad record's id, or comes from the damaged weight."""
    if event["kind"] != "data":
        return event["kind"] == "loss"
    bad = all("bad-" in name for name in event["sample_ids"])
    return bad and f"token id {BAD_ID}" in event["detail"]


def _lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def _postmortem(bundle: Path) -> dict[str, Any]:
    return json.loads((bundle / "postmortem.json").read_text(encoding="utf-8"))


def _before_the_third(made: Trainer, act: Callable[[Any], None]) -> None:
    """Apply `act` to the model before the run's third micro-batch."""
    strategy, calls = made.strategy, itertools.count(1)

    def acting(model: Any, batch: Any, config: TrainConfig) -> BatchSums:
        if next(calls) == 3:
            act(model)
        return strategy(model, batch, config)

    made.strategy = acting


def bad_in_a_row(setting: Setting) -> Verdict:
    """Train on bad records only: the run must end after the third, without a step."""

    def check(bundle: Path) -> list[str]:
        refusals = _postmortem(bundle)["refusals"]
        bad = [r["sample_ids"][0].startswith("bad-") and r["kind"] == "data" for r in refusals]
        expected = [True] * (3 + setting.late)  # read late, one more window has started
        return [] if bad == expected else [f"the bundle has the refusals {refusals}"]

    with trainer(setting, records(0, 8), max_consecutive_bad=3) as made:
        return stopped(made, "3 refusals in a row", 0, check)


def packed_run(setting: Setting) -> Verdict:
    """Train on packed rows of two documents, one with a bad token: the bundle must keep where the
    documents of every row end.
    """

    def check(bundle: Path) -> list[str]:
        kept = {
            name: "documents" in stored.inputs and bool(stored.inputs["documents"][row].any())
            for stored in read_student(bundle).postmortem.micro_batches
            for row, name in enumerate(stored.sample_ids)
            if "+" in name
        }
        lost = [f"the documents of {name} are lost" for name, known in kept.items() if not known]
        return lost or ([] if len(kept) > 1 else ["no packed row was kept"])

    with trainer(
        setting, records(7, 1), packing=True, gradient_accumulation_steps=4, max_consecutive_bad=1
    ) as made:
        return stopped(made, "1 refusal", 0, check)


def poisoned_run(setting: Setting) -> Verdict:
    """Set a weight to NaN before the third micro-batch: the two steps before it must stay, and
    nothing may be saved after it.
    """
    name = "model.layers.1.npt.A"

    def check(bundle: Path) -> list[str]:
        state = (load_file(bundle / WEIGHTS) | load_file(bundle / MOMENTS)).items()
        bad = [key for key, t in state if t.is_floating_point() and not torch.isfinite(t).all()]
        right = bad == [name]
        complaints = [] if right else [f"not finite in the bundle: {bad}"]
        traces = _postmortem(bundle)["history"]
        if [trace["loss"] is None for trace in traces[:5]] != [False, False, True, True, True]:
            complaints.append(f"the bundle's history is {traces}")
        return complaints

    with trainer(setting, records(10, 0), max_consecutive_bad=3) as made:

        def poison(model: Any) -> None:
            model.get_parameter(name).data[1, 1] = math.nan

        _before_the_third(made, poison)
        return stopped(made, "3 refusals in a row", 2, check)


def over_budget(setting: Setting) -> Verdict:
    """Train with half of the micro-batches bad, never many in a row: the share must end the run."""

    def check(bundle: Path) -> list[str]:
        return [] if _postmortem(bundle)["history"] else ["the bundle has no history"]

    with trainer(
        setting, records(40, 40), max_consecutive_bad=80, gradient_accumulation_steps=4
    ) as made:
        return stopped(made, "micro-batches refused, over 20%", None, check)


def dtype_flipped_in_a_run(setting: Setting) -> Verdict:
    """Set a layer to fp16 during a run: the audit before the checkpoint must name it, and none of
    its steps may be saved.
    """
    name = "model.layers.0.mlp.up_proj"
    with trainer(setting, records(10, 0), save_steps=2) as made:

        def flip(model: Any) -> None:
            model.get_submodule(name).compute_dtype = torch.float16

        _before_the_third(made, flip)
        message = error_of(PrecisionError, made.train)
        named = message is not None and f"{name} computes in float16" in message
        complaints = [] if named else [f"stopped with: {message}"]
        saved = sorted(path.name for path in (made.setup.origin.folder / "checkpoints").iterdir())
    if saved != ["step-00000002"]:
        complaints.append(f"saved: {saved}")
    return verdict_of("stopped", complaints)


def refused_save(setting: Setting) -> Verdict:
    """Save over a good adapter while a tensor is not finite: the good file must stay, byte for
    byte.
    """
    student = Student(setting)
    name = "model.layers.2.npt.M.down"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "adapter"
        save_adapter(student.model, path)
        before = (path / WEIGHTS_NAME).read_bytes()
        with torch.no_grad():
            student.parameters[name][0, 3] = math.inf
        message = error_of(AdapterFileError, save_adapter, student.model, path)
        named = message is not None and name in message
        complaints = [] if named else [f"refused with: {message}"]
        if (path / WEIGHTS_NAME).read_bytes() != before or len(list(Path(folder).iterdir())) != 1:
            complaints.append("the good adapter was touched")
    return verdict_of("refused", complaints)


def tracker(setting: Setting) -> Verdict:
    """Log NaN, Inf, None and a number to TensorBoard: only the number may be drawn."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values = {"good": 1.5, "nan": math.nan, "inf": math.inf, "none": None}
    with tempfile.TemporaryDirectory() as folder:
        trackers = Trackers(TrainConfig(use_tensorboard=True), Path(folder))
        trackers.describe({})
        trackers.log(values, 1)
        trackers.close()
        drawn: dict[str, list[float]] = {}
        for file in Path(folder).rglob("events.out.tfevents*"):
            events = EventAccumulator(str(file)).Reload()
            drawn |= {
                tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
            }
    complaints = [] if drawn == {"good": [1.5]} else [f"drawn: {drawn}"]
    written = json.loads(to_json(values))
    if written != {"good": 1.5, "nan": None, "inf": None, "none": None}:
        complaints.append(f"written: {written}")
    return verdict_of("unharmed", complaints)
