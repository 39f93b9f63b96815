"""The transaction: what is refused leaves no trace, bit for bit, and what is not is averaged,
clipped and applied.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from students import moved as with_noise
from torch import Tensor, nn
from windows import add_filled, window_over

import npt
from npt.adapters.converted import adapter_parameters
from npt.batch import Sample, collate
from npt.config import NPTConfig, TrainConfig
from npt.distill.local import REPORTED
from npt.distill.strategies import STRATEGIES
from npt.guard.outcome import MicroBatch, Outcome

SHAPES = {"layer.A": (3, 4), "layer.B.gate": (5, 3), "layer.M.gate": (5, 3), "other.A": (2,)}
MAX_NORM = 0.5
LEARNING_RATE = 0.1


class World:
    """Four small tensors, their optimizer and a transaction over them; micro-batches are made from
    integers.
    """

    late = False

    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        max_grad_norm: float = MAX_NORM,
    ):
        generator = torch.Generator().manual_seed(0)
        self.parameters = {
            name: nn.Parameter(torch.randn(shape, generator=generator))
            for name, shape in SHAPES.items()
        }
        make = optimizer or (lambda p: torch.optim.AdamW(p, lr=1.0, weight_decay=0.01, fused=True))
        self.optimizer = make(list(self.parameters.values()))
        late = self.late and optimizer is None  # other optimizers do not obey `found_inf`
        self.transaction = window_over(
            self.parameters, self.optimizer, max_grad_norm, [LEARNING_RATE], late=late
        )

    def good(self, seed: int, tokens: int = 7, size: float = 1.0) -> None:
        """A clean micro-batch: loss and gradients are functions of `seed`."""
        gradients = clean_gradients(seed, size)
        self._run(gradients, torch.tensor(1.5 + seed), tokens, f"good-{seed}")

    def bad(self, kind: str, seed: int = 99) -> None:
        """Add a micro-batch that must be refused."""
        if kind == "data":
            self.transaction.refuse("token id 999 outside the vocabulary", ("broken",))
            return
        gradients = clean_gradients(seed, 1.0)
        loss = torch.tensor(1.0)
        broken = gradients["layer.B.gate"]
        if kind == "nan loss":
            loss = torch.tensor(math.nan)
        elif kind == "inf loss":
            loss = torch.tensor(math.inf)
        elif kind == "nan loss and gradients":
            loss = torch.tensor(math.nan)
            for gradient in gradients.values():
                gradient.fill_(math.nan)
        elif kind == "inf gradient":
            broken[1, 2] = -math.inf
        elif kind == "nan gradient":
            broken[4, 0] = math.nan
        elif kind == "overflowing norm":
            broken.fill_(1e20)
        elif (
            kind == "overflowing sum"
        ):  # each norm is 1.5e19: finite, and their squares' sum is not
            for gradient in gradients.values():
                gradient.fill_(1.5e19 / math.sqrt(gradient.numel()))
        else:
            raise AssertionError(kind)
        self._run(gradients, loss, 11, "broken")

    def _run(self, gradients: dict[str, Tensor], loss: Tensor, tokens: int, sample_id: str) -> None:
        def fill() -> MicroBatch:
            # As backward does: added in place to the present gradient.
            for name, parameter in self.parameters.items():
                parameter.grad += gradients[name]
            return MicroBatch(loss, tokens)

        add_filled(self.transaction, fill, (sample_id,))

    def commit(self, learning_rate: float = LEARNING_RATE) -> Outcome:
        self.transaction._rates.fill_(learning_rate)
        results = [*self.transaction.commit(), *self.transaction.flush()]
        assert len(results) == 1
        return results[0]

    def clean_window(self, seed: int) -> Outcome:
        self.good(seed)
        self.good(seed + 50, tokens=4)
        return self.commit()


def pytest_generate_tests(metafunc):
    """Every test of this small world holds for flags that are read at once and for flags that are
    read one window late.
    """
    if "load_model" not in metafunc.fixturenames:
        metafunc.parametrize(
            "_reading", [False, True], ids=["at once", "late"], indirect=True, scope="module"
        )


@pytest.fixture(autouse=True, scope="module")
def _reading(request):
    World.late = getattr(request, "param", False)
    yield
    World.late = False


def clean_gradients(seed: int, size: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: size * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


BAD = (
    "data",
    "nan loss",
    "inf loss",
    "nan loss and gradients",
    "inf gradient",
    "nan gradient",
    "overflowing norm",
    "overflowing sum",
)
KIND_OF = {"data": "data", "nan loss": "loss", "inf loss": "loss", "nan loss and gradients": "loss"}


def state(
    parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Weights, moments and step counts as bytes, so that equality means every bit: NaN equals
    itself, 0 is not -0.
    """
    tensors = {name: p.detach() for name, p in parameters.items()}
    for name, p in parameters.items():
        for key, value in optimizer.state.get(p, {}).items():
            tensors[f"{name}/{key}"] = torch.as_tensor(value)
    return {
        name: t.contiguous().reshape(-1).view(torch.uint8).clone() for name, t in tensors.items()
    }


