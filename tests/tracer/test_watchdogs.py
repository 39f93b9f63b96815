"""Watchdogs: each names exactly the first bad number, and says nothing about numbers that only look
bad.
"""

import math
from typing import Any

import pytest
import torch
from torch import nn

import npt
from npt.adapters.converted import adapter_parameters
from npt.batch import Sample, collate
from npt.config import NPTConfig
from npt.errors import NPTError, NumericalError
from npt.tracer.watchdogs import base_fault, moments_fault, require, tensor_fault

NAN, INF = math.nan, math.inf
BAD = pytest.mark.parametrize("value", [NAN, INF, -INF])


# --- named tensors


@BAD
def test_the_first_bad_tensor_is_named_with_its_first_bad_element(value) -> None:
    named = {"a": torch.ones(3), "empty": torch.ones(0), "b": torch.ones(2, 4), "c": torch.ones(2)}
    assert tensor_fault(named) is None
    named["b"][1, 2] = named["b"][1, 3] = named["c"][0] = value
    finding = tensor_fault(named)
    assert finding is not None and (finding.name, finding.index) == ("b", (1, 2))
    assert f"b[1, 2] is {value}" in finding.message and "2 of 8 elements: not" in finding.message


def test_a_scalar_and_integers_are_taken() -> None:
    assert tensor_fault({"step": torch.tensor(3.0)}) is None
    finding = tensor_fault({"step": torch.tensor(NAN)})
    assert finding is not None and finding.index == () and finding.message.startswith("step is nan")
    assert tensor_fault({}) is None


def test_finite_and_huge_is_named_only_with_a_limit() -> None:
    tensor = torch.ones(4)
    tensor[3] = -7e35
    assert tensor_fault({"a": tensor}) is None
    finding = tensor_fault({"a": tensor}, limit=1e6)
    assert finding is not None and finding.index == (3,) and "larger than 1e+06" in finding.message
    assert tensor_fault({"a": torch.full((4,), 1e6)}, limit=1e6) is None


@BAD
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "step"])
def test_a_bad_moment_is_named(key, value) -> None:
    parameters, optimizer = stepped()
    assert moments_fault(named_moments(parameters, optimizer)) is None
    optimizer.state[parameters["b"]][key].view(-1)[-1] = value
    finding = moments_fault(named_moments(parameters, optimizer))
    assert finding is not None and finding.name == f"{key} of b"


def test_a_negative_second_moment_is_named_a_negative_first_is_normal() -> None:
    parameters, optimizer = stepped()
    optimizer.state[parameters["a"]]["exp_avg"][0] = -1.0
    assert moments_fault(named_moments(parameters, optimizer)) is None
    optimizer.state[parameters["b"]]["exp_avg_sq"][1] = -1e-12
    finding = moments_fault(named_moments(parameters, optimizer))
    assert finding is not None and (finding.name, finding.index) == ("exp_avg_sq of b", (1,))
    assert "cannot be negative" in finding.message


def named_moments(parameters: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {f"{k} of {n}": v for n, p in parameters.items() for k, v in optimizer.state[p].items()}


def stepped() -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    parameters = {name: nn.Parameter(torch.ones(3)) for name in "ab"}
    optimizer = torch.optim.AdamW(parameters.values())
    for p in parameters.values():
        p.grad = torch.ones(3)
    optimizer.step()
    return parameters, optimizer


# --- the base


@pytest.mark.parametrize("quantization", ["nf4", "fp4", None])
def test_a_sound_base_is_sound_with_adapters_and_without(load_model, quantization) -> None:
    model = load_model(quantization)
    assert base_fault(model) is None
    npt.attach(model, NPTConfig(rank=4, layers="1,3"))
    assert base_fault(model) is None


@BAD
@pytest.mark.parametrize("statistic", ["state2.absmax", "offset", "code", "state2.code"])
def test_a_bad_statistic_of_a_4_bit_weight_is_named_by_its_module(
    load_model, statistic, value
) -> None:
    model = load_model()
    state = model.model.layers[2].mlp.up_proj.weight.quant_state
    for part in statistic.split("."):
        state = getattr(state, part)
    state.view(-1)[-1] = value
    finding = base_fault(model)
    assert finding is not None
    assert finding.name == f"model.layers.2.mlp.up_proj: {statistic}"
    assert finding.index == (() if state.ndim == 0 else (state.numel() - 1,))


def test_a_weight_that_dequantises_to_infinity_is_named(load_model) -> None:
    model = load_model()
    state = model.model.layers[1].mlp.gate_proj.weight.quant_state
    state.state2.absmax.fill_(3e38)
    state.state2.code.fill_(3.0)
    finding = base_fault(model)
    assert (
        finding is not None and finding.name == "model.layers.1.mlp.gate_proj: dequantised weight"
    )


@pytest.mark.parametrize("pattern", [0x7FC0, 0xFFFF, 0x7F80])
def test_packed_bytes_that_read_as_nan_are_only_codes(load_model, pattern) -> None:
    model = load_model()
    packed = model.model.layers[0].mlp.down_proj.weight.data
    codes = torch.tensor([pattern & 0xFF, pattern >> 8]).repeat(packed.numel() // 2)
    packed.view(torch.uint8).view(-1).copy_(codes)
    assert not torch.isfinite(packed.view(-1).view(torch.bfloat16)).any()
    assert base_fault(model) is None


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.input_layernorm.weight", "lm_head.weight"]
)
def test_an_unquantised_tensor_of_the_base_is_named(load_model, name) -> None:
    model = load_model()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[5] = NAN
    finding = base_fault(model)
    assert finding is not None and finding.name == name


def test_adapters_are_not_the_bases_business(load_model) -> None:
    model = load_model()
    npt.attach(model, NPTConfig(rank=4, layers="1,3"))
    parameters = adapter_parameters(model)
    with torch.no_grad():
        parameters["model.layers.3.npt.B.up"][7, 1] = NAN
    assert base_fault(model) is None
    finding = tensor_fault(parameters)
    assert finding is not None and (finding.name, finding.index) == (
        "model.layers.3.npt.B.up",
        (7, 1),
    )


def test_a_look_changes_nothing(load_model) -> None:
    model = load_model()
    before = npt.base_hash(model)
    base_fault(model)
    assert npt.base_hash(model) == before


# --- raising


def test_what_was_found_is_raised_as_one_line_for_the_user() -> None:
    require(None)
    with pytest.raises(NumericalError, match=r"a\[1\] is nan") as raised:
        require(tensor_fault({"a": torch.tensor([1.0, NAN])}))
    assert isinstance(raised.value, NPTError) and raised.value.exit_status == 2
    assert "\n" not in str(raised.value)


# --- the diagnosis of a refused micro-batch


@pytest.fixture
def model(load_model):
    model = load_model()
    npt.attach(model, NPTConfig(rank=4, layers="1,3"))
    return model


def test_documents_of_a_packed_row_are_looked_at_apart(model) -> None:
    masks = []

    def keep(module, arguments, keywords):
        masks.append(keywords["attention_mask"])

    model.model.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    packed = Sample("a+b", (5, 6, 7, 8, 9), (-100, 6, -100, 8, 9), (2, 3))
    assert npt.trace(model, collate([packed, Sample("c", (5, 6, 7))], 2)) is None
    assert masks and all(mask.dtype == torch.bool for mask in masks)
    allowed = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert all(mask[0, 0].int().tolist() == allowed for mask in masks)
