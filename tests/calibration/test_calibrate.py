"""`npt.calibrate`: nearer to the teacher without a gradient step, or nothing changed."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor, nn

import npt
from npt.adapters.attach import at_random_start
from npt.adapters.converted import adapter_parameters, attached_config, decoder_layers, npt_layers
from npt.calibration import walks
from npt.calibration.calibrate import balanced, check_calibration
from npt.calibration.placement import Placement
from npt.calibration.plan import plan
from npt.calibration.report import print_calibration
from npt.calibration.samples import read_samples, split
from npt.data.batch import Sample
from npt.errors import (
    ConfigError,
    DataError,
    ModelError,
    NotSupportedError,
    NPTError,
    NumericalError,
)

TOKENS = 900


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
        **{"tokens": TOKENS, "batch_size": 4, "rounds": 2, **options},
    )


def weights(model: Any) -> dict[str, Tensor]:
    return {
        name: parameter.detach().clone() for name, parameter in adapter_parameters(model).items()
    }


def kl(model: Any, tokenizer: Any) -> tuple[float, float]:
    fidelity = npt.evaluate(model, tokenizer, samples(16, seed=9), batch_size=8)
    return fidelity.student.kl, fidelity.floor.kl


@pytest.mark.parametrize("inputs", ["teacher", "propagated"])
def test_a_calibrated_student_is_far_nearer_to_its_teacher(inputs, load_model, tokenizer) -> None:
    model = student(load_model, rank=32)
    found = calibrate(model, tokenizer, inputs=inputs)
    near, floor = kl(model, tokenizer)
    assert near < 0.5 * floor
    assert list(found.layers) == [1, 2, 3] and found.nmse.keys() == found.layers.keys()
    for layer in found.layers.values():
        assert (
            layer.nmse_after <= layer.nmse_linear * 1.05 < layer.nmse_before
            and layer.kl_after <= layer.kl_linear < layer.kl_before
        )
    assert found.tokens == TOKENS and 0 < found.heldout_tokens < TOKENS / 4


def test_figures_of_the_report_are_those_of_the_layer_itself(load_model, tokenizer) -> None:
    model, data = student(load_model, layers="2"), samples()
    found = calibrate(model, tokenizer, data)
    read = read_samples(data, tokenizer, 256, TOKENS, 128)
    parts = split(read, 4, 2)
    ids, left = [], parts.heldout
    for batch in reversed(parts.batches):
        if left > 0:
            ids += batch.sample_ids
            left -= batch.tokens
    used = {sample.id: sample for sample in read}
    heldout = [used[i] for i in ids]
    assert sum(len(sample.input_ids) for sample in heldout) == found.heldout_tokens
    layer = npt.evaluate(model, tokenizer, heldout, batch_size=4).layers[2]
    # fp32 products in another order
    assert layer["nmse_student"] == pytest.approx(found.layers[2].nmse_after, rel=1e-3)
    assert layer["nmse_floor"] == pytest.approx(found.layers[2].nmse_before, rel=1e-3)


@pytest.mark.parametrize(
    ("quantization", "modulation"),
    [("nf4", "multiplicative"), (None, "additive"), ("fp16", "both")],
)
def test_every_form_and_base_is_calibrated(quantization, modulation, load_model, tokenizer) -> None:
    model = student(load_model, quantization, layers="2", modulation=modulation)
    before = weights(model)
    found = calibrate(model, tokenizer, rounds=1)
    layer = found.layers[2]
    assert layer.kl_after < layer.kl_before
    after = weights(model)
    assert after.keys() == before.keys() and all(
        p.dtype == torch.float32 and torch.isfinite(p).all() for p in after.values()
    )
    assert any(
        name.split(".npt.")[1].startswith("M.") and p.any() for name, p in after.items()
    ) == (modulation != "additive")


def sizes(parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Root mean squares by rank: of A's rows, and of the columns that read them."""
    behind = torch.cat([value for name, value in parameters.items() if name != "A"])
    return parameters["A"].square().mean(dim=1).sqrt(), behind.square().mean(dim=0).sqrt()


@given(st.integers(0, 1000), st.floats(-6, 3), st.floats(-4, 3))
def test_balancing_evens_numbers_and_changes_no_bit_of_the_student(seed, exponent, other) -> None:
    draw = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-2, 2, 5)
    before = {
        "A": torch.randn(5, 12, generator=draw) * 10**exponent * spread.unsqueeze(1),
        "B.gate": torch.randn(20, 5, generator=draw) * 10**other,
        "M.down": torch.randn(12, 5, generator=draw),
    }
    after = balanced(before)
    a = torch.randn(12, 7, generator=draw)
    for name in ("B.gate", "M.down"):
        # each rank by itself: how a product of matrices sums is the library's affair
        for r in range(5):
            assert torch.equal(
                after[name][:, r : r + 1] @ (after["A"][r : r + 1] @ a),
                before[name][:, r : r + 1] @ (before["A"][r : r + 1] @ a),
            )
    rows, columns = sizes(after)
    # the nearest power of two, on both sides of the square root
    assert bool(((rows / columns > 0.49) & (rows / columns < 2.04)).all())


