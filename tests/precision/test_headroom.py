"""Errors and headroom by number format: exactly zero against itself, and a layer that overflows is
the one that is named.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

import npt
import precision
from compare_precision import SHOWN, main, print_precision
from npt.adapters.stream import open_stream
from npt.base.load import EMBEDDED_FOLDER
from npt.base.precision import compute_in
from npt.config import DataConfig
from npt.data.batch import Batch, Sample, collate
from npt.diagnostics.variants import VARIANTS, load_variant
from npt.errors import ConfigError, ModelError
from npt.files import to_json
from precision import (
    CHECKPOINTS,
    Comparison,
    Extent,
    VariantFigures,
    compare_precision,
    measure,
    reference_passes,
)

SHORT = DataConfig(max_length=16)


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    compute_in(model, dtype)
    return model


def amplified(model: Any, layer: int, factor: float) -> Any:
    """The same function in fp32, with a product `factor` times as large: by a power of two, which
    rounds nothing.
    """
    mlp = model.model.layers[layer].mlp
    with torch.no_grad():
        mlp.up_proj.weight.mul_(factor)
        mlp.down_proj.weight.div_(factor)
    return model


def assert_exact(variant: VariantFigures) -> None:
    for layer in variant.layers:
        for errors in (layer.residual, layer.update):
            assert (errors.mean, errors.worst, errors.non_finite) == (0.0, 0.0, 0)
    assert (variant.figures.kl, variant.figures.perplexity_ratio, variant.figures.top1) == (
        0.0,
        1.0,
        1.0,
    )


def test_fp32_against_itself_is_exactly_zero(load_model, batch) -> None:
    assert_exact(measure(load_model(None), reference_passes(load_model(None), [batch, batch])))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_errors_are_those_of_their_definition(load_model, batch, dtype) -> None:
    plain, half = load_model(None), in_dtype(load_model(None), dtype)
    measured = measure(half, reference_passes(plain, [batch]))
    valid = batch.attention_mask.bool()
    with torch.no_grad():
        hidden, running = open_stream(plain, batch), open_stream(half, batch)
        h, r = hidden.hidden, running.hidden
        for index, layer in enumerate(measured.layers):
            t = plain.model.layers[index](h, **hidden.context_of(plain.model.layers[index]))
            given = h.to(dtype)
            own = (
                half.model.layers[index](
                    given, **running.context_of(half.model.layers[index])
                ).double()
                - given.double()
            )
            r = half.model.layers[index](r, **running.context_of(half.model.layers[index]))
            update = ((own - (t - h).double()).norm(dim=-1) / (t - h).double().norm(dim=-1))[valid]
            residual = ((r.double() - t.double()).norm(dim=-1) / t.double().norm(dim=-1))[valid]
            # fp32 sums of squares against fp64.
            assert layer.update.mean == pytest.approx(float(update.mean()), rel=1e-4)
            assert layer.update.worst == pytest.approx(float(update.max()), rel=1e-4)
            assert layer.residual.mean == pytest.approx(float(residual.mean()), rel=1e-4)
            h = t


def test_the_error_of_an_early_layer_is_not_counted_again_later(load_model, batch) -> None:
    worse = load_model(None)
    with torch.no_grad():
        worse.model.layers[1].mlp.down_proj.weight.mul_(1.1)
    measured = measure(worse, reference_passes(load_model(None), [batch]))
    assert [layer.update.mean > 0 for layer in measured.layers] == [False, True, False, False]
    assert [layer.residual.mean > 0 for layer in measured.layers] == [False, True, True, True]


def test_the_layer_whose_product_overflows_in_fp16_is_named(load_model, batch) -> None:
    plain = amplified(load_model(None), 1, 2.0**14)
    reference = reference_passes(plain, [batch])
    in_fp32 = measure(plain, reference)
    bits = in_fp32.layers[1].checkpoints["product"].headroom(torch.float16)
    assert bits < 0 and in_fp32.tightest(torch.float16) == (1, "product", bits)
    assert all(in_fp32.layers[i].tightest(torch.float16)[1] > 2 for i in (0, 2, 3))

    in_fp16 = measure(in_dtype(amplified(load_model(None), 1, 2.0**14), torch.float16), reference)
    first = in_fp16.first_non_finite
    assert first is not None and first[:2] == (1, "product") and first[2] > 0
    assert in_fp16.failing_layers == [1]
    assert [layer.residual.non_finite > 0 for layer in in_fp16.layers] == [False, True, True, True]
    assert in_fp16.layers[0].residual.mean < 0.01 and math.isnan(in_fp16.figures.kl)
    assert in_fp16.layers[1].checkpoints["gate"].non_finite == 0

    in_bf16 = measure(in_dtype(amplified(load_model(None), 1, 2.0**14), torch.bfloat16), reference)
    assert (
        in_bf16.first_non_finite is None
        and in_bf16.failing_layers == []
        and math.isfinite(in_bf16.figures.kl)
    )


def test_a_weight_that_is_not_finite_is_said_of_fp32_as_well(load_model, batch) -> None:
    model = load_model(None)
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight[3, 3] = math.nan
    measured = measure(model, reference_passes(model, [batch]))
    first = measured.first_non_finite
    assert first is not None and first[:2] == (2, "v")
    assert measured.failing_layers == [2, 3]  # fp32's own stream is not finite after it
    assert measured.layers[2].checkpoints["v"].headroom(torch.float16) == -math.inf


@pytest.mark.parametrize(
    ("size", "bad", "bits"),
    [(65504.0, 0, 0.0), (32752.0, 0, 1.0), (131008.0, 0, -1.0), (1.0, 1, -math.inf)],
)
def test_headroom_is_the_number_of_doublings_that_still_fit(size, bad, bits) -> None:
    assert Extent(size, bad).headroom(torch.float16) == bits


def test_every_checkpoint_is_what_its_name_says(load_model, batch) -> None:
    """A layer written out by hand, attention logits by repeating the key heads."""
    model = load_model(None)
    measured = measure(model, reference_passes(model, [batch]))
    stream = open_stream(model, batch)
    valid = batch.attention_mask.bool()
    with torch.no_grad():
        h = stream.hidden
        for index, layer in enumerate(model.model.layers):
            attention, mlp = layer.self_attn, layer.mlp
            x = layer.input_layernorm(h)
            a = attention(hidden_states=x, **stream.context_of(layer))[0]
            m = layer.post_attention_layernorm(h + a)
            product = mlp.act_fn(mlp.gate_proj(m)) * mlp.up_proj(m)
            q, k = (
                p(x).view(3, 9, -1, attention.head_dim).transpose(1, 2)
                for p in (attention.q_proj, attention.k_proj)
            )
            q, k = apply_rotary_pos_emb(q, k, *stream.shared["position_embeddings"])
            logits = q @ repeat_kv(k, attention.num_key_value_groups).transpose(2, 3)
            pairs = (valid[:, :, None] & valid[:, None, :])[:, None].expand_as(logits)
            values = {
                "input_norm": x[valid],
                "q": attention.q_proj(x)[valid],
                "k": attention.k_proj(x)[valid],
                "v": attention.v_proj(x)[valid],
                "qk": logits[pairs],
                "attention": a[valid],
                "residual_mid": (h + a)[valid],
                "mlp_norm": m[valid],
                "gate": mlp.gate_proj(m)[valid],
                "up": mlp.up_proj(m)[valid],
                "product": product[valid],
                "down": mlp.down_proj(product)[valid],
            }
            h = h + a + mlp.down_proj(product)
            values["residual"] = h[valid]
            found = measured.layers[index].checkpoints
            assert tuple(found) == CHECKPOINTS and found.keys() == values.keys()
            for name, value in values.items():
                # The same sums in another order.
                assert found[name].absmax == pytest.approx(float(value.abs().max()), rel=1e-4), (
                    index,
                    name,
                )
                assert found[name].non_finite == 0


def test_no_hook_is_left_and_nothing_is_changed(load_model, batch) -> None:
    model = load_model("nf4")
    before, logits = npt.base_hash(model), model(batch.input_ids).logits
    measure(model, reference_passes(model, [batch]))
    assert npt.base_hash(model) == before and torch.equal(model(batch.input_ids).logits, logits)
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks


def all_figures(batch: Batch, load_model: Any) -> dict[str, Any]:
    measured = measure(
        in_dtype(load_model(None), torch.bfloat16), reference_passes(load_model(None), [batch])
    )
    return json.loads(to_json(measured.as_dict()))


def test_what_stands_at_padding_changes_no_bit(load_model, batch) -> None:
    other = replace(batch, input_ids=torch.where(batch.attention_mask.bool(), batch.input_ids, 77))
    assert not torch.equal(other.input_ids, batch.input_ids)
    assert all_figures(other, load_model) == all_figures(batch, load_model)


def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(3)
    return [
        Sample(str(n), tuple(torch.randint(3, 128, (n,), generator=generator).tolist()))
        for n in (9, 5, 7)
    ]


@pytest.mark.parametrize(("side", "length"), [("left", None), ("right", 14), ("left", 14)])
def test_where_and_how_much_padding_there_is_does_not_matter(load_model, side, length) -> None:
    reference = reference_passes(load_model(None), [collate(samples(), 2)])
    other = reference_passes(load_model(None), [collate(samples(), 2, side=side, length=length)])
    one, two = (measure(load_model("nf4"), r) for r in (reference, other))
    for a, b in zip(one.layers, two.layers, strict=True):
        # Attention over another number of keys adds in another order: fp32 rounding, on errors of
        # about 0.1.
        assert a.residual.mean == pytest.approx(b.residual.mean, rel=1e-3)
        for name in CHECKPOINTS:
            assert a.checkpoints[name].absmax == pytest.approx(b.checkpoints[name].absmax, rel=1e-4)
    assert one.figures.tokens == two.figures.tokens == 18
    assert one.figures.kl == pytest.approx(two.figures.kl, rel=1e-3)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare_precision("tiny", SHORT, count=2, batch_size=2, device="cpu")


def test_variants_are_measured_on_the_same_tokens_in_their_formats(comparison) -> None:
    assert (
        [v.name for v in comparison.variants] == list(VARIANTS)
        and comparison.heldout
        and comparison.samples == 2
    )
    for v in comparison.variants:
        assert (v.quantization, v.dtype) == VARIANTS[v.name]
        assert len(v.layers) == 8 and v.first_non_finite is None and v.failing_layers == []
        assert v.figures.tokens == comparison.tokens - comparison.samples
    assert_exact(comparison.variants[0])
    means = {v.name: v.layers[-1].residual.mean for v in comparison.variants}
    assert 0 < means["fp16"] < means["bf16"] < means["nf4"]  # 11, 8 and about 3 bits of precision


def test_one_variant_is_in_memory_at_a_time(monkeypatch) -> None:
    loaded: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def load(*arguments: Any) -> Any:
        alive.append(sum(one() is not None for one in loaded))
        model, tokenizer = load_variant(*arguments)
        loaded.append(weakref.ref(model.model))
        return model, tokenizer

    monkeypatch.setattr(precision, "load_variant", load)
    compare_precision("tiny", SHORT, count=1, variants=("bf16", "nf4", "fp32"), device="cpu")
    assert alive == [0, 0, 0]


def test_a_base_stored_in_4_bit_cannot_be_compared(load_model, tmp_path) -> None:
    load_model("nf4").save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_FOLDER / file, tmp_path / file)
    with pytest.raises(ModelError, match="stored as nf4, so it has no fp32"):
        load_variant(str(tmp_path), "fp32", "cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variants": ("int3",)}, "variant 'int3' is unknown; choose from fp32, bf16"),
        ({"count": 0}, "--samples is 0"),
        ({"batch_size": -1}, "--batch_size is -1"),
        ({"data": DataConfig(max_length=4096)}, "--max_length is 4096, the model has 1024"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_loaded(
    arguments, message, monkeypatch
) -> None:
    monkeypatch.setattr(precision, "load_variant", None)
    with pytest.raises(ConfigError, match=message):
        compare_precision("tiny", **arguments)


def printed(comparison: Comparison) -> str:
    out = io.StringIO()
    print_precision(comparison, Console(file=out, width=100))
    return out.getvalue()


def test_tables_fit_a_hundred_columns_and_show_variants_and_layers(comparison) -> None:
    text = printed(comparison)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100 and "…" not in text
    for name in VARIANTS:
        assert any(line.startswith(f"│ {name} ") for line in lines)
    for name in SHOWN:
        assert any(name in line.split() for line in lines if line.startswith("┃"))
    assert sum(line.startswith("│     7 │") for line in lines) == 3
    assert "fp16 ends at 65504" in lines[-1] and "bits below" in lines[-1]


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory) -> Path:
    """The embedded model with a product in layer 3 that fp16 has no numbers for."""
    folder = tmp_path_factory.mktemp("overflowing")
    amplified(
        AutoModelForCausalLM.from_pretrained(EMBEDDED_FOLDER, dtype=torch.bfloat16), 3, 2.0**13
    ).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_FOLDER / file, folder / file)
    return folder


def script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["compare_precision.py", *arguments])
    return main()


def test_the_script_says_which_layer_overflows(monkeypatch, capsys, overflowing) -> None:
    arguments = ("--model_name", str(overflowing), "--samples", "2", "--max_length", "24")
    assert script(monkeypatch, *arguments, "--variants", "fp16,nf4-fp16") == 0
    text = capsys.readouterr().out
    assert (
        "the largest value of the fp32 pass is product in layer 3" in text and "beyond it" in text
    )
    for name in ("fp16", "nf4-fp16"):
        assert f"\n{name}: the first NaN or Inf is in layer 3, product" in text
    assert text.count("layers that fail on the stream of fp32: 3\n") == 2

    assert script(monkeypatch, *arguments, "--variants", "fp16,bf16", "--json") == 0
    read = json.loads(capsys.readouterr().out)["variants"]
    assert read["fp16"]["first_non_finite"]["layer"] == 3 and read["fp16"]["failing_layers"] == [3]
    assert read["fp16"]["kl"] is None and read["fp16"]["layers"][3]["update"]["mean"] is None
    assert read["fp32"]["layers"][3]["checkpoints"]["product"]["headroom_fp16"] < 0
    assert read["bf16"]["first_non_finite"] is None


def test_bad_input_to_the_script_is_one_line(monkeypatch, capsys) -> None:
    assert script(monkeypatch, "--variants", "fp64") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert script(monkeypatch, "--model_name", "/no/such/folder") == 2
    assert "there is no model folder" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        script(monkeypatch, "--samples", "many")
    assert stop.value.code == 2
