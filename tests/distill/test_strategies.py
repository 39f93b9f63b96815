"""The strategies against slow references built of plain transformers layers, and what must not change their results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import npt
from npt.adapters.attach import adapter_parameters, npt_layers
from npt.config import NPTConfig, TrainConfig
from npt.data.batch import Batch, batch_from_tensors, collate
from npt.data.samples import Sample
from npt.distill.strategies import STRATEGIES, MicroBatch

# fp32 sums of a few hundred terms, in another order than the reference's: a few units of 2^-24 times their square root,
# carried through four layers. Relative to the largest entry, because single entries may cancel.
ROUNDING = 2e-5

NAMES = ("local", "end_to_end")
PAD = 2
FORMS = (
    NPTConfig(rank=4, layers="all"),
    NPTConfig(rank=3, layers="1,3", targets=("gate",), modulation="additive"),
    NPTConfig(rank=3, layers="2", targets=("up", "down"), modulation="multiplicative"),
    NPTConfig(rank=5, layers="0-2", targets=("down",), additive_scale=1.0, mult_bound=0.9),
    NPTConfig(rank=4, layers="upper_half", residual="keep"),
)


def form_id(config: NPTConfig) -> str:
    return f"{config.modulation}-{'+'.join(config.targets)}-{config.layers}-{config.residual}"


def config_for(name: str, kl: float = 0.0) -> TrainConfig:
    return TrainConfig(strategy=name, regularization_lambda=0.3, logit_kl_weight=kl if name == "end_to_end" else 0.0)


def move_adapters(model: nn.Module) -> None:
    """Away from the start, where M = 0 and B is tiny and half of the maths would go untested."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def run(model: nn.Module, batch: Batch, config: TrainConfig) -> tuple[MicroBatch, dict[str, Tensor]]:
    """Sums and gradients of one micro-batch."""
    parameters = adapter_parameters(model)
    for parameter in parameters.values():
        parameter.grad = None
    sums = STRATEGIES[config.strategy](model, batch, config)
    return sums, {name: p.grad.clone() for name, p in parameters.items()}


def assert_near(actual: Tensor, expected: Tensor, what: str, tolerance: float = ROUNDING) -> None:
    error = float((actual.double() - expected.double()).abs().max())
    scale = float(expected.abs().max())
    assert error <= tolerance * scale, f"{what}: off by {error} at scale {scale}"


def assert_same_result(
    one: tuple[MicroBatch, dict[str, Tensor]], other: tuple[MicroBatch, dict[str, Tensor]], tolerance: float = ROUNDING
) -> None:
    assert one[0].tokens == other[0].tokens
    for name in ("loss", "nmse", "reg", "kl", "layer_nmse"):
        assert_near(getattr(one[0], name), getattr(other[0], name), name, tolerance)
    for name, gradient in one[1].items():
        assert_near(gradient, other[1][name], name, tolerance)


def assert_identical(one: tuple[MicroBatch, dict[str, Tensor]], other: tuple[MicroBatch, dict[str, Tensor]]) -> None:
    for name in ("loss", "nmse", "reg", "kl", "layer_nmse"):
        assert torch.equal(getattr(one[0], name), getattr(other[0], name)), name
    for name, gradient in one[1].items():
        assert torch.isfinite(gradient).all(), name
        assert torch.equal(gradient, other[1][name]), name


# --- the slow reference -----------------------------------------------------------------------------------------------


@dataclass
class Watched:
    """h, a and the output of every decoder layer of one forward of the model."""

    h: dict[int, Tensor] = field(default_factory=dict)
    a: dict[int, Tensor] = field(default_factory=dict)
    out: dict[int, Tensor] = field(default_factory=dict)


@contextmanager
def watching(model: nn.Module) -> Iterator[Watched]:
    seen = Watched()
    handles = []
    for index, layer in enumerate(model.model.layers):

        def on_layer(_: nn.Module, args: tuple[Any, ...], output: Tensor, index: int = index) -> None:
            seen.h[index], seen.out[index] = args[0], output

        def on_attention(_: nn.Module, __: Any, output: tuple[Tensor, ...], index: int = index) -> None:
            seen.a[index] = output[0]

        handles += [layer.register_forward_hook(on_layer), layer.self_attn.register_forward_hook(on_attention)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def forward(model: nn.Module, batch: Batch) -> Any:
    return model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        output_hidden_states=True,
        use_cache=False,
    )


