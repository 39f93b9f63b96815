"""Errors that leave a guard's step: the window has not happened, and the next one is whole."""

import weakref
from collections.abc import Iterator

import pytest
import torch
from guarded_loops import MAX_NORM, Micro, World, assert_same_state, never_saw, plain_run
from torch import Tensor, nn

from npt.errors import ConfigError
from npt.guard import Guard


class FailingOnce(torch.optim.AdamW):
    """Fails in the middle of a step, with one weight moved already.

    errors: of its steps, None for a step that is made; an iterator is not taken back.
    """

    errors: Iterator[type[BaseException] | None] = iter(())

    def step(self, closure=None):
        error = next(self.errors, None)
        if error is not None:
            first = self.param_groups[0]
            first["params"][0].data.add_(1.0)
            first["lr"] *= 2
            self.state[first["params"][1]]["step"] = torch.ones(())
            raise error("planted")
        return super().step(closure)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("fails_in", [1, 2])
@pytest.mark.parametrize("scaled", [False, True])
def test_an_error_in_the_step_takes_back_its_window(error, fails_in, scaled) -> None:
    windows = [[Micro(1), Micro(2)], [Micro(3)], [Micro(4), Micro(5)]]
    guarded, plain = (World(lambda p: FailingOnce(p, lr=0.01)) for _ in range(2))
    guarded.optimizer.errors = iter([*[None] * (fails_in - 1), error])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    torch.set_rng_state(guarded.random)
    guard = Guard(
        guarded.model, guarded.optimizer, guarded.scheduler, scaler, max_grad_norm=MAX_NORM
    )
    applied = []
    for number, window in enumerate(windows):
        for micro in window:
            with guard.micro_batch(micro.tokens) as told:
                scale = 1.0 if scaler is None else float(scaler.scale(torch.ones(())))
                guarded.forward_backward(told, micro, "sum", scale)
        if number == fails_in - 1:
            with pytest.raises(error, match="planted"):
                guard.step()
            assert all(parameter.grad is None for parameter in guarded.model.parameters())
        else:
            applied.append(guard.step().applied)
    guarded.random = torch.get_rng_state()
    assert applied == [True, True]
    plain_run(plain, [w for i, w in enumerate(windows) if i != fails_in - 1], "sum")
    assert_same_state(guarded, plain)


def test_an_error_while_a_window_is_closed_forgets_it(monkeypatch) -> None:
    guarded, plain = World(), World()
    torch.set_rng_state(guarded.random)
    with Guard(guarded.model, guarded.optimizer, guarded.scheduler, max_grad_norm=1.0) as guard:
        for seed in (1, 2):
            with guard.micro_batch(5) as told:
                guarded.forward_backward(told, Micro(seed), "sum")
            if seed == 1:
                with monkeypatch.context() as patched, pytest.raises(MemoryError):
                    patched.setattr(guard.window, "_clip", _out_of_memory)
                    guard.close_window()
        assert guard.step().tokens == 5
    guarded.random = torch.get_rng_state()
    plain_run(plain, [[Micro(2)]], "sum")
    assert_same_state(guarded, plain)


def _out_of_memory(_window: object) -> None:
    raise MemoryError


def test_a_loss_that_is_no_number_leaves_the_window_whole() -> None:
    said = r"the loss of a micro-batch has shape \(2,\); assign one number"
    guarded, plain = World(), World()
    torch.set_rng_state(guarded.random)
    with Guard(guarded.model, guarded.optimizer, guarded.scheduler, max_grad_norm=1.0) as guard:
        with guard.micro_batch(5) as told:
            guarded.forward_backward(told, Micro(1), "sum")
        with pytest.raises(ConfigError, match=said), guard.micro_batch(5) as told:
            guarded.forward_backward(told, Micro(9), "sum")
            told.loss = torch.zeros(2)
        with guard.micro_batch(5) as told:
            guarded.forward_backward(told, Micro(2), "sum")
        assert guard.step().tokens == 10
    guarded.random = torch.get_rng_state()
    plain_run(plain, [[Micro(1), Micro(2)]], "sum")
    assert_same_state(guarded, plain)


def test_a_loss_may_be_a_plain_number() -> None:
    world = World()
    guard = Guard(world.model, world.optimizer)
    for number in (2.5, float("nan"), 1):
        with guard.micro_batch() as told:
            world.forward_backward(told, Micro(1), "sum")
            told.loss = number
    outcome = guard.step()
    assert outcome.loss == 1.75
    assert [(r.micro_batch, r.kind) for r in outcome.refused] == [(1, "loss")]


