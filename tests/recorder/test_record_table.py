"""The table of a record: the worst first, a line for each layer, within the width of a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import npt
from npt.config import NPTConfig, TrainConfig
from npt.distill.strategies import STRATEGIES
from npt.recorder.record import Record
from npt.recorder.recorder import Recorder
from npt.recorder.table import print_record


def printed(record: Record, width: int = 80, **arguments: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_record(record, console, **arguments)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def recorded(model: nn.Module, batch: Any, strategy: str = "local") -> Record:
    with Recorder(model, valid=batch.attention_mask.bool()) as recorder:
        STRATEGIES[strategy](model, batch, TrainConfig(strategy=strategy))
    return recorder.record(3)


@pytest.fixture
def student(load_model) -> nn.Module:
    model = load_model()
    npt.attach(model, NPTConfig(rank=4, layers="1,3"))
    return model


def table(lines: list[str]) -> dict[str, list[str]]:
    """The lines of the table of layers, by their first word."""
    body = lines[lines.index("by layer") + 3 :]
    return {line.split()[0]: line.split() for line in body if line}


@pytest.mark.parametrize("strategy", ["local", "end_to_end"])
def test_a_clean_record_fits_a_terminal_with_a_line_for_each_layer(
    student, batch, strategy
) -> None:
    record = recorded(student, batch, strategy)
    lines = printed(record)
    assert max(map(len, lines)) <= 80
    assert " ".join(lines[:3]).startswith(
        f"step 3, micro-batch 0: all {len(record.rows)} tensors finite, none exploded, largest"
        " gradient"
    )
    layers = table(lines)
    assert list(layers) == ["embed_tokens", "rotary_emb", "0", "1", "2", "3"]
    for layer, name in (("0", "model.layers.0 out"), ("3", "model.layers.3.npt o")):
        row = next(r for r in record.rows if r.name == name)
        assert layers[layer][1:3] == [f"{row.rms:.3g}", f"{row.update_ratio:.3g}"]
    assert "saturated" not in " ".join(lines) and "bad" not in " ".join(lines)


def test_what_is_not_finite_comes_first_in_the_order_of_the_pass(student, batch) -> None:
    with torch.no_grad():
        student.model.layers[1].npt.A[0, 0] = float("nan")
    record = recorded(student, batch)
    lines = printed(record, width=100)
    assert "tensors are not finite, the first: model.layers.1.npt z" in " ".join(lines[:2])
    start = lines.index("not finite, in the order of the pass")
    assert lines[start + 3].split()[:2] == ["model.layers.1.npt", "z"]
    assert lines[start + 11].strip() == f"and {len(record.bad) - 8} more"
    assert start < lines.index("by layer") and max(map(len, lines)) <= 100
    assert table(lines)["1"][-1] == str(sum(row.layer == 1 for row in record.bad))


def test_explosions_and_saturated_multipliers_are_shown(student, batch) -> None:
    with torch.no_grad():
        student.model.layers[2].mlp.down_proj.weight.quant_state.offset.mul_(1e6)
        student.model.layers[1].npt.M["gate"].fill_(1e6)
    lines = printed(recorded(student, batch), width=120)
    start = lines.index("RMS grew more than 1000 times")
    for name in ("model.layers.2.mlp.down_proj out", "model.layers.2.mlp.down_proj in"):
        assert name in lines[start + 3]
    assert table(lines)["1"][-1].endswith("%") and "saturated" in " ".join(lines)
    assert "RMS grew more than 3 times" in printed(recorded(student, batch), width=120, factor=3.0)


def test_a_model_without_layers_or_gradients_has_a_table_too() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with Recorder(model) as recorder, torch.no_grad():
        model(torch.ones(2, 3))
    assert list(table(printed(recorder.record()))) == ["model", "0", "1"]
    assert printed(Record(1, ())) == ["step 1, micro-batch 0: nothing was computed"]
    with Recorder(model) as recorder:
        model(torch.full((2, 3), float("nan"))).sum().backward()
    assert "tensors are not finite" in printed(recorder.record())[0]
