"""Which base a model is: what rounding may change, what it may not, and what is said of a base that
is another one.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rounded import flip_last_bit, round_otherwise
from simulated_cuda import simulated_cuda, to_cuda

import npt
from npt.base import identity as identity_module
from npt.base.identity import PARTS, source_hash


def change_code(model: Any) -> None:
    flip_last_bit(model.model.layers[2].self_attn.q_proj.weight.data)


def change_norm(model: Any) -> None:
    flip_last_bit(model.model.layers[0].input_layernorm.weight.data)


def change_embedding(model: Any) -> None:
    flip_last_bit(model.model.embed_tokens.weight.data)


def change_setting(model: Any) -> None:
    model.config.rms_norm_eps = 0.5


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "a code": (change_code, "codes"),
    "a norm": (change_norm, "dense"),
    "an embedding": (change_embedding, "dense"),
    "a setting": (change_setting, "config"),
}


def test_statistics_rounded_otherwise_keep_the_bases_identity(load_model) -> None:
    model = load_model("nf4")
    before = npt.base_identity(model)
    round_otherwise(model)
    after = npt.base_identity(model)
    assert after.strict != before.strict and after == replace(before, strict=after.strict)
    assert after.mismatch(before.as_record()) is None


@pytest.mark.parametrize("case", CHANGES)
def test_anything_else_makes_it_another_and_is_named_with_both_values(load_model, case) -> None:
    change, part = CHANGES[case]
    model = load_model("nf4")
    before = npt.base_identity(model)
    change(model)
    after = npt.base_identity(model)
    assert {name for name in PARTS if getattr(before, name) != getattr(after, name)} == {part}
    theirs, ours = getattr(before, part)[:12], getattr(after, part)[:12]
    assert after.mismatch(before.as_record()) == f"{PARTS[part]} {theirs} there, {ours} here"


def test_a_record_without_parts_is_compared_by_every_byte(load_model) -> None:
    model = load_model("nf4")
    record = {"base_hash": npt.base_hash(model)}
    assert npt.base_identity(model).mismatch(record) is None
    round_otherwise(model)
    after = npt.base_identity(model)
    hashes = f"{record['base_hash'][:12]} there, {after.strict[:12]} here"
    assert after.mismatch(record) == f"base hash {hashes}"


@pytest.mark.parametrize("parts", [None, 3, [], {}, {"config": 3, "codes": None}])
def test_parts_that_are_none_are_never_those_of_a_base(load_model, parts) -> None:
    record = {"base_hash": "f" * 64, "base_parts": parts}
    assert npt.base_identity(load_model("nf4")).mismatch(record) is not None


@pytest.mark.parametrize("quantization", ["nf4", None])
def test_is_the_same_on_a_gpu_and_brought_to_the_host_in_chunks(
    load_model, monkeypatch, quantization
) -> None:
    model = load_model(quantization)
    expected = npt.base_identity(model)
    monkeypatch.setattr(identity_module, "CHUNK", 4096)
    largest = max(parameter.nbytes for parameter in model.parameters())
    assert largest >= 4 * 4096
    with simulated_cuda() as simulation:
        to_cuda(model)
        del simulation.waits[:]
        found = npt.base_identity(model)
        shapes = [re.search(r"copy of \((.*)\) from cuda", wait) for wait in simulation.waits]
    copied = [
        math.prod(int(size) for size in shape[1].split(",") if size.strip())
        for shape in shapes
        if shape
    ]
    assert found == expected
    assert len(copied) > len(list(model.parameters())) and max(copied) <= 4096


class TestSource:
    """The checkpoint speaks for the codes, between kinds of device alone."""

    def test_stands_in_for_codes_of_another_kind_of_device(self, load_model) -> None:
        here = npt.base_identity(load_model("fp4"))
        assert here.packed_on == "cpu" and here.source is not None
        there = replace(here, codes="0" * 64, strict="1" * 64, packed_on="cuda")
        assert here.mismatch(there.as_record()) is None

    @pytest.mark.parametrize(
        ("there", "part"),
        [
            ({"packed_on": "cpu"}, "4-bit codes"),
            ({"packed_on": None}, "4-bit codes"),
            ({"source": "2" * 64}, "4-bit codes"),
            ({"source": None}, "4-bit codes"),
            ({"dense": "2" * 64}, "unpacked tensors"),
            ({"config": "2" * 64}, "configuration"),
        ],
        ids=str,
    )
    def test_stands_in_for_nothing_else(self, load_model, there, part) -> None:
        here = npt.base_identity(load_model("fp4"))
        other = replace(here, **{"codes": "0" * 64, "packed_on": "cuda", **there})
        assert str(here.mismatch(other.as_record())).startswith(f"{part} ")

    def test_is_not_known_of_a_base_that_was_not_packed_on_loading(
        self, load_model, llama_folder, tmp_path
    ) -> None:
        assert npt.base_identity(load_model(None)).source is None
        load_model("nf4").save_pretrained(tmp_path)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(llama_folder / file, tmp_path / file)
        packed = npt.base_identity(npt.load_base(str(tmp_path), device="cpu")[0])
        assert (packed.source, packed.packed_on) == (None, None)
        assert packed.mismatch(npt.base_identity(load_model("nf4")).as_record()) is None

    def test_depends_on_every_tensor_and_the_quantisation_not_on_files(
        self, llama_folder, tmp_path
    ) -> None:
        from transformers import LlamaForCausalLM

        model = LlamaForCausalLM.from_pretrained(llama_folder, dtype="auto")
        whole = source_hash(str(llama_folder), "nf4")
        model.save_pretrained(tmp_path / "parts", max_shard_size="40KB")
        assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
        assert whole is not None and source_hash(str(tmp_path / "parts"), "nf4") == whole
        assert source_hash(str(llama_folder), "fp4") != whole
        found = {whole}
        for name in ("model.layers.3.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"):
            model.get_parameter(name).data.mul_(1.5)
            model.save_pretrained(tmp_path / name)
            found.add(source_hash(str(tmp_path / name), "nf4"))
        assert len(found) == 4

    def test_of_a_checkpoint_that_cannot_be_read_again_is_none(self, tmp_path: Path) -> None:
        assert source_hash(str(tmp_path), "nf4") is None
        assert source_hash("no-such-team/no-such-model", "nf4") is None
        (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
        assert source_hash(str(tmp_path), "nf4") is None
        (tmp_path / "model.safetensors").unlink()
        (tmp_path / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "gone.safetensors"}})
        )
        assert source_hash(str(tmp_path), "nf4") is None


REWRITTEN: dict[str, dict[str, Any]] = {
    "a whole number": {"rope_theta": 10000},
    "the older name of a type": {"type": "default"},
    "all of a head": {"partial_rotary_factor": 1.0},
}


@pytest.mark.parametrize("case", REWRITTEN)
def test_a_setting_written_otherwise_is_the_same_base(load_model, case) -> None:
    model, other = load_model("nf4"), load_model("nf4")
    other.config.rope_parameters = {**other.config.rope_parameters, **REWRITTEN[case]}
    identities = [npt.base_identity(each) for each in (model, other)]
    for one, two in (identities, identities[::-1]):
        assert one.mismatch(two.as_record()) is None
        # of a version that hashed what was written
        parts = {**two.as_record()["base_parts"], "config": two.written}
        assert two.mismatch({"base_parts": parts}) is None
    other.config.rope_parameters["rope_theta"] = 10001
    assert "configuration" in str(npt.base_identity(other).mismatch(identities[0].as_record()))