def test_the_sum_of_a_loss_in_fp16_does_not_overflow() -> None:
    world = World()
    guard = Guard(world.model, world.optimizer, loss="mean")
    with guard.micro_batch(tokens=65536) as told:
        world.forward_backward(told, Micro(1), "mean")
        told.loss = torch.tensor(2.5, dtype=torch.float16)
    assert guard.step().loss == 2.5


class FailingSchedule(torch.optim.lr_scheduler.ExponentialLR):
    """Fails at the end of a step; errors: as those of `FailingOnce`."""

    errors: Iterator[type[BaseException] | None] = iter(())

    def step(self, epoch=None):
        super().step()
        if (error := next(self.errors, None)) is not None:
            raise error("planted")


class FailingScaler(torch.amp.GradScaler):
    """Fails at the end of an update; errors: as those of `FailingOnce`."""

    errors: Iterator[type[BaseException] | None] = iter(())

    def update(self, new_scale=None):
        super().update(new_scale)
        if (error := next(self.errors, None)) is not None:
            raise error("planted")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("fails", ["scheduler", "scaler", "exchange"])
def test_an_error_after_the_step_takes_it_back(monkeypatch, fails, at, error) -> None:
    windows = [[Micro(1), Micro(2, fault="loss")], [Micro(3), Micro(4, fault="loss")], [Micro(5)]]
    guarded, plain = World(), World()
    guarded.scheduler = FailingSchedule(guarded.optimizer, 0.9)
    plain.scheduler = FailingSchedule(plain.optimizer, 0.9)
    scaler = FailingScaler("cpu", init_scale=1024.0, growth_interval=1)
    settings = {"max_grad_norm": MAX_NORM, "spike_sigmas": 50.0}
    torch.set_rng_state(guarded.random)
    guard = Guard(guarded.model, guarded.optimizer, guarded.scheduler, scaler, **settings)
    errors = iter([None] * at + [error])
    if fails == "scheduler":
        monkeypatch.setattr(FailingSchedule, "errors", errors)  # not a part of its state
    elif fails == "scaler":
        scaler.errors = errors
    else:
        gather = guard.window.processes.gather

        def failing(value: object) -> object:
            if (planted := next(errors, None)) is not None:
                raise planted("planted")
            return gather(value)

        monkeypatch.setattr(guard.window.processes, "gather", failing)
    for number, window in enumerate(windows):
        for micro in window:
            with guard.micro_batch(micro.tokens) as told:
                scale = float(scaler.scale(torch.ones(())))
                guarded.forward_backward(told, micro, "sum", scale)
        if number == at:
            before = guard.state_dict(), scaler.state_dict()
            with pytest.raises(error, match="planted"):
                guard.step()
            assert (guard.state_dict(), scaler.state_dict()) == before
            assert guard.window.known_steps == guard.window.applied_steps == guard.counts.steps
        else:
            outcome = guard.step()
            assert outcome.applied
            assert outcome.steps == guard.counts.steps
    guarded.random = torch.get_rng_state()
    plain_run(plain, never_saw([w for i, w in enumerate(windows) if i != at]), "sum")
    assert_same_state(guarded, plain)


def test_a_refused_error_keeps_nothing_of_its_forward_alive() -> None:
    """Although somebody holds the error. With torch 2.9 the hooks of a checkpointed forward stay
    in place as long as its frame, and spoil the next one.
    """
    world, alive, errors = World(), [], []

    def forward() -> None:
        of_forward = torch.nn.Identity()  # not a tensor, which the tracer may keep
        alive.append(weakref.ref(of_forward))
        try:
            raise FloatingPointError("planted")
        except FloatingPointError as error:
            errors.append(error)
            raise

    guard = Guard(world.model, world.optimizer, refuse=(FloatingPointError,), trace=1)
    with guard.micro_batch(run=forward):
        forward()
    assert alive[0]() is None
    assert "raises the same again" in guard.step().findings[0].told
    assert len(alive) > 1 and all(held() is None for held in alive)


def test_a_loader_that_hands_on_an_error_goes_on_after_its_refusal() -> None:
    """The error's frames include the loader's own, which waits for the next batch."""

    def decoded(number: int) -> Tensor:
        if number == 1:
            raise FloatingPointError("bad sample")
        return torch.ones(1, 3) * number

    def loader() -> Iterator[Tensor | Exception]:
        for number in range(4):
            try:
                item: Tensor | Exception = decoded(number)
            except FloatingPointError as error:
                item = error
            yield item

    model = nn.Linear(3, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    applied = []
    for item in loader():
        with guard.micro_batch() as micro:
            if isinstance(item, Exception):
                raise item
            micro.loss = loss = model(item).sum()
            loss.backward()
        applied.append(guard.step().applied)
    assert applied == [True, False, True, True]
