"""The guard: a run with bad micro-batches equals, bit for bit, an unguarded run that never saw
them.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from copy import deepcopy

import hypothesis.strategies as st
import pytest
import torch
from guarded_loops import (
    FAULTS,
    OPTIMIZERS,
    Micro,
    World,
    assert_same_state,
    guarded_run,
    never_saw,
    plain_run,
)
from hypothesis import given, settings
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from npt.errors import ConfigError
from npt.guard import Guard, GuardSettings, Outcome, TooManyRefusalsError


def micro_batches() -> st.SearchStrategy[Micro]:
    return st.builds(
        Micro,
        seed=st.integers(0, 50),
        tokens=st.integers(1, 9),
        fault=st.sampled_from([None, None, None, *FAULTS]),
        branch=st.booleans(),
    )


WINDOWS = st.lists(st.lists(micro_batches(), min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None)
@given(
    windows=WINDOWS,
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    loss=st.sampled_from(["sum", "mean"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_refused_micro_batches_leave_no_trace(windows, optimizer, loss, dtype) -> None:
    guarded = World(OPTIMIZERS[optimizer], dtype)
    outcomes = guarded_run(guarded, windows, loss=loss, max_refused=10**6)
    plain = World(OPTIMIZERS[optimizer], dtype)
    plain_run(plain, never_saw(windows), loss)
    assert_same_state(guarded, plain)
    refusals = [refusal for outcome in outcomes for refusal in outcome.refused]
    assert {r.tensor for r in refusals if r.kind == "gradient"} <= {"norm.weight"}
    for window, outcome in zip(windows, outcomes, strict=True):
        bad = [i for i, micro in enumerate(window) if micro.fault]
        assert [refusal.micro_batch for refusal in outcome.refused] == bad
        assert outcome.applied is (len(bad) < len(window))
        assert [r.sample_ids for r in outcome.refused] == [(str(window[i].seed),) for i in bad]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_same_loop_unguarded_is_lost_or_changed(fault) -> None:
    windows = [[Micro(1), Micro(2, fault=fault)], [Micro(3)]]
    bad, clean = World(), World()
    try:
        plain_run(bad, windows, "sum")
    except FloatingPointError:
        return
    plain_run(clean, never_saw(windows), "sum")
    with pytest.raises(AssertionError):
        assert_same_state(bad, clean)


@settings(max_examples=20, deadline=None)
@given(optimizer=st.sampled_from(sorted(OPTIMIZERS)), first=st.booleans())
def test_a_step_that_fails_is_taken_back(optimizer, first) -> None:
    good = [[Micro(1), Micro(2)], [Micro(3)]]
    place = 0 if first else 1
    windows = [*good[:place], [Micro(9)], *good[place:]]
    guarded, plain = World(OPTIMIZERS[optimizer]), World(OPTIMIZERS[optimizer])
    spoil = spoilt_step(guarded.optimizer, place)
    outcomes = guarded_run(guarded, windows)
    plain_run(plain, good, "sum")
    assert_same_state(guarded, plain)
    assert [o.applied for o in outcomes] == [index != place for index in range(3)]
    (refusal,) = outcomes[place].refused
    assert (refusal.kind, refusal.micro_batch, refusal.tensor) == ("update", None, spoil)


def spoilt_step(optimizer: torch.optim.Optimizer, at: int) -> str:
    """Let the step number `at` leave a NaN in a weight; returns the weight's name."""
    step, calls = optimizer.step, 0

    def spoiling() -> None:
        nonlocal calls
        step()
        if calls == at:
            optimizer.param_groups[0]["params"][-1].data.view(-1)[0] = math.nan
        calls += 1

    optimizer.step = spoiling  # type: ignore[method-assign]
    return "branch.bias"


def test_a_spike_is_refused_as_a_window() -> None:
    good = [[Micro(i), Micro(i + 100)] for i in range(24)]
    huge = [Micro(50, scale=1e4)]
    guarded, plain = World(), World()
    outcomes = guarded_run(guarded, [*good, huge, *good[:2]], spike_sigmas=8.0)
    plain_run(plain, [*good, *good[:2]], "sum")
    assert_same_state(guarded, plain)
    assert [r.kind for o in outcomes for r in o.refused] == ["spike"]
    assert not outcomes[24].applied


