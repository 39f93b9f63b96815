"""A base that is sharded over two processes computes what the whole one does, bit for bit, and hangs nowhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from several import several, values
from shard_work import assert_equal, attempted, computed, in_any_order, run

import npt
from npt.distill.ranks import Ranks
from npt.errors import ConfigError, ModelError


@pytest.fixture(scope="module")
def base(llama_folder: Path, load_model: Any) -> str:
    return str(llama_folder)


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_two_shares_of_a_base_compute_what_the_whole_computes(base: str, quantization: str | None) -> None:
    alone = computed(Ranks(), base, quantization)
    for rank, shared in enumerate(values(several(2, computed, base, quantization))):
        assert_equal(alone[f"rank {rank}"], shared[f"rank {rank}"])
        assert shared["figures"] == alone["figures"]
        assert shared["hash"] and shared["whole"] == []
    assert len(alone["whole"]) == 4 * 9  # the same look, at a base that is whole


def test_ranks_that_do_not_walk_in_step_hand_out_their_shares(base: str) -> None:
    assert values(several(2, in_any_order, base)) == [[True, True, True], [True, True]]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("shard", "the base is sharded already; load it again"),
        ("detach", "layer 1 has become a FSDPNPTLlamaDecoderLayer and cannot be given back; load the base again"),
        ("end_to_end", "--strategy end_to_end needs every layer of the base, which is sharded; use --strategy local"),
    ],
)
def test_what_a_sharded_base_cannot_do_is_refused(base: str, what: str, said: str) -> None:
    assert all(said in error for error in values(several(2, attempted, base, what)))


def test_one_process_has_nobody_to_share_with(load_model: Any) -> None:
    model = load_model()
    with pytest.raises(ModelError, match="no NPT adapters"):
        npt.shard_base(model, Ranks())
    npt.attach(model)
    with pytest.raises(ConfigError, match="there is one process, and nobody to share the base with"):
        npt.shard_base(model, Ranks())


def test_a_run_on_a_sharded_base_is_that_on_a_whole_one(base: str, tmp_path: Path) -> None:
    settings = {
        "smoke_test": True,
        "gradient_accumulation_steps": 2,
        "save_steps": 2,
        "eval_steps": 3,
        "count": 37,
    }  # the last window is uneven
    whole, sharded = (values(several(2, run, base, str(tmp_path / name), name == "sharded", **settings)) for name in ("whole", "sharded"))
    for one, other in zip(whole, sharded, strict=True):
        assert_equal(one["weights"], other["weights"])
        for key in ("steps", "tokens", "seen", "fidelity"):
            assert one[key] == other[key], key
        assert other["whole"] == []


@pytest.mark.parametrize("plant", ["raise", "kill", "term"])
def test_a_rank_that_ends_early_ends_the_other_too(base: str, tmp_path: Path, plant: str) -> None:
    ended = several(2, run, base, str(tmp_path / "run"), True, plant=plant, at=3, gradient_accumulation_steps=2)
    if plant == "term":
        assert [one["status"] for one in values(ended)] == [143, 143]
    else:
        assert ended[0].kind == "RankError" and "rank 1" in str(ended[0].error), ended[0].trace
        assert ended[0].seconds < 15  # far below the timeout of 20