def state_of(world: World) -> dict[str, Tensor]:
    return state(world.parameters, world.optimizer)


def assert_equal_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def warmed_up(windows: int, **arguments: Any) -> World:
    world = World(**arguments)
    for seed in range(windows):
        assert world.clean_window(seed).applied
    return world


# --- the counterfactual
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_window_equals_the_one_that_never_saw_its_bad_micro_batch(
    kind, position, steps_before
) -> None:
    world, twin = warmed_up(steps_before), warmed_up(steps_before)
    for index in range(3):
        if index == position:
            world.bad(kind)
        else:
            world.good(index, tokens=3 + index)
            twin.good(index, tokens=3 + index)
    result, expected = world.commit(), twin.commit()
    assert result.applied and expected.applied
    assert_equal_bits(state_of(world), state_of(twin))
    assert (result.tokens, result.grad_norm) == (expected.tokens, expected.grad_norm)
    assert len(result.places) == len(expected.places)
    # Nor does it show later.
    world.clean_window(7)
    twin.clean_window(7)
    assert_equal_bits(state_of(world), state_of(twin))


@given(
    windows=st.lists(
        st.lists(st.sampled_from((None, None, *BAD)), min_size=1, max_size=5),
        min_size=1,
        max_size=4,
    )
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_any_subset_of_bad_micro_batches_leaves_no_trace(windows) -> None:
    world, twin = World(), World()
    for number, window in enumerate(windows):
        for index, kind in enumerate(window):
            if kind is None:
                world.good(10 * number + index, tokens=1 + index)
                twin.good(10 * number + index, tokens=1 + index)
            else:
                world.bad(kind, seed=index)
        result, expected = world.commit(), twin.commit()
        assert result.applied == expected.applied == (None in window)
        assert result.tokens == expected.tokens
        assert [r.micro_batch for r in result.refused] == [
            i for i, kind in enumerate(window) if kind is not None
        ]
        assert_equal_bits(state_of(world), state_of(twin))


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize(
    "kinds",
    [(), ("data",), ("nan loss",), ("inf gradient", "nan gradient"), ("overflowing sum", "data")],
)
def test_without_a_survivor_nothing_changes(kinds, steps_before) -> None:
    world = warmed_up(steps_before)
    before = state_of(world)
    for kind in kinds:
        world.bad(kind)
    result = world.commit()
    assert (result.applied, result.tokens, result.grad_norm, result.places) == (False, 0, None, [])
    assert len(result.refused) == len(kinds)
    assert_equal_bits(state_of(world), before)


# --- the step as a whole
# ---------------------------------------------------------------------------------------------


class Sabotaged(torch.optim.AdamW):
    """AdamW that writes `value` after its step, once armed: into the weight, a moment or the step
    count of one tensor.
    """

    where: str | None = None
    value = math.nan

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        if self.where is not None:
            parameter = self.param_groups[0]["params"][2]
            target = parameter.data if self.where == "weight" else self.state[parameter][self.where]
            target.view(-1)[-1] = self.value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["weight", "exp_avg", "exp_avg_sq", "step"])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_turns_non_finite_is_taken_back_to_the_bit(
    where, value, steps_before, fused
) -> None:
    world, twin = (
        warmed_up(steps_before, optimizer=lambda p: Sabotaged(p, lr=1.0, fused=fused))
        for _ in range(2)
    )
    before = state_of(world)
    world.optimizer.where, world.optimizer.value = where, value
    result = world.clean_window(8)
    assert not result.applied
    assert [(r.kind, r.micro_batch) for r in result.refused] == [("update", None)]
    assert "layer.M.gate" in result.refused[0].detail
    assert (where in result.refused[0].detail) == (where != "weight")
    assert_equal_bits(state_of(world), before)
    world.optimizer.where = None
    assert world.clean_window(9).applied
    assert twin.clean_window(9).applied
    assert_equal_bits(state_of(world), state_of(twin))


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("rate", [3e38, math.inf, math.nan])
def test_a_learning_rate_that_overflows_the_weights_is_taken_back(steps_before, rate) -> None:
    world = warmed_up(steps_before)
    before = state_of(world)
    world.good(1)
    result = world.commit(rate)
    assert not result.applied and result.refused[0].kind == "update"
    assert_equal_bits(state_of(world), before)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_poisoned_moment_stops_every_step_and_stays(poison) -> None:
    world = warmed_up(2)
    world.optimizer.state[world.parameters["layer.A"]]["exp_avg"][0, 0] = poison
    before = state_of(world)
    for seed in range(2):
        result = world.clean_window(seed)
        assert not result.applied
        assert "layer.A" in result.refused[0].detail
        assert_equal_bits(state_of(world), before)


