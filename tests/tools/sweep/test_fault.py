"""The planted fault: activations of another size within the context, and as before after it."""

from __future__ import annotations

import pytest
import torch

import npt
from npt.adapters.converted import npt_layers
from npt.tools.sweep.run import enlarged
from npt.tools.sweep.settings import ProbeConfig


@pytest.mark.parametrize("place", ["attention", "embedding"])
def test_activations_are_enlarged_within_the_context_alone(load_model, batch, place) -> None:
    model = load_model()
    npt.attach(model, npt.NPTConfig(layers="2", rank=4))
    layer, seen = npt_layers(model)[0][1], []
    layer.npt.observer = lambda stages: seen.append(
        {name: stages[name].clone() for name in ("h", "a") if name in stages}
    )
    probe = ProbeConfig(fault_step=2, fault_scale=1e4, fault_place=place)

    def forward():
        with torch.no_grad():
            model.model(batch.input_ids, batch.attention_mask, batch.position_ids)
        return next(entry for entry in reversed(seen) if entry)

    before = forward()
    with enlarged(model, probe):
        within = forward()
    with enlarged(model, probe, armed=False):
        unarmed = forward()
    after = forward()
    assert all(
        torch.equal(before[name], other[name]) for name in before for other in (after, unarmed)
    )
    if place == "attention":
        assert torch.equal(within["a"], before["a"] * 1e4) and torch.equal(within["h"], before["h"])
    else:
        # Every layer adds to the stream what it makes of the normed stream, which the size of the
        # embedding leaves as it is.
        assert (
            within["h"].norm() > 1e2 * before["h"].norm()
            and within["a"].norm() < 1e1 * before["a"].norm()
        )


def test_the_teacher_is_hit_as_well(load_model, batch) -> None:
    model = load_model()
    npt.attach(model, npt.NPTConfig(layers="2", rank=4))
    with npt.adapters_disabled(model), torch.no_grad():
        before = model(batch.input_ids, batch.attention_mask).logits
        with enlarged(model, ProbeConfig(fault_step=2)):
            within = model(batch.input_ids, batch.attention_mask).logits
    assert not torch.allclose(before, within)
