"""A replay tells whether what stopped a run recurs, where it arises, and whether it is the data or
the state.
"""

import json
import math
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import Program
from rounded import round_otherwise
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from stopped_runs import BAD, acting, good, make_trainer, stop

import npt
from npt.base.precision import declared_dtype
from npt.base.source import EMBEDDED_FOLDER
from npt.batch import Sample, collate
from npt.cli.main import main
from npt.config import DataConfig
from npt.data.samples import Window
from npt.distill import logit_losses
from npt.errors import BundleError, TooManyRefusalsError
from npt.forensics import student
from npt.forensics.replay import Replay
from npt.forensics.student import read_student
from npt.forensics.student import replay_student as replay
from npt.guard.forensics import Finding
from npt.guard.outcome import Refusal
from npt.manifest import write_manifest
from npt.runs.run_folder import RunFolder
from npt.train.data import RunData


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def recorded(found: Any) -> list[tuple[str, int | None]]:
    return list(found.postmortem.recorded)


def places(refusals: Any) -> list[tuple[str, int | None]]:
    return [(r.kind, r.micro_batch) for r in refusals]


# --- what is found
# --------------------------------------------------------------------------------------------------


def test_an_overflowing_sample_is_found_in_the_state_of_the_run(trainer, poisoned_folder) -> None:
    """In windows of two, so that the other micro-batch was stepped on, and read late the window
    after it as well.
    """
    found = replay(
        stop(
            trainer(
                poisoned_folder, [*good(9), BAD], gradient_accumulation_steps=2, learning_rate=0.1
            ),
            late=True,
        )
    )
    assert found.classification == "data" and found.reproduced
    ((kind, index),) = places(found.refusals)
    assert kind == "loss" and list(found.traces) == [index]
    assert found.verdict.as_dict() == found.postmortem.record["findings"][0]["verdict"]
    assert found.trials == (False, False, False) and not any(found.findings.values())
    assert "bad@0" in str(found) and "verdict: data" in str(found)
    # And the window was computed in the very state that the run had.
    recorded = {(*t["sample_ids"],): t for t in found.postmortem.record["history"]}
    for trace in found.records:
        then = recorded[trace.sample_ids]
        if math.isfinite(trace.loss):  # every bit of it: one step further its loss is another
            assert (trace.loss, trace.grad_norm) == (then["loss"], then["grad_norm"])
        else:
            assert then["loss"] is None
    assert len({t.sample_ids for t in found.records}) == 2


def test_a_micro_batch_computed_in_parts_is_replayed_in_those_parts(
    trainer, poisoned_folder, monkeypatch
) -> None:
    """With more samples at once a replay could lack the very memory that the run had lacked."""
    run = trainer(poisoned_folder, [*good(7), BAD], batch_size=4)
    run.setup.splitter.samples = 2
    folder = stop(run)
    sizes: list[int] = []
    drive = student.drive

    def watching(model: Any, batch: Any, *others: Any, **more: Any) -> Any:
        sizes.append(len(batch.input_ids))
        return drive(model, batch, *others, **more)

    monkeypatch.setattr(student, "drive", watching)
    found = replay(folder)
    assert found.postmortem.record["student"]["samples_at_once"] == 2
    assert len(found.postmortem.micro_batches[0].sample_ids) == 4 and set(sizes) == {2}
    assert found.classification == "data" and found.reproduced


@pytest.mark.parametrize("limit", [math.inf, 0.0])
def test_a_replay_computes_the_loss_of_the_run(
    trainer, poisoned_folder, monkeypatch, limit
) -> None:
    """KL of a student that started close is that of sampled words, with the same draws."""
    monkeypatch.setattr(logit_losses, "SPARSE", 1)  # or the vocabulary would be too small
    monkeypatch.setattr("npt.train.trainer.SAMPLED_BELOW", limit)
    settings = {"strategy": "end_to_end", "logit_kl_weight": 1.0, "gradient_accumulation_steps": 2}
    found = replay(stop(trainer(poisoned_folder, [*good(9), BAD], **settings)))
    losses = {(*t["sample_ids"],): t["loss"] for t in found.postmortem.record["history"]}
    compared = [(t.loss, losses[t.sample_ids]) for t in found.records if math.isfinite(t.loss)]
    assert compared and all(one == other for one, other in compared)