def modulation(layer: nn.Module, target: str, a: Tensor) -> tuple[Tensor | float, Tensor | float, Tensor]:
    """m, s and their energy for one target, written as in the formula: m = 1 + beta * (2 sigmoid(M A a) - 1)."""
    adapter, config = layer.npt, layer.npt.config
    m: Tensor | float = 1.0
    s: Tensor | float = 0.0
    energy = a.new_zeros(a.shape[:-1])
    if target in adapter.M:
        m = 1 + config.mult_bound * (2 * torch.sigmoid(a @ adapter.A.T @ adapter.M[target].T) - 1)
        energy = energy + ((m - 1) ** 2).mean(-1)
    if target in adapter.B:
        s = config.additive_scale * (a @ adapter.A.T @ adapter.B[target].T)
        energy = energy + (s**2).mean(-1)
    return m, s, energy


def converted_output(layer: nn.Module, h: Tensor, a: Tensor) -> Tensor:
    """o of one NPT layer, from its plain modules."""
    stream = h + a if layer.npt.config.residual == "keep" else h
    x = layer.post_attention_layernorm(stream)
    product = {"gate": layer.mlp.gate_proj(x), "up": layer.mlp.up_proj(x)}
    for target in ("gate", "up"):
        m, s, _ = modulation(layer, target, a)
        product[target] = m * product[target] + s
    m, s, _ = modulation(layer, "down", a)
    return stream + m * layer.mlp.down_proj(nn.functional.silu(product["gate"]) * product["up"]) + s


def nmse_sum(o: Tensor, t: Tensor, batch: Batch) -> Tensor:
    """Token by token, over the valid ones."""
    total = o.new_zeros(())
    for row, column in batch.attention_mask.nonzero().tolist():
        total = total + (o[row, column] - t[row, column]).pow(2).sum() / t[row, column].pow(2).sum()
    return total


def energy_sum(layer: nn.Module, a: Tensor, batch: Batch) -> Tensor:
    energy = sum(modulation(layer, target, a)[2] for target in ("gate", "up", "down"))
    return (energy * batch.attention_mask).sum()


def reference(base: nn.Module, model: nn.Module, batch: Batch, config: TrainConfig) -> tuple[MicroBatch, dict[str, Tensor]]:
    """The same sums and gradients, with one autograd graph over everything and the untouched base as the teacher."""
    with torch.no_grad(), watching(base) as teacher:
        taught = forward(base, batch)
    with watching(model) as student:
        learnt = forward(model, batch)
    # transformers' own collection of states, on both models: the last entry is behind the final norm.
    for index in range(len(base.model.layers) - 1):
        assert torch.equal(taught.hidden_states[index + 1], teacher.out[index])
        assert torch.equal(learnt.hidden_states[index + 1], student.out[index])
    layers = dict(npt_layers(model))
    if config.strategy == "local":
        states = {i: (converted_output(layer, teacher.h[i], teacher.a[i]), teacher.a[i]) for i, layer in layers.items()}
    else:
        states = {i: (student.out[i], student.a[i]) for i in layers}
    nmses = torch.stack([nmse_sum(o, teacher.out[i], batch) for i, (o, _) in states.items()])
    regs = torch.stack([energy_sum(layers[i], a, batch) for i, (_, a) in states.items()])
    loss = nmses.mean() + config.regularization_lambda * regs.mean()
    kl = torch.zeros(())
    if config.logit_kl_weight:
        valid = batch.attention_mask.bool()
        log_p, log_q = (torch.log_softmax(out.logits[valid], -1) for out in (taught, learnt))
        kl = nn.functional.kl_div(log_q, log_p, log_target=True, reduction="sum")
        loss = loss + config.logit_kl_weight * kl
    parameters = adapter_parameters(model)
    gradients = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    sums = MicroBatch(loss.detach(), nmses.mean().detach(), regs.mean().detach(), kl.detach(), nmses.detach(), batch.tokens)
    return sums, gradients


