"""The strategies against slow references built of plain transformers layers, and what must not
change their results.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from students import moved
from torch import Tensor, nn

import npt
from npt.adapters.converted import adapter_parameters, npt_layers
from npt.adapters.layer import COUNT_GRADIENT
from npt.adapters.stream import open_stream
from npt.batch import IGNORE_INDEX, Batch, batch_from_tensors
from npt.config import NPTConfig, TrainConfig
from npt.distill import hidden_losses
from npt.distill.local import BatchSums
from npt.distill.strategies import drive

# fp32 sums of a few hundred terms, in another order than the reference's: a few units of 2^-24
# times their square root, carried through four layers. Relative to the largest entry, because
# single entries may cancel.
ROUNDING = 2e-5

NAMES = ("local", "propagated", "end_to_end")
FORMS = (
    NPTConfig(rank=4, layers="all"),
    NPTConfig(rank=3, layers="1,3", targets=("gate",), modulation="additive"),
    NPTConfig(rank=3, layers="2", targets=("up", "down"), modulation="multiplicative"),
    NPTConfig(rank=5, layers="0-2", targets=("down",), additive_scale=1.0, mult_bound=0.9),
    NPTConfig(rank=4, layers="upper_half", residual="keep"),
    NPTConfig(rank=8, layers="1-3", active=3, token_rank=4, additive_scale=1.0),
)


def form_id(config: NPTConfig) -> str:
    form = f"{config.modulation}-{'+'.join(config.targets)}-{config.layers}-{config.residual}"
    return f"{form}-{config.active}-{config.token_rank}"


# Every loss once, next to the default.
HIDDEN_LOSSES: dict[str, dict[str, Any]] = {
    "nmse_update": {"loss": "nmse_update"},
    "direction": {"loss": "direction"},
}
LOGIT_LOSSES: dict[str, dict[str, Any]] = {
    "kl": {},
    "reverse_kl": {"logit_loss": "reverse_kl"},
    "cross_entropy": {"logit_loss": "cross_entropy"},
}
# A layer's loss is one function for all strategies: `local` has every one, the others those that
# look at more than o and t.
VARIANTS = [
    *(("local", own) for own in HIDDEN_LOSSES.values()),
    *((name, HIDDEN_LOSSES["nmse_update"]) for name in ("propagated", "end_to_end")),
    *(("end_to_end", {"logit_kl_weight": 0.7, **own}) for own in LOGIT_LOSSES.values()),
]


def variant_id(value: Any) -> str:
    return value if isinstance(value, str) else ",".join(map(str, value.values()))


def config_for(name: str, kl: float = 0.0, **own: Any) -> TrainConfig:
    return TrainConfig(
        strategy=name,
        regularization_lambda=0.3,
        **{"logit_kl_weight": kl if name == "end_to_end" else 0.0, **own},
    )


def run(
    model: nn.Module, batch: Batch, config: TrainConfig, teacher: Any = None
) -> tuple[BatchSums, dict[str, Tensor]]:
    """Sums and gradients of one micro-batch."""
    parameters = adapter_parameters(model)
    for parameter in parameters.values():
        parameter.grad = None
    sums = drive(model, batch, config, teacher)
    return sums, {name: p.grad.clone() for name, p in parameters.items()}


def assert_near(actual: Tensor, expected: Tensor, what: str, tolerance: float = ROUNDING) -> None:
    error = float((actual.double() - expected.double()).abs().max())
    scale = float(expected.abs().max())
    assert error <= tolerance * scale, f"{what}: off by {error} at scale {scale}"


def assert_same_result(
    one: tuple[BatchSums, dict[str, Tensor]],
    other: tuple[BatchSums, dict[str, Tensor]],
    tolerance: float = ROUNDING,
) -> None:
    assert (one[0].tokens, one[0].scored) == (other[0].tokens, other[0].scored)
    for name in ("loss", "nmse", "reg", "logit", "layer_nmse"):
        assert_near(getattr(one[0], name), getattr(other[0], name), name, tolerance)
    for name, gradient in one[1].items():
        assert_near(gradient, other[1][name], name, tolerance)


def assert_identical(
    one: tuple[BatchSums, dict[str, Tensor]], other: tuple[BatchSums, dict[str, Tensor]]
) -> None:
    for name in ("loss", "nmse", "reg", "logit", "layer_nmse"):
        assert torch.equal(getattr(one[0], name), getattr(other[0], name)), name
    for name, gradient in one[1].items():
        assert torch.isfinite(gradient).all(), name
        assert torch.equal(gradient, other[1][name]), name


# --- the slow reference


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

        def on_layer(
            _: nn.Module, args: tuple[Any, ...], output: Tensor, index: int = index
        ) -> None:
            seen.h[index], seen.out[index] = args[0], output

        def on_attention(
            _: nn.Module, __: Any, output: tuple[Tensor, ...], index: int = index
        ) -> None:
            seen.a[index] = output[0]

        handles += [
            layer.register_forward_hook(on_layer),
            layer.self_attn.register_forward_hook(on_attention),
        ]
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


def code(layer: nn.Module, h: Tensor, a: Tensor) -> tuple[Tensor, Tensor | float, Tensor]:
    """z, l and what B of the stream reads, from their formulas."""
    adapter, config = layer.npt, layer.npt.config
    if not config.token_part:
        z = a @ adapter.A.T
        return z, 0.0, z
    own = layer.input_layernorm(h) @ adapter.L_in.T @ adapter.L_out.T + adapter.b
    size = h.pow(2).mean(-1, keepdim=True).sqrt()
    z = adapter.scale * ((a - own) @ adapter.A.T) / size
    z = z * (z.detach().abs() >= adapter.log_tau.detach().exp())
    return z, own, size * z / adapter.scale


def modulation(
    layer: nn.Module, target: str, z: Tensor
) -> tuple[Tensor | float, Tensor | float, Tensor]:
    """m, s and their energy for one target, written as in the formula: m = 1 + beta * (2 sigmoid(M
    z) - 1).
    """
    adapter, config = layer.npt, layer.npt.config
    m: Tensor | float = 1.0
    s: Tensor | float = 0.0
    energy = z.new_zeros(z.shape[:-1])
    if target in adapter.M:
        m = 1 + config.mult_bound * (2 * torch.sigmoid(z @ adapter.M[target].T) - 1)
        energy = energy + ((m - 1) ** 2).mean(-1)
    if target in adapter.B:
        s = config.additive_scale * (z @ adapter.B[target].T)
        energy = energy + (s**2).mean(-1)
    return m, s, energy


def converted_output(layer: nn.Module, h: Tensor, a: Tensor) -> Tensor:
    """o of one NPT layer, from its plain modules."""
    z, own, read = code(layer, h, a)
    stream = h + a if layer.npt.config.residual == "keep" else h + own
    stream = stream + modulation(layer, "stream", read)[1]
    x = layer.post_attention_layernorm(stream)
    product = {"gate": layer.mlp.gate_proj(x), "up": layer.mlp.up_proj(x)}
    for target in ("gate", "up"):
        m, s, _ = modulation(layer, target, z)
        product[target] = m * product[target] + s
    m, s, _ = modulation(layer, "down", z)
    return stream + m * layer.mlp.down_proj(nn.functional.silu(product["gate"]) * product["up"]) + s


def token_loss(config: TrainConfig, o: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """The hidden-state loss of one token, [D] each, from its formula."""
    nmse = (o - t).pow(2).sum() / t.pow(2).sum()
    cos = (o @ t) / (o.norm() * t.norm())
    if config.loss == "nmse_update":
        return (o - t).pow(2).sum() / (t - h).pow(2).sum()
    if config.loss == "direction":
        return 2 * (1 - cos) / len(o)
    return nmse


def hidden_sum(config: TrainConfig, o: Tensor, t: Tensor, h: Tensor, batch: Batch) -> Tensor:
    """Token by token, over the valid ones."""
    where = [(row, column) for row, column in batch.attention_mask.nonzero().tolist()]
    return torch.stack([token_loss(config, o[place], t[place], h[place]) for place in where]).sum()


def logit_sum(config: TrainConfig, taught: Any, learnt: Any, batch: Batch) -> tuple[Tensor, int]:
    """Token by token, over the positions whose next token is valid, from probabilities in fp64; and
    their number.
    """
    where = [
        (row, column)
        for row, column in batch.attention_mask.nonzero().tolist()
        if 1 in batch.attention_mask[row, column + 1 : column + 2]
    ]
    parts = []
    for place in where:
        q, p = (torch.softmax(out.logits[place].double(), -1) for out in (learnt, taught))
        forward, backward = ((a * (a / b).log()).sum() for a, b in ((p, q), (q, p)))
        value = {
            "kl": forward,
            "reverse_kl": backward,
            "cross_entropy": -q[batch.input_ids[place[0], place[1] + 1]].log(),
        }[config.logit_loss]
        parts.append(value)
    return torch.stack(parts).sum().float(), len(where)


def energy_sum(layer: nn.Module, h: Tensor, a: Tensor, batch: Batch) -> Tensor:
    z = code(layer, h, a)[0]
    energy = sum(modulation(layer, target, z)[2] for target in ("gate", "up", "down"))
    return (energy * batch.attention_mask).sum()


def reference(
    base: nn.Module, model: nn.Module, batch: Batch, config: TrainConfig
) -> tuple[BatchSums, dict[str, Tensor]]:
    """The same sums and gradients, with one autograd graph over everything and the untouched base
    as the teacher.
    """
    with torch.no_grad(), watching(base) as teacher:
        taught = forward(base, batch)
    with watching(model) as student:
        learnt = forward(model, batch)
    # transformers' own collection of states, on both models: the last entry is after the final
    # norm.
    for index in range(len(base.model.layers) - 1):
        assert torch.equal(taught.hidden_states[index + 1], teacher.out[index])
        assert torch.equal(learnt.hidden_states[index + 1], student.out[index])
    layers = dict(npt_layers(model))
    plain = TrainConfig()
    if config.strategy == "local":
        context = open_stream(model, batch).context_of(model.model.layers[0])
        attention = {
            i: layer.self_attn(hidden_states=layer.input_layernorm(teacher.h[i]), **context)[0]
            for i, layer in layers.items()
        }
        states = {
            i: (converted_output(layer, teacher.h[i], attention[i]), attention[i])
            for i, layer in layers.items()
        }
    elif config.strategy == "propagated":
        inputs = {i: (student.h[i].detach(), student.a[i].detach()) for i in layers}
        states = {
            i: (converted_output(layer, *inputs[i]), inputs[i][1]) for i, layer in layers.items()
        }
    else:
        states = {i: (student.out[i], student.a[i]) for i in layers}
    # h is the teacher's input: what a layer does to it is the teacher's t - h, whatever the
    # student's stream is.
    rows = [(o, teacher.out[i], teacher.h[i], batch) for i, (o, _) in states.items()]
    losses, nmses = (
        torch.stack([hidden_sum(which, *row) for row in rows]) for which in (config, plain)
    )
    read = teacher.h if config.strategy == "local" else student.h
    if config.strategy == "propagated":
        read = {i: h.detach() for i, h in read.items()}
    regs = torch.stack([energy_sum(layers[i], read[i], a, batch) for i, (_, a) in states.items()])
    loss = losses.mean() + config.regularization_lambda * regs.mean()
    logit, scored = torch.zeros(()), 0
    if config.logit_kl_weight:
        logit, scored = logit_sum(config, taught, learnt, batch)
        loss = loss + config.logit_kl_weight * logit
    parameters = adapter_parameters(model)
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    gradients = dict(zip(parameters, found, strict=True))
    for name, parameter in parameters.items():
        if name.endswith(".log_tau"):  # the numbers that it lacks
            valid, lacking = batch.attention_mask.bool(), 0
            for i, (_, a) in states.items():
                z = code(layers[i], read[i], a)[0][valid]
                lacking += layers[i].npt.config.active * len(z) - int((z != 0).sum())
            gradients[name] = torch.full_like(parameter, COUNT_GRADIENT * lacking)
    figures = (part.detach() for part in (loss, nmses.mean(), regs.mean(), logit, nmses))
    sums = BatchSums(*figures, batch.tokens, scored)
    return sums, gradients


@pytest.mark.parametrize(
    ("form", "quantization"),
    [*((form, "nf4") for form in FORMS), (FORMS[3], None)],
    ids=lambda v: v if v is None or isinstance(v, str) else form_id(v),
)
@pytest.mark.parametrize(("name", "kl"), [("local", 0.0), ("propagated", 0.0), ("end_to_end", 0.7)])
def test_losses_and_gradients_equal_the_plain_reference(
    load_model, batch, quantization, form, name, kl
) -> None:
    base, model = load_model(quantization), load_model(quantization)
    npt.attach(model, form)
    moved(model, 0.2)
    config = config_for(name, kl)
    result = run(model, batch, config)
    assert float(result[0].nmse) > 1e-3  # a comparison of two zeros would show nothing
    assert_same_result(result, reference(base, model, batch, config))


@pytest.mark.parametrize(("name", "own"), VARIANTS, ids=variant_id)
def test_every_loss_and_weight_equals_the_plain_reference(load_model, batch, name, own) -> None:
    base, model = load_model(), load_model()
    npt.attach(model, NPTConfig(rank=4, layers="1,3"))
    moved(model, 0.2)
    config = config_for(name, **own)
    result = run(model, batch, config)
    assert float(result[0].loss) > 1e-3 and (float(result[0].logit) > 1e-3) == bool(
        config.logit_kl_weight
    )
    assert_same_result(result, reference(base, model, batch, config))


@pytest.mark.parametrize(
    ("quantization", "residual"),
    # None: the student learns from another model that is unquantised as well
    [("nf4", "keep"), (None, "modulate")],
)
@pytest.mark.parametrize(
    ("name", "own"),
    [*((name, {}) for name in NAMES), ("propagated", {"loss": "nmse_update"}), *VARIANTS[-2:]],
)
def test_a_teacher_of_its_own_teaches_what_it_computes(
    load_model, batch, name, own, quantization, residual
) -> None:
    teacher, model = load_model(None), load_model(quantization)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.01)
    npt.attach(model, NPTConfig(rank=4, layers="1,3", residual=residual))
    moved(model, 0.2)
    config = config_for(name, **own)
    result = run(model, batch, config, teacher)
    assert float(result[0].nmse) > 1e-3
    assert_same_result(result, reference(teacher, model, batch, config))


# --- one attached model for what follows


@pytest.fixture(scope="module")
def student(load_model) -> nn.Module:
    """NF4, layers 1 and 3 converted (one frozen layer in front and one between), adapters away from
    the start.
    """
    model = load_model()
    npt.attach(model, NPTConfig(rank=4, layers="1,3"))
    return moved(model, 0.2)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_added_to_what_is_there(student, batch, name) -> None:
    config = config_for(name)
    _, once = run(student, batch, config)
    for parameter in adapter_parameters(student).values():
        parameter.grad = torch.ones_like(parameter)
    drive(student, batch, config)
    for key, parameter in adapter_parameters(student).items():
        # the fp32 defaults: the sum is rounded at 1
        torch.testing.assert_close(parameter.grad, once[key] + 1)


@pytest.mark.parametrize("name", NAMES)
def test_sums_carry_no_graph_and_the_same_batch_gives_the_same_bits(student, batch, name) -> None:
    first, second = (run(student, batch, config_for(name)) for _ in range(2))
    assert all(
        not getattr(first[0], key).requires_grad
        for key in ("loss", "nmse", "reg", "logit", "layer_nmse")
    )
    assert_identical(second, first)


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_that_ask_for_a_gradient_change_nothing(load_model, name) -> None:
    """As PEFT and gradient checkpointing make them, by a hook that stays on the base."""
    student, ids = load_model(), torch.arange(3, 19).view(2, 8)
    batch = batch_from_tensors(ids, torch.ones_like(ids))
    npt.attach(student, NPTConfig(rank=4, layers="all"))
    plain = run(student, batch, config_for(name))
    student.enable_input_require_grads()
    assert_identical(run(student, batch, config_for(name)), plain)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("quantization", "form"),
    [("nf4", FORMS[0]), (None, FORMS[0]), ("nf4", FORMS[2])],
    ids=["nf4", "none", "some"],
)
def test_adapters_get_gradients_and_frozen_tensors_keep_every_bit(
    load_model, batch, name, quantization, form
) -> None:
    before = load_model(quantization).state_dict()
    model = load_model(quantization)
    npt.attach(model, form)
    moved(model, 0.2)
    _, gradients = run(model, batch, config_for(name))
    optimizer = torch.optim.AdamW(adapter_parameters(model).values(), lr=0.1)
    optimizer.step()
    for key, gradient in gradients.items():
        assert torch.isfinite(gradient).all() and gradient.any(), key
    after = model.state_dict()
    # state_dict holds the packed 4-bit bytes and their quantisation statistics as well.
    for key, value in before.items():
        assert after[key].dtype == value.dtype and torch.equal(after[key], value), key
    assert all(
        p.grad is None and not p.requires_grad
        for key, p in model.named_parameters()
        if ".npt." not in key
    )


@pytest.mark.parametrize("name", NAMES)
def test_gradients_leave_the_layer_end_to_end_only(load_model, batch, name) -> None:
    model = load_model()
    npt.attach(model, NPTConfig(rank=4, layers="1,3"))
    moved(model, 0.2)
    _, before = run(model, batch, config_for(name))
    with torch.no_grad():
        model.model.layers[3].npt.B["down"].mul_(3)
    _, after = run(model, batch, config_for(name))
    key = "model.layers.1.npt.A"
    assert torch.equal(before[key], after[key]) == (name != "end_to_end")
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


# --- every loss and weight

every = pytest.mark.parametrize(("name", "own"), VARIANTS, ids=variant_id)


def test_uncounted_labels_leave_the_loss_on_the_logits_only(student, batch) -> None:
    """A prompt: hidden states of all its tokens count, predictions of its tokens do not."""
    labels = batch.labels.clone()
    labels[:, :4] = IGNORE_INDEX
    masked = replace(batch, labels=labels)
    for own in LOGIT_LOSSES.values():
        config = config_for("end_to_end", 0.7, **own)
        whole, part = run(student, batch, config)[0], run(student, masked, config)[0]
        assert (part.tokens, part.scored) == (whole.tokens, whole.scored - 9)
        assert torch.equal(part.layer_nmse, whole.layer_nmse) and 0 < float(part.logit) < float(
            whole.logit
        )
    assert_identical(
        run(student, masked, config_for("local")), run(student, batch, config_for("local"))
    )


def test_no_label_that_counts_means_no_loss_on_the_logits(student, batch) -> None:
    unlabelled = replace(batch, labels=torch.full_like(batch.labels, IGNORE_INDEX))
    for own in LOGIT_LOSSES.values():
        without = run(student, batch, config_for("end_to_end"))
        assert_same_result(run(student, unlabelled, config_for("end_to_end", 0.7, **own)), without)


def test_a_bad_number_at_an_unscored_position_is_still_seen(student, batch) -> None:
    """The last token of a row is no longer scored; its hidden state counts as any other's."""
    last = int(batch.input_ids[0, -1])
    assert int((batch.input_ids == last).sum()) == 1
    weight = student.model.embed_tokens.weight
    before = weight.data[last].clone()
    weight.data[last] = float("nan")
    try:
        for name in NAMES:
            assert not torch.isfinite(run(student, batch, config_for(name, 0.5))[0].loss)
    finally:
        weight.data[last] = before


