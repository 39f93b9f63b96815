"""Measures of a student on one batch, against numbers computed by hand from its own tensors."""

from __future__ import annotations

import pytest
import torch

import npt
from npt.adapters.converted import adapter_parameters, npt_layers
from npt.tools.sweep.inspect_student import inspect_student


def attached(load_model, **settings):
    model = load_model()
    npt.attach(
        model,
        npt.NPTConfig(**{"layers": "3", "rank": 4, "targets": ("gate", "up", "down"), **settings}),
    )
    return model, npt_layers(model)[0][1]


def recorded(model, batch):
    """Everything that the one converted layer shows of the batch's valid tokens."""
    layer, stages = npt_layers(model)[0][1], {}
    layer.npt.observer = stages.update
    with torch.no_grad():
        model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids,
        )
    layer.npt.observer = None
    return {
        name: t.reshape(-1, t.shape[-1])[batch.valid_index].double()
        for name, t in stages.items()
        if t is not None
    }


def shake(model, size: float) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter += size * torch.randn(parameter.shape, generator=generator)


def rms(tensor):
    return tensor.square().mean().sqrt().item()


def test_the_measures_are_what_the_tensors_say(load_model, batch) -> None:
    model, _ = attached(load_model)
    shake(model, 0.2)
    stages = recorded(model, batch)
    with npt.adapters_disabled(model), torch.no_grad():
        states = model.model(
            batch.input_ids, batch.attention_mask, batch.position_ids, output_hidden_states=True
        )
    found = inspect_student(model, batch)
    m = torch.cat([stages[f"m_{target}"].flatten() for target in ("gate", "up", "down")])
    assert (found.m_min, found.m_max) == pytest.approx((m.min().item(), m.max().item()))
    # Beta is 0.5: saturated are those further than 0.495 from 1.
    assert found.saturated == pytest.approx(((m - 1).abs() > 0.495).double().mean().item())
    assert found.additive_to_residual == pytest.approx(
        (stages["s_down"].norm() / stages["stream"].norm()).item()
    )
    ratios = [
        (stages[f"s_{t}"].norm() / (stages[t] - stages[f"s_{t}"]).norm()).item()
        for t in ("gate", "up")
    ]
    assert found.additive_to_product == pytest.approx(max(ratios))
    assert found.finite and found.bad_layer == 3
    # hidden_states[-1] is after the final norm, so the teacher's stream there is found by the
    # layer's own parts.
    h = states.hidden_states[3]
    layer = npt_layers(model)[0][1]
    with torch.no_grad():
        inputs = npt.adapters.stream.open_stream(model, batch)
        with npt.adapters_disabled(model):
            t = inputs.rows(layer(h, **inputs.context_of(layer)))
    # fp32 streams
    assert found.residual_ratio == pytest.approx(rms(stages["o"]) / rms(t.double()), rel=1e-5)


def test_a_fresh_student_has_multipliers_of_one(load_model, batch) -> None:
    model, _ = attached(load_model)
    found = inspect_student(model, batch)
    assert (found.m_min, found.m_max, found.saturated, found.dead) == (1.0, 1.0, 0.0, 0.0)
    assert found.additive_to_residual is not None and 0 < found.additive_to_residual < 1e-3


@pytest.mark.parametrize(
    ("form", "low", "high", "dead"),
    [
        ("sigmoid", 0.5, 1.5, False),
        ("half_sigmoid", 0.5, 1.0, False),
        ("one_plus_tanh", 0.0, 2.0, True),
    ],
)
def test_only_a_form_that_reaches_zero_has_dead_channels(
    load_model, batch, form, low, high, dead
) -> None:
    model, _ = attached(load_model, mult_form=form)
    shake(model, 100.0)
    found = inspect_student(model, batch)
    assert (found.m_min, found.m_max) == (low, high)
    assert found.saturated is not None and found.dead is not None
    # about half of the channels are driven to the lower end
    assert found.saturated > 0.9 and (found.dead > 0.3) == dead


def test_an_unbounded_form_is_never_saturated(load_model, batch) -> None:
    model, _ = attached(load_model, mult_form="unbounded")
    shake(model, 100.0)
    found = inspect_student(model, batch)
    assert found.saturated == 0.0 and found.m_max is not None and found.m_max > 1e3


@pytest.mark.parametrize(
    ("modulation", "absent"), [("additive", "m_min"), ("multiplicative", "additive_to_residual")]
)
def test_a_term_that_the_form_does_not_have_is_none(load_model, batch, modulation, absent) -> None:
    model, _ = attached(load_model, modulation=modulation)
    assert getattr(inspect_student(model, batch), absent) is None


def test_the_first_bad_number_is_found_in_the_order_of_the_pass(load_model, batch) -> None:
    model, layer = attached(load_model)
    with torch.no_grad():
        layer.npt.M["up"][0, 0] = float("nan")
    found = inspect_student(model, batch)
    assert (found.finite, found.bad_layer, found.bad_stage) == (False, 3, "m_up")


def test_a_bad_stream_before_the_layer_is_found_there(load_model, batch) -> None:
    model, _ = attached(load_model)
    with torch.no_grad():
        model.model.layers[2].input_layernorm.weight[0] = float("inf")
    found = inspect_student(model, batch)
    assert (found.finite, found.bad_layer, found.bad_stage) == (False, 3, "h")


def test_padding_does_not_count(load_model, batch) -> None:
    from dataclasses import replace

    model, _ = attached(load_model)
    shake(model, 0.2)
    ids = torch.where(batch.attention_mask.bool(), batch.input_ids, 77)
    assert inspect_student(model, batch).measures() == pytest.approx(
        inspect_student(model, replace(batch, input_ids=ids)).measures()
    )


def test_observers_and_modes_are_as_before(load_model, batch) -> None:
    model, layer = attached(load_model)
    seen: list[int] = []
    layer.npt.observer = lambda stages: seen.append(len(stages))
    before = layer.npt.observer
    inspect_student(model, batch)
    assert layer.npt.observer is before and layer.npt.mode == "student" and not seen
