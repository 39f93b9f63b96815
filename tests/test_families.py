"""Every family does all that the package does with a base: attached and detached, walked, trained,
evaluated, traced, generated from.
"""

import json
from pathlib import Path

import pytest
import torch
from families import MAKE, VOCAB, WINDOW, save_base
from students import moved
from torch import nn
from torch.testing import assert_close

import npt
from npt.adapters.converted import adapter_parameters, decoder_layers
from npt.adapters.layer import NPT_FORMS
from npt.adapters.stream import model_inputs, open_stream, sliding_layers
from npt.base.families import FAMILIES
from npt.batch import Batch, Sample, batch_from_tensors, collate
from npt.cli.main import main
from npt.config import RESIDUALS, TrainConfig
from npt.data.packing import pack
from npt.distill.strategies import STRATEGIES
from npt.errors import ModelError

NAMES = tuple(MAKE)
CONFIG = npt.NPTConfig(layers="1-3", rank=8, additive_scale=1.0)


@pytest.fixture(scope="module", params=NAMES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family, copied_bases, tmp_path_factory) -> Path:
    return save_base(family, tmp_path_factory.mktemp("base"))


def in_turn(family: str) -> int:
    """Return 0 or 1: either for some families with windows, and for some without."""
    return NAMES.index(family) // 2 % 2


def load(folder: Path, quantization: str | None = "nf4"):
    return npt.load_base(str(folder), quantization=quantization, device="cpu")[0]


@pytest.fixture(scope="module")
def model(folder):
    """Converted from layer 1 on, and far from its base."""
    model = load(folder)
    npt.attach(model, CONFIG)
    return moved(model, 0.3, seed=11)


def padded(side: str) -> Batch:
    """Rows of 9, 5 and 7 tokens, all longer than the window."""
    ids = torch.randint(3, VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * n + [0] * (9 - n) for n in (9, 5, 7)])
    mask = mask.flip(1) if side == "left" else mask
    return batch_from_tensors(torch.where(mask.bool(), ids, 2), mask)


DOCUMENTS = [
    Sample(
        str(i),
        tuple(torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist()),
    )
    for i, n in enumerate((9, 6, 1, 7, 2, 3))
]


def test_every_family_in_the_table_has_an_npt_form_and_a_test() -> None:
    assert {family.layer for family in FAMILIES.values()} == set(NPT_FORMS)
    assert {name.split(",")[0] for name in NAMES} == set(FAMILIES)


@torch.no_grad()
def test_attach_and_detach_give_the_original_back_bit_for_bit(folder):
    model, batch = load(folder), padded("right")
    before, classes = npt.base_hash(model), [type(m) for m in model.modules()]
    output = model(batch.input_ids, attention_mask=batch.attention_mask).logits
    npt.attach(model, CONFIG)
    moved(model, 0.3, seed=11)
    assert not torch.equal(
        model(batch.input_ids, attention_mask=batch.attention_mask).logits, output
    )
    with npt.adapters_disabled(model):
        assert torch.equal(
            model(batch.input_ids, attention_mask=batch.attention_mask).logits, output
        )
    assert npt.base_hash(model) == before
    npt.detach(model)
    assert npt.base_hash(model) == before and [type(m) for m in model.modules()] == classes
    assert torch.equal(model(batch.input_ids, attention_mask=batch.attention_mask).logits, output)