# --- the arithmetic of a clean step
# ----------------------------------------------------------------------------------


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def moved(world: World, act: Callable[[], Outcome]) -> tuple[dict[str, Tensor], Outcome]:
    """The gradient that a step of SGD at rate 1 took."""
    before = {name: p.detach().clone() for name, p in world.parameters.items()}
    result = act()
    return {name: before[name] - p.detach() for name, p in world.parameters.items()}, result


def norm_of(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))


def test_the_summed_gradient_is_divided_once_by_the_surviving_tokens() -> None:
    world = World(sgd, max_grad_norm=1e9)
    world.good(1, tokens=3)
    world.bad("nan gradient")
    world.good(2, tokens=8)
    world.bad("data")
    gradients, result = moved(world, lambda: world.commit(1.0))
    assert result.tokens == 11
    for name, gradient in gradients.items():
        expected = (clean_gradients(1, 1.0)[name] + clean_gradients(2, 1.0)[name]) / 11
        # Taken as the difference of two weights of size 1, so known to 2^-24 of that.
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "max_grad_norm"), [(1.0, 0.5), (1e6, 0.01), (1e15, 0.5), (0.01, 1e9)]
)
def test_a_large_gradient_is_clipped_and_keeps_its_direction(size, max_grad_norm) -> None:
    world = World(sgd, max_grad_norm)
    world.good(1, tokens=1, size=size)
    gradients, result = moved(world, lambda: world.commit(1.0))
    full = clean_gradients(1, size)
    assert result.applied
    # fp32; reported as it was before clipping
    assert result.grad_norm == pytest.approx(norm_of(full), rel=1e-5)
    # The steps taken are differences of weights of size 1: 34 entries known to 2^-24, which is 3e-5
    # of the smaller norm.
    scale = min(1.0, max_grad_norm / norm_of(full))
    assert norm_of(gradients) == pytest.approx(scale * norm_of(full), rel=1e-4)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, full[name] * scale, rtol=1e-4, atol=1e-6)


# --- what is reported, and what is left alone
# ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BAD)
def test_a_refusal_says_what_and_where(kind) -> None:
    world = World()
    world.good(0)
    world.bad(kind)
    (refusal,) = world.commit().refused
    assert refusal.kind == KIND_OF.get(kind, "gradient")
    assert refusal.micro_batch == 1
    assert refusal.sample_ids == ("broken",)
    if kind == "overflowing sum":
        assert "overflows" in refusal.detail
    elif refusal.kind == "gradient":
        assert "layer.B.gate" in refusal.detail
        assert "layer.A" not in refusal.detail
    if refusal.kind == "loss":
        assert ("nan" if "nan" in kind else "inf") in refusal.detail


def test_no_gradient_is_left_behind() -> None:
    world = World()
    world.good(1)
    world.bad("inf gradient")
    world.commit()
    assert all(p.grad is None for p in world.parameters.values())