def test_balancing_leaves_alone_rows_that_nothing_reads() -> None:
    before = {
        "A": torch.tensor([[1e-3, 2e-3], [0.0, 0.0], [0.0, 0.0]]),
        "B.up": torch.tensor([[0.0, 3.0, 0.0]]),
    }
    assert all(torch.equal(value, before[name]) for name, value in balanced(before).items())


@pytest.mark.parametrize("targets", [("gate",), ("up", "down")])
def test_targets_that_are_not_modulated_get_nothing(targets, load_model, tokenizer) -> None:
    model = student(load_model, layers="2", targets=targets)
    found = calibrate(model, tokenizer, rounds=1)
    assert found.layers[2].kl_after < found.layers[2].kl_before
    assert set(npt_layers(model)[0][1].npt.B) == set(targets)


def test_equal_seeds_give_equal_adapters_and_these_are_balanced(load_model, tokenizer) -> None:
    found = []
    for _ in range(2):
        model = student(load_model, layers="1,3", additive_scale=0.1)
        calibrate(model, tokenizer, seed=3, rounds=1)
        found.append(weights(model))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    for _, layer in npt_layers(model):
        rows, columns = sizes(
            {name.removeprefix("npt."): p.detach() for name, p in layer.npt.named_parameters()}
        )
        assert bool(((rows / columns > 0.49) & (rows / columns < 2.04)).all())


def test_the_base_the_modes_and_the_random_state_stay_as_they_were(load_model, tokenizer) -> None:
    model = student(load_model)
    npt_layers(model)[1][1].npt.mode = "floor"
    model.train()
    before, state = npt.base_hash(model), torch.get_rng_state()
    calibrate(model, tokenizer, rounds=1)
    assert npt.base_hash(model) == before and torch.equal(torch.get_rng_state(), state)
    assert [layer.npt.mode for _, layer in npt_layers(model)] == ["student", "floor", "student"]
    assert model.training and all(p.grad is None for p in model.parameters())
    assert not any(
        module._forward_hooks or module._forward_pre_hooks
        for layer in decoder_layers(model)
        for module in layer.modules()
    )


def test_a_budget_of_ranks_is_spent_saved_and_loaded(load_model, tokenizer, tmp_path: Path) -> None:
    model = student(load_model)
    found = calibrate(model, tokenizer, rank_budget=20, rounds=1)
    ranks = tuple(layer.rank for layer in found.layers.values())
    assert sum(ranks) == 20 and len(set(ranks)) > 1
    assert attached_config(model).ranks == ranks
    assert tuple(len(layer.npt.A) for _, layer in npt_layers(model)) == ranks
    assert [layer.npt.config.rank for _, layer in npt_layers(model)] == list(ranks)
    npt.save_adapter(model, tmp_path / "adapter")
    other = load_model("nf4")
    assert npt.load_adapter(other, tmp_path / "adapter").ranks == ranks
    assert all(torch.equal(value, weights(other)[name]) for name, value in weights(model).items())
    assert not at_random_start(other) and not at_random_start(model)
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
    assert all(
        torch.equal(value, before[name]) for name, value in weights(model).items()
    ) and at_random_start(model)
    assert all(layer.npt.mode == "student" for _, layer in npt_layers(model))


