import pytest
import torch
from token_students import IDS, student

import npt
from npt.adapters.converted import npt_layers
from npt.adapters.layer import multiplier
from npt.errors import ConfigError, ModelError, NumericalError


@torch.no_grad()
@pytest.mark.parametrize("token", [0, 2, -1])
def test_is_what_the_adapter_makes_of_that_tokens_attention(load_model, token):
    model = student(load_model)
    attention = {}
    hooks = [
        layer.self_attn.register_forward_hook(
            lambda _, __, output, i=i: attention.update({i: output[0]})
        )
        for i, layer in npt_layers(model)
    ]
    found = npt.modulation_of(model, IDS, token)
    for hook in hooks:
        hook.remove()
    assert (found.token, found.token_id) == (token % 5, IDS[token])
    for index, layer in npt_layers(model):
        z = layer.npt.code(attention[index])[0, token]
        assert torch.equal(found.codes[index], z)
        for target in ("gate", "up", "down"):
            m, s = found.terms[index][target]
            # the same products for one token and for five sum in other orders: fp32
            torch.testing.assert_close(m, multiplier(layer.npt.M[target] @ z, 0.5))
            torch.testing.assert_close(s, 0.4 * (layer.npt.B[target] @ z))


@pytest.mark.parametrize(
    ("modulation", "has_m", "has_s"), [("additive", False, True), ("multiplicative", True, False)]
)
def test_forms_without_a_term_have_none(load_model, modulation, has_m, has_s):
    found = npt.modulation_of(student(load_model, modulation=modulation, targets=("gate",)), IDS)
    assert found.terms.keys() == {1, 2} and found.terms[1].keys() == {"gate"}
    m, s = found.terms[1]["gate"]
    assert (m is not None, s is not None) == (has_m, has_s)


def test_the_model_is_left_as_it_was(load_model):
    model = student(load_model)
    model.train()
    seen: list = []
    for _, layer in npt_layers(model):
        layer.npt.observer = seen.append
        layer.npt.mode = "teacher"
    npt.modulation_of(model, IDS)
    assert seen == []
    assert all(
        layer.npt.observer == seen.append and layer.npt.mode == "teacher"
        for _, layer in npt_layers(model)
    )
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("ids", "token", "message"),
    [
        ([], -1, r"shape \[0\]|shape \[1, 0\]"),
        ([[1, 2], [3, 4]], 0, r"shape \[2, 2\]"),
        ([1.5, 2.0], 0, r"float32 of shape"),
        ([1, 128], 0, r"outside 0 to 127"),
        ([-1, 2], 0, r"outside 0 to 127"),
        (IDS, 5, r"there is no token 5: the text has tokens -5 to 4"),
        (IDS, -6, r"there is no token -6"),
    ],
)
def test_tokens_that_do_not_exist_are_refused(load_model, ids, token, message):
    with pytest.raises(ConfigError, match=message):
        npt.modulation_of(student(load_model), ids, token)


def test_a_model_without_adapters_is_refused(load_model):
    with pytest.raises(ModelError, match="no NPT adapters"):
        npt.modulation_of(load_model(), IDS)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_modulation_is_refused_by_its_place(load_model, poison):
    model = student(load_model)
    with torch.no_grad():
        model.model.layers[2].npt.B["up"][3, 1] = poison
    with pytest.raises(NumericalError, match="layer 2: the up modulation of token 4 is not finite"):
        npt.modulation_of(model, IDS)
