"""The smoke test: what it lets pass, what it stops, and that it leaves no trace."""

import itertools
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import npt
from npt.adapters.converted import adapter_parameters
from npt.adapters.layer import NPTAdapter
from npt.base.source import EMBEDDED_FOLDER
from npt.batch import Batch, Sample, batch_from_tensors, collate
from npt.config import NPTConfig, TrainConfig
from npt.data.packing import pack
from npt.distill.local import BatchSums
from npt.distill.strategies import STRATEGIES
from npt.distributed.processes import ProcessGroup
from npt.errors import PrecisionError, SmokeTestError
from npt.train.smoke import smoke_test

# Anomaly detection prints where a NaN came from; here the NaN are planted.
pytestmark = pytest.mark.filterwarnings("ignore:Error detected in")

strategies = pytest.mark.parametrize("name", ["local", "end_to_end"])


def attached(
    load_model: Callable[..., nn.Module], quantization: str | None = "nf4", **form: object
) -> nn.Module:
    model = load_model(quantization)
    npt.attach(model, NPTConfig(rank=4, layers="1,3", **form))
    return model


def run(model: nn.Module, batch: Batch, name: str = "local") -> str:
    config = TrainConfig(strategy=name)
    return smoke_test(model, batch, STRATEGIES[name], config)


