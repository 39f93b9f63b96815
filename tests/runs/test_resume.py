"""Resuming: a run that was interrupted anywhere and taken up again is the run that was not, and
what cannot be taken up is refused.
"""

import contextlib
import functools
import io
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from resumed_runs import (
    Outcome,
    Runs,
    Stream,
    at,
    checkpoint_names,
    events,
    lines,
    records,
    strict,
    with_faults,
)
from rounded import round_otherwise
from safetensors.torch import load_file, save_file
from torch import nn

import npt
from npt.batch import Batch
from npt.distill.step import student_guard
from npt.distributed.processes import ProcessGroup
from npt.errors import AdapterFileError, CheckpointError, ConfigError
from npt.guard import spikes
from npt.manifest import MANIFEST, write_manifest
from npt.runs.resume import changed_settings, check_same_data, data_fingerprint, find_origin
from npt.runs.run_folder import RunFolder
from npt.train.trainer import TrainResult

KINDS: dict[str, dict[str, Any]] = {
    "a list, over epochs": {
        "data": lambda: records(7),
        "settings": {
            "num_epochs": 2,
            "gradient_accumulation_steps": 2,
            "batch_size": 1,
            "save_steps": 2,
            "warmup_steps": 2,
        },
    },
    "refusals of data and of NaN in windows of three": {
        "data": lambda: with_faults(records(17)),
        "settings": {
            "gradient_accumulation_steps": 3,
            "batch_size": 1,
            "save_steps": 3,
            "eval_steps": 4,
            "weight_decay": 0.1,
        },
        "eval_data": records(3, seed=7),  # of one sample no figure has an error
    },
    "a stream, packed, over epochs": {
        "data": lambda: Stream(with_faults(records(10))),
        "settings": {
            "num_epochs": 2,
            "gradient_accumulation_steps": 2,
            "regularization_lambda": 0.1,
        },
        "data_settings": {"streaming": True, "packing": True},
    },
    "replayed samples mixed in, spikes refused": {
        "data": lambda: records(14),
        "replay": lambda: with_faults(records(12, seed=3)),
        "settings": {
            "num_epochs": 2,
            "batch_size": 2,
            "skip_spikes": True,
            "save_steps": 4,
            "strategy": "propagated",
        },
    },
    "a stream that is read once, end to end": {
        "data": lambda: (record for record in records(12)),
        "settings": {
            "batch_size": 1,
            "max_steps": 7,
            "strategy": "end_to_end",
            "logit_kl_weight": 0.5,
            "scheduler_type": "linear",
        },
        "data_settings": {"streaming": True},
    },
}


@pytest.fixture(scope="module")
def base(poisoned_folder: Path) -> nn.Module:
    return npt.load_base(str(poisoned_folder), quantization="nf4", device="cpu")[0]


@pytest.fixture
def runs(base: nn.Module, tmp_path: Path) -> Callable[..., Runs]:
    """Runs of a kind, or of ten records in steps of two; the number of steps from which spikes are
    looked for is lowered.
    """

    def make(kind: str | None = None, **more: Any) -> Runs:
        plain: dict[str, Any] = {
            "data": lambda: records(10),
            "settings": {"batch_size": 2, "save_steps": 2},
        }
        return Runs(base, tmp_path, **(plain | more if kind is None else KINDS[kind]))

    return make


def nothing(number: int, batch: Batch) -> None:
    """Does nothing before a micro-batch."""


@pytest.fixture(autouse=True)
def _spikes_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spikes, "MINIMUM", 4)
    monkeypatch.setattr("npt.distill.step.SIGMAS", 1.5)


@dataclass
class Whole:
    """A run that was not interrupted: the rows of its micro-batches, what was refused, and what it
    came to.
    """

    runs: Runs
    seen: list[tuple[str, ...]]
    packed: bool
    result: TrainResult
    outcome: Outcome


