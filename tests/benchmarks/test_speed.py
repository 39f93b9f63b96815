"""The speed benchmark: what it runs, counts and prints, not how fast anything is."""

import importlib.util
import json
import math
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import speed
import speed_runs
from flop_count import count_flops, matmul_roofline
from npt.doctor.measure import storage_bytes, tensors_of
from npt.doctor.shape import SHAPES, Shape
from speed_runs import PEFT, RUNS, Setting, make_base, make_batch, make_runs

SMALL = Shape(layers=4, hidden=64, ffn=128, heads=4, kv_heads=2, head_dim=16, vocab=96)
SETTING = Setting("small", "all", rank=4, batch_size=2, length=16)
ARGUMENTS = ["--shape", "small", "--rank", "4", "--tokens", "32", "--length", "16"]
ARGUMENTS += ["--repeats", "2", "--device", "cpu"]


@pytest.fixture(scope="module", autouse=True)
def _small_shape():
    """A shape that is small enough for a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "small", SMALL)
        patch.setattr(speed, "matmul_roofline", partial(matmul_roofline, sizes=(64,), seconds=0.0))
        yield


def losses(setting: Setting, *names: str) -> list[Any]:
    batch = make_batch(setting)
    return [make_runs(setting, (name,))[0][0].step(batch) for name in names]


def test_a_run_of_the_benchmark_gives_every_figure(tmp_path, capsys):
    assert speed.main([*ARGUMENTS, "--json", "--output", str(tmp_path / "out")]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures == json.loads((tmp_path / "out" / "small.json").read_text())
    rows = {row["name"]: row for row in figures["runs"]}
    missing = () if importlib.util.find_spec("peft") else PEFT
    assert tuple(rows) == tuple(name for name in RUNS if name not in missing)
    assert set(rows) | set(figures["missing"]) == set(RUNS) and figures["shape"] == "small"
    for row in rows.values():
        for key in ("tokens_per_second", "peak_bytes", "flops_per_token", "roofline_share"):
            assert math.isfinite(row[key]) and row[key] > 0
        low, high = row["tokens_per_second_range"]
        assert low <= row["tokens_per_second"] <= high and len(row["step_seconds"]) == 2
        assert row["peak_bytes"] > row["held_bytes"] > 0 and math.isfinite(row["loss"])
    assert rows["two_model"]["speed_ratio"]["median"] == rows["two_model"]["memory_ratio"] == 1.0
    base = storage_bytes(tensors_of(make_base(SETTING)))
    # two copies, and one of ours
    assert rows["two_model"]["held_bytes"] - rows["local"]["held_bytes"] == base
    peaks = [rows[name]["peak_bytes"] for name in ("two_model", "local")]
    assert peaks == sorted(peaks, reverse=True)


def test_only_our_arithmetic_is_near_its_floor():
    batch = make_batch(SETTING)
    made, _ = make_runs(SETTING, ("local", "two_model"))
    ours, theirs = (count_flops(partial(run.step, batch)) / batch.tokens for run in made)
    # every layer and its causal attention, the student's MLP, and the product of `down` backwards
    layer = 2 * SMALL.layer_weights + 2 * SETTING.length * SMALL.query_width
    floor = 4 * (layer + 2 * SMALL.mlp_weights + 2 * SMALL.hidden * SMALL.ffn)
    # low-rank products, and those of the rotary embedding
    assert floor < ours < 1.2 * floor
    assert theirs > 1.2 * ours


def test_every_run_has_a_finite_loss_and_moves_its_adapters_alone():
    batch = make_batch(SETTING)
    for run in make_runs(SETTING)[0]:
        held = [p for p in tensors_of(*run.holds) if isinstance(p, torch.nn.Parameter)]
        frozen = [p for p in held if not p.requires_grad]
        before = [p.detach().clone() for p in (*run.trainable, *frozen)]
        assert run.trainable and frozen
        loss = run.step(batch)
        assert torch.isfinite(loss) and loss > 0 and not loss.requires_grad, run.name
        assert all(p.grad is None for p in run.trainable), run.name
        pairs = zip((*run.trainable, *frozen), before, strict=True)
        assert [torch.equal(p, was) for p, was in pairs] == [
            *[False] * len(run.trainable),
            *[True] * len(frozen),
        ], run.name


def test_all_loops_see_the_same_loss_of_the_first_layer(monkeypatch):
    """Its input is the embedding for every student, so all kinds of run have the same task."""
    monkeypatch.setattr(speed_runs, "_kl", lambda *_: 0.0)
    local, *others = losses(replace(SETTING, layers="0"), "local", "end_to_end", "two_model")
    for other in others:
        torch.testing.assert_close(local, other)


def test_without_peft_its_rows_are_missing_with_a_reason(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert speed.main([*ARGUMENTS, "--runs", "local,peft_lora_ce"]) == 0
    shown = capsys.readouterr()
    assert "| `local` |" in shown.out and "Square products" in shown.out
    assert "Not measured: `peft_lora_ce`" in shown.out and "'.[peft]' in a clone" in shown.out
    assert "peft_lora_ce is not measured" in shown.err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--tokens", "30"], "--tokens 30 is not"),
        (["--rank", "65"], "--rank 65 is not"),
        (["--repeats", "0"], "--repeats 0 is below"),
        (["--layers", "9"], "layer 9"),
        (["--runs", "local,fast"], "'fast'"),
        (["--output", "/proc/nowhere/out"], "/proc/nowhere"),
    ],
)
def test_flags_that_cannot_work_are_refused_in_one_line(flags, named, capsys):
    assert speed.main([*ARGUMENTS, *flags]) == 2
    shown = capsys.readouterr()
    assert named in shown.err and shown.err.count("\n") == 1 and not shown.out