@pytest.mark.parametrize("quantization", ["nf4", None])
@pytest.mark.parametrize("form", FORMS, ids=form_id)
@pytest.mark.parametrize(("name", "kl"), [("local", 0.0), ("end_to_end", 0.0), ("end_to_end", 0.7)])
def test_losses_and_gradients_equal_the_plain_reference(load_model, batch, quantization, form, name, kl) -> None:
    base, model = load_model(quantization), load_model(quantization)
    npt.attach(model, form)
    move_adapters(model)
    config = config_for(name, kl)
    result = run(model, batch, config)
    assert float(result[0].nmse) > 1e-3  # a comparison of two zeros would show nothing
    assert_same_result(result, reference(base, model, batch, config))


# --- one attached model for what follows -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def student(load_model) -> nn.Module:
    """NF4, layers 1 and 3 converted (one frozen layer in front and one between), adapters away from the start."""
    model = load_model()
    npt.attach(model, NPTConfig(rank=4, layers="1,3"))
    move_adapters(model)
    return model


def samples(seed: int, lengths: list[int]) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    return [Sample(str(i), tuple(torch.randint(3, 128, (n,), generator=generator).tolist())) for i, n in enumerate(lengths)]


@contextmanager
def pad_row(model: nn.Module, value: float) -> Iterator[None]:
    """The pad token's embedding set to `value`."""
    weight = model.model.embed_tokens.weight
    before = weight.data[PAD].clone()
    weight.data[PAD] = value
    try:
        yield
    finally:
        weight.data[PAD] = before


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("garbage", [float("inf"), float("nan"), 1e30])
@pytest.mark.parametrize("side", ["left", "right"])
def test_garbage_in_the_embedding_of_padding_changes_no_bit(student, name, garbage, side) -> None:
    batch = collate(samples(2, [9, 4, 6]), PAD, side=side, length=11)
    config = config_for(name, 0.5)
    clean = run(student, batch, config)
    with pad_row(student, garbage):
        assert_identical(run(student, batch, config), clean)


