"""A refused micro-batch's diagnosis: the number that is bad, and no trace of having looked."""

from __future__ import annotations

import math

import pytest
import torch

import npt
from npt.adapters.converted import adapter_parameters, npt_layers
from npt.config import NPTConfig
from npt.data.batch import Sample, collate
from npt.diagnostics.diagnose import diagnose


@pytest.fixture
def model(load_model):
    model = load_model()
    npt.attach(model, NPTConfig(rank=4, layers="1,3"))
    return model


def test_a_clean_micro_batch_has_no_finding_and_changes_nothing(model, batch) -> None:
    weights = {name: p.detach().clone() for name, p in adapter_parameters(model).items()}
    state = torch.get_rng_state()
    assert diagnose(model, batch) is None
    assert all(
        torch.equal(p, weights[name]) and p.grad is None
        for name, p in adapter_parameters(model).items()
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert {layer.npt.mode for _, layer in npt_layers(model)} == {"student"}


def test_a_bad_adapter_is_named_before_anything_is_computed(model, batch) -> None:
    model.model.layers[3].npt.B["up"].data[5, 2] = math.inf
    assert "model.layers.3.npt.B.up[5, 2] is inf" in str(diagnose(model, batch))


def test_a_bad_statistic_of_the_base_is_named_by_its_module(model, batch) -> None:
    model.model.layers[0].self_attn.k_proj.weight.quant_state.state2.absmax[0] = math.nan
    assert "model.layers.0.self_attn.k_proj" in str(diagnose(model, batch))


@pytest.mark.parametrize("look", [diagnose, npt.trace])
def test_documents_of_a_packed_row_are_looked_at_apart(model, look) -> None:
    masks = []

    def keep(module, arguments, keywords):
        masks.append(keywords["attention_mask"])

    model.model.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    assert (
        look(
            model,
            collate(
                [
                    Sample("a+b", (5, 6, 7, 8, 9), (-100, 6, -100, 8, 9), (2, 3)),
                    Sample("c", (5, 6, 7)),
                ],
                2,
            ),
        )
        is None
    )
    assert masks and all(mask.dtype == torch.bool for mask in masks)
    allowed = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert all(mask[0, 0].int().tolist() == allowed for mask in masks)


@pytest.mark.parametrize("student_only", [False, True])
def test_bad_logits_are_located_and_said_to_be_whose(model, batch, student_only) -> None:
    def spoil(module, arguments, output):
        output = output.clone()
        if not student_only or model.model.layers[1].npt.mode == "student":
            output[1, 2, 7] = math.nan
        return output

    model.lm_head.register_forward_hook(spoil)
    finding = diagnose(model, batch)
    assert finding is not None and finding.index == (1, 2, 7)
    assert finding.name == ("student logits" if student_only else "teacher logits")


def test_what_stands_at_padding_is_no_finding(model, batch) -> None:
    def spoil(module, arguments, output):
        output = output.clone()
        output[1, 6] = math.nan  # row 1 has five valid tokens
        return output

    model.lm_head.register_forward_hook(spoil)
    assert diagnose(model, batch) is None
