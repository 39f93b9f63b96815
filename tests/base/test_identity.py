"""Which base a model is: what rounding may change, what it may not, and what is said of a base that
is another one.
"""

import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rounded import flip_last_bit, round_otherwise
from simulated_cuda import simulated_cuda, to_cuda

import npt
from npt.base import identity as identity_module
from npt.base.identity import PARTS


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
    assert after.mismatch(before.as_record()) == f"{PARTS[part]} {ours}, expected {theirs}"


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


def test_a_saved_base_is_the_one_that_was_packed_on_loading(
    load_model, llama_folder, tmp_path
) -> None:
    load_model("nf4").save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(llama_folder / file, tmp_path / file)
    saved = npt.base_identity(npt.load_base(str(tmp_path), device="cpu")[0])
    assert saved.mismatch(npt.base_identity(load_model("nf4")).as_record()) is None


def test_entries_of_earlier_versions_are_passed_over(load_model) -> None:
    identity = npt.base_identity(load_model("nf4"))
    parts = {**identity.as_record()["base_parts"], "source": "2" * 64, "packed_on": "cuda"}
    assert identity.mismatch({"base_hash": "f" * 64, "base_parts": parts}) is None


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
    other.config.rope_parameters["rope_theta"] = 10001
    assert "configuration" in str(npt.base_identity(other).mismatch(identities[0].as_record()))
