"""The modulation along a text, against the model's own passes and the terms of each token."""

import json
from typing import Any

import pytest
import torch
from students import moved
from torch import Tensor

import npt
from npt.adapters.converted import adapter_mode, adapter_parameters, npt_layers
from npt.config import PRODUCTS
from npt.errors import ConfigError, ModelError
from npt.evaluation.modulation_map import modulation_map, token_texts
from npt.files import to_json

IDS = [1, 5, 9, 4, 9, 30, 2, 7]


OLD: dict[str, Any] = {"layers": "1,3", "targets": tuple(PRODUCTS)}


def norms(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values, dim=-1)


def student_of(load_model: Any, **config: Any) -> Any:
    model = load_model()
    npt.attach(model, npt.NPTConfig(**{**OLD, "rank": 4, "additive_scale": 0.7, **config}))
    return moved(model, 0.2)


@torch.no_grad()
def stages_of(model: Any, mode: Any, inputs: dict[int, Tensor] | None = None) -> Any:
    """Each converted layer's stages, in `mode`, of the given inputs or the model's own."""
    stages: dict[int, dict[str, Any]] = {index: {} for index, _ in npt_layers(model)}
    with adapter_mode(model, mode):
        for index, layer in npt_layers(model):
            layer.npt.observer = stages[index].update
        model.eval()
        if inputs is None:
            model(torch.tensor([IDS]), use_cache=False)
        else:
            for index, layer in npt_layers(model):
                x = layer.post_attention_layernorm(inputs[index])
                stages[index]["mlp"] = layer.mlp(x)
                gate, up = layer.mlp.gate_proj(x), layer.mlp.up_proj(x)
                stages[index] |= {"gate": gate, "up": up}
        for _, layer in npt_layers(model):
            layer.npt.observer = None
    return stages


@pytest.mark.parametrize("residual", ["modulate", "keep"])
def test_the_change_is_that_of_the_mlps_output(load_model, residual) -> None:
    model = student_of(load_model, residual=residual)
    found = modulation_map(model, IDS)
    own = stages_of(model, "student")
    # an unchanged stream is h
    read = {
        i: stages["h"] if stages["stream"] is None else stages["stream"]
        for i, stages in own.items()
    }
    plain = stages_of(model, "teacher", read)
    assert found.layers == (1, 3) and found.change.shape == (len(IDS), 2)
    for place, index in enumerate(found.layers):
        seen, base = own[index], plain[index]["mlp"][0]
        moved = norms(seen["mlp"][0] - base)
        torch.testing.assert_close(found.change[:, place], moved / norms(base))


def test_kl_and_likeliest_tokens_are_those_of_the_two_models(load_model) -> None:
    model = student_of(load_model)
    found = modulation_map(model, torch.tensor([IDS]))
    logs = {}
    for mode in ("teacher", "student"):
        with torch.no_grad(), adapter_mode(model, mode):
            logits = model(torch.tensor([IDS]), use_cache=False).logits[0, :-1]
            logs[mode] = torch.log_softmax(logits, -1)
    p, q = logs["teacher"], logs["student"]
    torch.testing.assert_close(found.kl[1:], (p.exp() * (p - q)).sum(-1))
    assert torch.equal(found.teacher_first[1:], p.argmax(-1))
    assert torch.equal(found.student_first[1:], q.argmax(-1))
    assert found.kl[0].isnan() and found.teacher_first[0] == -1


def test_a_student_that_changes_nothing_has_zeros(load_model) -> None:
    model = load_model()
    npt.attach(model, npt.NPTConfig(**OLD, rank=4, residual="keep"))
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.zero_()
    found = modulation_map(model, IDS)
    assert float(found.change.abs().max()) == 0
    assert float(found.kl[1:].abs().max()) == 0


def test_the_model_stays_as_it_was(load_model) -> None:
    model = student_of(load_model)
    model.train()
    seen: list[Any] = []
    for _, layer in npt_layers(model):
        layer.npt.observer = seen.append
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    modulation_map(model, IDS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random) and seen == []
    for _, layer in npt_layers(model):
        assert layer.npt.observer == seen.append and layer.npt.mode == "student" and layer.training
        assert not layer.mlp.gate_proj._forward_hooks and not layer._forward_hooks


def test_what_cannot_be_measured_is_refused(load_model) -> None:
    model = student_of(load_model)
    with pytest.raises(ConfigError, match="outside 0 to"):
        modulation_map(model, [1, 10**6])
    npt.detach(model)
    with pytest.raises(ModelError, match="no NPT adapters"):
        modulation_map(model, IDS)


def test_numbers_that_are_not_finite_stay_so(load_model, tiny) -> None:
    model = student_of(load_model)
    with torch.no_grad():
        next(iter(adapter_parameters(model).values())).fill_(torch.nan)
    found = modulation_map(model, IDS)
    assert found.change[:, 0].isnan().all() and found.kl.isnan().all()
    assert json.loads(to_json(found.as_dict(tiny[1])))["change"][0][0] is None


def test_plain_values_have_three_digits(tiny) -> None:
    model, tokenizer = tiny
    ids = tokenizer("def area(self):\n    return 2 * self")["input_ids"]
    plain = modulation_map(npt.teacher_view(model), ids).as_dict(tokenizer)
    assert len(plain["tokens"]) == len(plain["kl"]) == len(plain["change"]) == len(ids)
    assert plain["teacher_first"][0] is None and isinstance(plain["student_first"][1], str)
    assert all(len(f"{x:.3g}") >= len(f"{x:g}") for row in plain["change"] for x in row)


def test_the_texts_of_tokens_make_up_the_text(tiny) -> None:
    _, tokenizer = tiny
    text = "if x:\n\treturn  '<script>'  # naïve 日本 ok"
    ids = tokenizer(text)["input_ids"]
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids) and "".join(texts[1:]).replace("\ufffd", "") == text
    assert "日" in texts or any("日" in each for each in texts)
