"""The post-mortem bundle holds what it takes to see why a run stopped."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import npt
from npt.adapters.attach import adapter_parameters
from npt.config import NPTConfig
from npt.data.batch import collate
from npt.data.samples import Sample
from npt.distill.postmortem import write_postmortem
from npt.distill.transaction import Refusal

WINDOW = [collate([Sample("a", (5, 6, 7)), Sample("b", (8,))], 2), collate([Sample("c", (9, 999))], 2)]
REFUSALS = [Refusal("loss", "loss is nan", 0, ("a", "b")), Refusal("data", "token id 999", 1, ("c",)), Refusal("norm", "inf")]


@pytest.fixture
def student(load_model: Callable[..., nn.Module]) -> nn.Module:
    model = load_model()
    npt.attach(model, NPTConfig(rank=2, layers="3"))
    return model


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    parameters = adapter_parameters(model)
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1, fused=True)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_the_bundle_holds_adapters_moments_and_random_state(student, tmp_path) -> None:
    optimizer = stepped(student)
    folder = write_postmortem(tmp_path, student, optimizer, WINDOW, REFUSALS, 12)
    assert folder == tmp_path / "postmortem" / "step-00000012"
    state = load_file(folder / "state.safetensors")
    for name, parameter in adapter_parameters(student).items():
        assert torch.equal(state[f"adapter.{name}"], parameter.detach())
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(state[f"optimizer.{name}.{key}"], value)
    assert torch.equal(state["rng.cpu"], torch.get_rng_state())


def test_the_bundle_holds_the_window_and_the_refusals(student, tmp_path) -> None:
    folder = write_postmortem(tmp_path, student, stepped(student), WINDOW, REFUSALS, 12)
    batches = load_file(folder / "window.safetensors")
    for index, batch in enumerate(WINDOW):
        assert torch.equal(batches[f"{index}.input_ids"], batch.input_ids)
        assert torch.equal(batches[f"{index}.attention_mask"], batch.attention_mask)
    record = json.loads((folder / "postmortem.json").read_text())
    assert record["step"] == 12
    assert record["sample_ids"] == [["a", "b"], ["c"]]
    assert [(r["kind"], r["micro_batch"], r["sample_ids"]) for r in record["refusals"]] == [
        ("loss", 0, ["a", "b"]),
        ("data", 1, ["c"]),
        ("norm", None, []),
    ]


def test_a_poisoned_adapter_and_a_run_without_a_step_are_recorded_as_well(student, tmp_path) -> None:
    with torch.no_grad():
        student.model.layers[3].npt.A[0, 0] = math.nan
    optimizer = torch.optim.AdamW(adapter_parameters(student).values(), lr=0.1)
    folder = write_postmortem(tmp_path, student, optimizer, WINDOW, REFUSALS, 0)
    state = load_file(folder / "state.safetensors")
    assert state["adapter.model.layers.3.npt.A"][0, 0].isnan()
    assert not [key for key in state if key.startswith("optimizer.")]


def test_writing_it_changes_neither_weights_nor_random_state(student, tmp_path) -> None:
    optimizer = stepped(student)
    weights = {name: p.detach().clone() for name, p in adapter_parameters(student).items()}
    random_state = torch.get_rng_state()
    write_postmortem(tmp_path, student, optimizer, WINDOW, REFUSALS, 1)
    assert all(torch.equal(p.detach(), weights[name]) for name, p in adapter_parameters(student).items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [p.name for p in (tmp_path / "postmortem").iterdir()] == ["step-00000001"]