def test_a_failure_in_the_last_layer_leaves_the_first_as_it_was(
    load_model, tokenizer, monkeypatch
) -> None:
    model = student(load_model)
    before, original, calls = weights(model), walks.solve, iter(range(3))

    def solve(*arguments: Any) -> Any:
        solution = original(*arguments)
        if next(calls) == 2:
            solution.parameters["A"][0, 0] = torch.nan
        return solution

    monkeypatch.setattr(walks, "solve", solve)
    with pytest.raises(NumericalError, match="A of layer 3 came out non-finite"):
        calibrate(model, tokenizer, rounds=1)
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], type[NPTError], str]] = {
    "no data": ({}, {"data": []}, DataError, "needs two samples"),
    "records without text": (
        {},
        {"data": [{"text": ""}, {"text": ""}]},
        DataError,
        "needs two samples",
    ),
    "one sample": ({}, {"data": samples(1)}, DataError, "the data gave 1"),
    "too little for the rank": ({"rank": 64}, {"data": samples(8)}, DataError, "rank 64 needs 256"),
    "no tokens": ({}, {"tokens": 0}, ConfigError, "--calibration_tokens is 0"),
    "negative rounds": ({}, {"rounds": -1}, ConfigError, "--calibration_rounds is -1"),
    "other inputs": (
        {},
        {"inputs": "student"},
        ConfigError,
        "--calibration_inputs is 'student'; choose from teacher, propagated",
    ),
    "a budget below one each": ({}, {"rank_budget": 2}, ConfigError, "--rank_budget is 2"),
    "a budget beyond the model": ({}, {"rank_budget": 193}, ConfigError, "3 to 192 ranks"),
    "another form": (
        {"mult_form": "one_plus_tanh"},
        {},
        NotSupportedError,
        "--mult_form is one_plus_tanh",
    ),
    "kept residual": (
        {"residual": "keep"},
        {},
        NotSupportedError,
        "--residual keep start equal to their base",
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


def test_a_model_without_adapters_is_refused(load_model, tokenizer) -> None:
    with pytest.raises(ModelError, match="no NPT adapters"):
        calibrate(load_model("nf4"), tokenizer)


@pytest.mark.parametrize(
    ("form", "budget", "named"),
    [
        ({}, 9, "means nothing without --init calibrated"),
        ({"init": "calibrated", "ranks": (4, 5)}, 9, "next to --ranks 4,5"),
        ({"init": "calibrated"}, 1, "--rank_budget is 1; 2 converted"),
        ({"init": "calibrated", "residual": "keep"}, None, "--residual keep"),
    ],
)
def test_impossible_settings_are_refused_before_a_base_is_loaded(form, budget, named) -> None:
    with pytest.raises(ConfigError, match=named):
        check_calibration(npt.NPTConfig(**form), budget, 2, 64)


def test_unknown_ids_are_left_out_and_the_last_sample_is_cut(load_model, tokenizer) -> None:
    model = student(load_model, layers="2", rank=4)
    data = [Sample("bad", (3, 4, 500)), *samples(40)]
    found = calibrate(model, tokenizer, data, tokens=200, rounds=0)
    assert found.tokens in (199, 200)  # a rest of one token is no sample


def test_packed_samples_stay_apart(load_model, tokenizer, monkeypatch) -> None:
    """Two documents in one row calibrate as the two alone do, to fp32 rounding."""
    pairs = [replace(sample, input_ids=sample.input_ids[:12]) for sample in samples(32)]
    # in the order given: of 32 samples another is drawn than of 16
    monkeypatch.setattr("npt.calibration.samples.Permutation", lambda n, key: range(n))
    packed = [
        Sample(
            f"{a.id}+{b.id}", a.input_ids + b.input_ids, None, (len(a.input_ids), len(b.input_ids))
        )
        for a, b in zip(pairs[::2], pairs[1::2], strict=True)
    ]
    found = []
    for data, batch_size in ((pairs, 4), (packed, 2)):
        model = student(load_model, layers="1", modulation="additive")
        found.append(
            calibrate(
                model, tokenizer, data, tokens=10_000, rounds=0, batch_size=batch_size
            ).layers[1]
        )
    assert found[0].nmse_before == pytest.approx(found[1].nmse_before, rel=1e-4)


def test_prompts_and_plain_records_are_read_as_everywhere(load_model, tokenizer) -> None:
    model = student(load_model, layers="3", rank=4)
    records = [{"text": "abcdefgh" * 3, "id": str(i)} for i in range(16)]
    assert calibrate(model, tokenizer, iter(records), rounds=0, max_length=12).tokens > 300


def test_estimate_progress_and_table_are_shown(load_model, tokenizer) -> None:
    console = Console(file=io.StringIO(), width=140)
    found = calibrate(student(load_model), tokenizer, rounds=1, console=console)
    said = console.file.getvalue()
    assert "calibrating layers 1-3 on 900 tokens: about" in said and "MiB of temporary disk" in said
    assert said.count("layer 2: NMSE") == 1
    print_calibration(found, console)
    assert f"{found.layers[2].nmse_after:.5f}" in console.file.getvalue()


def test_memory_does_not_grow_with_the_tokens() -> None:
    model = npt.base.load.read_config("tiny")
    config, cpu = npt.NPTConfig(rank=16), torch.device("cpu")
    few, many = (plan(config, model, (4, 5), (16, 16), tokens, 3) for tokens in (1 << 14, 1 << 20))
    assert many.ram(cpu, Placement()) == few.ram(cpu, Placement())
    assert many.disk(Placement()) == 64 * few.disk(Placement())
    assert many.products == 64 * few.products