def test_an_adapter_that_is_not_finite_is_the_state_and_is_named(trainer, tiny_folder) -> None:
    name = "model.layers.3.npt.B.up"

    def poison(model: Any, number: int) -> None:
        if number == 4:
            model.get_parameter(name).data[2, 1] = math.nan

    found = replay(stop(acting(trainer(tiny_folder, good(12)), poison)))
    assert found.classification == "state" and found.reproduced
    assert f"{name}[2, 1] is nan" in str(found.findings["weights"])
    assert found.findings["base"] is None and found.trials == (True,)
    assert name in str(found)


def test_adapters_grown_too_large_but_finite_are_a_fault_of_the_state(trainer, tiny_folder) -> None:
    def grow(model: Any, number: int) -> None:
        if number == 4:
            model.get_parameter("model.layers.1.npt.B.down").data.fill_(1e25)

    found = replay(stop(acting(trainer(tiny_folder, good(12)), grow)))
    assert found.classification == "state" and found.reproduced
    assert not any(found.findings.values())
    assert found.trials == (True,)


def test_a_fault_that_was_only_there_in_the_run_is_transient(trainer, tiny_folder) -> None:
    hooked: list[Any] = []

    def hook(model: Any, number: int) -> None:
        if number == 4:
            layer = model.model.layers[2].self_attn.o_proj
            hooked.append(layer.register_forward_hook(lambda *call: call[-1] * math.nan))

    found = replay(stop(acting(trainer(tiny_folder, good(12)), hook)))
    assert hooked
    assert found.classification == "transient" and not found.reproduced
    assert found.postmortem.recorded and not found.refusals
    assert not found.traces and not found.trials
    assert "suspect the machine" in str(found)


def test_moments_that_are_not_finite_are_the_state(trainer, tiny_folder) -> None:
    made = trainer(tiny_folder, good(12))

    def poison(model: Any, number: int) -> None:
        if number == 4:
            parameter = model.get_parameter("model.layers.1.npt.M.gate")
            (optimizer,) = [o for o in optimizers if parameter in o.state]
            optimizer.state[parameter]["exp_avg"][0, 1] = math.inf

    optimizers: list[Any] = []
    original = torch.optim.AdamW.__init__

    def kept(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        optimizers.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "__init__", kept)
        folder = stop(acting(made, poison))
    found = replay(folder)
    assert recorded(found) == [("update", None)]
    assert found.classification == "state" and found.reproduced
    assert "exp_avg of model.layers.1.npt.M.gate[0, 1] is inf" in str(found.findings["moments"])
    assert found.trials == (True,)


def test_a_spike_recurs_at_the_limits_of_its_time(trainer, tiny_folder, monkeypatch) -> None:
    monkeypatch.setattr("npt.distill.step.SIGMAS", 1.5)
    made = trainer(tiny_folder, good(60), skip_spikes=True, gradient_accumulation_steps=2)
    found = replay(stop(made))
    assert recorded(found) == places(found.refusals) == [("spike", None)]
    # value and limit, digit by digit
    assert found.refusals[0].detail == found.postmortem.recorded["spike", None].detail
    assert len(found.trials) == 1
    limits = found.postmortem.limits
    assert limits is not None and all(math.isfinite(limit) for limit in limits)