@pytest.fixture(scope="module")
def wholes(base: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Whole]:
    """The whole run of a kind, which is made once."""

    @functools.cache
    def make(kind: str) -> Whole:
        made = Runs(base, tmp_path_factory.mktemp("whole"), **KINDS[kind])
        batches: list[Batch] = []
        result = made.run("whole", lambda number, batch: batches.append(batch))
        packed = any(batch.documents is not None for batch in batches)
        return Whole(
            made, [batch.sample_ids for batch in batches], packed, result, made.outcome("whole")
        )

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_interrupted_again_and_again_equals_one_that_was_not(runs, wholes, kind) -> None:
    """Every process is stopped a few micro-batches on, in another place of a window each time,
    until one comes to the end.
    """
    here, whole = runs(kind), wholes(kind)
    seen = whole.seen
    stops = (5, 8, 9, 7)  # odd and even, and every remainder of three
    for process in range(60):
        again: list[tuple[str, ...]] = []

        def act(
            number: int, batch: Batch, stop: int = stops[process % 4], again: list[Any] = again
        ) -> None:
            again.append(batch.sample_ids)
            at(stop)(number, batch)

        result = here.run("parts", act, resume="auto")
        assert any(seen[start : start + len(again)] == again for start in range(len(seen)))
        if result.signal is None:
            break
        assert result.exit_status == 143
    here.outcome("parts").assert_equal(whole.outcome)
    assert process > 0 and len(events(here.place / "parts", "resume")) == process + 1
    assert {tuple(e["sample_ids"]) for e in events(here.place / "parts", "refusal")} == {
        tuple(e["sample_ids"]) for e in events(whole.runs.place / "whole", "refusal")
    }


def test_the_kinds_of_runs_have_in_them_what_they_are_for(wholes) -> None:
    """Refusals of every sort, packed rows, replayed samples, evaluations: without them the sweep
    above would show little.
    """
    found = {kind: wholes(kind) for kind in KINDS}
    assert any(whole.packed for whole in found.values())
    assert any(
        name.startswith("3-") for whole in found.values() for names in whole.seen for name in names
    )
    assert {"data", "loss"} <= set(
        found["refusals of data and of NaN in windows of three"].result.refused_by_kind
    )
    assert "spike" in found["replayed samples mixed in, spikes refused"].result.refused_by_kind


def test_a_run_killed_between_any_two_disk_operations_resumes_exactly(runs, monkeypatch) -> None:
    """SIGKILL before the n-th rename, sync or new folder of a process, then of the next, for
    more and more n.
    """
    settings = {"batch_size": 2, "save_steps": 1, "save_total_limit": 1, "eval_steps": 1}
    here = runs(data=lambda: records(4), settings=settings)
    here.run("whole")
    operations = {"replace": os.replace, "fsync": os.fsync, "mkdir": os.mkdir}
    count, kills, limit = 0, 0, 0

    def counted(name: str) -> Callable[..., Any]:
        def operation(*arguments: Any, **more: Any) -> Any:
            nonlocal count
            count += 1
            if count == limit:
                os.kill(os.getpid(), signal.SIGKILL)
            return operations[name](*arguments, **more)

        return operation

    for name in operations:
        monkeypatch.setattr(os, name, counted(name))
    for first in range(3, 400, 43):
        folder, limit = f"killed-{first}", first
        if here.killed(folder, nothing) == 0:
            break
        limit = first // 2
        kills += 1 + (here.killed(folder, nothing, resume="auto") != 0)
        limit = 0
        assert here.killed(folder, nothing, resume="auto") == 0
        here.outcome(folder).assert_equal(here.outcome("whole"))
    assert kills >= 4


def test_results_that_come_late_are_resumed_exactly(runs, wholes, monkeypatch) -> None:
    """Flags read one window late, as on a GPU, to the bits of those read at once."""
    monkeypatch.setattr(
        "npt.train.trainer.student_guard", functools.partial(student_guard, late=True)
    )
    kind = "refusals of data and of NaN in windows of three"
    here = runs(kind)
    here.run("part", at(10))
    here.run("part", resume="auto")
    here.outcome("part").assert_equal(wholes(kind).outcome)


def test_a_run_that_had_ended_is_taken_up_without_another_step(runs) -> None:
    for name, changed in (("by data", {}), ("by steps", {"max_steps": 3})):
        here = runs()
        here.run(name, **changed)
        before = here.outcome(name)
        (here.place / name / "fidelity.json").unlink()
        result = here.run(
            name,
            lambda number, batch: pytest.fail("a micro-batch was computed"),
            resume="auto",
            smoke_test=True,
            **changed,
        )
        here.outcome(name).assert_equal(before)
        assert result.steps == len(before.metrics) and result.fidelity is not None