def alone(**own: Any) -> TrainConfig:
    """The logit loss by itself, at weight 1 and without a regulariser."""
    return TrainConfig(strategy="end_to_end", hidden_weight=0.0, **{"logit_kl_weight": 1.0, **own})


@pytest.mark.parametrize(
    ("own", "checkpointing"),
    [*((own, False) for own in LOGIT_LOSSES.values()), (LOGIT_LOSSES["kl"], True)],
    ids=[*LOGIT_LOSSES, "recomputed"],
)
def test_without_a_hidden_weight_the_loss_is_the_logit_loss(
    student, batch, own, checkpointing
) -> None:
    sums, gradients = run(student, batch, alone(gradient_checkpointing=checkpointing, **own))
    assert torch.equal(sums.loss, sums.logit) and float(sums.logit) > 0
    assert not sums.nmse and not sums.layer_nmse.any() and sums.layer_nmse.shape == (2,)
    beside = run(student, batch, TrainConfig(strategy="end_to_end", logit_kl_weight=1.0, **own))[0]
    assert torch.equal(sums.logit, beside.logit)
    # Both losses send their gradients through one sum, so the difference is right to rounding at
    # the scale of the two.
    hidden = run(student, batch, TrainConfig(strategy="end_to_end"))[1]
    both = run(student, batch, TrainConfig(strategy="end_to_end", logit_kl_weight=1.0, **own))[1]
    for name, gradient in gradients.items():
        assert_near(gradient + hidden[name], both[name], name)
        assert gradient.any(), name


@pytest.mark.parametrize(
    ("own", "rounds"), [({}, 2), ({"logit_loss": "cross_entropy"}, 1)], ids=["kl", "cross_entropy"]
)
def test_without_a_hidden_weight_the_teacher_runs_for_logits_only(
    student, batch, monkeypatch, own, rounds
) -> None:
    """A loss against the text needs no teacher at all; none compares hidden states."""
    monkeypatch.setitem(
        hidden_losses.HIDDEN_LOSSES, "nmse", lambda *_: pytest.fail("hidden states are compared")
    )
    calls: list[int] = []
    for index in range(1, 4):
        student.model.layers[index].self_attn.q_proj.register_forward_hook(
            lambda *_, index=index: calls.append(index)
        )
    run(student, batch, alone(**own))
    assert calls == [1, 2, 3] * rounds
