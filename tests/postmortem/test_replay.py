"""A replay tells whether what stopped a run recurs, where it arises, and whether it is the data or
the state.
"""

from __future__ import annotations

import json
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from forked import Program
from hypothesis import given
from rounded import round_otherwise
from safetensors.torch import load_file, save_file
from stopped_runs import BAD, acting, good, stop

import npt
from npt.base.load import EMBEDDED_FOLDER
from npt.base.precision import declared_dtype
from npt.cli.main import main
from npt.data.batch import IGNORE_INDEX, Sample, batch_from_tensors
from npt.errors import AdapterFileError, BundleError, CheckpointError, ConfigError
from npt.guard.outcome import Refusal
from npt.guard.spikes import SpikeGuard
from npt.manifest import write_manifest
from npt.postmortem import restore
from npt.postmortem.bundle import read_bundle
from npt.postmortem.replay import FRESH, Trial, classify, fresh_batch, replay

ROOT = Path(npt.__file__).parent.parent


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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
    assert found.classification == "data" and found.reproduced and found.same_fault
    ((kind, index),) = places(found.found)
    assert kind == "loss" and found.verdicts[0][0] == index
    assert found.verdict is not None and found.verdict.as_dict() == found.bundle.said["verdict"]
    assert found.count(fresh=True) == (0, FRESH) and found.count(fresh=False) == (0, 3)
    assert not any(found.findings.values()) and found.base_changed is False
    assert "bad@0" in str(found) and "verdict: data" in str(found)
    # And the window was computed in the very state that the run had.
    recorded = {(*t["sample_ids"],): t for t in found.bundle.said["history"]}
    for trace in found.traces:
        then = recorded[trace.sample_ids]
        if math.isfinite(trace.loss):  # every bit of it: one step further its loss is another
            assert (trace.loss, trace.grad_norm) == (then["loss"], then["grad_norm"])
        else:
            assert then["loss"] is None
    assert len({t.sample_ids for t in found.traces}) == 2


def test_a_micro_batch_computed_in_parts_is_replayed_in_those_parts(
    trainer, poisoned_folder, monkeypatch
) -> None:
    """With more samples at once a replay could lack the very memory that the run had lacked."""
    run = trainer(poisoned_folder, [*good(7), BAD], batch_size=4)
    run.setup.splitter.samples = 2
    folder = stop(run)
    sizes: list[int] = []
    drive = restore.drive

    def watching(model: Any, batch: Any, *others: Any, **more: Any) -> Any:
        sizes.append(len(batch.input_ids))
        return drive(model, batch, *others, **more)

    monkeypatch.setattr(restore, "drive", watching)
    found = replay(folder)
    assert found.bundle.samples_at_once == found.bundle.said["samples_at_once"] == 2
    assert len(found.bundle.window[0].input_ids) == 4 and set(sizes) == {2}
    assert found.classification == "data" and found.same_fault


def test_an_adapter_that_is_not_finite_is_the_state_and_is_named(trainer, tiny_folder) -> None:
    name = "model.layers.3.npt.B.up"

    def poison(model: Any, number: int) -> None:
        if number == 4:
            model.get_parameter(name).data[2, 1] = math.nan

    found = replay(stop(acting(trainer(tiny_folder, good(12)), poison)))
    assert found.classification == "state" and found.reproduced
    assert (
        found.findings["adapters"] is not None
        and f"{name}[2, 1] is nan" in found.findings["adapters"]
    )
    assert found.count(fresh=True) == (FRESH, FRESH) and found.count(fresh=False) == (1, 1)
    assert name in str(found)


def test_adapters_grown_too_large_but_finite_are_a_fault_of_the_state(trainer, tiny_folder) -> None:
    def grow(model: Any, number: int) -> None:
        if number == 4:
            model.get_parameter("model.layers.1.npt.B.down").data.fill_(1e25)

    found = replay(stop(acting(trainer(tiny_folder, good(12)), grow)))
    assert found.classification == "state" and found.reproduced
    assert not any(found.findings.values())
    assert found.count(fresh=True) == (FRESH, FRESH) and found.count(fresh=False) == (1, 1)


def test_a_fault_that_was_only_there_in_the_run_is_transient(trainer, tiny_folder) -> None:
    hooked: list[Any] = []

    def hook(model: Any, number: int) -> None:
        if number == 4:
            layer = model.model.layers[2].self_attn.o_proj
            hooked.append(layer.register_forward_hook(lambda *call: call[-1] * math.nan))

    found = replay(stop(acting(trainer(tiny_folder, good(12)), hook)))
    assert hooked
    assert found.classification == "transient" and not found.reproduced
    assert found.bundle.refusals and not found.found and not found.verdicts and not found.trials
    assert found.bundle.said["verdict"] is not None  # there it was seen while it lasted
    assert "suspect the machine" in str(found)


