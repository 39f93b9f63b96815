"""transformers' Trainer over FSDP2, two processes: what one refuses, the other never saw."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from fsdp_trainers import FSDP, fsdp_on_cpus
from guarded_loops import assert_equal
from guarded_trainers import InOrder, small_llama, trainer_of
from several import several, values

from faults.row_faults import VOCABULARY, plant, row
from npt.errors import DataError, TooManyRefusalsError
from npt.guard import Guard, TrainerMixin, read_postmortem
from npt.guard.ids import refuse_bad_ids
from npt.guard.parallel import full

WINDOW = {"gradient_accumulation_steps": 4, "max_steps": 3, "max_grad_norm": 0.1}
BAD = {"gradient-nan": 11, "loss-nan": 8, "id-large": 13, "label": 15, "tensor-nan": 14}
"""Rows of the epoch's second and last window, the only one that may be smaller."""


class Safe(TrainerMixin, InOrder):
    refusals: tuple[Any, ...] = ()

    def on_refused(self, outcome: Any) -> None:
        self.refusals += outcome.refused


class Plain(InOrder):
    """Sums gradients over the processes in each backward, and not once in a window: another order
    of summation has other bits."""

    def train(self, *arguments: Any, **named: Any) -> Any:
        self.accelerator.no_sync = lambda *_, **__: nullcontext()
        return super().train(*arguments, **named)


def trained(
    kind: Any, rows: Any, fault: str, out: str, whole: bool = False, **arguments: Any
) -> Any:
    """Return the state that a Trainer left, and its refusals."""
    model = small_llama()
    if whole:  # trained by each process; the base alone is sharded, or nothing
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name)
    plant(model, fault)
    with fsdp_on_cpus():
        trainer = trainer_of(kind, rows, Path(out), model, **WINDOW, **arguments)
        if whole and arguments:
            own = [m for name, m in model.named_modules() if name.endswith("q_proj")]
            trainer.accelerator.state.fsdp_plugin.ignored_modules = own
        torch.manual_seed(torch.distributed.get_rank())
        trainer.train()
    parameters = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    states = [trainer.optimizer.state[p] for p in parameters.values()]
    state = {
        "weights": {n.removeprefix("module."): full(p.detach()) for n, p in parameters.items()},
        "moments": [{key: full(value) for key, value in state.items()} for state in states],
        "schedule": trainer.lr_scheduler.state_dict(),
        "random": torch.get_rng_state(),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }
    told = [(r.process, r.kind, r.micro_batch) for r in getattr(trainer, "refusals", [])]
    return state, told


def sharded(_processes: Any, out: str) -> Any:
    told = {}
    for fault, bad in BAD.items():
        rows = [row(i, fault if i == bad else None) for i in range(16)]
        guarded, told[fault] = trained(Safe, rows, fault, out, **FSDP)
        kept = [row(i) for i in range(16) if i // 2 != bad // 2]
        plain, _ = trained(Plain, kept, fault, out, **FSDP)
        assert_equal(guarded, plain, fault)
    return told


def whole(_processes: Any, out: str) -> Any:
    told = {}
    for fault, bad in BAD.items():
        rows = [row(i, fault if i == bad else None) for i in range(16)]
        guarded, told[fault] = trained(Safe, rows, fault, out, True, **FSDP)
        by_ddp, again = trained(Safe, rows, fault, out, True)
        assert_equal(guarded, by_ddp, fault)
        assert told[fault] == again
    return told


def evaluated(_processes: Any, out: str) -> Any:
    rows = [row(i, "gradient-nan" if i == BAD["gradient-nan"] else None) for i in range(16)]
    kept = [row(i) for i in range(16) if i // 2 != BAD["gradient-nan"] // 2]
    between = {**FSDP, "eval_strategy": "steps", "eval_steps": 1}
    states = []
    for kind, given in ((Safe, rows), (Plain, kept)):
        evaluating = partial(kind, eval_dataset=[row(i) for i in range(20, 24)])
        state, _ = trained(evaluating, given, "gradient-nan", out, **between)
        states.append(state)
    assert_equal(*states, "after an evaluation")


def test_an_evaluation_leaves_layers_whole_and_the_next_window_is_guarded(tmp_path: Path) -> None:
    """As a generation does: no backward shards them again."""
    values(several(2, evaluated, str(tmp_path)))


@pytest.mark.parametrize("act", [sharded, whole])
def test_a_trainer_leaves_no_trace_of_a_refused_row(act: Any, tmp_path: Path) -> None:
    first, second = values(several(2, act, str(tmp_path)))
    assert first == second
    for fault, bad in BAD.items():
        kind = {"loss-nan": "loss", "id-large": "data", "label": "data"}.get(fault, "gradient")
        assert first[fault] == [(bad % 2, kind, bad - 8)], fault


FAULTS = [(0, None), (1, "loss-nan"), (2, None), (3, "id-large"), (4, "loss-nan")]


def by_accelerate(processes: Any, out: str) -> Any:
    """Train in a loop of accelerate's, and end it by windows of bad rows."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    told = []
    with fsdp_on_cpus():
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model: Any = plant(small_llama(), "loss-nan")
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = accelerator.prepare(model, optimizer)
        settings = {"loss": "mean", "refuse": (DataError,), "max_refused": 2, "postmortem": out}
        guard = Guard(model, optimizer, **settings)
        for seed, fault in FAULTS:
            one = row(seed, fault if processes.index == 1 else None)
            inputs = {name: ids[None] for name, ids in one.items()}
            with guard.micro_batch(3, [seed]) as micro, refuse_bad_ids(inputs, model):
                micro.loss = loss = model(**inputs).loss
                accelerator.backward(loss)
            try:
                outcome = guard.step()
            except TooManyRefusalsError:
                break
            told.append((outcome.applied, [(r.process, r.kind) for r in outcome.refused]))
    if processes.index == 0:  # nothing was refused here
        return told, {}
    weights = read_postmortem(Path(out, "step-00000002-process-1")).weights
    return told, {name: list(shard.shape) for name, shard in weights.items()}


def test_a_loop_of_accelerates_is_guarded_and_leaves_a_post_mortem(tmp_path: Path) -> None:
    (first, _), (second, shapes) = values(several(2, by_accelerate, str(tmp_path)))
    assert first == second
    lost = [(1, "loss")], [(1, "data")]
    assert first == [(True, []), (False, lost[0]), (True, []), (False, lost[1])]
    assert shapes["lm_head.weight"] == [VOCABULARY // 2, 16]
