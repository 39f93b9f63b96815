"""What is measured of the modulation, against the terms that the layers themselves give, and that
the model is left as it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from students import moved
from torch import Tensor, nn

import npt
from npt.adapters.converted import adapter_parameters, npt_layers
from npt.config import PRODUCTS, NPTConfig
from npt.data.batch import Batch, batch_from_tensors
from npt.errors import DataError, ModelError
from npt.evaluation.modulation import measure_modulation

OLD: dict[str, Any] = {"targets": tuple(PRODUCTS)}


def make(load_model: Callable[..., nn.Module], scale: float = 0.2, **config: Any) -> nn.Module:
    """A student whose adapters are of this size, M included."""
    model = load_model()
    npt.attach(
        model, NPTConfig(**{"rank": 4, "layers": "1,3", "additive_scale": 0.7, **OLD, **config})
    )
    return moved(model, scale)


def shown(model: nn.Module, batch: Batch) -> dict[int, dict[str, Tensor]]:
    """The stages of the model's own forward at valid tokens, by layer: [N, O]."""
    stages: dict[int, dict[str, Tensor]] = {}
    valid = batch.attention_mask.bool()

    def look(index: int) -> Callable[[dict[str, Any]], None]:
        return lambda found: stages.setdefault(index, {}).update(
            {k: v[valid] for k, v in found.items() if v is not None}
        )

    for index, layer in npt_layers(model):
        layer.npt.observer = look(index)
    with torch.no_grad():
        model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
    for _, layer in npt_layers(model):
        layer.npt.observer = None
    return stages


def test_the_figures_are_those_of_the_terms_in_the_models_own_forward(load_model, batch) -> None:
    model = make(load_model)
    stages = shown(model, batch)
    found = measure_modulation(model, [batch])
    assert found.tokens == batch.tokens == 21
    assert found.mult_bound == 0.5
    assert list(found.layers) == [1, 3]
    for index, layer in found.layers.items():
        of = stages[index]
        # rel: two ways through the same 4-bit products, in fp32 with other groupings.
        assert layer["stream_rms"] == pytest.approx(
            float(of["stream"].double().square().mean().sqrt()), rel=1e-4
        )
        assert list(layer["targets"]) == ["gate", "up", "down"]
        for name, target in layer["targets"].items():
            m, s = of[f"m_{name}"].double(), of[f"s_{name}"].double()
            product = of["mlp" if name == "down" else name].double()
            assert target["mean"] == pytest.approx(float(m.mean()), rel=1e-4)
            assert target["std"] == pytest.approx(float(m.std(correction=0)), rel=1e-3)
            assert target["add_rms"] == pytest.approx(float(s.square().mean().sqrt()), rel=1e-3)
            assert target["product_rms"] == pytest.approx(
                float((product - s).square().mean().sqrt()), rel=1e-3
            )


def test_batches_add_up_whatever_their_padding(load_model, batch) -> None:
    model = make(load_model)
    rows = [
        batch_from_tensors(batch.input_ids[i : i + 1, :n], batch.attention_mask[i : i + 1, :n])
        for i, n in enumerate(batch.attention_mask.sum(dim=1).tolist())
    ]
    one, several = measure_modulation(model, [batch]), measure_modulation(model, rows)
    assert one.tokens == several.tokens
    for index, layer in one.layers.items():
        for name, target in layer["targets"].items():
            other = several.layers[index]["targets"][name]
            # rows alone take other kernels
            assert target["add_rms"] == pytest.approx(other["add_rms"], rel=1e-3)
            assert target["mean"] == pytest.approx(other["mean"], rel=1e-4)


@pytest.mark.parametrize("form", ["half_sigmoid", "one_plus_tanh", "unbounded", "sigmoid"])
@pytest.mark.parametrize("size", [0.0, 30.0])
def test_saturation_is_of_the_range_of_the_form(load_model, batch, form, size) -> None:
    found = measure_modulation(make(load_model, scale=size, mult_form=form), [batch])
    shares = [t["saturated"] for layer in found.layers.values() for t in layer["targets"].values()]
    if size and form != "unbounded":
        assert all(0.5 <= share <= 1 for share in shares)
    else:
        assert set(shares) == {0.0}


