"""A base that is sharded over two processes computes what the whole one does, bit for bit, and
hangs nowhere.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from several import several, values
from shard_work import (
    STRATEGY_SETTINGS,
    assert_equal,
    attempted,
    computed,
    lost_in_an_evaluation,
    measured,
    run,
    runs,
    started,
)
from torch.distributed.fsdp import FSDPModule

import npt
from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError, ModelError

pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="a base is sharded with torch 2.13 or later"
)


@pytest.fixture(scope="module")
def base(llama_folder: Path, load_model: Any) -> str:
    return str(llama_folder)


@pytest.mark.parametrize(("quantization", "size"), [(None, 2), ("nf4", 3)])
def test_the_shares_of_a_base_compute_what_the_whole_computes(
    base: str, quantization: str | None, size: int
) -> None:
    alone = computed(ProcessGroup(), base, quantization)
    for name, value in alone["start"].items():
        assert name.endswith((".A", ".B.stream")) == bool(value.any())
    for process, shared in enumerate(values(several(size, computed, base, quantization))):
        assert_equal(alone[f"process {process}"], shared[f"process {process}"])
        assert shared["figures"] == alone["figures"] and shared["base fault"] is None
        for name, value in alone["start"].items():  # C and S are summed in another order
            np.testing.assert_allclose(shared["start"][name], value, rtol=1e-4, atol=1e-6)
        # a layer at a time, and in backward the one that FSDP has ready
        assert shared["hash"] and shared["whole"] == [] and shared["most"] <= 2
    assert len(alone["whole"]) == 4 * 9  # the same look, at a base that is whole


def test_what_a_sharded_base_cannot_do_is_refused(base: str) -> None:
    for errors in values(several(2, attempted, base)):
        assert errors["corrupt"].startswith(
            "sharding changes mlp.up_proj.weight of layer 2 (one of 2) with torch"
        )
        assert (
            errors["shard"] == "the base is sharded already; load it again to shard it differently"
        )
        assert (
            errors["detach"]
            == "layer 1 has become a FSDPNPTLlamaDecoderLayer and cannot be restored: load the"
            " base again"
        )


def test_an_older_torch_is_refused(load_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model()
    npt.attach(model)
    monkeypatch.delattr(FSDPModule, "reset_iter_state")
    with pytest.raises(ConfigError, match=r"needs torch 2\.13 or later; this is 2"):
        npt.shard_base(model, ProcessGroup(0, 2, torch.device("cpu")))


@pytest.mark.usefixtures("short_library", "undrawn_charts")
def test_a_run_starts_from_an_adapter_of_the_sharded_base_and_of_no_other(tmp_path: Path) -> None:
    model, _ = npt.load_base("tiny", quantization="nf4", device="cpu")
    npt.attach(model, npt.NPTConfig(rank=4))
    adapter = ["--adapter", str(npt.save_adapter(model, tmp_path / "start"))]
    runs = {}
    for name, kind, flags in (
        ("whole", "nf4", []),
        ("sharded", "nf4", ["--shard_base"]),
        ("other", "fp4", ["--shard_base"]),
    ):
        out = str(tmp_path / name)
        runs[name] = values(several(2, started, "tiny", out, kind, *adapter, *flags))
    assert [runs[name][0][0] for name in runs] == [0, 0, 5]
    assert "the base is sharded over 2 processes" in runs["sharded"][0][1]
    assert re.search("was trained on another base .*: 4-bit codes", runs["other"][0][1])
    one, other = (
        load_file(tmp_path / name / "adapter" / "adapter_model.safetensors")
        for name in ("whole", "sharded")
    )
    assert all(torch.equal(one[name], other[name]) for name in one) and one.keys() == other.keys()


def test_one_process_has_nobody_to_share_with(load_model: Any) -> None:
    model = load_model()
    with pytest.raises(ModelError, match="no NPT adapters"):
        npt.shard_base(model, ProcessGroup())
    npt.attach(model)
    with pytest.raises(ConfigError, match="cannot be sharded over one process: start several"):
        npt.shard_base(model, ProcessGroup())


def test_a_run_on_a_sharded_base_is_that_on_a_whole_one(base: str, tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": 2, "save_steps": 1, "eval_steps": 1}
    settings |= {"smoke_test": True, "count": 13}  # the last window is uneven
    plans = {
        f"{name} {sharded}": {"sharded": sharded, **settings, **strategy}
        for name, strategy in STRATEGY_SETTINGS.items()
        for sharded in (False, True)
    }
    for process in values(several(2, runs, base, str(tmp_path), plans)):
        for name in STRATEGY_SETTINGS:
            one, other = (process[f"{name} {sharded}"] for sharded in (False, True))
            assert_equal(one["weights"], other["weights"], name)
            assert one["seen"] == [each for each in other["seen"] if each != "placeholder"]
            for key in ("steps", "tokens", "fidelity"):
                assert one[key] == other[key], key
            assert other["whole"] == []


def test_a_sharded_run_is_resumed_by_another_number_of_processes(base: str, tmp_path: Path) -> None:
    # 12 micro-batches, in windows of 6
    settings = {"count": 24, "save_steps": 1, "sharded": True}
    plans = {
        "whole": {**settings, "gradient_accumulation_steps": 3},
        "half": {**settings, "gradient_accumulation_steps": 3, "max_steps": 1},
    }
    # on a whole base process 1 goes on in smaller parts, which a sharded one must not have
    plans["half"] |= {"sharded": False, "plant": "no memory"}
    whole = values(several(2, runs, base, str(tmp_path), plans))[0]["whole"]
    checkpoint = tmp_path / "half" / "checkpoints" / "step-00000001"
    settings |= {"gradient_accumulation_steps": 2, "resume": str(checkpoint)}
    plans = {"rest": {**settings, "output_dir": str(tmp_path / "rest")}}
    for process in values(several(3, runs, base, str(tmp_path), plans)):
        rest = process["rest"]
        assert (rest["steps"], rest["tokens"]) == (whole["steps"], whole["tokens"]) == (2, 180)
        for name, value in whole["weights"].items():
            # sums of six gradients in another order, through one step of Adam
            np.testing.assert_allclose(rest["weights"][name], value, rtol=1e-4, atol=1e-5)


def test_a_refusal_on_one_process_leaves_the_processes_in_step(base: str, tmp_path: Path) -> None:
    good = ["good a", "good b", "good c", "good d"]
    windows = [
        good,
        ["nan", "good e", "data", "masked"],
        ["data", "good f", "data", "nan"],
        good[:1],
    ]
    whole, sharded = (
        values(
            several(
                2,
                run,
                base,
                str(tmp_path / name),
                name == "sharded",
                windows,
                gradient_accumulation_steps=2,
            )
        )
        for name in ("whole", "sharded")
    )
    for one, other in zip(whole, sharded, strict=True):
        assert_equal(one["state"], other["state"])
        for key in ("steps", "tokens", "refused", "error"):
            assert one[key] == other[key], key
        assert other["whole"] == []
    assert sharded[0]["refused"] == {"gradient": 2, "data": 4} and sharded[0]["error"] is None


def test_a_process_that_is_lost_in_an_evaluation_is_named(base: str, tmp_path: Path) -> None:
    left, _ = several(2, lost_in_an_evaluation, base, str(tmp_path / "run"))
    assert left.kind == "ProcessError" and left.status == 6, left.trace
    assert "process 1 no longer responds" in str(left.error)


def test_a_process_that_ends_early_ends_the_other_too(base: str, tmp_path: Path) -> None:
    settings = {"plant": "kill", "at": 1, "gradient_accumulation_steps": 2, "count": 13}
    ended = several(2, run, base, str(tmp_path / "run"), True, **settings)
    assert ended[0].kind == "ProcessError" and "process 1" in str(ended[0].error), ended[0].trace
    assert ended[0].seconds < 15  # far below the timeout of 20


@pytest.mark.parametrize(("quantization", "size"), [("nf4", 2), ("nf4", 3), (None, 2)])
def test_a_plan_of_a_share_is_within_15_percent(quantization: str | None, size: int) -> None:
    ended = values(several(size, measured, quantization))
    for share, plan, peak, planned in ended:
        assert plan == pytest.approx(share, rel=0.05)  # tables of codes are left out
        assert planned == pytest.approx(peak, rel=0.15)
