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
from updates import random_update

import npt
from npt.adapters.consolidate import Consolidation, apply_update, patched_module, summed
from npt.adapters.converted import adapter_parameters, npt_layers
from npt.adapters.files.adapter_files import CARD_NAME, CONFIG_NAME, WEIGHTS_NAME, adapter_hash
from npt.adapters.files.consolidated_files import HISTORY_NAME, PATCHES_NAME
from npt.adapters.stream import open_stream
from npt.base.patched import Patched
from npt.config import TrainConfig
from npt.distill.strategies import STRATEGIES
from npt.errors import AdapterFileError, ConfigError, ModelError


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits


@torch.no_grad()
@pytest.mark.parametrize("quantization", ["nf4", None])
@pytest.mark.parametrize("adapters", ["live", "disabled", "detached"])
def test_an_update_acts_on_student_and_teacher_and_without_adapters(
    load_model, quantization, adapters
):
    model = student(load_model, quantization=quantization)
    update = random_update(model)
    if adapters == "disabled":
        for _, layer in npt_layers(model):
            layer.npt.mode = "teacher"
    elif adapters == "detached":
        npt.detach(model)
    before = logits(model)
    products = []
    module = patched_module(model.model.layers[1])
    hook = module.register_forward_hook(lambda _, args, output: products.append((args[0], output)))
    identity = npt.base_hash(model)
    apply_update(model, update)
    after = logits(model)
    assert npt.base_hash(model) == identity  # not a byte is written
    assert not torch.equal(after, before)
    npt.unconsolidate(model)
    assert torch.equal(logits(model), before)
    hook.remove()
    (p, patched), (other_p, plain) = products
    assert torch.equal(p, other_p)  # layer 1 is the first that is changed
    outer, inner = update.patches[1]
    assert torch.equal(patched, plain + p @ inner.T @ outer.T)
    assert not any(isinstance(m, Patched) for m in model.modules())


@pytest.fixture(scope="module")
def stacked(load_model):
    model = student(load_model)
    return model, logits(model)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    taken=st.lists(st.integers(0, 3), max_size=4),
)
def test_updates_add_up_and_each_comes_off_alone_to_the_same_bits(stacked, sizes, taken):
    model, plain = stacked
    updates = [random_update(model, size=size, seed=n) for n, size in enumerate(sizes)]
    for update in updates:
        apply_update(model, update)
    for number in taken:
        if number < len(updates):
            (gone,) = npt.unconsolidate(model, number)
            assert gone is updates.pop(number)
    assert npt.consolidated(model) == tuple(updates)
    found = logits(model)
    npt.unconsolidate(model, None)
    assert npt.consolidated(model) == () and torch.equal(logits(model), plain)
    for update in updates:
        apply_update(model, update)
    assert torch.equal(logits(model), found)
    npt.unconsolidate(model, None)