def test_a_base_that_changed_in_the_runs_memory_is_said(trainer, tiny_folder) -> None:
    def flip(model: Any, number: int) -> None:
        if number == 4:
            model.get_submodule("model.layers.1.mlp.up_proj").weight.quant_state.absmax.data.view(
                -1
            )[0] += 1
            model.get_submodule("model.layers.1.mlp.up_proj").weight.quant_state.state2.absmax[
                0
            ] = math.inf

    found = replay(stop(acting(trainer(tiny_folder, good(12)), flip)))
    assert found.classification == "transient" and found.base_changed
    assert "up_proj" in found.bundle.said["findings"]["base"]
    assert "it had changed there" in str(
        found
    ) and "base, when the run stopped: model.layers.1.mlp.up_proj" in str(found)


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
    assert places(found.bundle.refusals) == [("update", None)]
    assert found.classification == "state" and found.reproduced
    assert "exp_avg of model.layers.1.npt.M.gate[0, 1] is inf" in str(found.findings["moments"])
    assert found.count(fresh=True) == (FRESH, FRESH)


def test_a_spike_recurs_at_the_limits_of_its_time(trainer, tiny_folder, monkeypatch) -> None:
    monkeypatch.setattr("npt.distill.step.SpikeGuard", partial(SpikeGuard, 1.5))
    made = trainer(tiny_folder, good(60), skip_spikes=True, gradient_accumulation_steps=2)
    found = replay(stop(made))
    assert places(found.bundle.refusals) == places(found.found) == [("spike", None)]
    # value and limit, digit by digit
    assert found.found[0].detail == found.bundle.refusals[0].detail
    # random tokens are no text to compare with
    assert found.count(fresh=True) == (0, 0) and found.count(fresh=False)[1] == 1
    read = read_bundle(found.bundle.folder)
    assert read.limits is not None and all(math.isfinite(limit) for limit in read.limits)


def test_unknown_token_ids_are_a_fault_of_the_data_without_a_trace(trainer, tiny_folder) -> None:
    found = replay(
        stop(trainer(tiny_folder, [*good(7), {"id": "outside", "input_ids": [5, 999, 7]}]))
    )
    assert found.classification == "data" and found.reproduced
    assert not found.verdicts and not found.trials
    assert "outside@0" in str(found) and "nothing was computed on it" in str(found)


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
    assert (found.bundle.base.quantization, found.bundle.base.dtype) == (None, dtype)
    assert found.classification == "data"


def test_a_packed_base_is_loaded_with_products_in_its_recorded_dtype(trainer, tiny_folder) -> None:
    folder = stop(
        trainer(tiny_folder, [{"id": "outside", "input_ids": [5, 999, 7]}], compute_dtype="bf16")
    )
    bundle = read_bundle(folder)
    assert (bundle.base.quantization, bundle.base.dtype) == ("nf4", "bfloat16")
    with restore.restored(bundle) as found:
        assert declared_dtype(found.model) == torch.bfloat16
        assert found.model.model.layers[0].mlp.up_proj.compute_dtype == torch.bfloat16


def test_a_micro_batch_that_was_accepted_can_be_traced_too(bundle) -> None:
    (refused,) = [r.micro_batch for r in read_bundle(bundle).refusals]
    found = replay(bundle, micro_batch=1 - refused)
    assert found.verdicts == ((1 - refused, None),)
    assert "no operation made a number that is not finite" in str(found)
    with pytest.raises(
        ConfigError, match="--micro_batch is 2, the bundle has micro-batches 0 to 1"
    ):
        replay(bundle, micro_batch=2)


def test_json_holds_what_was_recorded_found_and_tried(bundle) -> None:
    said = json.loads(npt.files.to_json(replay(bundle).as_dict()))
    assert (
        said["classification"] == "data"
        and said["reproduced"] is True
        and said["same_fault"] is True
    )
    assert said["recorded"] == said["found"] and said["found"][0]["sample_ids"] == ["bad@0"]
    assert said["verdict"]["index"] == said["recorded_verdict"]["index"]
    assert (said["fresh_failed"], said["fresh_total"]) == (0, FRESH)
    assert (said["accepted_failed"], said["accepted_total"]) == (0, 3)
    assert said["versions"] == {} and said["device"] == said["recorded_device"] == "cpu"


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
    recorded = read_bundle(bundle).base.hash
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
    load = restore.load_base

    def load_rounded(*arguments: Any, **more: Any) -> Any:
        model, tokenizer = load(*arguments, **more)
        return round_otherwise(model), tokenizer

    monkeypatch.setattr(restore, "load_base", load_rounded)
    with pytest.raises(BundleError, match="was recorded on base"):
        replay(bundle)


def test_a_base_on_another_kind_of_device_is_refused_with_the_kind(bundle, tiny_folder) -> None:
    said = json.loads((bundle / "postmortem.json").read_text())
    said["device"] = "cuda:0"
    (bundle / "postmortem.json").write_text(json.dumps(said))
    with pytest.raises(
        BundleError,
        match=r"--model_name, on cuda \(statistics of 4-bit weights are rounded otherwise on cpu\)",
    ):
        replay(bundle, model_name=str(tiny_folder), device="cpu")