def test_unknown_token_ids_are_a_fault_of_the_data_without_a_trace(trainer, tiny_folder) -> None:
    found = replay(
        stop(trainer(tiny_folder, [*good(7), {"id": "outside", "input_ids": [5, 999, 7]}]))
    )
    assert found.classification == "data" and found.reproduced
    assert found.verdict is None and not found.trials
    assert "outside@0: token id 999" in str(found).replace(")", "")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_an_unquantised_base_is_loaded_as_it_was(trainer, tiny_folder, dtype) -> None:
    short = {"float32": None, "float16": "fp16", "bfloat16": "bf16"}
    found = replay(
        stop(
            trainer(
                tiny_folder,
                [{"id": "outside", "input_ids": [5, 999, 7]}],
                quantization=None,
                dtype=short[dtype],
            )
        )
    )
    loading = found.postmortem.record["student"]["base_loading"]
    assert loading["quantization"] is None and loading["use_fp16"] == (dtype == "float16")
    assert loading.get("dtype") == ("bf16" if dtype == "bfloat16" else None)
    assert found.classification == "data"


def test_a_packed_base_is_loaded_with_products_in_its_recorded_dtype(trainer, tiny_folder) -> None:
    folder = stop(
        trainer(tiny_folder, [{"id": "outside", "input_ids": [5, 999, 7]}], compute_dtype="bf16")
    )
    model, _ = read_student(folder).load()
    assert declared_dtype(model) == torch.bfloat16
    assert model.model.layers[0].mlp.up_proj.compute_dtype == torch.bfloat16


def test_json_holds_what_was_recorded_found_and_tried(bundle) -> None:
    said = json.loads(npt.files.to_json(replay(bundle).as_dict()))
    assert said["classification"] == "data" and said["reproduced"] is True
    assert said["recorded"] == said["found"] and said["found"][0]["sample_ids"] == ["bad@0"]
    assert said["verdicts"] == [
        {"micro_batch": said["found"][0]["micro_batch"], "verdict": said["verdict"]}
    ]
    assert (said["accepted_failed"], said["accepted_total"]) == (0, 3)
    assert said["device"] == said["recorded_device"] == "cpu"


# --- what it leaves, and what it refuses
# -------------------------------------------------------------------------------


def test_the_process_is_left_as_it_was(bundle) -> None:
    torch.manual_seed(5)
    before, files = torch.get_rng_state(), contents(bundle)
    torch.set_float32_matmul_precision("high")
    try:
        first, second = replay(bundle).as_dict(), replay(bundle).as_dict()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(torch.get_rng_state(), before)
    assert npt.files.to_json(first) == npt.files.to_json(second)
    assert contents(bundle) == files


def test_another_base_is_refused_and_both_hashes_are_named(bundle, tiny_folder) -> None:
    recorded = read_student(bundle).entry["base_hash"]
    other = npt.base_hash(npt.load_base(str(tiny_folder), quantization="nf4", device="cpu")[0])
    with pytest.raises(BundleError) as caught:
        replay(bundle, model_name=str(tiny_folder))
    assert (
        recorded[:12] in str(caught.value)
        and other[:12] in str(caught.value)
        and "--model_name" in str(caught.value)
    )
    assert caught.value.exit_status == 5


def test_a_base_with_otherwise_rounded_statistics_is_refused(bundle, monkeypatch) -> None:
    load = student.load_base

    def load_rounded(*arguments: Any, **more: Any) -> Any:
        model, tokenizer = load(*arguments, **more)
        return round_otherwise(model), tokenizer

    monkeypatch.setattr(student, "load_base", load_rounded)
    with pytest.raises(BundleError, match="was recorded with base"):
        replay(bundle)


def test_a_base_that_has_moved_is_found_by_its_new_name(bundle, poisoned_folder, tmp_path) -> None:
    path = bundle / "postmortem.json"
    record = json.loads(path.read_text())
    record["student"]["base"] = str(tmp_path / "gone")
    path.write_text(json.dumps(record))
    write_manifest(bundle)
    with pytest.raises(BundleError, match=r"cannot be loaded.*gone.*--model_name"):
        replay(bundle)
    assert replay(bundle, model_name=str(poisoned_folder)).reproduced


A = "model.layers.1.npt.A"


