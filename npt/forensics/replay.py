"""Replay a post-mortem: does the fault recur, where does it arise, is it the data or the state?

The last window's step is made again from the state of then, with the optimizer and limits of the
run, so that a refusal of the whole window recurs too. Refusals that recur are traced. Then accepted
micro-batches are tried in the same state.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from npt.distributed.processes import ProcessGroup
from npt.errors import BundleError, ConfigError, printable_lines
from npt.forensics.bundle import Postmortem, read_postmortem, well_formed
from npt.guard.forensics import Finding, StoredMicroBatch, autocast, loss_in, values_in
from npt.guard.guard import Guard
from npt.guard.outcome import MicroBatch, Outcome, Refusal
from npt.guard.parameters import plain_name
from npt.guard.traces import Buffers
from npt.manifest import POSTMORTEM
from npt.random_state import kept_random_state, set_random_state

Classification = Literal["data", "state", "transient", "undecided"]

Loss = Callable[[nn.Module, Any], Any]

TRACED = 3
"""Refused micro-batches that are traced; more would say the same."""

_REASONS = {
    "transient": "Nothing is refused when the same batches are computed in the same state.",
    "data": "The inputs themselves are bad, and the state is not.",
    "undecided": "There is no other micro-batch to compare with.",
}
_REMEDIES = {
    "data": "leave out or repair {}, or mend what the trace names; the last checkpoint can be used",
    "state": "replace what is not finite above, or go back to an earlier checkpoint and lower the"
    " learning rate; leaving out samples will not help",
    "undecided": "look at {}",
    "transient": "start the run again; if this recurs there and never here, suspect the machine"
    " (memory, an unstable GPU) or what else ran in the process",
}


@dataclass(frozen=True)
class Replay:
    """The result of a replay.

    Attributes:
        refusals: of the replayed window.
        records: its micro-batches that were computed, with loss and gradient norm.
        findings: numbers in weights, moments and base that are not finite before anything is
            computed.
        traces: by index of a micro-batch, what the tracer found.
        trials: whether other micro-batches, or a window of them, failed in the same state.
    """

    postmortem: Postmortem
    device: str
    refusals: tuple[Refusal, ...]
    records: tuple[MicroBatch, ...]
    findings: Mapping[str, str | None]
    traces: Mapping[int, Finding]
    trials: tuple[bool, ...]

    @property
    def classification(self) -> Classification:
        """Whose fault it is, as `replay` describes it."""
        if not self.refusals:
            return "transient"
        if all(refusal.kind == "data" for refusal in self.refusals):
            return "data"
        if any(self.findings.values()) or any(self.trials):
            return "state"
        verdicts = [finding.verdict for finding in self.traces.values()]
        bad = [verdict is not None and verdict.phase == "data" for verdict in verdicts]
        return "data" if self.trials or (bad and all(bad)) else "undecided"

    @property
    def reproduced(self) -> bool:
        """True if exactly the recorded refusals recurred, of the same micro-batches and kinds."""
        return {(r.kind, r.micro_batch) for r in self.refusals} == set(self.postmortem.recorded)

    @property
    def verdict(self) -> Any:
        """The first one found."""
        verdicts = (finding.verdict for finding in self.traces.values())
        return next(filter(None, verdicts), None)

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        record = self.postmortem.record
        verdicts = {i: f.verdict and f.verdict.as_dict() for i, f in self.traces.items()}
        return {
            "bundle": str(self.postmortem.folder),
            "step": self.postmortem.step,
            "reason": record["reason"],
            "classification": self.classification,
            "reproduced": self.reproduced,
            "recorded": [refusal.as_dict() for refusal in self.postmortem.recorded.values()],
            "found": [refusal.as_dict() for refusal in self.refusals],
            "verdict": self.verdict and self.verdict.as_dict(),
            "verdicts": [{"micro_batch": i, "verdict": v} for i, v in verdicts.items()],
            "accepted_failed": sum(self.trials),
            "accepted_total": len(self.trials),
            "findings": dict(self.findings),
            "micro_batches": [record.as_dict() for record in self.records],
            "device": self.device,
            "recorded_device": record["device"],
        }

    def __str__(self) -> str:
        postmortem, record = self.postmortem, self.postmortem.record
        lines = [
            f"{postmortem.folder}: stopped after step {postmortem.step}, {record['reason']}",
            f"recorded on {record['device']}, replayed on {self.device}",
            *(f"recorded: {refusal}" for refusal in postmortem.recorded.values()),
            *(f"replayed: {refusal}" for refusal in self.refusals or ("no refusal",)),
            "reproduced" if self.reproduced else "not reproduced as recorded",
            "",
        ]
        reason = _REASONS.get(self.classification, "No batch will help.")
        if self.trials:
            reason = (
                f"In the same state {sum(self.trials)} of {len(self.trials)} accepted ones fail."
            )
        lines.append(f"verdict: {self.classification}. {reason}")
        lines += [f"  {name}: {message}" for name, message in self.findings.items() if message]
        for index, finding in self.traces.items():
            samples = ", ".join(postmortem.micro_batches[index].sample_ids)
            named = f" (samples {samples})" if samples else ""
            lines += ["", f"micro-batch {index}{named}:"]
            lines += [f"  {line}" for line in finding.told.splitlines()]
        names = dict.fromkeys(name for refusal in self.refusals for name in refusal.sample_ids)
        samples = f"sample {', '.join(names)}" if names else "the samples of this window"
        remedy = _REMEDIES[self.classification].format(samples)
        return printable_lines([*lines, "", f"what to do: {remedy}"])


def replay(folder: str | Path, model: nn.Module, loss: Loss | None = None) -> Replay:
    """Make the last window of a run that gave up again, trace the refusals that recur, and say
    whether data or state is to blame.

    *transient*: no refusal recurs. *state*: weights, moments or the rest of the model hold a number
    that is not finite, or another micro-batch fails too. *data*: the inputs themselves are bad, or
    other micro-batches are clean in this state. *undecided*: there is no other micro-batch.

    Args:
        folder: of the post-mortem.
        model: the one that was trained, in the same mode (`train` or `eval`). Its weights, buffers
            and gradients are put back afterwards, and the random state.
        loss: makes the loss from the model and a micro-batch's inputs; default `model(**inputs)`,
            which is enough if the model returns its loss.

    Raises:
        BundleError: it is no post-mortem, or of another model.
        CheckpointError: a file is not the one that was written.
        ConfigError: the model returns no loss.
    """
    postmortem = read_postmortem(folder)
    if postmortem.record["student"] is not None:
        raise BundleError(
            f"{postmortem.folder} is of an NPT run, which knows its model; replay it with: npt"
            f" replay {postmortem.folder}"
        )
    with kept_random_state():
        return replayed(postmortem, model, loss)


def replayed(postmortem: Postmortem, model: nn.Module, loss: Loss | None = None) -> Replay:
    """Return what `replay` describes, of any run. `loss` may also run backward itself, and return
    an object with `loss` and `tokens`.
    """
    state = StoredState(postmortem, model, loss)
    with values_in(state.parameters, state.weights):
        findings = state.findings()
        outcome = state.window(postmortem.micro_batches, postmortem.limits, TRACED)
        records = tuple(m for m in outcome.own if m.grad_norm is not None)
        traces = {m.index: m.finding for m in outcome.own if m.finding is not None}
        trials = _trials(state, outcome.refused)
    device = str(state.device)
    return Replay(postmortem, device, outcome.refused, records, findings, traces, trials)


def _trials(state: StoredState, refusals: Sequence[Refusal]) -> tuple[bool, ...]:
    """Return whether other micro-batches fail in the same state: each alone, or all as a window if
    a window was refused.
    """
    postmortem = state.postmortem
    accepted, limits = postmortem.accepted, postmortem.limits
    computed = [refusal for refusal in refusals if refusal.kind != "data"]
    if not computed:
        return ()
    if all(refusal.micro_batch is None for refusal in computed):
        limits = limits if computed[0].kind == "spike" else None
        return (bool(state.window(accepted, limits).refused),) if accepted else ()
    # those of the window that were not refused have been clean
    clean = len(postmortem.micro_batches) - len({r.micro_batch for r in refusals} - {None})
    return (*[False] * clean, *(bool(state.window([each]).refused) for each in accepted))


class StoredState:
    """A model in the state that a post-mortem's window found; every attempt starts from it.

    BundleError if weights, moments or optimizer do not fit the model.
    """

    def __init__(self, postmortem: Postmortem, model: nn.Module, loss: Loss | None = None):
        self.postmortem, self.model, self.loss = postmortem, model, loss
        named = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        self.weights = {plain_name(n): w for n, w in postmortem.weights.items()}
        for name, weight in self.weights.items():
            if name not in named or named[name].shape != weight.shape:
                there = f"of shape {tuple(named[name].shape)}" if name in named else "none"
                raise BundleError(
                    f"{postmortem.folder} has {name} of shape {tuple(weight.shape)}, the model has"
                    f" {there}; give the model that was trained"
                )
        self.parameters = {name: named[name] for name in self.weights}
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def window(
        self,
        micro_batches: Sequence[StoredMicroBatch],
        limits: tuple[float, float] | None = None,
        trace: int = 0,
    ) -> Outcome:
        """Make one step, as the run would have, with the spike guard's limits, and trace so many
        refused micro-batches; the state is the post-mortem's before and after.
        """
        buffers = Buffers(self.model)
        buffers.begin()
        with values_in(self.parameters, self.weights), self._guard(trace) as guard:
            if limits is None:
                guard.window.spikes = None
            elif guard.window.spikes is not None:
                guard.window.spikes.limits = limits
            for stored in micro_batches:
                if stored.refusal is not None and stored.refusal.kind == "data":
                    guard.refuse(stored.refusal.detail, stored.sample_ids)
                    continue
                ids, run = stored.sample_ids, partial(self.compute, stored)
                with guard.micro_batch(stored.tokens, ids, stored.inputs, run) as micro:
                    result = run()
                    micro.loss = loss_in(result)
                    micro.tokens = getattr(result, "tokens", stored.tokens)
                    if micro.loss is None:
                        raise ConfigError(
                            "the model returns no loss; say how it is made: npt.guard.replay(...,"
                            " loss=lambda model, inputs: ...)"
                        )
                    if micro.loss.requires_grad:
                        micro.loss.backward()
            outcome: Outcome = guard.step()
        buffers.settle(None)
        return outcome

    def compute(self, micro_batch: StoredMicroBatch) -> Any:
        """Return the loss, or the model's outputs, from the random state of then."""
        with autocast(micro_batch.autocast):
            set_random_state(micro_batch.random)
            inputs = tree_map_only(Tensor, lambda t: t.to(self.device), micro_batch.inputs)
            if self.loss is not None:
                return self.loss(self.model, inputs)
            if isinstance(inputs, Mapping):
                return self.model(**inputs)
            return self.model(*inputs if isinstance(inputs, list) else [inputs])

    def findings(self) -> dict[str, str | None]:
        """Return what is not finite in weights, moments and the rest of the model."""
        from npt.tracer.watchdogs import base_fault, moments_fault, tensor_fault

        moments = {n: v for n, v in self.postmortem.moments.items() if isinstance(v, Tensor)}
        weights = tensor_fault(self.weights)
        faults = {
            "weights": weights,
            "moments": moments_fault(moments),
            "base": base_fault(self.model) if weights is None else None,
        }
        return {name: None if fault is None else str(fault) for name, fault in faults.items()}

    def _guard(self, trace: int) -> Guard:
        settings = self.postmortem.record["settings"]
        names = ("max_grad_norm", "loss", "spike_sigmas")
        chosen = {name: settings[name] for name in names if settings.get(name) is not None}
        if chosen.get("loss") == "share":  # each is a mean here, weighted by its tokens
            chosen["loss"] = "mean"
        refuse = [getattr(builtins, str(name), None) for name in settings.get("refuse") or ()]
        chosen["refuse"] = tuple(kind for kind in refuse if kind is not None)
        chosen |= {"trace": trace, "max_refused": float("inf"), "processes": ProcessGroup()}
        with well_formed(self.postmortem.folder / POSTMORTEM):
            return Guard(self.model, self._optimizer(), **chosen)

    def _optimizer(self) -> torch.optim.Optimizer:
        """Return the run's optimizer; of one that is not torch's, whose step cannot be made again,
        one that changes nothing.
        """
        record = self.postmortem.record
        made = getattr(torch.optim, record["optimizer"], None)
        if not (isinstance(made, type) and issubclass(made, torch.optim.Optimizer)):
            return torch.optim.SGD(self.parameters.values(), lr=0.0)
        places: dict[str, int] = {}
        groups, parameters = [], []
        for group in record["groups"]:
            names = [plain_name(name) for name in group["params"]]
            parameters.append({"params": [self.parameters[name] for name in names]})
            places |= {name: len(places) + index for index, name in enumerate(names)}
            groups.append({**group, "params": [places[name] for name in names]})
        state: dict[int, dict[str, Any]] = {}
        for name, value in self.postmortem.moments.items():
            key, _, parameter = name.partition(" of ")
            value = value.clone() if isinstance(value, Tensor) else value
            state.setdefault(places[plain_name(parameter)], {})[key] = value
        optimizer: torch.optim.Optimizer = made(parameters)  # type: ignore[call-arg]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        return optimizer
