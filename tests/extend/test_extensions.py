"""Extensions as docs/extend prints them: registered from outside the package, then used."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, HeliumConfig

import npt
from npt import config as settings
from npt.adapters.converted import adapter_parameters
from npt.adapters.layer import NPT_FORMS
from npt.base import families
from npt.batch import batch_from_tensors
from npt.distill import hidden_losses, strategies
from npt.distill.step import forward_backward
from npt.distill.strategies import drive
from npt.errors import ConfigError, ModelError

PAGES = Path(__file__).parents[2] / "docs" / "extend"
TABLES: tuple[Any, ...] = (
    settings.LOSSES,
    settings.STRATEGIES,
    hidden_losses.HIDDEN_LOSSES,
    hidden_losses.READS_INPUT,
    strategies.STRATEGIES,
    families.FAMILIES,
    NPT_FORMS,
)


@pytest.fixture(autouse=True)
def _tables_as_before() -> Iterator[None]:
    before = [table.copy() for table in TABLES]
    yield
    for table, saved in zip(TABLES, before, strict=True):
        table.clear()
        table.extend(saved) if isinstance(table, list) else table.update(saved)


def run_page(name: str) -> dict[str, Any]:
    """Run the page's code; return its names."""
    (code,) = re.findall(r"```python\n(.*?)```", (PAGES / name).read_text(encoding="utf-8"), re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def batch() -> Any:
    ids = torch.arange(3, 27).view(2, 12)
    return batch_from_tensors(ids, torch.ones_like(ids))


def finite_gradients(model: nn.Module) -> bool:
    return all(
        p.grad is not None and bool(torch.isfinite(p.grad).all())
        for p in adapter_parameters(model).values()
    )


@pytest.fixture
def student(load_model: Callable[..., nn.Module]) -> nn.Module:
    model = load_model()
    npt.attach(model, npt.NPTConfig(rank=2, layers="1,3"))
    return model


def test_a_loss_of_ones_own_trains(student) -> None:
    with pytest.raises(ConfigError, match="log_cosh"):
        npt.TrainConfig(loss="log_cosh")
    page = run_page("loss.md")
    config, error = page["config"], torch.tensor([[0.0, 0.5], [0.0, 0.0]])
    expected = error.cosh().log().mean(dim=-1)
    torch.testing.assert_close(page["log_cosh"](error, torch.zeros_like(error)), expected)
    sums = forward_backward(student, drive, batch(), config)
    plain = forward_backward(student, drive, batch(), npt.TrainConfig(loss="direction"))
    assert finite_gradients(student) and 0 < float(sums.loss) != float(plain.loss)


def test_a_loss_may_read_the_layers_input(student) -> None:
    seen = []

    def update(o: torch.Tensor, t: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        seen.append(h.shape == o.shape == t.shape)
        return (o - t).square().sum(dim=-1) / (t - h).square().sum(dim=-1)

    hidden_losses.register_loss("update", update, reads_input=True)
    for strategy in ("local", "propagated", "end_to_end"):
        own = npt.TrainConfig(loss="update", strategy=strategy)
        known = npt.TrainConfig(loss="nmse_update", strategy=strategy)
        one, other = (float(drive(student, batch(), c).loss) for c in (own, known))
        assert one == pytest.approx(other, rel=1e-5)  # fp32 sums in another order
    assert len(seen) == 6 and all(seen)


def test_a_strategy_of_ones_own_drives(student) -> None:
    config = run_page("strategy.md")["config"]
    found = forward_backward(student, drive, batch(), config)
    known = forward_backward(student, drive, batch(), npt.TrainConfig(strategy="local"))
    assert float(found.loss) == float(known.loss) and finite_gradients(student)


def test_a_family_of_ones_own_is_converted(tmp_path) -> None:
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    model = AutoModelForCausalLM.from_config(HeliumConfig(**size, **heads)).eval()
    with pytest.raises((ModelError, ConfigError), match="Helium"):
        npt.attach(model, npt.NPTConfig(rank=2))
    run_page("family.md")
    npt.attach(model, npt.NPTConfig(rank=2))
    ids = torch.arange(3, 15).view(1, 12)
    with torch.no_grad(), npt.adapters_disabled(model):
        taught = model(ids).logits
    forward_backward(model, drive, batch(), npt.TrainConfig())
    assert finite_gradients(model)
    npt.detach(model)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, taught)


@pytest.mark.parametrize(
    "register",
    [
        lambda: hidden_losses.register_loss("direction", lambda o, t: o),
        lambda: strategies.register_strategy("local", strategies.local),
        lambda: families.register_family("llama", nn.Module),
    ],
)
def test_a_name_that_is_taken_is_refused(register) -> None:
    with pytest.raises((ValueError, ModelError), match=r"choose another|known already"):
        register()