@pytest.mark.parametrize(
    ("modulation", "targets"),
    [
        ("additive", ("gate",)),
        ("multiplicative", ("up", "down")),
        ("additive", ("gate", "up", "down")),
    ],
)
def test_what_the_form_does_not_have_is_none(load_model, batch, modulation, targets) -> None:
    found = measure_modulation(make(load_model, modulation=modulation, targets=targets), [batch])
    for layer in found.layers.values():
        assert tuple(layer["targets"]) == targets
        for target in layer["targets"].values():
            assert (
                (target["mean"] is None)
                == (target["saturated"] is None)
                == (modulation == "additive")
            )
            assert (target["add_rms"] is None) == (modulation == "multiplicative")
            assert target["product_rms"] > 0


def test_numbers_that_are_not_finite_are_counted_and_end_nothing(load_model, batch) -> None:
    model = make(load_model)
    with torch.no_grad():
        model.get_parameter("model.layers.3.npt.M.gate")[5] = math.nan
    sound, hurt = measure_modulation(model, [batch]).layers.values()
    assert sound["targets"]["gate"]["bad"] == 0.0
    assert hurt["targets"]["gate"]["bad"] == pytest.approx(1 / 128)  # one channel of F
    assert math.isfinite(hurt["targets"]["gate"]["mean"])
    assert math.isnan(
        hurt["targets"]["down"]["product_rms"]
    )  # what comes after is NaN, and says so


def test_the_model_is_left_as_it_was(load_model, batch) -> None:
    model = make(load_model)
    model.train()
    observer = lambda stages: None  # noqa: E731 - must be the same object afterwards
    for _, layer in npt_layers(model):
        layer.npt.observer = observer
        layer.npt.mode = "floor"
    before, state = (
        {k: v.clone() for k, v in adapter_parameters(model).items()},
        torch.get_rng_state(),
    )
    measure_modulation(model, [batch])
    assert all(
        layer.npt.observer is observer and layer.npt.mode == "floor"
        for _, layer in npt_layers(model)
    )
    assert all(module.training for module in model.modules())
    assert all(
        torch.equal(value, before[name]) for name, value in adapter_parameters(model).items()
    )
    assert torch.equal(torch.get_rng_state(), state)


def test_a_dict_of_it_is_json_with_layers_by_their_index(load_model, batch) -> None:
    values = json.loads(
        json.dumps(measure_modulation(make(load_model), [batch]).as_dict(), allow_nan=False)
    )
    assert list(values["layers"]) == ["1", "3"]
    gate = {"product_rms", "add_rms", "saturated", "bad", "mean", "std"}
    assert values["layers"]["1"]["targets"]["gate"].keys() == gate


def test_no_batch_and_foreign_tokens_and_a_plain_model_are_refused(load_model, batch) -> None:
    model = make(load_model)
    with pytest.raises(DataError, match="no token"):
        measure_modulation(model, [])
    foreign = batch_from_tensors(torch.tensor([[3, 4, 500]]), torch.ones(1, 3, dtype=torch.int64))
    with pytest.raises(DataError, match="token id 500 outside the vocabulary"):
        measure_modulation(model, [foreign])
    with pytest.raises(ModelError):
        measure_modulation(load_model(), [batch])


def test_the_stream_has_the_size_of_its_shift_and_no_multiplier(load_model, batch) -> None:
    model = make(load_model, targets=("stream", "up"), modulation="multiplicative")
    stages, found = shown(model, batch), measure_modulation(model, [batch])
    for index, layer in found.layers.items():
        shift = stages[index]["s_stream"]
        look = layer["targets"]["stream"]
        assert look["add_rms"] == pytest.approx(float(shift.square().mean().sqrt()), rel=1e-5)
        assert look["mean"] is None and look["saturated"] is None
        assert (
            layer["targets"]["up"]["add_rms"] is None
            and layer["targets"]["up"]["saturated"] is not None
        )