@pytest.mark.parametrize(
    ("file", "change", "named"),
    [
        ("weights", {A: torch.zeros(2, 2)}, f"{A} of shape (2, 2), but the model has (4, 64)"),
        ("weights", {"other": torch.zeros(2)}, "other of shape (2,), but the model has none"),
        ("moments", {"step of other": torch.zeros(())}, "KeyError: \"'other'\""),
    ],
)
def test_tensors_that_do_not_fit_the_base_are_named(bundle, file, change, named) -> None:
    path = bundle / f"{file}.safetensors"
    save_file(load_file(path) | change, path)
    write_manifest(bundle)
    with pytest.raises(BundleError) as caught:
        replay(bundle)
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_a_share_exceeded_at_a_clean_window_leaves_the_last_bad_one(
    trainer, poisoned_folder, monkeypatch
) -> None:
    """A share counts from the fiftieth micro-batch on, and that one was accepted."""
    bad, fine = (
        collate([Sample(name, ids)], 2) for name, ids in (("bad", (5, 99, 7)), ("fine", (5, 6, 7)))
    )
    windows = [Window([bad])] * 3 + [Window([fine])] * 60
    monkeypatch.setattr(RunData, "windows", lambda self: (window for window in windows))
    monkeypatch.setattr("npt.train.loop.REFUSED_SHARE", 0.05)
    found = replay(stop(trainer(poisoned_folder, good(3), max_consecutive_bad=100)))
    assert found.postmortem.record["reason"].startswith("3 of 50 micro-batches refused")
    assert [each.sample_ids for each in found.postmortem.micro_batches] == [("bad",)]
    assert found.postmortem.step == 47
    assert found.reproduced and found.classification == "data"