def test_numbers_that_the_loop_draws_itself_are_not_drawn_again() -> None:
    """A window that is refused as a whole is rewound, but not over the draws of the loop's data."""
    world = World()
    with Guard(world.model, world.optimizer) as guard:
        before = torch.get_rng_state()
        for _ in range(2):
            with guard.micro_batch() as micro:
                world.forward_backward(micro, Micro(1, fault="loss"), "sum")
            drawn = torch.rand(3)
        assert not guard.step().applied
    torch.set_rng_state(before)
    assert torch.equal(drawn, torch.rand(2, 3)[1])


def test_an_error_leaves_the_window_as_it_was() -> None:
    windows = [[Micro(1), Micro(2)]]
    guarded, plain = World(), World()
    torch.set_rng_state(guarded.random)
    with Guard(guarded.model, guarded.optimizer, guarded.scheduler, max_grad_norm=1.0) as guard:
        for micro in (windows[0][0], Micro(3, fault="exception"), windows[0][1]):
            with suppress(KeyError), guard.micro_batch(micro.tokens) as told:
                try:
                    guarded.forward_backward(told, micro, "sum")
                except FloatingPointError as error:
                    raise KeyError from error
        assert guard.step().refused == ()
    guarded.random = torch.get_rng_state()
    plain_run(plain, windows, "sum")
    assert_same_state(guarded, plain)


def test_too_many_refusals_stop_with_the_state_before_them() -> None:
    guarded, plain = World(), World()
    with pytest.raises(TooManyRefusalsError, match=r"^3 refusals in a row, the last: "):
        guarded_run(guarded, [[Micro(1)], *[[Micro(2, fault="loss")]] * 5], max_refused=3)
    plain_run(plain, [[Micro(1)]], "sum")
    assert_same_state(guarded, plain)


@pytest.mark.parametrize(
    ("windows", "stops"),
    [
        ([[1, 0], [0, 1], [1, 0, 0]], False),
        ([[0], [0], [1], [0], [0]], False),
        ([[1, 0], [0], [0], [1]], True),
        ([[1, 0], [0, 0, 0]], True),
        ([[1, 0, 0, 0]], True),
        # the row reaches over a window's start and ends inside it
        ([[0], [1, 0, 0], [0, 1]], True),
    ],
)
def test_refusals_are_in_a_row_by_their_order_wherever_windows_begin(windows, stops) -> None:
    """1 is a micro-batch that counts, 0 one that is refused."""
    made = [[Micro(i, fault=None if good else "loss") for i, good in enumerate(w)] for w in windows]
    with pytest.raises(TooManyRefusalsError) if stops else nullcontext():
        guarded_run(World(), made, max_refused=3)


def test_a_loop_continues_after_too_many_refusals() -> None:
    world = World()
    guard = Guard(world.model, world.optimizer, max_refused=2)
    ended = []
    for fault in ("loss", "loss", None, "loss", None, "loss", "loss"):
        with guard.micro_batch() as micro:
            world.forward_backward(micro, Micro(1, fault=fault), "sum")
        try:
            ended.append(guard.step().applied)
        except TooManyRefusalsError:
            ended.append("too many")
    assert ended == [False, "too many", True, False, True, False, "too many"]
    assert (guard.counts.windows, guard.counts.refused) == (7, 5)


def test_counts_continue_after_a_resume() -> None:
    world = World()
    first = Guard(world.model, world.optimizer, spike_sigmas=6.0)
    for seed, fault in ((1, None), (2, "loss")):
        with first.micro_batch() as micro:
            world.forward_backward(micro, Micro(seed, fault=fault), "sum")
        first.step()
    second = Guard(world.model, world.optimizer, spike_sigmas=6.0)
    second.load_state_dict(first.state_dict())
    assert second.counts == first.counts
    assert (second.counts.windows, second.counts.steps, second.counts.refused) == (2, 1, 1)
    assert second.state_dict() == first.state_dict()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: [state], "state is [{'counts'"),
        (lambda state: {}, "the entry 'counts' is missing (2 in all)"),
        (lambda state: {**state, "more": 1}, "the entry 'more' is unknown"),
        (lambda state: {**state, "counts": {}}, "counts.'in_a_row' is missing (4 in all)"),
        (lambda state: {**state, "counts": {**state["counts"], "steps": "x"}}, "steps is 'x'"),
        (lambda state: {**state, "counts": {**state["counts"], "steps": -1}}, "steps is -1"),
        (lambda state: {**state, "spikes": [[1.0]]}, "spikes is [[1.0]], expected two lists"),
        (lambda state: {**state, "spikes": [[1.0], [float("nan")]]}, "lists of finite numbers"),
        (lambda state: {**state, "spikes": 3}, "spikes is 3, expected list or tuple or null"),
    ],
)
def test_a_state_that_is_none_is_refused_and_changes_nothing(change, words) -> None:
    world = World()
    guard = Guard(world.model, world.optimizer, spike_sigmas=6.0)
    before = guard.state_dict()
    with pytest.raises(ConfigError) as refused:
        guard.load_state_dict(change(guard.state_dict()))
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert guard.state_dict() == before


