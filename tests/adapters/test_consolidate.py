import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from token_students import IDS, student
from torch.testing import assert_close

import npt
from npt.adapters.consolidate import Consolidation, product_of
from npt.adapters.converted import adapter_parameters, npt_layers
from npt.adapters.files.adapter_files import CARD_NAME, CONFIG_NAME, WEIGHTS_NAME, adapter_hash
from npt.adapters.files.consolidated_files import HISTORY_NAME, ROWS_NAME
from npt.adapters.layer import attention_output, student_output
from npt.adapters.stream import open_stream
from npt.base.rows import RowScaled, rows_of
from npt.config import PRODUCTS, RESIDUALS, TrainConfig
from npt.data.batch import batch_from_tensors
from npt.distill.strategies import STRATEGIES
from npt.errors import AdapterFileError, ConfigError, ModelError


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits


def first(model, alpha: float = 0.5, token: int = -1, **what) -> Consolidation:
    return npt.update_from(npt.modulation_of(model, IDS, token), alpha, **what)


@torch.no_grad()
@pytest.mark.parametrize("residual", RESIDUALS)
def test_at_full_strength_every_token_is_modulated_as_that_one_was(
    load_model, monkeypatch, residual
):
    """Without a modulation of its own (the floor), a layer with the rows is the layer in which all
    tokens have that token's code.
    """
    model = student(load_model, residual=residual, targets=tuple(PRODUCTS))
    found = npt.modulation_of(model, IDS, 2)
    stream = open_stream(
        model, batch_from_tensors(torch.tensor([IDS]), torch.ones(1, 5, dtype=torch.int64))
    )
    index, layer = npt_layers(model)[0]
    attention = attention_output(layer, stream.hidden, **stream.context_of(layer))
    with monkeypatch.context() as patched:
        patched.setattr(
            type(layer.npt), "code", lambda self, a: found.codes[index].expand(*a.shape[:-1], -1)
        )
        expected = student_output(layer, stream.hidden, attention)[0]
    npt.consolidate(model, npt.update_from(found, 1.0))
    with npt.adapter_mode(model, "floor"):
        got = student_output(layer, stream.hidden, attention)[0]
    # the same products of fp32, m and s of one token and of five computed in other orders
    assert_close(got, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@torch.no_grad()
def test_a_shift_of_the_stream_becomes_part_of_every_attention_output(load_model):
    model = student(load_model)
    found = npt.modulation_of(model, IDS, 2)
    shift = found.terms[1]["stream"][1]
    streams: list[torch.Tensor] = []
    norm = model.model.layers[1].post_attention_layernorm
    norm.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
    with npt.adapters_disabled(model):
        logits(model)
        npt.consolidate(model, npt.update_from(found, 1.0, targets=["stream"]))
        logits(model)
    # differences of fp32 numbers of order 1
    assert_close(streams[1] - streams[0], shift.expand_as(streams[0]), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("quantization", ["nf4", None])
@pytest.mark.parametrize("adapters", ["live", "disabled", "detached"])
def test_rows_act_on_student_and_teacher_and_without_adapters(load_model, quantization, adapters):
    model = student(load_model, quantization=quantization, targets=tuple(PRODUCTS))
    update = first(model)
    if adapters == "disabled":
        for _, layer in npt_layers(model):
            layer.npt.mode = "teacher"
    elif adapters == "detached":
        npt.detach(model)
    before = logits(model)
    outputs = []
    layer = model.model.layers[1]
    hook = layer.mlp.gate_proj.register_forward_hook(
        lambda _, args, output: outputs.append((args[0], output))
    )
    identity = npt.base_hash(model)
    npt.consolidate(model, update)
    after = logits(model)
    assert npt.base_hash(model) == identity  # not a byte is written
    assert not torch.equal(after, before)
    npt.unconsolidate(model)
    assert torch.equal(logits(model), before)
    hook.remove()
    (x, scaled), (other_x, plain) = outputs
    assert torch.equal(x, other_x)  # layer 1 is the first that is changed
    scale, bias = update.rows[1, "gate"]
    assert torch.equal(scaled, scale * plain + bias)
    assert not any(isinstance(m, RowScaled) for m in model.modules())


@settings(max_examples=25, deadline=None)
@given(
    alphas=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4),
    tokens=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    undone=st.integers(0, 4),
)
def test_updates_stack_and_come_off_in_reverse_to_the_same_bits(stacked, alphas, tokens, undone):
    model, plain = stacked
    states = [plain]
    for alpha, token in zip(alphas, tokens, strict=False):
        npt.consolidate(
            model, first(model, alpha, token, targets=("gate", "down") if token % 2 else None)
        )
        states.append(logits(model))
    gate = product_of(model.model.layers[1], "gate")
    plain_product = torch.randn(3, gate.out_features)
    y = plain_product
    for update in npt.consolidated(model):
        y_scale, y_bias = update.rows[1, "gate"]
        y = y_scale * y + y_bias
    scale, bias = rows_of(gate)
    assert (scale > 0).all() and len(npt.consolidated(model)) == len(alphas)
    # fp32, multiplied out in another order
    assert_close(scale * plain_product + bias, y, rtol=1e-5, atol=1e-5)
    undone = min(undone, len(alphas))
    taken = npt.unconsolidate(model, undone)
    assert len(taken) == undone
    assert torch.equal(logits(model), states[len(alphas) - undone])
    npt.unconsolidate(model, None)
    assert npt.consolidated(model) == () and torch.equal(logits(model), plain)


@pytest.fixture(scope="module")
def stacked(load_model):
    model = student(load_model)
    return model, logits(model)


@pytest.mark.parametrize("strategy", ["local", "end_to_end"])
def test_gradients_on_a_consolidated_base_are_those_with_its_rows(load_model, batch, strategy):
    """The local strategy multiplies by the frozen weight itself in backward; the end-to-end one
    leaves that to autograd.
    """
    model = student(load_model, layers="1")
    npt.consolidate(model, first(model, 0.9))
    STRATEGIES[strategy](model, batch, TrainConfig(strategy=strategy))
    found = {name: p.grad.clone() for name, p in adapter_parameters(model).items()}
    model.zero_grad()
    layer = model.model.layers[1]
    with npt.adapters_disabled(model), torch.no_grad():
        stream = open_stream(model, batch)
        h = model.model.layers[0](stream.hidden, **stream.context_of(model.model.layers[0]))
        t = stream.rows(layer(h, **stream.context_of(layer)))
    o = stream.rows(layer(h, **stream.context_of(layer)))
    ((o - t).square().sum(-1) / t.square().sum(-1)).sum().backward()
    for name, parameter in adapter_parameters(model).items():
        # the same sums in another order, over 21 tokens
        assert_close(
            found[name], parameter.grad, rtol=1e-3, atol=1e-5 * float(parameter.grad.abs().max())
        )


ONES, NAN, ZEROS = torch.ones(128), torch.full((128,), float("nan")), torch.zeros(128)


class TestRefused:
    @pytest.mark.parametrize(
        ("what", "message"),
        [
            *(({"alpha": alpha}, "--alpha is") for alpha in (0.0, -0.5, 1.01, float("nan"))),
            ({"targets": ("sideways",)}, "is sideways, but the adapter modulates down, gate"),
            ({"targets": ()}, "--targets is none"),
        ],
    )
    def test_what_the_adapter_does_not_modulate(self, load_model, what, message):
        with pytest.raises(ConfigError, match=message):
            first(student(load_model), **what)

    @pytest.mark.parametrize(
        ("place", "rows", "message"),
        [
            ((1, "gate"), (NAN, ZEROS), "layer 1, gate: .* not finite"),
            ((1, "gate"), (ONES, ONES / 0), "layer 1, gate: .* not finite"),
            ((1, "gate"), (ZEROS, ZEROS), "not above 0"),
            ((1, "gate"), (ONES[:64], ZEROS[:64]), r"float32 \[64\], the model needs .* \[128\]"),
            ((9, "gate"), (ONES, ZEROS), "'gate' of layer 9, but the model has layers 0 to 3"),
        ],
    )
    def test_rows_that_would_poison_or_do_not_fit_change_nothing(
        self, load_model, place, rows, message
    ):
        model = student(load_model)
        npt.consolidate(model, first(model))
        before = logits(model)
        with pytest.raises((ConfigError, ModelError), match=message):
            npt.consolidate(model, Consolidation({(2, "up"): (ONES, ONES), place: rows}))
        assert torch.equal(logits(model), before) and len(npt.consolidated(model)) == 1

    def test_taking_back_more_than_there_are(self, load_model):
        model = student(load_model)
        for count in (1, -1):
            with pytest.raises(ConfigError, match=f"cannot undo {count} updates"):
                npt.unconsolidate(model, count)


def in_history(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def tamper(folder: Path) -> None:
        record = json.loads((folder / HISTORY_NAME).read_text())
        change(record)
        (folder / HISTORY_NAME).write_text(json.dumps(record))

    return tamper


def in_rows(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def tamper(folder: Path) -> None:
        tensors = load_file(folder / ROWS_NAME)
        change(tensors)
        save_file(tensors, folder / ROWS_NAME)

    return tamper


SOME = "updates.0.layers.1.gate.scale"
DAMAGE = {
    "no updates": (in_history(lambda r: r.pop("updates")), "the update None lacks"),
    "a place that leads elsewhere": (
        in_history(lambda r: r["updates"][0]["places"].append([1, "../up"])),
        "the update {'places'",
    ),
    "a place twice": (
        in_history(lambda r: r["updates"][0]["places"].append([1, "gate"])),
        "the update {'places'.*distinct places",
    ),
    "a layer too many": (
        in_history(lambda r: r["updates"][0]["places"].append([77, "up"])),
        "lacks the tensor 'updates.0.layers.77.up",
    ),
    "rows without a place": (
        in_rows(lambda t: t.update(stranger=torch.zeros(1))),
        "has the extra tensor 'stranger'",
    ),
    "a wrong shape": (
        in_rows(lambda t: t.update({SOME: torch.ones(3)})),
        r"has torch.float32 \[3\], the model needs torch.float32 \[128\]",
    ),
    "a wrong dtype": (
        in_rows(lambda t: t.update({SOME: t[SOME].half()})),
        r"has torch.float16 \[128\], the model needs torch.float32",
    ),
    "a value is NaN": (
        in_rows(lambda t: t[SOME].fill_(float("nan"))),
        "update 0 is invalid: layer 1, gate: .*not finite",
    ),
    "a scale is 0": (in_rows(lambda t: t[SOME].fill_(0.0)), "update 0 is invalid: .*not above 0"),
}


class TestFiles:
    @pytest.fixture
    def made(self, load_model):
        model = student(load_model)
        npt.consolidate(model, first(model, 0.5, record={"text": "one"}))
        npt.consolidate(model, first(model, 0.3, 1, targets=("down",), record={"text": "two"}))
        return model

    def test_an_adapter_is_saved_with_its_updates_and_loads_with_them(
        self, load_model, made, tmp_path
    ):
        folder = npt.save_adapter(made, tmp_path / "adapter")
        assert {p.name for p in folder.iterdir()} == {
            CONFIG_NAME,
            WEIGHTS_NAME,
            CARD_NAME,
            HISTORY_NAME,
            ROWS_NAME,
        }
        other = load_model()
        npt.load_adapter(other, folder)
        assert torch.equal(logits(other), logits(made))
        assert [u.record for u in npt.consolidated(other)] == [
            u.record for u in npt.consolidated(made)
        ]
        assert adapter_hash(other) == adapter_hash(made)
        npt.unconsolidate(other)
        npt.unconsolidate(made)
        assert torch.equal(logits(other), logits(made)) and adapter_hash(other) == adapter_hash(
            made
        )
        npt.save_adapter(made, folder)
        npt.unconsolidate(made)
        npt.save_adapter(made, folder)
        assert {p.name for p in folder.iterdir()} == {CONFIG_NAME, WEIGHTS_NAME, CARD_NAME}

    def test_updates_are_not_loaded_on_top_of_others(self, made, tmp_path):
        folder = npt.save_adapter(made, tmp_path / "adapter")
        before = logits(made)
        with pytest.raises(
            ModelError, match=r"already has consolidated updates: call npt\.unconsolidate"
        ):
            npt.load_adapter(made, folder)
        assert torch.equal(logits(made), before)

    @pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
    def test_a_damaged_folder_is_refused_and_leaves_the_model_as_it_was(
        self, load_model, made, tmp_path, damage, message
    ):
        folder = npt.save_adapter(made, tmp_path / "adapter")
        damage(folder)
        other = load_model()
        before = logits(other)
        with pytest.raises(AdapterFileError, match=message) as refusal:
            npt.load_adapter(other, folder)
        assert str(folder) in str(refusal.value)
        assert torch.equal(logits(other), before) and npt.consolidated(other) == ()
