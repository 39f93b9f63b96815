"""Whose hooks only look, which forwards were replaced, and hooks around another computation."""

import pytest
import torch
from torch import nn

from npt.errors import ModelError
from npt.hooks import call_around, has_forward_hooks, may_change, only_looks

REGISTERS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)


@pytest.fixture
def module() -> nn.Linear:
    return nn.Linear(3, 3)


@pytest.mark.parametrize("register", REGISTERS)
def test_any_hook_may_change_a_value_while_it_is_there(module, register):
    handle = getattr(module, register)(lambda *_: None)
    assert may_change(module) and has_forward_hooks(module) == ("forward" in register)
    handle.remove()
    assert not may_change(module) and not has_forward_hooks(module)


def test_a_marked_hook_only_looks_but_another_one_may_change(module):
    module.register_forward_hook(only_looks(lambda *_: None))
    assert has_forward_hooks(module) and not may_change(module)
    module.register_forward_pre_hook(lambda *_: None)
    assert may_change(module)


def test_hooks_that_transformers_leaves_on_the_layers_only_look(load_model):
    model = load_model("nf4")
    model(torch.ones(1, 3, dtype=torch.int64), output_hidden_states=True, output_attentions=True)
    hooked = [module for module in model.modules() if has_forward_hooks(module)]
    assert hooked and not any(map(may_change, hooked))


class TestCallAround:
    def test_hooks_see_and_change_what_goes_in_and_comes_out(self, module):
        module.register_forward_pre_hook(
            lambda _, args, kwargs: ((args[0] + 1,), {"factor": kwargs["factor"] * 2}),
            with_kwargs=True,
        )
        module.register_forward_hook(lambda _, __, output: output + 100)
        output = call_around(module, "it", lambda x, factor: factor * x, torch.ones(2), factor=3)
        assert output.tolist() == [112, 112]

    def test_the_modules_own_forward_comes_back_behind_an_error_too(self, module):
        module.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            call_around(module, "it", lambda x: x, torch.ones(2))
        assert "forward" not in vars(module)

    def test_a_replaced_forward_is_refused_by_name(self, module):
        module.forward = lambda x: x
        with pytest.raises(ModelError, match="the forward of layer 3's mlp was replaced"):
            call_around(module, "layer 3's mlp", lambda x: x, torch.ones(2))


def test_a_hook_is_marked_under_the_former_name_too():
    from npt.base import hooks

    assert hooks.only_looks is only_looks