def sharded(model: nn.Linear) -> nn.Linear:
    """Mark a weight as FSDP marks its own."""
    model.weight._is_flat_param = True  # type: ignore[assignment]
    return model


def by_fsdp1(model: nn.Linear) -> nn.Module:
    """Return the model as FSDP1 leaves it with `use_orig_params`; it cannot be made on a CPU."""
    outer = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(outer)
    outer._modules["_fsdp_wrapped_module"] = model
    return nn.Sequential(outer)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda m: Guard(by_fsdp1(m), torch.optim.SGD(m.parameters())),
            "does not support FSDP1; us",
        ),
        (lambda m: Guard(nn.Linear(2, 2), torch.optim.SGD(m.parameters())), "pass the guard the"),
        (lambda m: Guard(m, torch.optim.SGD(m.parameters()), loss="all"), "loss is 'all'; choose"),
        (
            lambda m: Guard(sharded(m), torch.optim.SGD(m.parameters())),
            "the guard does not support FSDP1",
        ),
        (lambda m: GuardSettings(refuse=ValueError), "pass a tuple of exception"),
        (lambda m: GuardSettings(max_grad_norm=0.0), "max_grad_norm is 0.0; it must be above 0"),
    ],
)
def test_what_cannot_be_guarded_is_refused_in_one_line(change, said) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        change(nn.Linear(3, 3))
    assert "\n" not in str(caught.value)


class Remembering(nn.Module):
    """A forward that writes to buffers, in the three ways that models have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        for name in ("written", "hidden", "assigned"):
            self.register_buffer(name, torch.zeros(4))
        self.register_buffer("table", torch.zeros(2, 2**20))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        output = self.inner(data)
        mean = output.detach().mean(0)
        with torch.no_grad():
            self.written.mul_(0.5).add_(mean)
        self.hidden.data.lerp_(mean, 0.5)
        self.assigned = 0.5 * self.assigned + mean
        return output.square().sum()


@pytest.mark.parametrize("good", [0, 1])
def test_buffers_that_a_forward_writes_are_put_back(good) -> None:
    """In a window with a survivor, and in one without."""

    def trained(values: list[float]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Remembering()
        torch.manual_seed(1)
        guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for value in values:
            with guard.micro_batch() as micro:
                micro.loss = loss = model(value * torch.randn(5, 3))
                loss.backward()
        guard.step()
        return model.state_dict()

    saw, never = trained([1.0] * good + [math.nan]), trained([1.0] * good)
    for name, value in never.items():
        assert torch.equal(saw[name], value), name


def grows(model: nn.Module) -> None:
    model.register_buffer("held", torch.ones(16, 1), persistent=False)


def empties(model: nn.Module) -> None:
    model.held = None


def deletes(model: nn.Module) -> None:
    if "held" in model._buffers:
        del model.held


@pytest.mark.parametrize("change", [grows, empties, deletes])
@pytest.mark.parametrize("between", [False, True])
def test_a_buffer_that_an_accepted_forward_replaces_stays(change, between) -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("held", torch.ones(8, 1))
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        if between:
            change(model)
        with guard.micro_batch() as micro:
            if not between:
                change(model)
            micro.loss = loss = model(torch.ones(1, 3)).sum()
            loss.backward()
        assert guard.step().applied
    expected = nn.Module()
    expected.register_buffer("held", None)
    change(expected)
    found, wanted = model._buffers.get("held"), expected._buffers.get("held")
    assert ("held" in model._buffers) == ("held" in expected._buffers)
    assert (found is None) == (wanted is None) and (found is None or found.shape == wanted.shape)


def test_buffers_that_cannot_be_written_are_left_alone() -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("expanded", torch.zeros(1).expand(5))
    model.register_buffer("sparse", torch.sparse_coo_tensor([[0]], [1.0], (3,)))
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with guard.micro_batch() as micro:
        micro.loss = loss = model(torch.ones(1, 3)).sum()
        loss.backward()
    assert guard.step().applied


def test_a_graph_from_before_the_micro_batches_keeps_its_buffers() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("scale", torch.ones(4))
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    encoded = model(torch.ones(4, 4)) * model.scale
    for rows in encoded.split(2):
        with guard.micro_batch() as micro:
            micro.loss = loss = rows.sum()
            loss.backward(retain_graph=True)
    assert guard.step().applied


def test_a_running_statistic_that_overflows_refuses_its_micro_batch() -> None:
    """One row of 1e20: the variance is inf, but normalised values, loss and gradients are finite.
    A mask that holds -inf is no fault.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, loss="mean")
    rows = torch.randn(4, 3)

    def window(*batches: Tensor) -> Outcome:
        for batch in batches:
            with guard.micro_batch() as micro:
                micro.loss = loss = model(batch).square().mean()
                loss.backward()
        outcome: Outcome = guard.step()
        return outcome

    assert not window(rows).refused
    before = deepcopy(model.state_dict())
    (refusal,) = window(torch.cat([rows, torch.full((1, 3), 1e20)])).refused
    assert (refusal.kind, refusal.tensor) == ("buffer", "0.running_var")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert window(rows).applied


