"""A guard over FSDP2, two processes: the layers are sharded, the trained parameters too or not."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from guarded_loops import MAX_NORM, assert_equal
from several import several, values
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from npt.errors import ConfigError, DataError
from npt.guard import Guard

WIDTH = 5

HOOK = "set_custom_reduce_scatter"
OF_SHARDS = pytest.mark.skipif(
    not hasattr(FSDPModule, HOOK), reason="sharded parameters are guarded with torch 2.9 or later"
)
SHARDED = pytest.param(False, id="sharded", marks=OF_SHARDS)
EITHER = pytest.mark.parametrize("whole", [pytest.param(True, id="whole"), SHARDED])


class Layer(nn.Module):
    """A frozen weight with an adapter beside it, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.adapter, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(1))

    def forward(self, data: Tensor) -> Tensor:
        adapted = nn.functional.dropout(self.adapter(data), 0.25)
        return (self.base(data) + self.scale * adapted).tanh()


def model_of(processes: Any, whole: bool) -> nn.Module:
    """Return a sharded model; whole: its trained parameters are not."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    own = {p for p in model.parameters() if p.requires_grad} if whole else set()
    mesh = init_device_mesh("cpu", (processes.size,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, ignored_params=own)
    return model


def data_of(seed: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))


class Run:
    """A run of windows of micro-batches, each a seed and a fault."""

    def __init__(self, processes: Any, whole: bool, **settings: Any):
        self.processes, self.whole = processes, whole
        self.model = model_of(processes, whole)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.mean = settings.get("loss") == "mean"
        self.settings = {"refuse": (FloatingPointError, DataError), **settings}
        torch.manual_seed(processes.index)

    def compute(self, data: Tensor, fault: str = "", weight: float = 1.0) -> Tensor:
        parts = list(self.model(data).square().sum(0))
        if fault == "gradient":
            parts[1].register_hook(lambda g: g * float("nan"))
        if fault == "huge":
            parts[1].register_hook(lambda g: g + 1e20)
        loss = torch.stack(parts).sum() * (float("nan") if fault == "loss" else 1.0)
        (loss * weight).backward()
        return loss

    def guarded(self, windows: Any) -> list[Any]:
        guard = Guard(
            self.model, self.optimizer, self.scheduler, max_grad_norm=MAX_NORM, **self.settings
        )
        self.guard, outcomes = guard, []
        with guard:
            for window in windows:
                for seed, fault, tokens in window[self.processes.index]:
                    stand_in = lambda: self.compute(data_of(99))  # noqa: E731
                    if fault == "data":
                        guard.refuse("planted", [seed], run=stand_in)
                        continue
                    with guard.micro_batch(tokens, [seed]) as micro:
                        micro.loss = self.compute(data_of(seed), fault)
                        if fault == "after":
                            raise FloatingPointError("planted")
                outcomes.append(guard.step())
        return outcomes

    def plain(self, windows: Any) -> None:
        """Train by hand, without the micro-batches that have faults."""
        if not self.whole:
            for module in (*self.model, self.model):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        for window in windows:
            lost = {
                place if not self.whole else (process, place)
                for process, row in enumerate(window)
                for place, (_, fault, _) in enumerate(row)
                if fault
            }
            tokens = torch.zeros(())
            for place, (seed, _, count) in enumerate(window[self.processes.index]):
                if (place if not self.whole else (self.processes.index, place)) in lost:
                    if self.whole:  # the other process needs this one
                        state, kept = torch.get_rng_state(), [p.grad for p in trained]
                        kept = [g if g is None else g.clone() for g in kept]
                        self.compute(data_of(99))
                        torch.set_rng_state(state)
                        for parameter, gradient in zip(trained, kept, strict=True):
                            parameter.grad = gradient
                    continue
                self.compute(data_of(seed), weight=count if self.mean else 1.0)
                tokens += count
            dist.all_reduce(tokens)
            if not tokens:
                continue
            for parameter in trained:
                if self.whole:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    dist.all_reduce(parameter.grad)
                parameter.grad.div_(float(tokens))
            nn.utils.clip_grad_norm_(trained, MAX_NORM)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        own = lambda t: t.to_local().clone() if hasattr(t, "to_local") else t  # noqa: E731
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        moments = [{k: own(v) for k, v in self.optimizer.state[p].items()} for p in trained]
        return {
            "weights": [own(p.detach()).clone() for p in trained],
            "moments": moments,
            "schedule": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
        }


GOOD = [[(1, "", 5), (2, "", 3)], [(11, "", 4), (12, "", 5)]]
THIRD = [(21, "", 2), (22, "", 6)]
WINDOWS = {
    "loss": [GOOD, [[(3, "", 5), (4, "", 5)], [(13, "", 5), (14, "loss", 5)]], GOOD],
    "gradient": [[[(3, "", 5), (4, "gradient", 2)], [(13, "", 5), (14, "", 5)]], GOOD],
    "huge": [GOOD, [[(3, "", 5), (4, "", 5)], [(13, "huge", 5), (14, "", 5)]]],
    "data": [GOOD, [[(3, "", 5), (4, "", 5)], [(13, "data", 5), (14, "", 5)]], GOOD],
    "after": [GOOD, [[(3, "", 5), (4, "", 5)], [(13, "after", 5), (14, "", 5)]], GOOD],
    "both": [[[(3, "loss", 5), (4, "", 5)], [(13, "", 5), (14, "data", 5)]], GOOD],
    "all": [GOOD, [[(3, "gradient", 5), (4, "", 5)], [(13, "loss", 5), (14, "loss", 5)]], GOOD],
}


def compared(processes: Any, whole: bool) -> dict[str, Any]:
    told = {}
    for name, given in WINDOWS.items():
        windows = [[*window, THIRD][: processes.size] for window in given]
        guarded, plain = Run(processes, whole, trace=1), Run(processes, whole)
        torch.manual_seed(processes.index)
        outcomes = guarded.guarded(windows)
        state = guarded.state()
        torch.manual_seed(processes.index)
        plain.plain(windows)
        if whole and processes.size > 2:  # gloo adds three in an order that depends on the place
            torch.testing.assert_close(state["weights"], plain.state()["weights"])
        else:
            assert_equal(state, plain.state(), name)
        told[name] = [
            [(r.process, r.kind, r.micro_batch, r.sample_ids) for r in o.refused] for o in outcomes
        ]
        alone = processes.size == 1
        assert all(alone or "not traced" in f.told for f in guarded.guard.findings)
    return told


@EITHER
@pytest.mark.parametrize("size", [1, 3])
def test_of_one_or_three_processes_too(size: int, whole: bool) -> None:
    first, *others = values(several(size, compared, whole))
    assert all(other == first for other in others)
    assert [len(refused) for refused in first["both"]] == [1 if size == 1 else 2, 0]
    assert first["all"][1][0] == (0, "gradient", 0, ("3",))


@EITHER
def test_a_fault_on_one_process_leaves_no_trace(whole: bool) -> None:
    first, second = values(several(2, compared, whole))
    assert first == second
    assert first["loss"] == [[], [(1, "loss", 3, ("14",))], []]
    assert first["gradient"] == [[(0, "gradient", 2, ("4",))], []]
    assert first["huge"] == [[], [(1, "gradient", 1, ("13",))]]
    assert first["data"] == [[], [(1, "data", 1, ("13",))], []]
    assert first["after"] == [[], [(1, "error", 1, ("13",))], []]
    assert first["both"] == [[(0, "loss", 0, ("3",)), (1, "data", 3, ("14",))], []]


def rechecked(processes: Any, whole: bool, spoilt: bool) -> tuple[list[Tensor], list[list[str]]]:
    """Train four windows that are computed twice; an activation of process 1 changes once."""
    run = Run(processes, whole)
    guard = Guard(run.model, run.optimizer, max_grad_norm=MAX_NORM, recheck=1)
    calls, told = 0, []

    def spoil(_module: Any, _args: Any, output: Tensor) -> None:
        nonlocal calls
        calls += 1
        if spoilt and processes.index == 1 and calls == 5:  # a window is four
            output.detach().numpy().reshape(-1).view("uint32")[0] ^= 1 << 29

    run.model[0].register_forward_hook(spoil)
    torch.manual_seed(processes.index)
    for number in range(4):
        for seed, _, tokens in GOOD[processes.index]:
            compute = partial(run.compute, data_of(seed))
            if number == 3 and processes.index == 0:  # cannot be computed twice
                guard.refuse("planted", [seed], run=compute)
                continue
            with guard.micro_batch(tokens, [seed], run=compute) as micro:
                micro.loss = compute()
        told.append(list(guard.step().repaired))
    return [tensor.numpy() for tensor in run.state()["weights"]], told


@EITHER
def test_a_changed_activation_is_found_and_repaired_on_all_processes(whole: bool) -> None:
    clean = values(several(2, rechecked, whole, False))
    found = values(several(2, rechecked, whole, True))
    for (weights, told), (expected, nothing) in zip(found, clean, strict=True):
        assert nothing == [[], [], [], []]
        assert [bool(faults) for faults in told] == [False, True, False, False]
        assert all((one == other).all() for one, other in zip(weights, expected, strict=True))


class Spoiling(torch.optim.AdamW):
    """AdamW whose second step leaves a NaN in process 1's shard of a moment."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        type(self).steps += 1
        if type(self).steps == 2 and dist.get_rank() == 1:
            moment: Any = self.state[self.param_groups[0]["params"][-1]]["exp_avg"]
            moment.to_local().view(-1)[0] = float("nan")


