"""The speed benchmark: what it runs, what it counts and what it prints; how fast anything is, is no
matter for a test.
"""

import importlib
import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import npt
from flop_count import count_flops, matmul_roofline
from npt.adapters.converted import adapter_parameters
from npt.doctor.measure import storage_bytes, tensors_of
from npt.doctor.plan import base_bytes
from npt.doctor.shape import Shape

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = Shape(layers=4, hidden=64, ffn=128, heads=4, kv_heads=2, head_dim=16, vocab=96)
PEFT = ("peft_lora_distill", "peft_lora_ce")


@pytest.fixture(scope="module")
def parts():
    """The benchmark's modules, with a shape that is small enough for a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        modules = [importlib.import_module(name) for name in ("speed", "speed_runs", "speed_sweep")]
        patch.setitem(modules[1].SHAPES, "small", SMALL)
        patch.setattr(
            modules[0], "matmul_roofline", partial(matmul_roofline, sizes=(64,), seconds=0.0)
        )
        yield modules
        for name in ("speed", "speed_runs", "speed_sweep"):
            sys.modules.pop(name)


@pytest.fixture
def setting(parts):
    return parts[1].Setting(shape="small", layers="all", rank=4, batch_size=2, length=16)


ARGUMENTS = [
    "--shape",
    "small",
    "--rank",
    "4",
    "--tokens",
    "32",
    "--length",
    "16",
    "--repeats",
    "2",
    "--device",
    "cpu",
]


def names_of(runs) -> tuple[str, ...]:
    return (
        runs.RUNS
        if importlib.util.find_spec("peft")
        else tuple(name for name in runs.RUNS if name not in PEFT)
    )


def test_a_run_of_the_benchmark_gives_every_figure(parts, capsys):
    speed, runs = parts[:2]
    assert speed.main([*ARGUMENTS, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in figures["runs"]}
    assert figures["shape"] == "small" and tuple(rows) == names_of(runs)
    assert set(rows) | set(figures["missing"]) == set(runs.RUNS)
    for row in rows.values():
        for key in ("tokens_per_second", "peak_bytes", "flops_per_token", "roofline_share"):
            assert math.isfinite(row[key]) and row[key] > 0
        low, high = row["tokens_per_second_range"]
        assert low <= row["tokens_per_second"] <= high and len(row["step_seconds"]) == 2
        assert row["peak_bytes"] > row["held_bytes"] > 0 and math.isfinite(row["loss"])
        assert (
            row["speed_ratio"]["low"] <= row["speed_ratio"]["median"] <= row["speed_ratio"]["high"]
        )
    assert rows["two_model"]["speed_ratio"]["median"] == rows["two_model"]["memory_ratio"] == 1.0
    assert (
        figures["machine"]["threads"] == torch.get_num_threads()
        and figures["roofline"]["flops_per_second"] > 0
    )
    base = storage_bytes(tensors_of(runs.make_base(runs.Setting("small", "all", 4, 2, 16))))
    # two copies, and one of ours
    assert rows["two_model"]["held_bytes"] - rows["local"]["held_bytes"] == base
    assert (
        rows["two_model"]["peak_bytes"]
        > rows["two_model_checkpointed"]["peak_bytes"]
        > rows["local"]["peak_bytes"]
    )


def test_only_our_arithmetic_is_near_its_floor(parts, setting):
    speed, runs = parts[:2]
    batch = runs.make_batch(setting)
    made, _ = runs.make_runs(setting, ("local", "two_model"))
    counted = {
        run.name: count_flops(lambda run=run: run.step(batch)) / batch.tokens for run in made
    }
    floor = speed.floors(setting, "local")
    # Of the matrix products the formula leaves out the low-rank ones, and both leave out those of
    # the rotary embedding.
    assert (
        floor["formula_flops_per_token"] < counted["local"] < 1.03 * floor["floor_flops_per_token"]
    )
    assert counted["two_model"] > 1.2 * counted["local"]


def test_every_run_has_a_finite_loss_and_moves_its_adapters_alone(parts, setting):
    runs = parts[1]
    batch = runs.make_batch(setting)
    made, _ = runs.make_runs(setting)
    for run in made:
        frozen = [
            p
            for p in tensors_of(*run.holds)
            if isinstance(p, torch.nn.Parameter) and not p.requires_grad
        ]
        before, kept = (
            [p.detach().clone() for p in run.trainable],
            [p.detach().clone() for p in frozen],
        )
        assert run.trainable and frozen
        loss = run.step(batch)
        assert torch.isfinite(loss) and loss > 0 and not loss.requires_grad, run.name
        assert all(p.grad is None for p in run.trainable), run.name
        assert all(torch.equal(p, was) for p, was in zip(frozen, kept, strict=True)), run.name
        assert not any(torch.equal(p, was) for p, was in zip(run.trainable, before, strict=True)), (
            run.name
        )


def test_the_gradient_of_the_two_model_loop_crosses_the_whole_student(parts, setting):
    """A lower layer is moved by what the layers above it lose: with all but the first layer's loss
    left out it still gets a gradient.
    """
    runs = parts[1]
    student = runs.Student(setting, runs.make_base(setting))
    student.converted = [3]
    moved = {name: p.detach().clone() for name, p in adapter_parameters(student.model).items()}
    student.run("two_model").step(runs.make_batch(setting))
    assert all(
        not torch.equal(p, moved[name]) for name, p in adapter_parameters(student.model).items()
    )


def test_checkpointing_changes_the_memory_and_not_the_loss(parts, setting):
    runs = parts[1]
    batch = runs.make_batch(setting)
    losses = {
        name: runs.make_runs(setting, (name,))[0][0].step(batch)
        for name in ("two_model", "two_model_checkpointed")
    }
    torch.testing.assert_close(losses["two_model"], losses["two_model_checkpointed"])


def test_both_loops_see_the_same_loss_of_the_first_layer(parts, setting):
    """One converted layer, the first: its input is the embedding for every student, so that all
    kinds of run have the same task.
    """
    runs = parts[1]
    setting = replace(setting, layers="0")
    batch = runs.make_batch(setting)
    losses = {
        name: runs.make_runs(setting, (name,))[0][0].step(batch)
        for name in ("local", "end_to_end", "two_model_hidden")
    }
    torch.testing.assert_close(losses["local"], losses["end_to_end"])
    torch.testing.assert_close(losses["local"], losses["two_model_hidden"])


def test_bases_of_one_setting_are_equal_and_of_another_seed_not(parts, setting):
    runs = parts[1]
    first, second = runs.make_base(setting), runs.make_base(setting)
    assert npt.base_hash(first) == npt.base_hash(second)
    assert storage_bytes(tensors_of(first, second)) == 2 * storage_bytes(tensors_of(first))


@pytest.mark.parametrize("name", ["embedded", "cpu-0.2b"])
def test_the_shapes_are_of_the_sizes_that_their_names_say(parts, name):
    shapes = parts[1].SHAPES
    if name == "embedded":
        assert shapes[name] == Shape.of(npt.load_base("tiny")[0].config)
    else:
        assert 1e8 < base_bytes(shapes[name], None, torch.float32) / 4 < 3e8


def test_without_peft_its_rows_are_missing_with_a_reason(parts, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert parts[0].main([*ARGUMENTS, "--runs", "local,peft_lora_ce", "--json"]) == 0
    shown = capsys.readouterr()
    figures = json.loads(shown.out)
    assert [row["name"] for row in figures["runs"]] == ["local"] and "npt-distill[peft]" in figures[
        "missing"
    ]["peft_lora_ce"]
    assert "peft_lora_ce is left out" in shown.err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--tokens", "30"], "--tokens is 30"),
        (["--rank", "0"], "--rank is 0"),
        (["--rank", "65"], "--rank is 65"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--layers", "9"], "layer 9"),
        (["--runs", "local,fast"], "'fast'"),
        (["--output", "/proc/nowhere/out"], "/proc/nowhere"),
    ],
)
def test_flags_that_cannot_work_are_refused_in_one_line(parts, flags, named, capsys):
    assert parts[0].main([*ARGUMENTS, *flags]) == 2
    shown = capsys.readouterr()
    assert named in shown.err and shown.err.count("\n") == 1 and not shown.out


def test_the_sweep_and_its_file(parts, tmp_path, capsys):
    output = tmp_path / "out"
    flags = ["--repeats", "1", "--runs", "local,two_model", "--sweep", "--output", str(output)]
    assert parts[0].main([*ARGUMENTS, *flags]) == 0
    shown = capsys.readouterr().out
    found = json.loads((output / "small.json").read_text())["sweep"]
    curve = {
        name: [found["points"][i] for i in numbers] for name, numbers in found["curves"].items()
    }
    assert [p["tokens"] for p in curve["tokens"]] == [8, 16, 32, 64]
    assert {p["length"] for p in curve["tokens"]} == {8}
    assert [p["length"] for p in curve["length"]] == [4, 8, 16, 32]
    assert {p["tokens"] for p in curve["length"]} == {32}
    assert [p["converted"] for p in curve["layers"]] == [1, 2, 3, 4]
    assert all(
        len(p["all_seconds"][kind]) == 1 for p in found["points"] for kind in ("local", "two_model")
    )
    assert "| `local` |" in shown and "| converted layers |" in shown and "Square products" in shown


def test_a_straight_line_is_found_straight(parts):
    found = parts[2].linearity([(n, 0.5 + 0.01 * n) for n in (100, 200, 400, 800)])
    assert found["seconds_per_token"] == pytest.approx(0.01) and found[
        "fixed_seconds"
    ] == pytest.approx(0.5)
    assert found["slope_ratio"] == pytest.approx(1.0) and found["largest_deviation"] < 1e-9
    bent = parts[2].linearity([(n, 0.01 * n + 1e-5 * n * n) for n in (100, 200, 400, 800)])
    assert bent["slope_ratio"] > 1.3 and bent["largest_deviation"] > 0.01


def test_rounds_go_back_and_forth(parts):
    taken: list[str] = []
    steps = {name: lambda name=name: taken.append(name) for name in "abc"}
    seconds = parts[0].in_turns(steps, 3, torch.device("cpu"))
    assert "".join(taken) == "abccbaabc" and all(len(found) == 3 for found in seconds.values())