class Keeping(nn.Module):
    """A layer that writes to a buffer in ways of its own."""

    def __init__(self, buffer: Tensor):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("kept", buffer)
        self.write: Callable[[Tensor], None] = lambda rows: None

    def forward(self, rows: Tensor) -> Tensor:
        self.write(rows)
        return self.layer(rows).square().mean()


def stepped(model: Keeping, *batches: Tensor) -> Outcome:
    """Make a step from these rows with a guard of its own."""
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), loss="mean")
    for rows in batches:
        with guard.micro_batch() as micro:
            micro.loss = loss = model(rows)
            loss.backward()
    outcome: Outcome = guard.step()
    return outcome


def test_a_mask_may_grow_with_inf_and_a_range_may_begin_at_inf() -> None:
    mask = Keeping(torch.zeros(1, 1))

    def grow(rows: Tensor) -> None:
        mask.kept = torch.full((3, 3), -math.inf).triu(1)

    mask.write = grow
    assert not stepped(mask, torch.ones(2, 3)).refused
    observed = Keeping(torch.tensor(math.inf))
    observed.write = lambda rows: observed.kept.copy_(torch.minimum(observed.kept, rows.min()))
    assert not stepped(observed, torch.ones(2, 3)).refused
    observed.write = lambda rows: observed.kept.fill_(math.nan)
    assert [r.kind for r in stepped(observed, torch.ones(2, 3)).refused] == ["buffer"]


def test_buffers_of_8_bits_are_let_alone() -> None:
    model = Keeping(torch.ones(4).to(torch.float8_e4m3fn))
    assert stepped(model, torch.ones(2, 3)).applied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_a_forward_keeps_as_its_buffer_are_not_written_to(dtype: torch.dtype) -> None:
    model = Keeping(torch.zeros(2, 3))

    def keep(rows: Tensor) -> None:
        model.kept = rows.to(dtype)

    model.write = keep
    bad = torch.full((2, 3), math.nan)
    expanded = torch.ones(1, 3).expand(2, 3)
    assert stepped(model, expanded, bad).applied
    assert bad.isnan().all()
    assert torch.equal(model.kept.float(), torch.ones(2, 3))


def test_complex_weights_are_verified() -> None:
    weight = nn.Parameter(torch.full((3,), 1 + 1j))
    model = nn.ParameterDict({"weight": weight})
    guard = Guard(model, torch.optim.SGD([weight], lr=1e38))
    before = weight.detach().clone()
    for scale, applied in ((0.0, True), (1e3, False)):
        with guard.micro_batch() as micro:
            micro.loss = loss = scale * weight.abs().square().sum()
            loss.backward()
        assert guard.step().applied == applied
    assert torch.equal(weight, before)
