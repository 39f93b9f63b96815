"""The modulation of each layer at logged steps: what it is, and that measuring changes nothing."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_runs import Runs, lines, records
from torch import Tensor, nn

import npt
from npt.adapters.converted import npt_layers
from npt.adapters.token_modulation import observed
from npt.adapters.trained import MODULATION, ModulationMeter
from npt.batch import Batch, Sample, collate
from npt.config import NPTConfig, TrainConfig
from npt.config.adapter import MULT_FORMS, SATURATED
from npt.distill.step import MicroBatchSplitter, summed
from npt.distill.strategies import STRATEGIES

LENGTHS = (5, 9, 3)
"""Of rows, so that some tokens are padding."""


@pytest.fixture
def batch() -> Batch:
    ids = ([3 + (7 * i + 5 * j) % 90 for j in range(n)] for i, n in enumerate(LENGTHS))
    return collate([Sample(f"s{i}", tuple(row)) for i, row in enumerate(ids)])


def student(model: nn.Module, **form: Any) -> nn.Module:
    """Attach adapters whose multipliers are spread over their range."""
    npt.detach(model)
    npt.attach(model, NPTConfig(rank=4, layers="1,3", **form))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, layer in npt_layers(model):
            for name, weight in layer.npt.named_parameters():
                size = 6.0 if name.startswith("M") else 0.1
                weight.copy_(size * torch.randn(weight.shape, generator=generator))
    return model


def meter_of(model: nn.Module) -> ModulationMeter:
    return ModulationMeter([layer.npt for _, layer in npt_layers(model)])


def measured(model: nn.Module, batch: Batch, samples: int = 8, **settings: Any) -> Tensor:
    """Return the sums of one pass, [layers, 6]."""
    config, meter = TrainConfig(batch_size=8, **settings), meter_of(model)
    with meter.measuring():
        summed(model, STRATEGIES[config.strategy], batch, config, MicroBatchSplitter(samples))
    model.zero_grad()
    return meter.take().view(-1, 1 + len(MODULATION))


def slowly(model: nn.Module, batch: Batch) -> Tensor:
    """Return the same from the stages that an observer sees, token by token."""
    valid, rows = batch.attention_mask.bool(), []
    shown: dict[int, dict[str, Tensor | None]] = {i: {} for i, _ in npt_layers(model)}
    watched = [(layer.npt, shown[i].update) for i, layer in npt_layers(model)]
    with torch.no_grad(), observed(watched):
        model.model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
    for i, layer in npt_layers(model):
        middle, half = layer.npt.config.multiplier_spread
        stages = {n: t[valid].double() for n, t in shown[i].items() if t is not None}
        m = [t for name, t in stages.items() if name.startswith("m_")]
        if layer.npt.config.token_part:  # the stream's shift in units of r
            stages["s_stream"] /= stages["h"].square().mean(dim=-1, keepdim=True).sqrt()
        s = [t for name, t in stages.items() if name.startswith("s_")]
        m = torch.cat(m, dim=1) if m else torch.ones(int(valid.sum()), 1)
        bound = ((m - middle).abs() > SATURATED * half).double()
        norm = torch.cat(s, dim=1).norm(dim=1) if s else torch.zeros(len(m))
        z = stages["z"]
        each = ((m - 1).abs().mean(dim=1), bound.mean(dim=1), z.norm(dim=1), norm, (z != 0).sum(1))
        rows.append([float(len(m)), *(float(values.sum()) for values in each)])
    return torch.tensor(rows)


FORMS: list[dict[str, Any]] = [
    *({"mult_form": form} for form in MULT_FORMS),
    {"modulation": "additive"},
    {"modulation": "multiplicative", "targets": ("gate", "down")},
    {"mult_bound": 0.2, "additive_scale": 2.0},
    {"targets": ("stream",)},
    {"active": 2, "targets": ("gate", "stream")},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_figures_are_those_of_the_stages_over_valid_tokens(load_model, batch, form) -> None:
    model = student(load_model(), **form)
    found = measured(model, batch, strategy="end_to_end")
    # fp32 sums in another order
    torch.testing.assert_close(found, slowly(model, batch), rtol=1e-4, atol=1e-4)
    assert found[:, 0].tolist() == [sum(LENGTHS)] * 2


def test_the_multipliers_of_the_test_reach_their_bounds_and_do_not(load_model, batch) -> None:
    share = slowly(student(load_model()), batch)[:, 2] / sum(LENGTHS)
    assert ((share > 0.05) & (share < 0.95)).all()


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("strategy", [*STRATEGIES])
def test_parts_of_a_micro_batch_add_up(load_model, batch, strategy, samples) -> None:
    model = student(load_model())
    whole, parts = (measured(model, batch, n, strategy=strategy) for n in (8, samples))
    torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-4)


def test_a_recomputed_pass_changes_no_mean(load_model, batch) -> None:
    model = student(load_model())
    kept = measured(model, batch, strategy="end_to_end")
    again = measured(model, batch, strategy="end_to_end", gradient_checkpointing=True)
    torch.testing.assert_close(kept / kept[:, :1], again / again[:, :1])


def test_an_error_drops_what_was_measured(load_model, batch) -> None:
    model = student(load_model())
    meter, config = meter_of(model), TrainConfig(strategy="local", batch_size=8)
    with pytest.raises(ZeroDivisionError), meter.measuring():
        summed(model, STRATEGIES["local"], batch, config)
        raise ZeroDivisionError
    assert not meter.take().any()
    assert all(layer.npt.recode is None for _, layer in npt_layers(model))


# --- in a run


@pytest.fixture
def here(load_model: Callable[..., nn.Module], tmp_path: Path) -> Runs:
    return Runs(load_model(), tmp_path, lambda: records(12))


def figures(line: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in line.items() if key.rpartition(".")[2] in MODULATION}


@pytest.mark.parametrize("strategy", ["local", "end_to_end"])
def test_a_run_is_bit_equal_however_often_it_is_measured(here, strategy) -> None:
    settings = {"strategy": strategy, "gradient_accumulation_steps": 2, "batch_size": 2}
    often, seldom = (here.run(str(n), log_steps=n, **settings).folder for n in (1, 100))
    one, other = here.outcome("1"), here.outcome("100")
    steps = {line["step"] for line in other.metrics}
    one.metrics = [line for line in one.metrics if line["step"] in steps]
    one.assert_equal(other)
    assert len(lines(often, "metrics")) == 3 and len(lines(seldom, "metrics")) == 2
    keys = {f"layers.{i}.{name}" for i in (1, 3) for name in MODULATION}
    for line in lines(often, "metrics"):
        found = figures(line)
        assert found.keys() == keys and all(math.isfinite(value) for value in found.values())
        assert found["layers.1.code_norm"] > 0 and found["layers.3.shift_norm"] > 0
    assert lines(often, "metrics")[0]["layers.1.multiplier_change"] == 0.0  # M is 0
    assert lines(often, "metrics")[-1]["layers.1.multiplier_change"] > 0.0


def test_a_step_between_logged_ones_is_not_measured(here, monkeypatch) -> None:
    taken = []
    take = ModulationMeter.take
    monkeypatch.setattr(ModulationMeter, "take", lambda self: taken.append(1) or take(self))
    result = here.run("run", log_steps=5, data=lambda: records(8))
    logged = [line["step"] for line in lines(result.folder, "metrics")]
    assert logged == [1, 5, 8] and len(taken) == 3


def test_a_refused_micro_batch_is_not_measured(here) -> None:
    """The NaN of its codes reaches no figure."""

    def act(number: int, batch: Batch) -> None:
        if number == 1:
            norm = here.model.model.layers[1].input_layernorm
            handle = norm.register_forward_hook(
                lambda module, args, output: handle.remove() or torch.full_like(output, math.nan),
                prepend=True,
            )

    result = here.run("run", act, gradient_accumulation_steps=4)
    assert result.refused == 1
    for line in lines(result.folder, "metrics"):
        assert len(figures(line)) == 2 * len(MODULATION)
        assert all(isinstance(value, float) for value in figures(line).values())