def partly_whole(processes: Any) -> nn.Module:
    """Return a model of which one parameter is whole."""
    model = model_of(processes, False)
    model.add_module("whole", nn.Linear(1, 1))
    return model


def hybrid(processes: Any) -> nn.Module:
    """Return a model on a mesh of two dimensions."""
    mesh = init_device_mesh("cpu", (1, processes.size), mesh_dim_names=("replicate", "shard"))
    return fully_shard(nn.Linear(4, 4), mesh=mesh)


def tensors(processes: Any) -> nn.Module:
    """Return a layer that is parallel in its columns."""
    mesh = init_device_mesh("cpu", (processes.size,))
    return parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())


def others(processes: Any) -> dict[str, Any]:
    """Return what becomes of a spoilt step, of mean losses, and of errors."""
    windows = [GOOD, [[(5, "", 5)], [(15, "", 5)]], GOOD]
    spoilt, plain = Run(processes, False), Run(processes, False)
    spoilt.optimizer = Spoiling([*spoilt.optimizer.param_groups[0]["params"]], lr=0.05)
    spoilt.scheduler = torch.optim.lr_scheduler.ExponentialLR(spoilt.optimizer, 0.9)
    torch.manual_seed(processes.index)
    outcomes = spoilt.guarded(windows)
    state = spoilt.state()
    torch.manual_seed(processes.index)
    plain.plain([windows[0], windows[2]])
    assert_equal(state, plain.state(), "spoilt")
    told: dict[str, Any] = {"spoilt": [str(r) for o in outcomes for r in o.refused]}
    # weights that are powers of two round nowhere
    good = [[(1, "", 4), (2, "", 2)], [(11, "", 8), (12, "", 1)]]
    windows = [[[(1, "", 2), (2, "", 8)], [(11, "", 4), (12, "gradient", 1)]], good]
    mean, by_hand = Run(processes, False, loss="mean"), Run(processes, False, loss="mean")
    torch.manual_seed(processes.index)
    mean.guarded(windows)
    state = mean.state()
    torch.manual_seed(processes.index)
    by_hand.plain(windows)
    assert_equal(state, by_hand.state(), "mean")
    unguarded, after = Run(processes, False), Run(processes, False)
    after.guarded([])  # a guard that was closed
    for run in (unguarded, after):
        torch.manual_seed(processes.index)
        run.compute(data_of(1))
    for one, other in zip(unguarded.model.parameters(), after.model.parameters(), strict=True):
        assert one.grad is None or torch.equal(one.grad.full_tensor(), other.grad.full_tensor())
    told["refused"] = []
    guard = Guard(after.model, after.optimizer)
    for act in (
        lambda: guard.refuse("planted"),
        lambda: Guard(after.model, after.optimizer, scaler=torch.amp.GradScaler("cpu")),
        lambda: Guard(other := partly_whole(processes), torch.optim.SGD([*other.parameters()])),
        lambda: Guard(other := hybrid(processes), torch.optim.SGD([*other.parameters()])),
        lambda: Guard(other := tensors(processes), torch.optim.SGD([*other.parameters()])),
    ):
        with pytest.raises(ConfigError) as error:
            act()
        told["refused"].append(str(error.value))
    return told


