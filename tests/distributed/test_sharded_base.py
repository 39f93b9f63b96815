"""A base that is sharded over two processes computes what the whole one does, bit for bit, and
hangs nowhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from several import several, values
from shard_work import assert_equal, attempted, computed, in_any_order, run

import npt
from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError, ModelError


@pytest.fixture(scope="module")
def base(llama_folder: Path, load_model: Any) -> str:
    return str(llama_folder)


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_two_shares_of_a_base_compute_what_the_whole_computes(
    base: str, quantization: str | None
) -> None:
    alone = computed(ProcessGroup(), base, quantization)
    for process, shared in enumerate(values(several(2, computed, base, quantization))):
        assert_equal(alone[f"process {process}"], shared[f"process {process}"])
        assert shared["figures"] == alone["figures"]
        assert shared["hash"] and (shared["whole"], shared["most"]) == ([], 1)  # a layer at a time
    assert len(alone["whole"]) == 4 * 9  # the same look, at a base that is whole


def test_processes_that_do_not_walk_in_step_hand_out_their_shares(base: str) -> None:
    assert values(several(2, in_any_order, base)) == [[True, True, True], [True, True]]


def test_what_a_sharded_base_cannot_do_is_refused(base: str) -> None:
    for errors in values(several(2, attempted, base)):
        assert (
            errors["shard"]
            == "the base is sharded already; load it again to shard it in another way"
        )
        assert (
            errors["detach"]
            == "layer 1 has become a FSDPNPTLlamaDecoderLayer and cannot be given back; load the"
            " base again"
        )
        assert (
            errors["end_to_end"]
            == "--strategy propagated and end_to_end do not support a sharded base; use --strategy"
            " local"
        )


def test_one_process_has_nobody_to_share_with(load_model: Any) -> None:
    model = load_model()
    with pytest.raises(ModelError, match="no NPT adapters"):
        npt.shard_base(model, ProcessGroup())
    npt.attach(model)
    with pytest.raises(
        ConfigError, match="there is one process, and nobody to share the base with"
    ):
        npt.shard_base(model, ProcessGroup())


def test_a_run_on_a_sharded_base_is_that_on_a_whole_one(base: str, tmp_path: Path) -> None:
    settings = {
        "smoke_test": True,
        "gradient_accumulation_steps": 2,
        "save_steps": 1,
        "eval_steps": 1,
        "count": 13,
    }  # the last window is uneven
    whole, sharded = (
        values(several(2, run, base, str(tmp_path / name), name == "sharded", **settings))
        for name in ("whole", "sharded")
    )
    for one, other in zip(whole, sharded, strict=True):
        assert_equal(one["weights"], other["weights"])
        for key in ("steps", "tokens", "seen", "fidelity"):
            assert one[key] == other[key], key
        assert other["whole"] == []


def test_a_refusal_on_one_process_leaves_the_processes_in_step(base: str, tmp_path: Path) -> None:
    good = ["good a", "good b", "good c", "good d"]
    windows = [
        good,
        ["nan", "good e", "data", "masked"],
        ["data", "good f", "data", "nan"],
        good[:1],
    ]
    whole, sharded = (
        values(several(2, run, base, str(tmp_path / name), name == "sharded", windows))
        for name in ("whole", "sharded")
    )
    for one, other in zip(whole, sharded, strict=True):
        assert_equal(one["state"], other["state"])
        for key in ("steps", "tokens", "refused", "error"):
            assert one[key] == other[key], key
        assert other["whole"] == []
    assert sharded[0]["refused"] == {"gradient": 2, "data": 4} and sharded[0]["error"] is None
    found = [
        [e["message"] for e in processes[0]["events"] if e["event"] == "diagnosis"]
        for processes in (whole, sharded)
    ]
    assert found[0] == found[1] and len(found[0]) == 2  # process 0 looked into them alone


@pytest.mark.parametrize("plant", ["kill"])
def test_a_process_that_ends_early_ends_the_other_too(
    base: str, tmp_path: Path, plant: str
) -> None:
    ended = several(
        2,
        run,
        base,
        str(tmp_path / "run"),
        True,
        plant=plant,
        at=1,
        gradient_accumulation_steps=2,
        count=13,
    )
    assert ended[0].kind == "ProcessError" and "process 1" in str(ended[0].error), ended[0].trace
    assert ended[0].seconds < 15  # far below the timeout of 20
