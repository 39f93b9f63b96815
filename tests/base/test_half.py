"""A base made to compute in 16 bit is the one that transformers loads so, and not a worse one."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from npt.base.half import compute_in
from npt.base.linear import quantized_linears
from npt.base.load import EMBEDDED_FOLDER, load_base
from npt.base.precision import audit_precision

HALVES = [torch.bfloat16, torch.float16]
IDS = torch.arange(3, 67).view(2, 32)


@pytest.mark.parametrize("dtype", HALVES)
def test_an_unquantised_base_equals_the_one_that_was_loaded_so(
    load_model, llama_folder, dtype
) -> None:
    model = load_model(None)
    compute_in(model, dtype)
    loaded = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=dtype)
    assert torch.equal(model(IDS).logits, loaded(IDS).logits)
    assert model(IDS).logits.dtype == dtype


@pytest.mark.parametrize("dtype", HALVES)
def test_a_4_bit_base_equals_the_one_that_was_loaded_so(load_model, llama_folder, dtype) -> None:
    model = load_model("nf4")
    compute_in(model, dtype)
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    loaded = AutoModelForCausalLM.from_pretrained(
        llama_folder, dtype=dtype, quantization_config=settings
    )
    for _, module in quantized_linears(loaded):
        module.support_avx512bf16_for_cpu = False  # repacked, it would be another product
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, loaded(IDS).logits)


@pytest.mark.parametrize("quantization", ["nf4", None])
@pytest.mark.parametrize("dtype", HALVES)
def test_the_audit_finds_the_dtype_everywhere_and_the_packed_bytes_untouched(
    load_model, quantization, dtype
) -> None:
    model = load_model(quantization)
    before = [module.weight.data.clone() for _, module in quantized_linears(model)]
    compute_in(model, dtype)
    report = audit_precision(model, dtype)
    assert set(report.compute_dtype) == {str(dtype).removeprefix("torch.")}
    assert all(
        torch.equal(old, module.weight.data)
        for old, (_, module) in zip(before, quantized_linears(model), strict=True)
    )


def test_rotary_frequencies_stay_in_fp32_and_weights_that_are_tied_stay_tied() -> None:
    model, _ = load_base("tiny")
    frequencies = model.model.rotary_emb.inv_freq.clone()
    compute_in(model, torch.bfloat16)
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    loaded = AutoModelForCausalLM.from_pretrained(EMBEDDED_FOLDER, dtype=torch.bfloat16)
    assert torch.equal(model(IDS).logits, loaded(IDS).logits)