@OF_SHARDS
def test_what_else_becomes_of_sharded_parameters() -> None:
    first, second = values(several(2, others))
    assert first == second
    (spoilt,) = first["spoilt"]
    assert spoilt.startswith("the whole window: exp_avg of ")
    waits, scaled, mixed, hybrid, columns = first["refused"]
    assert waits.endswith("refuse(..., run=...), the forward and backward of any good batch")
    assert scaled.startswith("sharded parameters support neither rates=[...] nor a scaler: ")
    assert mixed.startswith("0.scale is sharded and whole.weight is whole; shard all ")
    assert hybrid.startswith("the guard does not support weight with placements (Replicate(), ")
    assert columns.startswith("the guard does not support weight with placements (Shard(dim=0),)")


def stopped(processes: Any, whole: bool, where: str) -> None:
    run = Run(processes, whole)
    guard = Guard(run.model, run.optimizer, refuse=(FloatingPointError,))

    def stop(*_: Any) -> None:
        raise FloatingPointError("planted")

    with guard.micro_batch() as micro:
        if processes.index == 1 and where == "before":
            stop()
        if processes.index == 1 and where == "forward":
            run.model[0].adapter.register_forward_hook(stop)
        loss = run.model(data_of(1)).sum()
        if processes.index == 1 and where == "backward":
            loss.register_hook(stop)
        micro.loss = loss
        loss.backward()
    guard.step()


@EITHER
@pytest.mark.parametrize("where", ["before", "forward", "backward"])
def test_an_error_that_others_would_wait_for_ends_all(whole: bool, where: str) -> None:
    first, second = several(2, stopped, whole, where)
    assert (first.kind, second.kind) == ("ProcessError", "ProcessError")
    assert first.error.startswith("process 1 no longer responds (")
    assert second.error.startswith("process 1 raised FloatingPointError: planted in the middle of ")
    assert "\n" not in first.error + second.error


def unhooked(processes: Any) -> str:
    """Return what a guard says of sharded parameters whose sums torch lets nobody see."""
    if hasattr(FSDPModule, HOOK):
        delattr(FSDPModule, HOOK)
    model = model_of(processes, False)
    with pytest.raises(ConfigError) as caught:
        Guard(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))
    return str(caught.value)


def test_an_older_torch_does_not_let_sharded_parameters_be_guarded() -> None:
    (told,) = values(several(1, unhooked))
    assert told.startswith("guarding sharded parameters needs torch 2.9 or later; this is ")