def spoil_adapter(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        model.model.layers[3].npt.A[0, 0] = value


@pytest.mark.parametrize(
    ("name", "form", "quantization"),
    [
        ("local", {}, "nf4"),
        ("end_to_end", {}, None),
        ("local", {"modulation": "multiplicative"}, None),
        ("end_to_end", {"modulation": "additive", "targets": ("gate",)}, "nf4"),
    ],
)
def test_a_clean_start_passes_and_says_so_in_one_line(
    load_model, batch, name, form, quantization
) -> None:
    # With modulation multiplicative M = 0 at the start, so A has no gradient yet and must not be
    # blamed for it.
    verdict = run(attached(load_model, quantization, **form), batch, name)
    assert verdict.startswith("smoke test passed: loss ")
    assert "\n" not in verdict


@pytest.mark.parametrize(("name", "side"), [("local", "left"), ("end_to_end", "right")])
def test_packed_rows_pass(load_model, name, side) -> None:
    rows = pack([Sample(str(i), tuple(range(5 + i, 9 + 2 * i))) for i in range(5)], 16)
    packed = collate(rows, 2, side=side, length=17)
    assert packed.documents is not None and packed.padded
    assert run(attached(load_model), packed, name).startswith("smoke test passed")


@strategies
@pytest.mark.parametrize("spoilt", [None, math.nan])
def test_weights_gradients_random_and_anomaly_state_are_as_before(
    load_model, batch, name, spoilt
) -> None:
    model = attached(load_model)
    if spoilt is not None:
        spoil_adapter(model, spoilt)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    if spoilt is None:
        run(model, batch, name)
    else:
        with pytest.raises(SmokeTestError):
            run(model, batch, name)
    for key, value in model.state_dict().items():
        # bytes: NaN does not equal itself
        assert torch.equal(value.view(torch.uint8), weights[key].view(torch.uint8)), key
    assert [key for key, p in model.named_parameters() if p.grad is not None] == []
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not torch.is_anomaly_enabled()
    assert {model.model.layers[index].npt.mode for index in (1, 3)} == {"student"}


@strategies
@pytest.mark.parametrize(("where", "value"), [("A", math.nan), ("A", math.inf), ("base", math.nan)])
def test_numbers_that_are_not_finite_are_stopped_in_one_line(
    load_model, batch, name, where, value
) -> None:
    model = attached(load_model)
    if where == "A":
        spoil_adapter(model, value)
    else:
        model.model.layers[0].input_layernorm.weight.data[3] = value
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with pytest.raises(SmokeTestError, match="smoke test") as caught:
            run(model, batch, name)
    assert "\n" not in str(caught.value)
    assert not [w for w in shown if "Traceback" in str(w.message)]


@strategies
@pytest.mark.parametrize(
    "frozen", ["model.layers.1.post_attention_layernorm.weight", "lm_head.weight"]
)
def test_a_frozen_tensor_that_would_be_trained_is_named(load_model, batch, name, frozen) -> None:
    model = attached(load_model, None)
    model.get_parameter(frozen).requires_grad_(True)
    with pytest.raises(SmokeTestError, match=frozen):
        run(model, batch, name)


@strategies
def test_an_adapter_tensor_cut_off_the_graph_is_named(load_model, batch, name, monkeypatch) -> None:
    model = attached(load_model)

    def code_without_gradient(self: NPTAdapter, attention: Tensor) -> Tensor:
        return attention @ self.A.detach().T

    monkeypatch.setattr(NPTAdapter, "code", code_without_gradient)
    with pytest.raises(SmokeTestError, match=r"model\.layers\.1\.npt\.A gets no gradient"):
        run(model, batch, name)


@pytest.mark.parametrize("bad", [-1, 128, 10**9])
def test_token_ids_outside_the_vocabulary_stop_before_anything_runs(
    load_model, bad, monkeypatch
) -> None:
    model = attached(load_model)
    ids = torch.tensor([[5, 6, bad, 8]])
    monkeypatch.setattr(
        model.model.embed_tokens, "forward", lambda *_: pytest.fail("the model ran")
    )
    with pytest.raises(SmokeTestError, match=str(bad)):
        run(model, batch_from_tensors(ids, torch.ones_like(ids)))


@strategies
def test_a_gradient_that_does_not_belong_to_the_loss_is_stopped(load_model, batch, name) -> None:
    model = attached(load_model)
    uphill = wrong(model, name, negate)
    before = {key: p.detach().clone() for key, p in adapter_parameters(model).items()}
    with pytest.raises(SmokeTestError, match="gradient does not match") as caught:
        smoke_test(model, batch, uphill, TrainConfig(strategy=name))
    assert caught.value.exit_status == 4
    assert all(
        torch.equal(p, before[key]) and p.grad is None
        for key, p in adapter_parameters(model).items()
    )


def wrong(model: nn.Module, name: str, spoil: Callable[[nn.Module], None]) -> Callable[..., Any]:
    """Return the strategy with a gradient that `spoil` changes in place."""

    def strategy(*arguments) -> BatchSums:
        sums = STRATEGIES[name](*arguments)
        spoil(model)
        return sums

    return strategy


def negate(model: nn.Module) -> None:
    for parameter in adapter_parameters(model).values():
        parameter.grad.neg_()


def draw(model: nn.Module, seed: int = 0) -> None:
    """Put noise of its own size in place of the gradient."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapter_parameters(model).values():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.grad.copy_(noise * parameter.grad.square().mean().sqrt())


def trained(model: nn.Module, batch: Batch, name: str, steps: int = 30) -> nn.Module:
    """Bring the adapters near the optimum of one batch."""
    parameters = adapter_parameters(model).values()
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / steps)
        STRATEGIES[name](model, batch, TrainConfig(strategy=name))
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("quantization", ["nf4", None])
@strategies
def test_a_student_near_its_optimum_passes_at_a_smaller_rate(
    load_model, batch, name, quantization
) -> None:
    model = trained(attached(load_model, quantization), batch, name)
    config = TrainConfig(strategy=name, learning_rate=0.1)
    verdict = smoke_test(model, batch, STRATEGIES[name], config)
    assert "at a learning rate of 0.0" in verdict and "at the run's 0.1)" in verdict
    for spoil in (negate, draw):
        with pytest.raises(SmokeTestError, match="gradient does not match"):
            smoke_test(model, batch, wrong(model, name, spoil), config)


def test_the_runs_own_rate_is_tried_first(load_model, batch, monkeypatch) -> None:
    rates = []
    adam = torch.optim.AdamW
    look = lambda parameters, lr, **more: rates.append(lr) or adam(parameters, lr, **more)  # noqa: E731
    monkeypatch.setattr(torch.optim, "AdamW", look)
    model = attached(load_model)
    smoke_test(model, batch, STRATEGIES["local"], TrainConfig(learning_rate=3e-5))
    assert rates == [3e-5]


def test_a_rate_that_no_fallback_mends_is_named(load_model, batch) -> None:
    model, config = attached(load_model), TrainConfig(learning_rate=1e12)
    with pytest.raises(SmokeTestError, match=r"from 1e\+12 down to 1e\+06 .*lower --learning_rate"):
        smoke_test(model, batch, STRATEGIES["local"], config)


@strategies
def test_a_gradient_of_noise_is_stopped_even_if_the_loss_falls_by_chance(
    load_model, batch, name
) -> None:
    model = attached(load_model)
    for seed in range(3):
        strategy = wrong(model, name, partial(draw, seed=seed))
        with pytest.raises(SmokeTestError, match="gradient does not match"):
            smoke_test(model, batch, strategy, TrainConfig(strategy=name))


def test_a_loss_that_is_all_rounding_passes_and_says_so(load_model, batch) -> None:
    model, calls = attached(load_model), itertools.count()

    def rounding(*arguments) -> BatchSums:
        number = next(calls)
        sums = STRATEGIES["local"](*arguments)
        draw(model, seed=number)  # the gradient of another rounding every time
        return sums._replace(loss=sums.loss * 0 + 1e-9 * (1 + (number * 7 % 5) / 10 * bool(number)))

    verdict = smoke_test(model, batch, rounding, TrainConfig())
    assert "below the loss's resolution" in verdict


def test_processes_go_on_alike(load_model, batch) -> None:
    """A sharded base needs the same passes of all: here the loss rises in another process first."""
    asked = []

    class Two(ProcessGroup):
        def gather(self, value: Any) -> list[Any]:
            asked.append(value)
            return [value, len(asked) > 2]

    model = attached(load_model)
    verdict = smoke_test(model, batch, STRATEGIES["local"], TrainConfig(), processes=Two())
    assert asked[:2] == [True, True]  # it falls here
    assert "at a learning rate of 0.0001" in verdict


def test_a_4_bit_base_of_the_users_own_is_refused_by_its_reason(tmp_path, tokenizer) -> None:
    packing = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_FOLDER, quantization_config=packing)
    npt.attach(model, NPTConfig(rank=4))
    config = TrainConfig(max_steps=1, output_dir=str(tmp_path / "run"))
    with pytest.raises(PrecisionError, match=r"computes in bfloat16 .*npt\.load_base"):
        npt.Trainer(model, tokenizer, [{"text": "hello " * 99}] * 40, config)
    assert not (tmp_path / "run").exists()