@pytest.fixture(scope="module")
def packed_bundle(poisoned_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run in windows of two rows of several documents, one of which overflowed."""
    made = make_trainer(
        poisoned_folder,
        [*good(30), BAD],
        tmp_path_factory.mktemp("packed") / "run",
        data_config=DataConfig(max_length=24, packing=True),
        gradient_accumulation_steps=2,
    )
    return stop(made)


def test_a_packed_micro_batch_is_replayed_bit_for_bit(packed_bundle) -> None:
    found = replay(packed_bundle)
    assert found.reproduced and found.classification == "data"
    then = {(*t["sample_ids"],): t for t in found.postmortem.record["history"]}
    (record,) = [record for record in found.records if math.isfinite(record.loss)]
    assert any("+" in name for name in record.sample_ids)  # of a packed row
    recorded = then[record.sample_ids]
    assert (record.loss, record.grad_norm) == (recorded["loss"], recorded["grad_norm"])


# --- what cannot keep it from being written


def no_space(*_: Any, **__: Any) -> Any:
    raise SafetensorError("Error while serializing: I/O error: No space left on device")


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
            folders[0]._logs["events.jsonl"] = os.open("/dev/full", os.O_WRONLY)
            monkeypatch.setattr("npt.forensics.bundle.save_file", no_space)

    monkeypatch.setattr(RunFolder, "__init__", kept)
    with pytest.raises(TooManyRefusalsError) as caught:
        acting(made, fill_up).train()
    assert caught.value.exit_status == 3
    for part in ("1 refusals in a row", "bad@0", "loss is nan", "No space left on device"):
        assert part in str(caught.value)
    assert "cannot write a post-mortem" in str(caught.value)
    assert not list((made.setup.origin.folder / "postmortem").iterdir())


def test_an_unwritable_place_is_said_with_the_reason_of_the_stop(trainer, poisoned_folder) -> None:
    made = trainer(poisoned_folder, [*good(3), BAD])

    def block(model: Any, number: int) -> None:
        (made.setup.origin.folder / "postmortem").touch()  # a file in its place stops root as well

    with pytest.raises(TooManyRefusalsError, match="1 refusals in a row") as caught:
        acting(made, block).train()
    assert "cannot write a post-mortem" in str(caught.value)
    assert os.strerror(17) in str(caught.value)
    events = map(json.loads, (made.setup.origin.folder / "events.jsonl").read_text().splitlines())
    (event,) = [event for event in events if event["event"] == "stopped"]
    assert event["postmortem"] is None and "refusals in a row" in event["reason"]


# --- its parts
# --------------------------------------------------------------------------------------------------


def refusal(kind: str) -> Refusal:
    return Refusal(kind, "", None if kind in ("norm", "spike", "update") else 0)


@pytest.mark.parametrize(
    ("found", "finding", "failing", "phase", "expected"),
    [
        ([], None, [], None, "transient"),
        (["data"], None, [], None, "data"),
        (["data"], "A is nan", [], None, "data"),
        (["loss"], None, [False, False], None, "data"),
        (["loss", "data"], None, [False], None, "data"),
        (["loss"], None, [], "data", "data"),
        (["loss"], None, [False, True], "data", "state"),
        (["gradient"], "A is nan", [False], None, "state"),
        (["update"], None, [True], None, "state"),
        (["loss"], None, [], "forward", "undecided"),
        (["loss"], None, [], None, "undecided"),
    ],
)
def test_the_class_follows_from_refusals_findings_trials_and_traces(
    found, finding, failing, phase, expected
) -> None:
    verdict: Any = None if phase is None else SimpleNamespace(phase=phase)
    refusals = tuple(refusal(kind) for kind in found)
    traces = {0: Finding(refusals[0], verdict)} if refusals else {}
    postmortem: Any = None
    result = Replay(postmortem, "cpu", refusals, (), {"weights": finding}, traces, tuple(failing))
    assert result.classification == expected


# --- as a user runs it
# -------------------------------------------------------------------------------------------------


def test_the_verb_ends_with_the_status_of_what_is_wrong(bundle, tmp_path, capsys) -> None:
    for arguments, status in (
        ([str(tmp_path / "none")], 5),
        ([str(bundle), "--model_name", str(tmp_path)], 5),
    ):
        assert main(["replay", *arguments]) == status
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["replay", str(bundle)]) == 0
    assert "verdict: data" in capsys.readouterr().out


def test_a_run_killed_by_nan_replays_in_another_process(tmp_path, capfd) -> None:
    """The embedded model with a finite 1e30 in the embedding of one token, and data in which one
    sample has it.
    """
    import shutil

    rare, base = 2000, tmp_path / "base"
    shutil.copytree(EMBEDDED_FOLDER, base)
    tensors = load_file(base / "model.safetensors")
    # tied they would be poisoned together
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.embed_tokens.weight"][rare] = 1e30
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    source = random.Random(0)
    rows = [[0, *(source.randrange(3, 1900) for _ in range(15))] for _ in range(30)]
    rows[12] = [0, 5, 6, rare, 7, 8]
    assert not Sample("", tuple(rows[12])).heldout
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(
            json.dumps({"id": f"row-{i}", "input_ids": row}) + "\n" for i, row in enumerate(rows)
        )
    )
    run = tmp_path / "run"
    settings = [
        "--batch_size",
        "2",
        "--gradient_accumulation_steps",
        "2",
        "--max_consecutive_bad",
        "1",
        "--no_smoke_test",
    ]
    small = [
        "--max_length",
        "16",
        "--eval_samples",
        "1",
        "--use_quantization",
        "--init",
        "random",
        "--layers",
        "7",
    ]
    source_of_run = [
        "--model_name",
        str(base),
        "--dataset_name",
        str(data),
        "--output_dir",
        str(run),
    ]
    ended = Program(["pretrain", *source_of_run, *settings, *small], tmp_path / "errors")
    assert ended.wait() == 3, ended.errors.read_text()
    (folder,) = (run / "postmortem").iterdir()
    assert f"npt replay {folder}" in ended.errors.read_text()
    recorded = json.loads((folder / "postmortem.json").read_text())

    assert main(["replay", str(folder), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["classification"] == "data" and found["reproduced"] is True
    assert found["found"] == [
        recorded["micro_batches"][found["found"][0]["micro_batch"]]["refusal"]
    ]
    assert "row-12@0" in found["found"][0]["sample_ids"]
    assert found["verdict"]["index"] == recorded["findings"][0]["verdict"]["index"]
    assert found["accepted_failed"] == 0
