"""`npt.calibrate`: attention cut to the directions that matter, or nothing changed."""

import functools
import io
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import MAKE, save_base
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor, nn

import npt
from npt.adapters.converted import (
    adapter_parameters,
    attached,
    attached_config,
    decoder_layers,
    npt_layers,
)
from npt.adapters.trained import trained_output
from npt.base.attention import EXACT, SDPA
from npt.batch import Sample
from npt.calibration import calibrate as module
from npt.calibration.calibrate import check_form
from npt.calibration.cut import balanced
from npt.calibration.report import print_calibration
from npt.config import TARGETS
from npt.errors import ConfigError, DataError, NotSupportedError, NPTError, NumericalError

TOKENS = 900


@functools.cache
def samples(count: int = 90, length: int = 24, seed: int = 0) -> list[Sample]:
    """Random walks through the vocabulary: a token depends on those before it."""
    source = random.Random(seed)
    found = []
    for number in range(count):
        ids = [source.randrange(3, 128)]
        while len(ids) < source.randint(length // 2, length):
            ids.append(3 + (ids[-1] * 5 + ids[len(ids) // 2] + source.randrange(6)) % 125)
        found.append(Sample(f"walk-{number}", tuple(ids)))
    return found


def student(load_model: Callable[..., Any], quantization: str | None = "nf4", **form: Any) -> Any:
    model = load_model(quantization) if quantization != "fp16" else load_model(None, use_fp16=True)
    npt.attach(model, npt.NPTConfig(**{"layers": "1-3", "rank": 16, "additive_scale": 0.5, **form}))
    return model


def calibrate(model: Any, tokenizer: Any, data: Any = None, **options: Any) -> npt.Calibration:
    return npt.calibrate(
        model,
        tokenizer,
        samples() if data is None else data,
        **{"tokens": TOKENS, "batch_size": 16, **options},
    )


def weights(model: Any) -> dict[str, Tensor]:
    return {
        name: parameter.detach().clone() for name, parameter in adapter_parameters(model).items()
    }


def kl(model: Any, tokenizer: Any) -> tuple[float, float]:
    fidelity = npt.evaluate(model, tokenizer, samples(16, seed=9), batch_size=16)
    return fidelity.student.kl, fidelity.floor.kl


def test_a_calibrated_student_is_far_nearer_to_its_teacher(load_model, tokenizer) -> None:
    """And of all else nothing has changed."""
    model = student(load_model, rank=32)
    npt_layers(model)[1][1].npt.mode = "floor"
    model.train()
    before, state = npt.base_hash(model), torch.get_rng_state()
    console = Console(file=io.StringIO(), width=140)
    found = calibrate(model, tokenizer, console=console)
    assert npt.base_hash(model) == before and torch.equal(torch.get_rng_state(), state)
    assert [layer.npt.mode for _, layer in npt_layers(model)] == ["student", "floor", "student"]
    assert model.training and all(p.grad is None for p in model.parameters())
    assert not any(
        module._forward_hooks or module._forward_pre_hooks
        for layer in decoder_layers(model)
        for module in layer.modules()
    )
    print_calibration(found, console)
    said = console.file.getvalue()
    assert "calibrating layers 1-3 on 900 tokens" in said and f"{found.layers[2].kl:.2g}" in said
    npt_layers(model)[1][1].npt.mode = "student"
    near, floor = kl(model, tokenizer)
    assert near < 0.1 * floor
    assert list(found.layers) == [1, 2, 3] and found.nmse.keys() == found.layers.keys()
    assert all(0 < layer.nmse < 0.5 and 0 < layer.kl < near for layer in found.layers.values())
    assert found.tokens == TOKENS and sum(layer.rank for layer in found.layers.values()) == 96


@pytest.mark.parametrize(
    ("family", "targets"),
    [*zip(MAKE, itertools.cycle([tuple(TARGETS), ("stream",)]), strict=False)],
    ids=MAKE,
)
def test_at_every_direction_the_student_is_its_teacher(family, targets, tmp_path) -> None:
    """In every layer to 1e-5 of the output, and as a whole to 1e-7 nats: rounding of fp32."""
    folder = save_base(family, tmp_path)
    model, tokenizer = npt.load_base(str(folder), quantization="nf4", device="cpu")
    npt.attach(model, npt.NPTConfig(layers="all", rank=64, targets=targets))
    found = calibrate(model, tokenizer, tokens=500)
    assert all(layer.rank == 64 and layer.kl == 0 for layer in found.layers.values())
    draw = torch.Generator().manual_seed(0)
    for _, layer in npt_layers(model):
        # not of the text that was fitted
        hidden, attention = torch.randn(2, 50, 64, generator=draw)
        with torch.no_grad():
            o, _, t = trained_output(layer, hidden, attention, teach=True)
        assert float((o - t).norm() / t.norm()) < 1e-5
    near, floor = kl(model, tokenizer)
    assert near < 1e-7 < 1e-2 < floor


@pytest.mark.parametrize("rank", [2, 32])
def test_at_every_rank_the_student_is_attention_cut_by_hooks(rank, load_model, tokenizer) -> None:
    """The layers of the base itself, whose attention output a becomes P A a."""
    model = student(load_model, rank=rank)
    calibrate(model, tokenizer)
    near, _ = kl(model, tokenizer)
    ids = torch.randint(3, 125, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = model(ids).logits
    cuts = {
        index: (layer.npt.A.detach(), layer.npt.config.additive_scale * layer.npt.B["stream"])
        for index, layer in npt_layers(model)
    }
    npt.detach(model)
    for index, (code, back) in cuts.items():

        def cut(_: Any, __: Any, output: Any, code: Any = code, back: Any = back) -> Any:
            return (output[0] @ code.T @ back.T, *output[1:])

        decoder_layers(model)[index].self_attn.register_forward_hook(cut)
    with torch.no_grad():
        torch.testing.assert_close(found, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert near > 0


@pytest.mark.parametrize(
    ("quantization", "modulation"),
    [("nf4", "multiplicative"), (None, "additive"), ("fp16", "both")],
)
def test_every_form_and_base_starts_with_the_stream_alone(
    quantization, modulation, load_model, tokenizer
) -> None:
    model = student(load_model, quantization, layers="2", modulation=modulation)
    before = weights(model)
    calibrate(model, tokenizer, tokens=300)
    after = weights(model)
    assert after.keys() == before.keys()
    for name, value in after.items():
        assert value.dtype == torch.float32 and torch.isfinite(value).all()
        assert bool(value.any()) == name.endswith((".npt.A", ".B.stream")), name


def even(code: Tensor, back: Tensor) -> bool:
    """Return whether rows of A and the columns that read them have sizes within the nearest power
    of two, on both sides of the square root.
    """
    quotients = code.square().mean(dim=1).sqrt() / back.square().mean(dim=0).sqrt()
    return bool(((quotients > 0.49) & (quotients < 2.04)).all())


@given(st.integers(0, 1000), st.floats(-6, 3), st.floats(-4, 3))
def test_balancing_evens_numbers_and_changes_no_bit_of_the_student(seed, exponent, other) -> None:
    draw = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-2, 2, 5)
    code = torch.randn(5, 12, generator=draw) * 10**exponent * spread.unsqueeze(1)
    back = torch.randn(20, 5, generator=draw) * 10**other
    after = balanced(code, back)[:2]
    a = torch.randn(12, 7, generator=draw)
    # each rank by itself: how a product of matrices sums is the library's affair
    for r in range(5):
        found, expected = (b[:, r : r + 1] @ (a_[r : r + 1] @ a) for a_, b in (after, (code, back)))
        assert torch.equal(found, expected)
    assert even(*after)


def test_balancing_leaves_alone_rows_that_nothing_reads() -> None:
    code = torch.tensor([[1e-3, 2e-3], [0.0, 0.0], [0.0, 0.0]])
    back = torch.tensor([[0.0, 3.0, 0.0]])
    assert all(map(torch.equal, balanced(code, back)[:2], (code, back)))


def test_equal_seeds_give_equal_adapters_and_these_are_balanced(load_model, tokenizer) -> None:
    found, used = [], set()
    for _ in range(2):
        model = student(load_model, layers="1,3", additive_scale=0.1)
        hook = lambda *_: used.add(model.config._attn_implementation)  # noqa: E731, B023
        decoder_layers(model)[2].register_forward_pre_hook(hook)
        calibrate(model, tokenizer, seed=3, tokens=300)
        found.append(weights(model))
    assert used == {EXACT} and model.config._attn_implementation == SDPA  # on CUDA too
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    for _, layer in npt_layers(model):
        assert even(layer.npt.A.detach(), layer.npt.B["stream"].detach())


def test_ranks_are_given_out_saved_and_loaded(load_model, tokenizer, tmp_path: Path) -> None:
    model = student(load_model, rank=7)
    found = calibrate(model, tokenizer, tokens=300)
    ranks = tuple(layer.rank for layer in found.layers.values())
    assert sum(ranks) == 21 and len(set(ranks)) > 1
    assert attached_config(model).ranks == ranks
    assert tuple(len(layer.npt.A) for _, layer in npt_layers(model)) == ranks
    assert [layer.npt.config.rank for _, layer in npt_layers(model)] == list(ranks)
    npt.save_adapter(model, tmp_path / "adapter")
    other = load_model("nf4")
    assert npt.load_adapter(other, tmp_path / "adapter").ranks == ranks
    assert all(torch.equal(value, weights(other)[name]) for name, value in weights(model).items())
    assert not attached(other).random_start and not attached(model).random_start
    ids = torch.arange(3, 20).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, other(ids).logits)


class Poisoned(nn.Module):
    """Gives what the module gives, with one NaN in it."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        # by which attention is told apart from layer to layer
        self.layer_idx = getattr(module, "layer_idx", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.module(*args, **kwargs)
        poisoned = (output[0] if isinstance(output, tuple) else output).clone()
        poisoned[..., -1, 5] = torch.nan
        return (poisoned, *output[1:]) if isinstance(output, tuple) else poisoned


@pytest.mark.parametrize(
    ("place", "named"),
    [
        (("model.layers.2", "self_attn"), "the attention output of layer 2 is not finite"),
        (("model.layers.3", "post_attention_layernorm"), "not finite"),
        (("model", "norm"), "the teacher's logits are not finite"),
    ],
)
def test_a_non_finite_number_is_named_and_nothing_is_changed(
    place, named, load_model, tokenizer
) -> None:
    model = student(load_model)
    owner = model.get_submodule(place[0])
    setattr(owner, place[1], Poisoned(getattr(owner, place[1])))
    before = weights(model)
    with pytest.raises(NumericalError, match=named) as caught:
        calibrate(model, tokenizer)
    assert "\n" not in str(caught.value)
    assert (
        all(torch.equal(value, before[name]) for name, value in weights(model).items())
        and attached(model).random_start
    )
    assert all(layer.npt.mode == "student" for _, layer in npt_layers(model))


def test_a_failure_in_the_last_layer_leaves_the_first_as_it_was(
    load_model, tokenizer, monkeypatch
) -> None:
    model = student(load_model)
    before, original, calls = weights(model), module.Cut.of, iter(range(3))

    def of(*matrices: Tensor) -> Any:
        cut = original(*matrices)
        if next(calls) == 2:
            cut.code[0, 0] = torch.nan
        return cut

    monkeypatch.setattr(module.Cut, "of", of)
    with pytest.raises(NumericalError, match="directions of layer 3 are non-finite"):
        calibrate(model, tokenizer)
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], type[NPTError], str]] = {
    "no data": ({}, {"data": []}, DataError, "needs two samples"),
    "records without text": (
        {},
        {"data": [{"text": ""}, {"text": ""}]},
        DataError,
        "needs two samples",
    ),
    "one sample": ({}, {"data": samples(1)}, DataError, "the data yield 1"),
    "too little for the rank": ({"rank": 64}, {"data": samples(8)}, DataError, "rank 64 needs 256"),
    "no tokens": ({}, {"tokens": 0}, ConfigError, "--calibration_tokens is 0"),
    "a form that does not start at 1": (
        {"mult_form": "half_sigmoid"},
        {},
        NotSupportedError,
        "--mult_form half_sigmoid has 0.75",
    ),
    "no stream": (
        {"targets": ("gate", "up", "down")},
        {},
        NotSupportedError,
        "--targets is gate,up,down: add stream",
    ),
    "kept residual": (
        {"residual": "keep"},
        {},
        NotSupportedError,
        "--residual keep, where adapters start equal to",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_calibration_says_one_line_and_changes_nothing(
    case, load_model, tokenizer
) -> None:
    form, options, kind, named = REFUSED[case]
    model = student(load_model, **form)
    before = weights(model)
    with pytest.raises(kind, match=named) as caught:
        calibrate(model, tokenizer, **options)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())


@pytest.mark.parametrize(
    ("form", "named"),
    [({"residual": "keep"}, "--residual keep"), ({"targets": ("gate",)}, "add stream")],
)
def test_impossible_settings_are_refused_before_a_base_is_loaded(form, named) -> None:
    with pytest.raises(ConfigError, match=named):
        check_form(npt.NPTConfig(init="calibrated", **form))


def test_unknown_ids_are_left_out_the_last_sample_is_cut_and_listed_ranks_stay(
    load_model, tokenizer
) -> None:
    model = student(load_model, ranks=(3, 9, 5))
    data = [Sample("bad", (3, 4, 500)), *samples(40)]
    found = calibrate(model, tokenizer, data, tokens=200)
    assert found.tokens in (199, 200)  # a rest of one token is no sample
    assert [layer.rank for layer in found.layers.values()] == [3, 9, 5]
    assert attached_config(model).ranks == (3, 9, 5)


def test_packed_samples_stay_apart(load_model, tokenizer, monkeypatch) -> None:
    """Two documents in one row calibrate as the two alone do, to fp32 rounding."""
    pairs = [replace(sample, input_ids=sample.input_ids[:12]) for sample in samples(32)]
    # in the order given: of 32 samples another is drawn than of 16
    monkeypatch.setattr("npt.calibration.samples.permutation", lambda n, key: range(n))
    packed = [
        Sample(
            f"{a.id}+{b.id}", a.input_ids + b.input_ids, None, (len(a.input_ids), len(b.input_ids))
        )
        for a, b in zip(pairs[::2], pairs[1::2], strict=True)
    ]
    found = []
    for data, batch_size in ((pairs, 4), (packed, 2)):
        model = student(load_model, layers="1")
        options = {"tokens": 10_000, "batch_size": batch_size}
        found.append(calibrate(model, tokenizer, data, **options).layers[1])
    assert found[0].nmse == pytest.approx(found[1].nmse, rel=1e-4)