@pytest.mark.parametrize("name", NAMES)
def test_the_pad_id_changes_no_bit(student, name) -> None:
    config = config_for(name, 0.5)
    results = [run(student, collate(samples(2, [9, 4, 6]), pad, length=10), config) for pad in (PAD, 0, 77)]
    assert_identical(results[1], results[0])
    assert_identical(results[2], results[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("length", [9, 12, 33])
def test_the_amount_and_side_of_padding_change_nothing(student, name, side, length) -> None:
    # Not to the bit: attention sums over another number of keys, in another order.
    some = samples(2, [9, 4, 6])
    config = config_for(name, 0.5)
    assert_same_result(run(student, collate(some, PAD, side=side, length=length), config), run(student, collate(some, PAD), config))


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_the_sum_of_its_rows(student, name) -> None:
    some = samples(3, [8, 3, 5])
    config = config_for(name, 0.5)
    together, gradients = run(student, collate(some, PAD), config)
    alone = [run(student, collate([s], PAD), config) for s in some]
    assert together.tokens == sum(sums.tokens for sums, _ in alone) == 16
    assert_near(together.loss, sum(sums.loss for sums, _ in alone), "loss")
    assert_near(together.layer_nmse, sum(sums.layer_nmse for sums, _ in alone), "layer_nmse")
    for key, gradient in gradients.items():
        assert_near(gradient, sum(g[key] for _, g in alone), key)


@pytest.mark.parametrize("name", NAMES)
@given(lengths=st.lists(st.integers(1, 9), min_size=2, max_size=5), data=st.data())
@settings(deadline=None, max_examples=8, derandomize=True)
def test_the_order_of_rows_changes_nothing(student, name, lengths, data) -> None:
    some = samples(4, lengths)
    order = data.draw(st.permutations(range(len(some))))
    config = config_for(name, 0.5)
    # A row keeps its padding and its kernel; only the order of the sums over tokens changes.
    assert_same_result(run(student, collate([some[i] for i in order], PAD), config), run(student, collate(some, PAD), config))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_added_to_what_is_there(student, batch, name) -> None:
    config = config_for(name)
    _, once = run(student, batch, config)
    for parameter in adapter_parameters(student).values():
        parameter.grad = torch.ones_like(parameter)
    STRATEGIES[name](student, batch, config)
    for key, parameter in adapter_parameters(student).items():
        torch.testing.assert_close(parameter.grad, once[key] + 1)  # the fp32 defaults: the sum is rounded at 1


@pytest.mark.parametrize("name", NAMES)
def test_sums_carry_no_graph_and_the_same_batch_gives_the_same_bits(student, batch, name) -> None:
    first, second = (run(student, batch, config_for(name)) for _ in range(2))
    assert all(not getattr(first[0], key).requires_grad for key in ("loss", "nmse", "reg", "kl", "layer_nmse"))
    assert_identical(second, first)


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_nmse_plus_weighted_regularisation_plus_weighted_kl(student, batch, name) -> None:
    config = config_for(name, 0.5)
    sums, _ = run(student, batch, config)
    expected = sums.nmse + config.regularization_lambda * sums.reg + config.logit_kl_weight * sums.kl
    torch.testing.assert_close(sums.loss, expected)
    torch.testing.assert_close(sums.nmse, sums.layer_nmse.mean())
    assert float(sums.reg) > 0
    assert (float(sums.kl) > 0) == (name == "end_to_end")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("quantization", ["nf4", None])
@pytest.mark.parametrize("form", FORMS[:4], ids=form_id)
def test_every_adapter_tensor_gets_a_gradient_and_frozen_tensors_keep_every_bit(load_model, batch, name, quantization, form) -> None:
    model = load_model(quantization)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    npt.attach(model, form)
    move_adapters(model)
    _, gradients = run(model, batch, config_for(name))
    optimizer = torch.optim.AdamW(adapter_parameters(model).values(), lr=0.1)
    optimizer.step()
    for key, gradient in gradients.items():
        assert torch.isfinite(gradient).all() and gradient.any(), key
    after = model.state_dict()
    # state_dict holds the packed 4-bit bytes and their quantisation statistics as well.
    for key, value in before.items():
        assert after[key].dtype == value.dtype and torch.equal(after[key], value), key
    assert all(p.grad is None and not p.requires_grad for key, p in model.named_parameters() if ".npt." not in key)


@pytest.mark.parametrize("name", NAMES)
def test_local_keeps_gradients_inside_the_layer_and_end_to_end_does_not(load_model, batch, name) -> None:
    model = load_model()
    npt.attach(model, NPTConfig(rank=4, layers="1,3"))
    move_adapters(model)
    _, before = run(model, batch, config_for(name))
    with torch.no_grad():
        model.model.layers[3].npt.B["down"].mul_(3)
    _, after = run(model, batch, config_for(name))
    key = "model.layers.1.npt.A"
    assert torch.equal(before[key], after[key]) == (name == "local")
    assert not torch.equal(before["model.layers.3.npt.A"], after["model.layers.3.npt.A"])


@pytest.mark.parametrize("name", NAMES)
def test_the_mode_of_the_layers_and_the_random_state_stay(student, batch, name) -> None:
    random_state = torch.get_rng_state()
    run(student, batch, config_for(name, 0.5))
    assert {layer.npt.mode for _, layer in npt_layers(student)} == {"student"}
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_layers_up_to_the_last_converted_one_run(load_model, batch, name) -> None:
    model = load_model()
    npt.attach(model, NPTConfig(rank=4, layers="1"))

    def fail(*_: Any) -> None:
        raise AssertionError("ran")

    for module in (*model.model.layers[2:], model.model.norm, model.lm_head):
        module.register_forward_hook(fail)
    run(model, batch, config_for(name))
    if name == "end_to_end":
        with pytest.raises(AssertionError, match="ran"):
            run(model, batch, config_for(name, 0.5))


def test_a_row_of_one_valid_token_is_enough(student) -> None:
    ids = torch.tensor([[5, 6, 7], [9, PAD, PAD]])
    lonely = batch_from_tensors(ids, (ids != PAD).long())
    for name in NAMES:
        sums, gradients = run(student, lonely, config_for(name))
        assert sums.tokens == 4 and torch.isfinite(sums.loss)
        assert all(torch.isfinite(g).all() for g in gradients.values())