def test_a_base_that_has_moved_is_found_by_its_new_name(bundle, poisoned_folder, tmp_path) -> None:
    path = bundle / "adapter" / "adapter_config.json"
    gone = {"base_model_name_or_path": str(tmp_path / "gone")}
    path.write_text(json.dumps(json.loads(path.read_text()) | gone))
    write_manifest(bundle)
    with pytest.raises(BundleError, match=r"cannot be loaded.*gone.*--model_name"):
        replay(bundle)
    assert replay(bundle, model_name=str(poisoned_folder)).reproduced


ADAPTER, STATE = "adapter/adapter_model.safetensors", "state.safetensors"
A, STEP = "base_model.model.model.layers.1.npt.A", "optimizer.model.layers.1.npt.A.step"


@pytest.mark.parametrize(
    ("file", "change", "named"),
    [
        (ADAPTER, lambda state: state.pop(A), f"lacks the tensor '{A}'"),
        (STATE, lambda state: state.pop(STEP), f"lacks the tensor '{STEP}'"),
        (STATE, lambda state: state.update({"../a": torch.zeros(1)}), "extra tensor '../a'"),
        (
            ADAPTER,
            lambda state: state.update({A: torch.zeros(2, 2)}),
            "the model needs F32 [4, 64]",
        ),
        (ADAPTER, lambda state: state.update({A: state[A].double()}), "F64 [4, 64]"),
        (STATE, lambda state: state.update({STEP: torch.zeros(1)}), "step is F32 [1]"),
    ],
)
def test_tensors_that_do_not_fit_the_base_are_named(bundle, file, change, named) -> None:
    state = load_file(bundle / file)
    change(state)
    save_file(state, bundle / file)
    write_manifest(bundle)
    with pytest.raises((CheckpointError, AdapterFileError)) as caught:
        replay(bundle)
    assert named in str(caught.value) and "\n" not in str(caught.value)


# --- its parts
# --------------------------------------------------------------------------------------------------


def refusal(kind: str) -> Refusal:
    return Refusal(kind, "", None if kind in ("norm", "spike", "update") else 0)


@pytest.mark.parametrize(
    ("found", "finding", "failing", "expected"),
    [
        ([], None, [], "transient"),
        (["data"], None, [], "data"),
        (["data"], "A is nan", [], "data"),
        (["loss"], None, [False, False], "data"),
        (["loss", "data"], None, [False], "data"),
        (["loss"], None, [False, True], "state"),
        (["gradient"], "A is nan", [False], "state"),
        (["update"], None, [True], "state"),
    ],
)
def test_the_class_follows_from_refusals_findings_and_trials(
    found, finding, failing, expected
) -> None:
    trials = [Trial("", True, (refusal("loss"),) if failed else ()) for failed in failing]
    assert classify([refusal(kind) for kind in found], {"adapters": finding}, trials) == expected


@given(
    seed=st.integers(0, 2**31),
    vocab_size=st.integers(2, 300),
    rows=st.lists(st.integers(0, 7), min_size=1, max_size=4),
    avoided=st.sets(st.integers(0, 299)),
)
def test_fresh_tokens_are_of_the_vocabulary_and_none_to_be_avoided(
    seed, vocab_size, rows, avoided
) -> None:
    mask = torch.tensor([[1] * n + [0] * (7 - n) for n in rows])
    like = batch_from_tensors(torch.zeros(len(rows), 7, dtype=torch.int64), mask)
    made = fresh_batch(like, torch.tensor(sorted(avoided), dtype=torch.int64), vocab_size, seed)
    assert bool(((made.input_ids >= 0) & (made.input_ids < vocab_size)).all())
    if set(range(vocab_size)) - avoided:
        assert not set(made.input_ids.flatten().tolist()) & avoided
    assert torch.equal(made.attention_mask, mask) and made.tokens == like.tokens
    assert torch.equal(made.labels, torch.where(mask.bool(), made.input_ids, IGNORE_INDEX))
    again = fresh_batch(like, torch.tensor(sorted(avoided), dtype=torch.int64), vocab_size, seed)
    assert torch.equal(made.input_ids, again.input_ids)


# --- as a user runs it
# -------------------------------------------------------------------------------------------------


def test_the_verb_ends_with_the_status_of_what_is_wrong(bundle, tmp_path, capsys) -> None:
    for arguments, status in (
        ([str(tmp_path / "none")], 5),
        ([str(bundle), "--micro_batch", "7"], 2),
        ([str(bundle), "--device", "abacus"], 2),
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
    assert found["found"] == recorded["refusals"] and "row-12@0" in found["found"][0]["sample_ids"]
    assert recorded["verdict"] is not None, recorded["failures"]
    assert found["verdict"]["index"] == recorded["verdict"]["index"]
    assert found["same_fault"] is True and found["fresh_failed"] == 0
