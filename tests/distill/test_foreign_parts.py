"""What others put around the parts of a converted layer, or hook to them, is part of training as it
is of the model's own forward.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from students import moved
from torch import Tensor

import npt
from faults.agreement import by_calls
from faults.bench import Around
from npt.adapters.converted import adapter_parameters, decoder_layers
from npt.batch import Batch, batch_from_tensors
from npt.config import NPTConfig, TrainConfig
from npt.distill.strategies import drive
from npt.errors import ModelError
from npt.hooks import only_looks

NAMES = ("local", "propagated", "end_to_end")
FORMS = (NPTConfig(rank=4, layers="1-3"), NPTConfig(rank=4, layers="1-3", residual="keep"))
WHERE = 2  # the layer that somebody else has changed
every_strategy = pytest.mark.parametrize("strategy", NAMES)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def student(model: Any, form: NPTConfig = FORMS[0]) -> Any:
    npt.attach(model, form)
    return moved(model, 0.2)


@pytest.fixture
def padded() -> Batch:
    ids = torch.randint(3, 128, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    return batch_from_tensors(ids, mask)


def trained(model: Any, batch: Batch, strategy: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the strategy."""
    parameters = adapter_parameters(model)
    for parameter in parameters.values():
        parameter.grad = None
    sums = drive(model, batch, TrainConfig(strategy=strategy, regularization_lambda=0.0))
    return sums.loss, {name: p.grad.clone() for name, p in parameters.items()}


