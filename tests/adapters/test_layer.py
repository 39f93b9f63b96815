import itertools

import pytest
import torch
from students import moved
from torch import nn
from torch.testing import assert_close

import npt
from npt.adapters.converted import adapter_parameters
from npt.batch import batch_from_tensors
from npt.config import MODULATIONS, RESIDUALS, TARGETS

SUBSETS = [s for n in (1, 2, 3, 4) for s in itertools.combinations(TARGETS, n)]
LAYER = 2


def converted(load_model, quantization: str | None = "nf4", **settings):
    model = load_model(quantization)
    npt.attach(model, npt.NPTConfig(**{"layers": "all", "rank": 8, **settings}))
    return moved(model, 0.3)


@pytest.fixture(scope="module", params=["nf4", None])
def pair(request, load_model):
    """The untouched base, and a second copy for adapters to come and go."""
    return load_model(request.param), load_model(request.param)


def reference(
    layer: nn.Module, adapter: nn.Module, config: npt.NPTConfig, hidden: torch.Tensor, context: dict
) -> torch.Tensor:
    """The design's formula, line by line, on the modules of an untouched decoder layer; the
    modulation in fp64.
    """
    attention, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden), **context)
    stream = hidden + attention if config.residual == "keep" else hidden
    z = attention.double() @ adapter.A.double().T

    def modulated(target: str, y: torch.Tensor) -> torch.Tensor:
        m, s = 1, 0
        if target in config.targets and config.modulation != "additive":
            m = 1 + config.mult_bound * (2 * torch.sigmoid(z @ adapter.M[target].double().T) - 1)
        if target in config.targets and config.modulation != "multiplicative":
            s = config.additive_scale * (z @ adapter.B[target].double().T)
        return (m * y.double() + s).float()

    if "stream" in config.targets:
        shift = config.additive_scale * (z @ adapter.B["stream"].double().T)
        stream = (stream.double() + shift).float()
    x = layer.post_attention_layernorm(stream)
    gate, up = modulated("gate", layer.mlp.gate_proj(x)), modulated("up", layer.mlp.up_proj(x))
    return stream + modulated("down", layer.mlp.down_proj(nn.functional.silu(gate) * up))


@torch.no_grad()
@pytest.mark.parametrize("targets", SUBSETS, ids=",".join)
@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("modulation", MODULATIONS)
def test_equals_the_slow_reference_in_every_form(pair, batch, modulation, residual, targets):
    base, model = pair
    config = npt.NPTConfig(
        layers="all",
        rank=8,
        modulation=modulation,
        residual=residual,
        targets=targets,
        mult_bound=0.7,
        additive_scale=0.4,
    )
    npt.attach(model, config)
    try:
        moved(model, 0.3)
        calls = []
        hook = base.model.layers[LAYER].register_forward_pre_hook(
            lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
        )
        base(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
        hook.remove()
        (hidden,), context = calls[0]
        layer = model.model.layers[LAYER]
        got = layer(hidden, **context)
        expected = reference(base.model.layers[LAYER], layer.npt, config, hidden, context)
        # outputs of order 10 from sums of 128 products of fp32, against a modulation in fp64
        assert_close(got, expected, rtol=1e-5, atol=1e-4)
        assert (got - base.model.layers[LAYER](hidden, **context)).abs().max() > 0.1
    finally:
        npt.detach(model)


@pytest.mark.parametrize("mode", ["student", "teacher", "floor"])
def test_generating_with_the_cache_gives_the_same_tokens_as_without(load_model, batch, mode):
    model = converted(load_model)
    ids = batch.input_ids[:1]
    with npt.adapter_mode(model, mode):
        with_cache, without = (
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=12,
                do_sample=False,
                use_cache=use_cache,
            )
            for use_cache in (True, False)
        )
    assert with_cache.shape[1] > ids.shape[1]
    assert torch.equal(with_cache, without)


@torch.no_grad()
@pytest.mark.parametrize("layers", ["all", "1-2"])
def test_hidden_states_come_out_of_every_layer(load_model, batch, layers):
    model = converted(load_model, layers=layers)
    caught = []
    hooks = [
        layer.register_forward_hook(lambda _, __, output: caught.append(output))
        for layer in model.model.layers
    ]
    states = model(
        batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=True
    ).hidden_states
    for hook in hooks:
        hook.remove()
    assert len(states) == 5
    assert torch.equal(states[0], model.model.embed_tokens(batch.input_ids))
    for index in range(3):
        assert torch.equal(states[index + 1], caught[index])
    # transformers gives the last state after the final norm
    assert torch.equal(states[4], model.model.norm(caught[3]))


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("residual", RESIDUALS)
def test_padding_does_not_change_the_logits_of_valid_tokens(load_model, batch, residual, side):
    model = converted(load_model, residual=residual)
    ids = batch.input_ids[:1]
    for pads in (1, 4):
        padding = torch.full((1, pads), 2)
        order = (padding, ids) if side == "left" else (ids, padding)
        padded = batch_from_tensors(
            torch.cat(order, 1), torch.cat([torch.full_like(t, int(t is ids)) for t in order], 1)
        )
        plain = model(ids).logits[0]
        got = model(
            padded.input_ids, attention_mask=padded.attention_mask, position_ids=padded.position_ids
        ).logits
        # another width takes another attention kernel and another blocking of the sums: logits of
        # order 5, four layers
        assert_close(got[0, padded.valid_index], plain, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize("quantization", ["nf4", None])
def test_gradient_checkpointing_gives_the_same_gradients(load_model, batch, quantization):
    def gradients(checkpointing: bool) -> tuple[dict[str, torch.Tensor], int]:
        model = converted(load_model, quantization)
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train()
        runs = []
        model.model.layers[1].self_attn.register_forward_hook(lambda *_: runs.append(1))
        output = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
        output.logits.square().mean().backward()
        return {name: p.grad for name, p in adapter_parameters(model).items()}, len(runs)

    (plain, once), (recomputed, twice) = gradients(False), gradients(True)
    assert (once, twice) == (1, 2)
    for name, gradient in plain.items():
        assert gradient.abs().sum() > 0, name
        # no tolerance: recomputing repeats the same operations on the same values
        assert torch.equal(gradient, recomputed[name]), name


@torch.no_grad()
@pytest.mark.parametrize("mode", ["student", "teacher", "floor"])
def test_whatever_the_decoder_passes_to_a_layer_reaches_its_attention(load_model, batch, mode):
    model = converted(load_model)
    calls = []
    model.model.layers[LAYER].self_attn.register_forward_pre_hook(
        lambda _, __, kwargs: calls.append(kwargs), with_kwargs=True
    )
    with npt.adapter_mode(model, mode):
        model.model(batch.input_ids, an_argument_of_tomorrow="kept")
    assert calls[0]["an_argument_of_tomorrow"] == "kept"


def test_an_fp16_base_runs_with_fp32_adapters(load_model, batch):
    model = load_model(None, use_fp16=True)
    npt.attach(model, npt.NPTConfig(rank=8))
    moved(model, 0.3)
    output = model(batch.input_ids, attention_mask=batch.attention_mask).logits
    assert output.dtype == torch.float16
    output.float().square().mean().backward()
    for name, parameter in adapter_parameters(model).items():
        assert parameter.grad.dtype == torch.float32, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name
