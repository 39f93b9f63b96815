import json
import math
from copy import deepcopy
from dataclasses import asdict
from operator import attrgetter

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import npt
from gpu_sections.runner import _as_it_was
from npt.base import precision
from npt.base.linear import UpcastEmbedding, UpcastLinear
from npt.base.precision import (
    audit_precision,
    enforce_policy,
    fp32_products,
    matmul_precision,
    policy_dtype,
    product_error,
    quantization_of,
    set_matmul_precision,
)
from npt.errors import PrecisionError
from npt.forensics.student import student_entry
from npt.packed import quantized_linears
from this_machine import machine

CPU = torch.device("cpu")

NAME = "model.layers.1.mlp.gate_proj"


@pytest.fixture
def model(load_model):
    return load_model("nf4")


class TestAudit:
    def test_reports_what_was_found(self, model):
        npt.attach(model, npt.NPTConfig(layers="1", rank=4, targets=("gate", "up", "down")))
        report = audit_precision(model)
        assert report.quantization == "nf4"
        # seven linears in each of four layers, embedding and head
        assert report.compute_dtype == {"float32": 30}
        # embedding, head and nine norms
        assert report.stored_dtype == {"uint8": 28, "bfloat16": 2 + 9}
        assert report.adapter_dtype == {"float32": 7}
        assert report.matmul_precision == torch.get_float32_matmul_precision()
        assert json.loads(json.dumps(asdict(report)))["compute_dtype"] == {"float32": 30}

    def test_an_unquantised_model_is_judged_by_what_is_expected_of_it(self, load_model):
        model = load_model(None, use_fp16=True)
        assert policy_dtype(model) == torch.float16
        report = audit_precision(model, torch.float16)
        assert (report.quantization, report.compute_dtype) == (None, {"float16": 30})
        with pytest.raises(
            PrecisionError,
            match=r"expected float32, but model\.embed_tokens computes in float16 \(and 29 more\)",
        ):
            audit_precision(model)

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            ({"compute_dtype": torch.float16}, "float16 forward, float32 backward"),
            ({"compute_dtype": None}, "the dtype of its first input"),
            ({"compute_type_is_set": False}, "the dtype of its first input"),
            ({"support_avx512bf16_for_cpu": True}, r"bfloat16 \(CPU repacking\)"),
            ({"weight.quant_state.dtype": torch.bfloat16}, "float32 forward, bfloat16 backward"),
            ({"weight.quant_state": None}, "an unknown dtype until it is quantised"),
        ],
    )
    def test_names_the_one_4bit_layer_that_would_compute_otherwise(self, model, spoil, message):
        audit_precision(model)
        ((name, value),) = spoil.items()
        owner, _, last = f".{name}".rpartition(".")
        part = model.get_submodule(NAME)
        setattr(attrgetter(owner[1:])(part) if owner else part, last, value)
        message = rf"expected float32, but {NAME} computes in {message}: load"
        with pytest.raises(PrecisionError, match=message):
            audit_precision(model)

    @pytest.mark.parametrize(
        ("name", "plain"), [("model.embed_tokens", nn.Embedding), ("lm_head", nn.Linear)]
    )
    def test_a_bf16_module_without_its_upcast_is_named(self, model, name, plain):
        model.get_submodule(name).__class__ = plain
        with pytest.raises(PrecisionError, match=rf"{name} computes in bfloat16"):
            audit_precision(model)

    @pytest.mark.parametrize("quantization", ["nf4", None])
    def test_an_adapter_in_another_dtype_is_named(self, load_model, quantization):
        model = load_model(quantization)
        npt.attach(model, npt.NPTConfig(layers="1-2", rank=4, targets=("gate", "up", "down")))
        audit_precision(model)
        for parameter in model.model.layers[2].npt.parameters():
            parameter.data = parameter.data.bfloat16()  # a cast of the module leaves them fp32
        with pytest.raises(
            PrecisionError, match=r"adapter model\.layers\.2\.npt\.A is bfloat16 \(and 6 more\)"
        ):
            audit_precision(model)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast_is_found(self, model, dtype):
        with (
            torch.autocast("cpu", dtype=dtype),
            pytest.raises(PrecisionError, match=rf"autocast to {str(dtype)[6:]} is on for cpu"),
        ):
            audit_precision(model)
        audit_precision(model)


def test_enforcing_repairs_all_that_the_audit_finds_twice_as_once(model):
    for _, module in quantized_linears(model):
        module.compute_dtype, module.compute_type_is_set = None, False
        module.support_avx512bf16_for_cpu = True
        module.weight.quant_state.dtype = torch.bfloat16
    model.model.embed_tokens.__class__, model.lm_head.__class__ = nn.Embedding, nn.Linear
    with pytest.raises(PrecisionError):
        audit_precision(model)
    for _ in range(2):
        enforce_policy(model)
        assert audit_precision(model).compute_dtype == {"float32": 30}
    assert (type(model.model.embed_tokens), type(model.lm_head)) == (UpcastEmbedding, UpcastLinear)