@torch.no_grad()
def test_a_converted_layer_equals_the_formula_on_the_plain_one(folder):
    plain, model, batch = load(folder), load(folder), padded("right")
    # a form of layer meets both: with windows and without
    residual = RESIDUALS[any(sliding_layers(plain.config))]
    config = npt.NPTConfig(
        layers="all", rank=8, residual=residual, mult_bound=0.7, additive_scale=0.4
    )
    npt.attach(model, config)
    moved(model, 0.3, seed=11)
    given = []
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: given.append((args[0], kwargs)), with_kwargs=True
        )
        for layer in decoder_layers(plain)
    ]
    plain(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
    for hook in hooks:
        hook.remove()
    for layer, own, (hidden, context) in zip(
        decoder_layers(plain), decoder_layers(model), given, strict=True
    ):
        attention = layer.self_attn(hidden_states=layer.input_layernorm(hidden), **context)[0]
        stream = hidden + attention if residual == "keep" else hidden
        z = attention.double() @ own.npt.A.double().T
        stream = (stream.double() + 0.4 * (z @ own.npt.B["stream"].double().T)).float()
        x = layer.post_attention_layernorm(stream)

        def modulated(target: str, y: torch.Tensor, z=z, own=own) -> torch.Tensor:
            m = 1 + 0.7 * (2 * torch.sigmoid(z @ own.npt.M[target].double().T) - 1)
            return (m * y.double() + 0.4 * (z @ own.npt.B[target].double().T)).float()

        gate, up = modulated("gate", layer.mlp.gate_proj(x)), modulated("up", layer.mlp.up_proj(x))
        expected = stream + modulated("down", layer.mlp.down_proj(nn.functional.silu(gate) * up))
        got = own(hidden, **context)
        # outputs of order 10 to 100 from sums of 128 products of fp32, against a modulation in fp64
        assert_close(got, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        assert (got - layer(hidden, **context)).abs().max() > 0.1


@torch.no_grad()
@pytest.mark.parametrize(("side", "mode"), [("right", "teacher"), ("left", "student")])
def test_layers_walked_by_hand_equal_the_model_itself(model, side, mode):
    batch = padded(side)
    with npt.adapter_mode(model, mode):
        whole = model(
            batch.input_ids,
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids,
            output_hidden_states=True,
        )
        stream = open_stream(model, batch)
        states = [stream.hidden]
        for layer in decoder_layers(model):
            states.append(stream.clean(layer(states[-1], **stream.context_of(layer))))
    states[-1] = model.model.norm(states[-1])
    for got, wanted in zip(states, whole.hidden_states, strict=True):
        # default tolerance of fp32, of the largest entry: valid tokens see the same keys, only what
        # is at padding differs
        atol = 1e-5 * float(wanted.abs().max())
        assert_close(stream.rows(got), stream.rows(wanted), rtol=1.3e-6, atol=atol)


@torch.no_grad()
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_does_not_change_a_row(model, side):
    batch, row = padded(side), 1
    valid = batch.attention_mask[row].bool()
    together = model(
        batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids
    ).logits[row, valid]
    alone = model(batch.input_ids[row : row + 1, valid]).logits[0]
    # products of other shapes sum in another order, through four layers
    assert_close(together, alone, rtol=0, atol=1e-5 * float(alone.abs().max()))


@torch.no_grad()
def test_packed_documents_see_what_they_see_in_rows_of_their_own(family, model, monkeypatch):
    attention, mode = (("sdpa", "student"), ("eager", "teacher"))[in_turn(family)]
    monkeypatch.setattr(model.config, "_attn_implementation_internal", attention)
    batch = collate(pack(DOCUMENTS, 16), 2)
    assert batch.documents is not None
    names = [name for row in batch.sample_ids for name in row.split("+")]
    with npt.adapter_mode(model, mode):
        stream = open_stream(model, batch)
        hidden = stream.hidden
        for layer in decoder_layers(model):
            hidden = stream.clean(layer(hidden, **stream.context_of(layer)))
        walked = model.model.norm(stream.rows(hidden))
        whole = stream.rows(
            model.model(**model_inputs(model, batch), use_cache=False).last_hidden_state
        )
        alone = torch.cat(
            [
                model.model(torch.tensor([DOCUMENTS[int(n)].input_ids])).last_hidden_state[0]
                for n in names
            ]
        )
    for got in (walked, whole):
        # the same keys, but products of other shapes, which sum in another order through four
        # layers
        assert_close(got, alone, rtol=0, atol=2e-5 * float(alone.abs().max()))


@torch.no_grad()
def test_a_layer_with_a_window_does_not_see_beyond_it(model):
    """Layer by layer, a change of the first token moves the last one's attention output only if
    no window separates them.
    """
    one = padded("right").input_ids[:1]
    other = one.clone()
    other[0, 0] = one[0, 0] % 1000 + 5
    batches = [batch_from_tensors(ids, torch.ones_like(ids)) for ids in (one, other)]
    streams = [open_stream(model, batch) for batch in batches]
    expected = sliding_layers(model.config)
    for layer, slides in zip(decoder_layers(model), expected, strict=True):
        a, b = (
            layer.self_attn(
                hidden_states=layer.input_layernorm(stream.hidden), **stream.context_of(layer)
            )[0]
            for stream in streams
        )
        assert torch.equal(a[0, WINDOW:], b[0, WINDOW:]) is slides
        assert not torch.equal(a[0, : WINDOW - 1], b[0, : WINDOW - 1])


@torch.no_grad()
def test_generating_with_the_cache_gives_the_same_tokens_as_without(model):
    batch = padded("left")
    with_cache, without = (
        model.generate(
            batch.input_ids,
            attention_mask=batch.attention_mask,
            max_new_tokens=6,
            do_sample=False,
            use_cache=cached,
        )
        for cached in (True, False)
    )
    assert with_cache.shape[1] > 9
    assert torch.equal(with_cache, without)


def test_a_step_gives_every_adapter_the_plain_pass_gradient(family, folder):
    strategy, rows = (("local", "padded"), ("end_to_end", "packed"))[in_turn(family)]
    model = load(folder)
    npt.attach(model, CONFIG)
    moved(model, 0.3, seed=11)
    batch = padded("left") if rows == "padded" else collate(pack(DOCUMENTS, 16), 2)
    before = npt.base_hash(model)
    weight = 0.5 if strategy == "end_to_end" else 0.0
    sums = STRATEGIES[strategy](
        model,
        batch,
        TrainConfig(strategy=strategy, logit_kl_weight=weight, regularization_lambda=0.01),
    )
    for name, parameter in adapter_parameters(model).items():
        assert torch.isfinite(parameter.grad).all() and parameter.grad.abs().sum() > 0, name
    assert npt.base_hash(model) == before
    # The NMSE from the model's own forward: teacher's states in, teacher's and student's states
    # out.
    with torch.no_grad():
        inputs = model_inputs(model, batch)
        with npt.adapters_disabled(model):
            caught = _states(model, inputs)
        fed = caught if strategy == "local" else _states(model, inputs)
        valid = batch.valid_index
        expected = []
        for index in (1, 2, 3):
            layer = decoder_layers(model)[index]
            hidden, context = fed[index][:2]
            o, t = (
                layer(hidden, **context).flatten(0, 1)[valid],
                caught[index][2].flatten(0, 1)[valid],
            )
            expected.append(float(((o - t).square().sum(-1) / t.square().sum(-1)).sum()))
    # fp32 sums over a few thousand entries, in another order
    assert sums.layer_nmse.tolist() == pytest.approx(expected, rel=1e-4)


def _states(model, inputs) -> list:
    """(h, context, output) of every layer in the model's own pass."""
    caught: list = []
    hooks = [
        layer.register_forward_hook(
            lambda _, args, kwargs, output: caught.append((args[0], kwargs, output)),
            with_kwargs=True,
        )
        for layer in decoder_layers(model)
    ]
    model.model(**inputs, use_cache=False)
    for hook in hooks:
        hook.remove()
    return caught


def test_evaluation_and_trace_look_at_every_family(model, tokenizer):
    text = [{"text": "a sentence that is longer than any window " * 2}] * 2
    fidelity = npt.evaluate(model, tokenizer, text)
    assert set(fidelity.layers) == {1, 2, 3} and 0 < fidelity.student.kl < float("inf")
    for batch in (padded("left"), collate(pack(DOCUMENTS, 16), 2)):
        assert npt.trace(model, batch) is None


def test_a_fault_planted_in_a_layer_is_found_in_every_family(model):
    if any(sliding_layers(model.config)):
        return  # a window has no part in it
    layer = decoder_layers(model)[2]
    hook = layer.mlp.up_proj.register_forward_hook(lambda _, __, output: output * float("nan"))
    try:
        verdict = npt.trace(model, padded("right"))
    finally:
        hook.remove()
    assert verdict is not None and "model.layers.2.mlp.up_proj" in str(verdict)


def test_a_saved_adapter_loads_only_onto_a_base_of_its_window(model, folder, tmp_path):
    npt.save_adapter(model, tmp_path / "adapter")
    fresh = load(folder)
    npt.load_adapter(fresh, tmp_path / "adapter")
    with torch.no_grad():
        ids = padded("right").input_ids
        assert torch.equal(fresh(ids).logits, model(ids).logits)
    if any(sliding_layers(model.config)):
        other = load(folder)
        other.config.sliding_window = WINDOW + 1
        assert npt.base_hash(other) != npt.base_hash(fresh)


def test_an_unknown_kind_of_layer_is_refused(model, monkeypatch):
    if FAMILIES[model.config.model_type].sight == "by layer":
        monkeypatch.setattr(model.config, "layer_types", ["chunked_attention"] * 4)
        with pytest.raises(ModelError, match="layers of type 'chunked_attention'"):
            open_stream(model, padded("right"))


def test_pretrain_runs_on_a_folder_of_another_family(short_library, tmp_path):
    """The one that differs most from a Llama: layers with and without positions, with and without
    windows.
    """
    folder = save_base("smollm3, window", tmp_path / "base")
    command = (
        "pretrain --dataset_name builtin --init random --use_quantization --adapter_rank 4"
        " --max_steps 2 --batch_size 2 --max_length 24 --num_samples 8 --eval_samples 2"
        " --warmup_steps 0 --packing --model_name"
    )
    folders = (str(folder), "--output_dir", str(tmp_path / "run"))
    assert main([*command.split(), *folders]) == 0
    assert json.loads((tmp_path / "run" / "fidelity.json").read_text())["student"]["kl"] > 0