@pytest.mark.parametrize(
    ("settings", "signalled", "steps", "evaluated"),
    [({}, 1, 5, []), ({"eval_steps": 2}, 1, 2, [2, 4])],
    ids=["the last", "the first inside the run"],
)
def test_an_evaluation_that_a_signal_ended_is_made_up_for(
    runs, monkeypatch, settings, signalled, steps, evaluated
) -> None:
    here = runs(settings={"batch_size": 2, **settings})
    here.run("whole")
    trainer = here.trainer("part")
    original, calls = trainer.evaluate, iter(range(9))

    def evaluate() -> Any:
        if next(calls) == signalled:
            os.kill(os.getpid(), signal.SIGTERM)
        return original()

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    result = trainer.train()
    assert (result.steps, result.exit_status, result.fidelity) == (steps, 143, None)
    assert not events(here.place / "part", "evaluation")
    here.run("part", resume="auto")
    here.outcome("part").assert_equal(here.outcome("whole"))
    assert [e["step"] for e in events(here.place / "part", "evaluation")] == evaluated


@pytest.fixture(scope="module")
def _stopped(base: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    settings = {"batch_size": 2, "save_steps": 1}
    made = Runs(base, tmp_path_factory.mktemp("stopped"), lambda: records(10), settings=settings)
    made.run("run", at(3))
    assert checkpoint_names(made.place / "run") == [f"step-0000000{step}" for step in (1, 2, 3, 4)]
    shutil.rmtree(made.place / "run" / "checkpoints" / "step-00000004")
    return made


@pytest.fixture
def stopped(_stopped: Runs, tmp_path: Path) -> Runs:
    """A run stopped at step 3 of 5 with checkpoints of the steps 1, 2 and 3 in `run`."""
    shutil.copytree(_stopped.place / "run", tmp_path / "run")
    return replace(_stopped, place=tmp_path, said=io.StringIO())


def damage(checkpoint: Path) -> None:
    path = checkpoint / "state.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)


def test_a_broken_checkpoint_is_set_aside_and_the_one_before_used(stopped) -> None:
    run = stopped.place / "run"
    damage(run / "checkpoints" / "step-00000003")
    stopped.run("whole")
    stopped.run("run", resume="auto")
    stopped.outcome("run").assert_equal(stopped.outcome("whole"))
    (warning,) = events(run, "warning")
    for part in ("03/state.safetensors is damaged: sha256", "set aside as step-00000003.broken"):
        assert part in warning["message"]
    assert warning["message"] in stopped.said.getvalue()
    assert events(run, "resume")[0]["step"] == 2
    assert "step-00000003.broken" in checkpoint_names(run)


def test_where_all_are_broken_nothing_is_started_and_nothing_touched(stopped) -> None:
    run = stopped.place / "run"
    for name in checkpoint_names(run):
        damage(run / "checkpoints" / name)
    before = content_of(run)
    message = r"no checkpoint in .* can be resumed: .*step-00000003/state.*step-00000001/state"
    for _ in range(2):  # the second time as well: it is not an empty folder by then
        with pytest.raises(CheckpointError, match=message) as caught:
            stopped.run("run", resume="auto")
        assert caught.value.exit_status == 5
    assert content_of(run) == before


def test_auto_without_a_run_starts_one(runs) -> None:
    here = runs()
    here.run("whole")
    (here.place / "empty").mkdir()
    for name in ("empty", "missing"):
        result = here.run(name, resume="auto")
        assert result.steps == 5
        here.outcome(name).assert_equal(here.outcome("whole"))
        (event,) = events(here.place / name, "resume")
        assert (event["step"], event["checkpoint"], event["changed"]) == (0, None, {})


@pytest.mark.parametrize(
    ("resume", "named"),
    [
        ("RUN", True),
        ("RUN/", False),
        ("RUN/checkpoints/step-00000003/", False),
        ("RUN/checkpoints/../checkpoints/step-00000003", True),
    ],
)
def test_a_path_goes_on_in_its_run(stopped, resume, named, monkeypatch) -> None:
    run = stopped.place / "run"
    monkeypatch.chdir(stopped.place)
    result = stopped.run("run" if named else None, resume=resume.replace("RUN", "run"))
    assert result.steps == 5 and result.folder.resolve() == run
    assert events(run, "resume")[0]["step"] == 3
    assert [line["step"] for line in lines(run, "metrics")] == [1, 2, 3, 4, 5]


def test_an_older_checkpoint_sets_the_newer_ones_aside(stopped) -> None:
    """Otherwise the next `auto` would pick a run that was left, and rotation would count it."""
    run = stopped.place / "run"
    first = str(run / "checkpoints" / "step-00000001")
    stopped.run(None, at(0), resume=first, learning_rate=1e-3, save_total_limit=1)
    aside = [f"step-0000000{step}.superseded" for step in (2, 3)]
    assert checkpoint_names(run) == ["step-00000002", *aside]
    assert [e["message"] for e in events(run, "warning")] == [
        f"the run continues from step 1; {name[:13]} is set aside as {name}" for name in aside
    ]
    assert [line["step"] for line in lines(run, "metrics")] == [1, 2]


def test_a_resume_in_a_new_folder_leaves_the_old_one_as_it_is(stopped) -> None:
    run = stopped.place / "run"
    before = content_of(run)
    stopped.run("whole")
    stopped.run("new", resume=str(run))
    new = stopped.place / "new"
    assert content_of(run) == before
    assert [line["step"] for line in lines(new, "metrics")] == [4, 5]
    assert checkpoint_names(new) == ["step-00000004", "step-00000005"]
    one, other = stopped.outcome("new"), stopped.outcome("whole")
    other.metrics = other.metrics[3:]
    one.assert_equal(other)


def test_best_is_what_evaluated_best_the_last_evaluation_included(runs) -> None:
    here = runs(settings={"batch_size": 2, "eval_steps": 2, "save_total_limit": 1, "save_steps": 1})
    result = here.run("run")
    kls = {e["step"]: e["student"]["kl"] for e in events(result.folder, "evaluation")}
    kls[result.steps] = result.fidelity.student.kl
    best = strict(result.folder / "best" / "fidelity.json")
    assert len(kls) == 3
    assert (best["step"], best["student"]["kl"]) == min(kls.items(), key=lambda item: item[1])
    assert checkpoint_names(result.folder) == ["step-00000005"]


def content_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_no_checkpoint_is_refused_by_name(stopped, tmp_path) -> None:
    checkpoints = stopped.place / "run" / "checkpoints"
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    (tmp_path / "none" / "checkpoints").mkdir(parents=True)
    (checkpoints / "step-00000002" / MANIFEST).unlink()
    shutil.copytree(checkpoints / "step-00000003", tmp_path / "copied" / "checkpoint")
    damage(checkpoints / "step-00000003")
    neither, other = "neither a checkpoint nor a run folder", str(tmp_path / "other")
    cases: list[tuple[Any, str | None, type[Exception], str]] = [
        (tmp_path / "missing", None, CheckpointError, neither),
        (tmp_path / "file", None, CheckpointError, "file"),
        ("", None, CheckpointError, neither),
        (other, None, CheckpointError, neither),
        (tmp_path / "none", None, CheckpointError, "there is none"),
        (checkpoints / "step-00000002", None, CheckpointError, "incomplete (no manifest.json)"),
        (checkpoints / "step-00000003", None, CheckpointError, "safetensors is damaged: sha256"),
        (tmp_path / "copied" / "checkpoint", None, ConfigError, "is not inside a run folder"),
        ("auto", None, ConfigError, "--output_dir"),
        ("auto", other, ConfigError, "other holds something other than a run"),
        ("auto", str(tmp_path / "file"), ConfigError, "file"),
        (checkpoints.parent, other, ConfigError, "other holds other files"),
    ]
    before = sorted(tmp_path.rglob("*"))
    for resume, output_dir, error, part in cases:
        with pytest.raises(error, match=re.escape(part)) as caught:
            find_origin(str(resume), output_dir, ProcessGroup())
        assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_copy_of_a_checkpoint_goes_on_in_a_folder_of_its_own(stopped) -> None:
    copied = shutil.copytree(
        stopped.place / "run" / "checkpoints" / "step-00000003",
        stopped.place / "copied" / "checkpoint",
    )
    assert stopped.run("new", resume=str(copied)).steps == 5
    assert not (stopped.place / "run.json").exists()


def test_a_run_that_is_being_written_is_not_resumed(stopped) -> None:
    with contextlib.closing(RunFolder(stopped.place / "run", resume_at=9)):
        for resume, folder in (("auto", "run"), (str(stopped.place / "run"), None)):
            with pytest.raises(ConfigError, match="another process is writing"):
                stopped.trainer(folder, resume=resume)


MATTER: list[tuple[dict[str, Any], str]] = [
    ({"adapter": {"rank": 4}}, "--adapter_rank 2, .* 4"),
    ({"adapter": {"layers": "3"}}, "--layers '1,3', .* has '3'"),
    (
        {"adapter": {"targets": ("gate", "up")}},
        r"--targets \['stream', 'gate', 'up', 'down'\], .* \['gate', 'up'\]",
    ),
    ({"adapter": {"modulation": "additive"}}, "--modulation 'both', .* 'additive'"),
    ({"data_settings": {"max_length": 8}}, "--max_length 12, .* 8"),
    ({"data_settings": {"packing": True}}, "--packing False, .* True"),
    ({"data_settings": {"num_samples": 4}}, "--num_samples None, .* 4"),
    ({"seed": 1}, "--seed 0, .* 1"),
    ({"data": lambda: records(11)}, "data of 10 records .* 11 records"),
    ({"data": lambda: records(10, seed=1)}, r"10 records \(sha256 .* has 10 records \(sha256 "),
]


def test_a_setting_that_matters_is_refused_with_both_values(stopped) -> None:
    before = content_of(stopped.place / "run")
    for changed, message in MATTER:
        with pytest.raises(CheckpointError, match=message):
            stopped.trainer("run", resume="auto", **dict(changed))
        assert content_of(stopped.place / "run") == before, message


def test_another_base_is_refused_with_both_hashes(stopped, load_model) -> None:
    before = content_of(stopped.place / "run")
    there = npt.base_identity(stopped.model).codes[:12]
    stopped.model = load_model(quantization="fp4")
    here = npt.base_identity(stopped.model).codes[:12]
    with pytest.raises(AdapterFileError, match=f"4-bit codes {here}, .*{there}.*--any_base"):
        stopped.run("run", resume="auto")
    assert content_of(stopped.place / "run") == before


def test_a_run_goes_on_where_statistics_are_rounded_otherwise(stopped, poisoned_folder) -> None:
    run = stopped.place / "run"
    before = strict(run / "run.json")
    stopped.model = round_otherwise(
        npt.load_base(str(poisoned_folder), quantization="nf4", device="cpu")[0]
    )
    assert stopped.run("run", resume="auto").steps == 5
    after = strict(run / "run.json")
    assert after["base_hash"] != before["base_hash"] and after["base_parts"] == before["base_parts"]
    assert not events(run, "warning")


def test_what_may_change_is_taken_and_logged(stopped) -> None:
    run = stopped.place / "run"
    other = {"learning_rate": 1e-3, "max_steps": 4, "scheduler_type": "constant"}
    assert stopped.run("run", resume="auto", log_steps=1, **other).steps == 4
    changed = events(run, "resume")[0]["changed"]
    assert changed == {
        "learning_rate": [1e-2, 1e-3],
        "max_steps": [None, 4],
        "scheduler_type": ["cosine", "constant"],
    }
    # the table is fp32
    assert [line["lr"] for line in lines(run, "metrics")][-1] == pytest.approx(1e-3)
    assert strict(run / "run.json")["settings"]["learning_rate"] == 1e-3
    assert "changed setting: learning_rate was 0.01, is now 0.001" in stopped.said.getvalue()
    stopped.run("run", resume="auto", **other)
    # that of the checkpoint that the changed run made
    assert events(run, "resume")[-1]["changed"] == {}


@pytest.mark.parametrize(
    ("changed", "steps", "sizes"),
    [
        ({"gradient_accumulation_steps": 2}, 4, [2]),
        ({"batch_size": 4}, 4, [1]),
        ({"num_epochs": 2}, 10, [1] * 7),
        ({"batch_size": 1}, 7, [1] * 4),
    ],
)
def test_windows_of_another_size_take_the_remaining_samples(stopped, changed, steps, sizes) -> None:
    """Six of ten records come before the checkpoint of step 3."""
    seen: list[int] = []
    trainer = stopped.trainer(
        "run",
        lambda number, batch: seen.append(len(batch.sample_ids)),
        resume="auto",
        scheduler_type="linear",
        **changed,
    )
    assert trainer.data.total_steps == steps
    result = trainer.train()
    assert result.steps == steps and sum(seen) == (4 if "num_epochs" not in changed else 14)
    rates = [line["lr"] for line in lines(stopped.place / "run", "metrics")]
    # fp32
    assert rates[3:] == pytest.approx(
        [1e-2 * (1 - step / steps) for step in range(3, steps)], rel=1e-6
    )


def test_a_setting_of_one_version_only_is_refused_where_it_was_set() -> None:
    now = {"rank": 4, "new": 2, "targets": ("gate",)}
    assert not changed_settings({"rank": 4, "old": None}, now)
    with pytest.raises(CheckpointError, match="settings that this version does not know: 'old' 1"):
        changed_settings({"rank": 4, "old": 1}, now)
    then = {"targets": ["gate"], "resume": None, "output_dir": "a"}
    assert not changed_settings(then, {"targets": ("gate",), "resume": "auto"})
    with pytest.raises(CheckpointError, match=r"--quant_type 'nf4', but this run has 'fp4'"):
        changed_settings({"quant_type": "nf4"}, {"quant_type": "fp4"})


@pytest.mark.parametrize("setting", ["dataset_name", "replay_dataset"])
def test_a_file_may_lie_elsewhere_if_its_name_is_the_same(setting) -> None:
    for one, other in (("a.jsonl", "/data/a.jsonl"), ("sub/*.jsonl", "*.jsonl")):
        assert changed_settings({setting: one}, {setting: other}) == {}
    for one, other in (("a.jsonl", "b.jsonl"), ("owner/name", "owner/other"), (None, "a.jsonl")):
        with pytest.raises(CheckpointError, match=f"trained with --{setting} "):
            changed_settings({setting: one}, {setting: other})


# --- which data
# --------------------------------------------------------------------------------------------------


class Rows:
    """A sequence that is no list, as `datasets` has them."""

    def __init__(self, content: list[Any]):
        self.content = content

    def __len__(self) -> int:
        return len(self.content)

    def __getitem__(self, index: int) -> Any:
        return self.content[index]


def test_equal_data_have_one_identity_and_others_another() -> None:
    rows = records(50)
    one = data_fingerprint(rows)
    assert one == data_fingerprint(Rows(rows)) == data_fingerprint(tuple(rows))
    check_same_data({"data": one}, {"data": one})
    message = r"trained on data of 50 records \(sha256 \w{12}\), but this run has "
    for other in (records(51), records(50, seed=1), rows[::-1], rows[:49], [{"text": "a"}] * 50):
        with pytest.raises(CheckpointError, match=message):
            check_same_data({"data": one}, {"data": data_fingerprint(other)})


def test_a_streams_first_record_is_hashed_and_none_of_a_generator() -> None:
    stream = data_fingerprint(Stream(records(5)))
    assert stream["records"] is None
    assert (
        stream
        == data_fingerprint(Stream(records(9)))
        != data_fingerprint(Stream(records(5, seed=1)))
    )
    taken = (record for record in records(3))
    assert data_fingerprint(taken) == {"records": None, "sha256": None} and len(list(taken)) == 3
    check_same_data({"data": stream}, {"data": data_fingerprint(record for record in records(3))})
    check_same_data({}, {"data": stream})
    with pytest.raises(CheckpointError, match="an unknown number of records"):
        check_same_data({"data": stream}, {"data": data_fingerprint(Stream(records(5, seed=1)))})


def test_a_checkpoint_that_does_not_fit_leaves_the_folder_untouched(stopped) -> None:
    """Its sums are right, so it verifies; what it holds is not what the run needs."""
    run = stopped.place / "run"
    checkpoint = run / "checkpoints" / "step-00000003"
    tensors = load_file(checkpoint / "state.safetensors")
    tensors["optimizer.model.layers.1.npt.A.exp_avg"][0, 0] = float("nan")
    save_file(tensors, checkpoint / "state.safetensors")
    write_manifest(checkpoint)
    before = content_of(run)
    with pytest.raises(CheckpointError, match=r"npt\.A\.exp_avg has a non-finite value"):
        stopped.run("run", resume="auto")
    assert content_of(run) == before
    assert (checkpoint / MANIFEST).is_file()