def test_patches_wider_than_the_layer_become_one_of_its_width(load_model):
    model = student(load_model)
    patches = [random_update(model, size=40, seed=seed).patches[1] for seed in range(3)]
    outer, inner = summed(patches)
    assert outer.shape[1] == len(outer) < 120
    expected = sum(one.double() @ other.double() for one, other in patches)
    # sums of 120 products in fp32 against fp64
    assert_close((outer @ inner).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("strategy", ["local", "end_to_end"])
def test_gradients_on_a_consolidated_base_are_those_with_its_patches(load_model, batch, strategy):
    """The local strategy multiplies by the frozen weight itself in backward; the end-to-end one
    leaves that to autograd.
    """
    model = student(load_model, layers="1")
    apply_update(model, random_update(model, layers=(1,)))
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


class TestRefused:
    @pytest.mark.parametrize(
        ("index", "shapes", "value", "message"),
        [
            (1, ((64, 2), (2, 128)), float("nan"), "layer 1: .* not finite"),
            (1, ((64, 2), (2, 128)), float("inf"), "layer 1: .* not finite"),
            (1, ((64, 2), (2, 64)), 1.0, r"float32 \[2, 64\], the model needs .* \[2, 128\]"),
            (1, ((32, 2), (2, 128)), 1.0, r"float32 \[32, 2\], the model needs .* \[64, 2\]"),
            (9, ((64, 2), (2, 128)), 1.0, "for layer 9, but the model has layers 0 to 3"),
        ],
    )
    def test_patches_that_would_poison_or_do_not_fit_change_nothing(
        self, load_model, index, shapes, value, message
    ):
        model = student(load_model)
        update = random_update(model)
        apply_update(model, update)
        before = logits(model)
        bad = tuple(torch.full(shape, value) for shape in shapes)
        with pytest.raises((ConfigError, ModelError), match=message):
            apply_update(model, Consolidation({2: update.patches[2], index: bad}))
        assert torch.equal(logits(model), before) and len(npt.consolidated(model)) == 1

    def test_taking_out_what_is_not_there(self, load_model):
        model = student(load_model)
        for number in (0, 1, -1):
            with pytest.raises(ConfigError, match=f"no update {number} to undo: the model has 0"):
                npt.unconsolidate(model, number)
        assert npt.unconsolidate(model, None) == ()


def in_history(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def tamper(folder: Path) -> None:
        record = json.loads((folder / HISTORY_NAME).read_text())
        change(record)
        (folder / HISTORY_NAME).write_text(json.dumps(record))

    return tamper


def in_patches(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def tamper(folder: Path) -> None:
        tensors = load_file(folder / PATCHES_NAME)
        change(tensors)
        save_file(tensors, folder / PATCHES_NAME)

    return tamper


SOME = "updates.0.layers.1.outer"
DAMAGE = {
    "no updates": (in_history(lambda r: r.pop("updates")), "the update None lacks"),
    "a layer that is none": (
        in_history(lambda r: r["updates"][0]["layers"].append("../1")),
        "the update {'layers'",
    ),
    "a layer twice": (
        in_history(lambda r: r["updates"][0]["layers"].append(1)),
        "the update {'layers'.*distinct layers",
    ),
    "a layer too many": (
        in_history(lambda r: r["updates"][0]["layers"].append(77)),
        "lacks the tensor 'updates.0.layers.77",
    ),
    "probes that are no tokens": (
        in_history(lambda r: r["updates"][0].update(probes=[[["a"], 1]])),
        "the update {'layers'.*lacks a record, probes",
    ),
    "a probe without a token": (
        in_history(lambda r: r["updates"][0].update(probes=[[[1, 2], 0]])),
        "the update {'layers'.*lacks a record, probes",
    ),
    "a probe outside the vocabulary": (
        in_history(lambda r: r["updates"][0].update(probes=[[[1, 10**9], 1]])),
        "update 0 is invalid: a probe has an id outside the vocabulary",
    ),
    "texts that are none": (
        in_history(lambda r: r["updates"][0]["record"].update(texts=[5])),
        "the update {'layers'.*lacks a record",
    ),
    "an earlier version's": (
        in_history(lambda r: r["updates"][0].update(places=[[1, "gate"]])),
        r"an earlier version, .* delete the two consolidated\.\* files and write the texts again",
    ),
    "patches without a layer": (
        in_patches(lambda t: t.update(stranger=torch.zeros(1))),
        "has the extra tensor 'stranger'",
    ),
    "a wrong shape": (
        in_patches(lambda t: t.update({SOME: torch.ones(3, 2)})),
        r"has torch.float32 \[3, 2\], the model needs torch.float32 \[64, 2\]",
    ),
    "no matrix": (in_patches(lambda t: t.update({SOME: torch.ones(3)})), "not two matrices"),
    "a wrong dtype": (
        in_patches(lambda t: t.update({SOME: t[SOME].half()})),
        r"has torch.float16 \[64, 2\], the model needs torch.float32",
    ),
    "a value is NaN": (
        in_patches(lambda t: t[SOME].fill_(float("nan"))),
        "update 0 is invalid: layer 1: .*not finite",
    ),
}


class TestFiles:
    @pytest.fixture
    def made(self, load_model):
        model = student(load_model)
        apply_update(model, random_update(model))
        apply_update(model, random_update(model, layers=(2,), seed=1))
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
            PATCHES_NAME,
        }
        other = load_model()
        npt.load_adapter(other, folder)
        assert torch.equal(logits(other), logits(made))
        for one, same in zip(npt.consolidated(other), npt.consolidated(made), strict=True):
            assert (one.record, one.probes) == (same.record, same.probes)
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