def test_tensors_of_two_dtypes_make_one_step() -> None:
    parameters = {
        "single": nn.Parameter(torch.ones(3)),
        "double": nn.Parameter(torch.ones(2, dtype=torch.float64)),
    }
    transaction = window_over(parameters, torch.optim.SGD(parameters.values(), lr=1.0), 1e9, [1.0])

    def fill() -> MicroBatch:
        for parameter in parameters.values():
            parameter.grad += 1.0
        return MicroBatch(torch.tensor(1.0), 2)

    add_filled(transaction, fill)
    (result,) = transaction.commit()
    assert result.grad_norm == pytest.approx(0.5 * math.sqrt(5), rel=1e-6)  # fp32
    assert all(torch.equal(p.detach(), torch.full_like(p, 0.5)) for p in parameters.values())


# --- with the real strategies
# ----------------------------------------------------------------------------------------


def student(load_model: Callable[..., nn.Module]) -> nn.Module:
    model = load_model()
    npt.attach(model, NPTConfig(rank=4, layers="1,3"))
    return with_noise(model, 0.1)


def eight_samples(equal: bool) -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    lengths = [6] * 8 if equal else [9, 2, 5, 7, 1, 8, 3, 6]
    return [
        Sample(str(i), tuple(torch.randint(3, 128, (n,), generator=generator).tolist()))
        for i, n in enumerate(lengths)
    ]


def one_step(
    model: nn.Module,
    config: TrainConfig,
    groups: Sequence[Sequence[Sample]],
    optimizer: Callable[..., torch.optim.Optimizer],
) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer, Outcome]:
    parameters = adapter_parameters(model)
    optimizer_made = optimizer(parameters.values())
    transaction = window_over(parameters, optimizer_made, 0.5, [1.0])
    for group in groups:
        batch = collate(group, 2)
        fill = partial(STRATEGIES[config.strategy], model, batch, config)
        add_filled(transaction, fill, batch.sample_ids)
    return parameters, optimizer_made, transaction.commit()[0]


LOSSES: tuple[dict[str, Any], ...] = (
    {},
    {"loss": "nmse_update"},
    {"loss": "direction"},
    {"strategy": "end_to_end"},
    {"strategy": "end_to_end", "logit_kl_weight": 0.5},
    {"strategy": "end_to_end", "logit_kl_weight": 0.5, "logit_loss": "reverse_kl"},
    {"strategy": "end_to_end", "logit_kl_weight": 0.5, "logit_loss": "cross_entropy"},
)


@pytest.mark.parametrize(
    ("settings", "equal"),
    # rows of one length are the easy case
    [(LOSSES[0], True), *((settings, False) for settings in LOSSES)],
    ids=lambda s: (
        ",".join(map(str, s.values())) or "default" if isinstance(s, dict) else f"equal {s}"
    ),
)
def test_windows_of_1_2_and_8_micro_batches_make_the_same_step(load_model, settings, equal) -> None:
    some = eight_samples(equal)
    config = TrainConfig(regularization_lambda=0.1, **settings)
    start = {
        name: p.detach().clone() for name, p in adapter_parameters(student(load_model)).items()
    }
    steps, results = [], []
    for rows in (8, 4, 1):
        groups = [some[i : i + rows] for i in range(0, 8, rows)]
        parameters, _, result = one_step(
            student(load_model), config, groups, lambda p: torch.optim.SGD(p, lr=1.0)
        )
        assert result.applied and result.micro_batches == 8 // rows
        steps.append({key: start[key] - p.detach() for key, p in parameters.items()})
        results.append(result)
    for result, step in zip(results[1:], steps[1:], strict=True):
        assert result.tokens == results[0].tokens == sum(len(s.input_ids) for s in some)
        scored = [sum(report[REPORTED.index("scored")] for report in r.reports) for r in results]
        assert scored.count(scored[0]) == len(scored)
        # The same fp32 sums in another order.
        assert result.loss == pytest.approx(results[0].loss, rel=1e-5)
        assert result.grad_norm == pytest.approx(results[0].grad_norm, rel=1e-5)
        for key, expected in steps[0].items():
            assert expected.any(), key
            # The same, and the steps are differences of weights of size 0.1, known to 2^-24 of
            # that.
            assert (
                float((expected - step[key]).abs().max())
                <= 1e-5 * float(expected.abs().max()) + 1e-7
            ), key