def by_modules(model: Any, batch: Batch, strategy: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The same from calls of whole decoder layers alone and automatic differentiation."""
    loss = by_calls(model, batch, TrainConfig(strategy=strategy, regularization_lambda=0.0))
    parameters = adapter_parameters(model)
    return loss.detach(), dict(
        zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True)
    )


@pytest.fixture(scope="module")
def fresh(load_model: Callable[..., Any]) -> Callable[[], Any]:
    """A 4-bit base of which nobody has changed anything, anew at every call."""
    return load_model


@pytest.fixture(scope="module")
def unchanged(fresh: Callable[[], Any]) -> Callable[[NPTConfig, Batch, str], dict[str, Tensor]]:
    """The gradients with nothing foreign, which are those of calls of whole layers as well: made
    once for each form and strategy.
    """
    made: dict[tuple[str, str], dict[str, Tensor]] = {}

    def of(form: NPTConfig, batch: Batch, strategy: str) -> dict[str, Tensor]:
        key = (form.residual, strategy)
        if key not in made:
            model = student(fresh(), form)
            found = trained(model, batch, strategy)
            assert_same(found, by_modules(model, batch, strategy))
            made[key] = found[1]
        return made[key]

    return of


def assert_same(
    found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]
) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=2e-5, atol=0)
    for name, gradient in found[1].items():
        # fp32 sums of up to 128 terms in another order, carried through four layers; relative to
        # the largest entry
        assert float((gradient - expected[1][name]).abs().max()) <= 5e-5 * float(
            expected[1][name].abs().max()
        ), name


def wavy(x: Tensor) -> Tensor:
    return x + 0.5 * torch.sin(3 * x)


def behind(part: str) -> Callable[[Any], Any]:
    return lambda layer: layer.get_submodule(part).register_forward_hook(
        lambda _, __, output: wavy(output)
    )


def in_front(part: str) -> Callable[[Any], Any]:
    return lambda layer: layer.get_submodule(part).register_forward_pre_hook(
        lambda _, args: (wavy(args[0]), *args[1:])
    )


def doubled_gradient(layer: Any) -> Any:
    return layer.mlp.down_proj.register_full_backward_hook(lambda _, inputs, __: (2 * inputs[0],))


def in_place(layer: Any) -> Any:
    return layer.mlp.down_proj.register_forward_hook(lambda _, __, output: output.mul_(1.5))


PARTS = (
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "mlp.act_fn",
    "mlp",
    "self_attn.o_proj",
    "post_attention_layernorm",
)
HOOKS: dict[str, Callable[[Any], Any]] = {
    **{f"after {part}": behind(part) for part in PARTS},
    **{f"before {part}": in_front(part) for part in PARTS},
    "after the layer": lambda layer: layer.register_forward_hook(
        lambda _, __, output: wavy(output)
    ),
    "before the layer": lambda layer: layer.register_forward_pre_hook(
        lambda _, args: (wavy(args[0]), *args[1:])
    ),
    "gradient after down_proj": doubled_gradient,
    "in place after down_proj": in_place,
}


# each hook under a strategy of single layers and the one of the whole student, the forms in turns
@pytest.mark.parametrize(
    ("hook", "form", "strategy"),
    [
        (hook, FORMS[(i + j) % len(FORMS)], strategy)
        for i, hook in enumerate(HOOKS)
        for j, strategy in enumerate((NAMES[i // 2 % 2], "end_to_end"))
    ],
)
def test_a_hook_that_changes_a_value_is_part_of_loss_and_gradient(
    fresh, unchanged, padded, strategy, form, hook
):
    model, before = student(fresh(), form), unchanged(form, padded, strategy)
    HOOKS[hook](decoder_layers(model)[WHERE])
    found = trained(model, padded, strategy)
    assert_same(found, by_modules(model, padded, strategy))
    assert any(not torch.allclose(found[1][name], before[name], rtol=1e-3) for name in found[1])


@every_strategy
@pytest.mark.parametrize("part", ["mlp.act_fn", "mlp.down_proj", "mlp"])
def test_observers_see_it_and_gradients_pass_them(fresh, padded, strategy, part):
    model = student(fresh())
    behind(part)(layer := decoder_layers(model)[WHERE])
    alone = trained(model, padded, strategy)
    layer.npt.observer = lambda stages: None
    beside = trained(model, padded, strategy)
    assert torch.equal(alone[0], beside[0]) and all(
        torch.equal(alone[1][name], beside[1][name]) for name in alone[1]
    )


@every_strategy
def test_hooks_that_only_look_see_everything_and_change_no_bit(fresh, padded, strategy):
    model = student(fresh())
    unseen = trained(model, padded, strategy)
    seen = []
    for part in PARTS[:3]:
        decoder_layers(model)[WHERE].get_submodule(part).register_forward_hook(
            only_looks(lambda *call: seen.append(call))
        )
    found = trained(model, padded, strategy)
    assert len(seen) >= 3
    assert torch.equal(found[0], unseen[0]) and all(
        torch.equal(found[1][name], unseen[1][name]) for name in found[1]
    )


@pytest.mark.parametrize(
    ("part", "form", "strategy"),
    [
        (part, FORMS[(i + j) % len(FORMS)], strategy)
        for i, part in enumerate(("gate_proj", "up_proj", "down_proj"))
        for j, strategy in enumerate(NAMES)
    ],
)
def test_a_wrapped_mlp_projection_is_part_of_loss_and_gradient(
    fresh, unchanged, padded, strategy, form, part
):
    model, before = student(fresh(), form), unchanged(form, padded, strategy)
    mlp = decoder_layers(model)[WHERE].mlp
    setattr(mlp, part, Around(getattr(mlp, part), seed=1))
    found = trained(model, padded, strategy)
    assert_same(found, by_modules(model, padded, strategy))
    assert any(not torch.allclose(found[1][name], before[name], rtol=1e-3) for name in found[1])


def lora(model: Any, targets: list[str]) -> Any:
    """PEFT's LoRA inside a model, far from its start at zero."""
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    )
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(wrapped.named_parameters()):
            if "lora_" in name:
                parameter.copy_(0.3 * normal(seed, *parameter.shape))
    return wrapped


@every_strategy
@pytest.mark.parametrize(
    "targets",
    [["gate_proj", "up_proj", "down_proj"], ["q_proj", "o_proj"], ["lm_head"]],
    ids="+".join,
)
def test_a_lora_of_peft_trains_as_the_same_one_merged(load_model, padded, strategy, targets):
    merged = student(lora(load_model(None), targets).merge_and_unload())
    model = student(lora(load_model(None), targets).get_base_model())
    assert_same(trained(model, padded, strategy), trained(merged, padded, strategy))


@every_strategy
@pytest.mark.parametrize("place", ["", "mlp"], ids=["layer", "mlp"])
def test_a_replaced_forward_that_training_would_leave_out_is_refused(
    fresh, padded, strategy, place
):
    model = student(fresh())
    module = decoder_layers(model)[WHERE].get_submodule(place)
    own = module.forward
    module.forward = lambda *args, **kwargs: 2 * own(*args, **kwargs)
    with pytest.raises(ModelError, match=rf"the forward of layer {WHERE}.* was replaced"):
        trained(model, padded, strategy)