@torch.no_grad()
@pytest.mark.parametrize("quantization", ["nf4", "fp4"])
def test_the_stream_is_fp32_from_a_bf16_embedding_to_a_bf16_head(load_model, batch, quantization):
    model = load_model(quantization)
    assert model.model.embed_tokens.weight.dtype == model.lm_head.weight.dtype == torch.bfloat16
    output = model(batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=True)
    assert {state.dtype for state in output.hidden_states} == {torch.float32}
    assert output.logits.dtype == torch.float32
    expected = output.hidden_states[-1] @ model.lm_head.weight.float().T
    assert_close(output.logits, expected)  # default tolerance of fp32: the same sums of 64 products
    assert torch.equal(
        output.hidden_states[0], model.model.embed_tokens.weight.float()[batch.input_ids]
    )


@torch.no_grad()
@pytest.mark.parametrize("quantization", ["nf4", None])
def test_tokens_are_added_to_a_loaded_base(load_model, batch, quantization):
    model = load_model(quantization)
    expected = model(batch.input_ids).logits
    size = model.config.vocab_size
    for resized in (deepcopy(model), model):
        resized.resize_token_embeddings(size + 2, mean_resizing=False)
        assert resized.get_input_embeddings().weight.shape[0] == size + 2
        audit_precision(resized)
        logits = resized(batch.input_ids).logits
        assert torch.equal(logits[..., :size], expected)
        assert torch.isfinite(resized(batch.input_ids.new_tensor([[size + 1]])).logits).all()


def test_the_upcast_embedding_is_exact_and_keeps_its_padding_row():
    module = nn.Embedding(10, 4, padding_idx=2).to(torch.float16)
    module.__class__ = UpcastEmbedding
    ids = torch.arange(10)
    assert module(ids).dtype == torch.float32
    assert torch.equal(module(ids).to(torch.float16), module.weight)
    assert torch.equal(module(torch.tensor([2])), torch.zeros(1, 4))


class TestNames:
    @pytest.mark.parametrize("quantization", ["nf4", None])
    def test_tied_weights_stay_tied(self, quantization):
        model, _ = npt.load_base("tiny", quantization=quantization, device="cpu")
        assert model.config.tie_word_embeddings
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert "lm_head.weight" not in dict(model.named_parameters())
        assert quantization is None or (type(model.model.embed_tokens), type(model.lm_head)) == (
            UpcastEmbedding,
            UpcastLinear,
        )


def test_the_kind_of_quantisation_is_read_off_the_modules(load_model):
    assert quantization_of(load_model("nf4")) == "nf4"
    assert quantization_of(load_model("fp4")) == "fp4"
    assert quantization_of(load_model(None)) is None
    mixed = load_model("nf4")
    mixed.get_submodule(NAME).weight.quant_type = "fp4"
    assert quantization_of(mixed) == "mixed"


def test_auto_changes_nothing_on_the_cpu(load_model):
    try:
        for setting in ("high", "auto"):
            set_matmul_precision(setting, load_model())
            expected = {"high": "high", "auto": "highest"}[setting]
            assert torch.get_float32_matmul_precision() == expected
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("exact", "fast", "expected"),
    [
        (1e-7, 3e-4, "high"),
        (1e-7, 2e-3, "highest"),
        (1e-7, 1e-7, "highest"),
        (1e-7, math.nan, "highest"),
    ],
)
def test_auto_is_chosen_by_the_measured_error(load_model, monkeypatch, exact, fast, expected):
    model, errors = load_model(), {"highest": exact, "high": fast}
    monkeypatch.setattr(precision, "product_error", lambda _, asked: errors[asked])
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True, raising=False)
    try:
        set_matmul_precision("auto", model)
        assert torch.get_float32_matmul_precision() == expected
    finally:
        torch.set_float32_matmul_precision("highest")


def test_products_in_fp32_are_exact_to_its_rounding(load_model):
    """Sums of at most 128 products in fp32: its 24 bits leave 6e-8 each."""
    assert 0 < product_error(load_model(), "highest") < 1e-6


def test_a_product_that_is_nan_is_the_largest_error(load_model):
    model = load_model()
    model.lm_head.weight.data[3, 5] = math.nan
    assert math.isnan(product_error(model, "highest"))


@pytest.fixture
def newer_interface():
    """torch's newer interface allows TF32, as `TrainingArguments(tf32=True)` does."""
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    for backend in backends:
        backend.fp32_precision = "none"
    torch.backends.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()
    yield backends[0]
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("newer_interface")
@pytest.mark.parametrize(
    "recorded",
    [
        lambda model: audit_precision(model).matmul_precision,
        lambda model: student_entry(model, {}, "", 1)["matmul_precision"],
        lambda model: machine(torch.device("cpu"))["matmul_precision"],
        lambda model: matmul_precision(),
    ],
)
def test_what_the_newer_interface_set_is_recorded(model, recorded):
    npt.attach(model, npt.NPTConfig(layers="1", rank=4))
    assert recorded(model) == "high"


@pytest.mark.parametrize("context", [fp32_products, lambda setting: _as_it_was(CPU)])
def test_what_the_newer_interface_set_is_put_back(newer_interface, context):
    with context("highest"):
        set_matmul_precision("highest", None)
        assert newer_interface.fp32_precision == "ieee"
    assert newer_interface.fp32_precision == "tf32"
    assert matmul_precision() == "high"


@pytest.mark.parametrize("setting", ["medium", "high", "highest"])
def test_what_the_older_interface_set_is_read(setting):
    with fp32_products(setting):
        assert matmul_precision() == torch.get_float32_matmul_precision() == setting
