"""Views: teacher and student at once, out of one model that stays as it was."""

import gc
import weakref

import pytest
import torch
from transformers import LlamaForCausalLM

import npt
from npt.adapters.converted import adapter_mode, adapter_parameters, npt_layers
from npt.errors import ModelError
from npt.evaluation.view import mode_view

IDS = torch.tensor([[9, 17, 40, 3, 77, 21, 8]])
VIEWS = {
    "teacher": npt.teacher_view,
    "student": npt.student_view,
    "floor": lambda model: mode_view(model, "floor"),
}


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("own_mode", ["student", "teacher", "floor"])
@pytest.mark.parametrize("mode", VIEWS)
def test_a_view_computes_its_mode_whatever_the_models_is(student, mode, own_mode) -> None:
    with adapter_mode(student, mode):
        expected = logits(student)
    view = VIEWS[mode](student)
    with adapter_mode(student, own_mode):
        own = logits(student)
        assert torch.equal(logits(view), expected)
        assert {layer.npt.mode for _, layer in npt_layers(student)} == {own_mode}
        assert torch.equal(logits(student), own)


def test_a_view_of_a_view_is_a_view_of_the_model(student) -> None:
    teacher, own = npt.teacher_view(student), npt.student_view(student)
    assert torch.equal(logits(npt.student_view(teacher)), logits(own))
    assert torch.equal(logits(npt.teacher_view(own)), logits(teacher))


def test_everything_is_shared_but_the_settings(student) -> None:
    view = npt.student_view(student)
    assert type(view) is LlamaForCausalLM and view.device == student.device
    assert all(
        one is other for one, other in zip(view.parameters(), student.parameters(), strict=True)
    )
    assert list(view.state_dict()) == list(student.state_dict())
    assert view.model is student.model and view.lm_head is student.lm_head
    view.generation_config.num_assistant_tokens = 3
    view.config.bos_token_id = 99
    assert student.generation_config.num_assistant_tokens != 3 and student.config.bos_token_id != 99


def test_a_views_hooks_are_its_own_and_the_models_run_once(student) -> None:
    calls = []
    student.register_forward_hook(lambda *_: calls.append("model"))
    view = npt.teacher_view(student)
    view.register_forward_pre_hook(lambda *_: calls.append("view"))
    logits(view)
    assert calls == ["view", "model"]
    logits(student)
    assert calls == ["view", "model", "model"]


def test_gradients_flow_through_a_view_as_through_the_model(student) -> None:
    gradients = []
    for model in (student, npt.student_view(student)):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        gradients.append(torch.autograd.grad(loss, list(adapter_parameters(student).values())))
    assert all(torch.equal(one, other) and one.any() for one, other in zip(*gradients, strict=True))


def test_views_need_adapters_and_end_with_them(student, load_model) -> None:
    with pytest.raises(ModelError, match=r"npt\.attach"):
        npt.student_view(load_model())
    view = npt.student_view(student)
    npt.detach(student)
    with pytest.raises(ModelError, match="no NPT adapters"):
        logits(view)


def test_a_view_keeps_no_adapter_alive_that_was_detached(student) -> None:
    view = npt.student_view(student)
    adapter = weakref.ref(student.model.layers[1].npt)
    npt.detach(student)
    gc.collect()
    assert adapter() is None
    assert view is not None


@pytest.mark.parametrize("mode", ["teacher", "student"])
def test_a_view_generates_what_the_model_generates_in_that_mode(student, mode) -> None:
    settings = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 12, "do_sample": False}
    with adapter_mode(student, mode):
        expected = student.generate(input_ids=IDS, **settings)
    assert torch.equal(VIEWS[mode](student).generate(input_ids=IDS, **settings), expected)
