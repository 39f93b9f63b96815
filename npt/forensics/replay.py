"""Re-run the last window of a failed run from its post-mortem, and find what was to blame.

The window's step is made again from the stored state, with the run's optimizer and limits, so that
a refusal of the whole window recurs too. Refusals that recur are traced. Then accepted
micro-batches are computed in the same state.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from npt.distributed.processes import ProcessGroup
from npt.errors import BundleError, ConfigError, first_line, printable_lines
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
"""How many refused micro-batches are traced."""

_REASONS = {
    "transient": "The same batches in the same state are accepted.",
    "data": "The inputs are bad; the state is not.",
    "undecided": "There is no other micro-batch to compare with.",
}
_REMEDIES = {
    "data": "leave out or repair {}, or fix what the trace names, and continue from the last"
    " checkpoint",
    "state": "replace what is not finite, or go back to an earlier checkpoint and lower the"
    " learning rate; leaving out samples will not help",
    "undecided": "check {}",
    "transient": "start the run again; if the fault recurs there but never here, suspect the"
    " machine (memory, an unstable GPU) or other code in the process",
}


_WITH_LOSS = (
    "with npt.guard.replay(..., loss=lambda model, inputs: ...), or loss=trainer.compute_loss for"
    " a Trainer"
)


@dataclass(frozen=True)
class Replay:
    """The result of a replay.

    Attributes:
        postmortem: the bundle that was replayed.
        device: the device it was replayed on.
        refusals: the refusals of the replayed window.
        records: its computed micro-batches, with loss and gradient norm.
        findings: what is not finite in weights, moments and base before the window.
        traces: the tracer's findings, by index of the micro-batch.
        trials: for each accepted micro-batch, or their window, whether it failed in the same state.
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
        """The kind of fault, as described in `replay`."""
        kinds = {refusal.kind for refusal in self.refusals}
        if not kinds:
            return "transient"
        if kinds != {"data"} and any((*self.findings.values(), *self.trials)):
            return "state"
        phases = {finding.verdict and finding.verdict.phase for finding in self.traces.values()}
        return "data" if self.trials or {"data"} in (kinds, phases) else "undecided"

    @property
    def reproduced(self) -> bool:
        """True if exactly the recorded refusals recurred, by micro-batch and kind."""
        found = {(refusal.kind, refusal.micro_batch) for refusal in self.refusals}
        return found == self.postmortem.recorded.keys()

    @property
    def verdict(self) -> Any:
        """The tracer's first verdict, or None."""
        verdicts = (finding.verdict for finding in self.traces.values())
        return next(filter(None, verdicts), None)

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        postmortem = self.postmortem
        record = postmortem.record
        recorded = [refusal.as_dict() for refusal in postmortem.recorded.values()]
        found = [refusal.as_dict() for refusal in self.refusals]
        verdicts = []
        for index, finding in self.traces.items():
            verdict = finding.verdict and finding.verdict.as_dict()
            verdicts.append({"micro_batch": index, "verdict": verdict})
        return {
            "bundle": str(postmortem.folder),
            "step": postmortem.step,
            "reason": record["reason"],
            "classification": self.classification,
            "reproduced": self.reproduced,
            "recorded": recorded,
            "found": found,
            "verdict": self.verdict and self.verdict.as_dict(),
            "verdicts": verdicts,
            "accepted_failed": sum(self.trials),
            "accepted_total": len(self.trials),
            "findings": dict(self.findings),
            "micro_batches": [record.as_dict() for record in self.records],
            "device": self.device,
            "recorded_device": record["device"],
        }

    def __str__(self) -> str:
        postmortem = self.postmortem
        record = postmortem.record
        lines = [
            f"{postmortem.folder}: stopped after step {postmortem.step}: {record['reason']}",
            f"recorded on {record['device']}, replayed on {self.device}",
            *(f"recorded: {refusal}" for refusal in postmortem.recorded.values()),
            *(f"replayed: {refusal}" for refusal in self.refusals or ("no refusal",)),
            "reproduced" if self.reproduced else "not reproduced",
            "",
            f"verdict: {self.classification}. {self._reason}",
            *(f"  {name}: {message}" for name, message in self.findings.items() if message),
        ]
        for index, finding in self.traces.items():
            named = _samples(postmortem.micro_batches[index].sample_ids)
            lines += ["", f"micro-batch {index}{named and f' ({named})'}:"]
            lines += [f"  {line}" for line in finding.told.splitlines()]
        # each once, in the order of the refusals
        names = dict.fromkeys(chain(*(refusal.sample_ids for refusal in self.refusals)))
        remedy = _REMEDIES[self.classification]
        remedy = remedy.format(_samples(names) or "the samples of this window")
        return printable_lines([*lines, "", f"what to do: {remedy}"])

    @property
    def _reason(self) -> str:
        if not self.trials:
            return _REASONS.get(self.classification, "No batch can succeed in this state.")
        return (
            f"{sum(self.trials)} of {len(self.trials)} accepted micro-batches fail in the same"
            " state."
        )


def _samples(names: Iterable[str]) -> str:
    text = ", ".join(names)
    return text and f"samples {text}"


def replay(folder: str | Path, model: nn.Module, loss: Loss | None = None) -> Replay:
    """Re-run the last window of a failed run, trace the refusals that recur, and tell whether the
    data or the state is to blame.

    The classification is *transient* if no refusal recurs; *state* if weights, moments or the rest
    of the model are not finite, or another micro-batch fails too; *data* if the inputs are bad, or
    other micro-batches are fine in this state; *undecided* if there is no other micro-batch.

    Args:
        folder: the post-mortem bundle, such as `postmortem/step-00000123`.
        model: the trained model, in the run's mode (`train` or `eval`). Its weights, buffers and
            gradients, and the random state, are restored afterwards.
        loss: computes the loss from the model and a micro-batch's inputs; default:
            `model(**inputs)`, which is enough if the model returns its loss; for a Trainer with a
            loss of its own, `trainer.compute_loss`.

    Raises:
        BundleError: the folder is no post-mortem, or belongs to another model.
        CheckpointError: a file is damaged.
        ConfigError: the model returns no loss, or cannot be called with the inputs.
    """
    postmortem = read_postmortem(folder)
    if postmortem.record["student"] is not None:
        raise BundleError(
            f"{postmortem.folder} is from an NPT run, which names its model; run npt replay"
            f" {postmortem.folder}"
        )
    with kept_random_state():
        return replayed(postmortem, model, loss)


def replayed(postmortem: Postmortem, model: nn.Module, loss: Loss | None) -> Replay:
    """Replay any post-mortem; `loss` may run backward and return an object with loss and tokens."""
    state = StoredState(postmortem, model, loss)
    with values_in(state.parameters, state.weights):
        findings = state.findings()
        outcome = state.window(postmortem.micro_batches, postmortem.limits, TRACED)
        trials = _trials(state, outcome.refused)
    own = outcome.own
    records = tuple(m for m in own if m.grad_norm is not None)
    traces = {m.index: m.finding for m in own if m.finding is not None}
    return Replay(
        postmortem,
        device=str(state.device),
        refusals=outcome.refused,
        records=records,
        findings=findings,
        traces=traces,
        trials=trials,
    )


def _trials(state: StoredState, refusals: Sequence[Refusal]) -> tuple[bool, ...]:
    """Return whether each accepted micro-batch, or all as one window, fails in the same state."""
    postmortem = state.postmortem
    accepted = postmortem.accepted
    computed = [refusal for refusal in refusals if refusal.kind != "data"]
    if not computed:
        return ()
    if all(refusal.micro_batch is None for refusal in computed):
        if not accepted:
            return ()
        limits = postmortem.limits if computed[0].kind == "spike" else None
        return (bool(state.window(accepted, limits).refused),)
    # the window's other micro-batches did not fail
    refused = {refusal.micro_batch for refusal in refusals} - {None}
    good = len(postmortem.micro_batches) - len(refused)
    trials = [bool(state.window([stored]).refused) for stored in accepted]
    return (False,) * good + tuple(trials)


class StoredState:
    """A model in the state from before a post-mortem's window, from which every attempt starts.

    Raises:
        BundleError: weights, moments or optimizer do not fit the model.
    """

    def __init__(self, postmortem: Postmortem, model: nn.Module, loss: Loss | None):
        self.postmortem = postmortem
        self.model = model
        self.loss = loss
        named = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        self.weights = postmortem.weights
        for name, weight in self.weights.items():
            shape = tuple(weight.shape)
            found = tuple(named[name].shape) if name in named else "none"
            if found != shape:
                raise BundleError(
                    f"{postmortem.folder} has {name} of shape {shape}, but the model has"
                    f" {found}; pass the model that was trained"
                )
        self.parameters = {name: named[name] for name in self.weights}
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def window(
        self,
        micro_batches: Sequence[StoredMicroBatch],
        limits: tuple[float, float] | None = None,
        trace: int = 0,
    ) -> Outcome:
        """Make one step as the run would have, with the spike guard's `limits`, and trace up to
        `trace` refused micro-batches. Afterwards the stored state is restored.
        """
        from npt.tracer.passes import differentiate

        # a forward may change them, such as running statistics
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
                ids = stored.sample_ids
                run = partial(self.compute, stored)
                # with its inputs and a way to run it again, so that a refusal can be traced
                with guard.micro_batch(stored.tokens, ids, stored.inputs, run) as micro:
                    result = run()
                    loss = loss_in(result)
                    if loss is None:
                        raise ConfigError(f"the model returns no loss: pass one {_WITH_LOSS}")
                    micro.loss = loss
                    micro.tokens = getattr(result, "tokens", stored.tokens)
                    differentiate(loss)
            outcome: Outcome = guard.step()
        buffers.settle(None)
        return outcome

    def compute(self, micro_batch: StoredMicroBatch) -> Any:
        """Return the loss, or the model's outputs, from the stored random state."""
        with autocast(micro_batch.autocast):
            with well_formed(self.postmortem.folder / POSTMORTEM):
                set_random_state(micro_batch.random)
            inputs = tree_map_only(Tensor, lambda t: t.to(self.device), micro_batch.inputs)
            if self.loss is not None:
                return self.loss(self.model, inputs)
            try:
                if isinstance(inputs, Mapping):
                    return self.model(**inputs)
                return self.model(*inputs if isinstance(inputs, list) else [inputs])
            except (TypeError, ValueError) as error:
                if isinstance(error, self._refuse):
                    raise
                names = ", ".join(inputs) if isinstance(inputs, Mapping) else "a tuple"
                raise ConfigError(
                    f"the model does not compute a loss from the inputs of its trainer ({names}):"
                    f" {first_line(error)}; pass the loss {_WITH_LOSS}"
                ) from error

    def findings(self) -> dict[str, str | None]:
        """Return what is not finite in weights, moments and the rest of the model."""
        from npt.tracer.watchdogs import base_fault, moments_fault, tensor_fault

        moments = {n: v for n, v in self.postmortem.moments.items() if isinstance(v, Tensor)}
        weights = tensor_fault(self.weights)
        faults = {"weights": weights, "moments": moments_fault(moments), "base": None}
        if weights is None:
            faults["base"] = base_fault(self.model)
        return {name: None if fault is None else str(fault) for name, fault in faults.items()}

    @property
    def _refuse(self) -> tuple[type[Exception], ...]:
        names = self.postmortem.record["settings"].get("refuse") or ()
        kinds = [getattr(builtins, str(name), None) for name in names]
        return tuple(filter(None, kinds))

    def _guard(self, trace: int) -> Guard:
        settings = self.postmortem.record["settings"]
        names = ("max_grad_norm", "loss", "spike_sigmas")
        chosen = {name: settings[name] for name in names if settings.get(name) is not None}
        if chosen.get("loss") == "share":  # here each is a mean, weighted by its tokens
            chosen["loss"] = "mean"
        with well_formed(self.postmortem.folder / POSTMORTEM):
            return Guard(
                self.model,
                self._optimizer(),
                refuse=self._refuse,
                trace=trace,
                max_refused=math.inf,
                processes=ProcessGroup(),
                **chosen,
            )

    def _optimizer(self) -> torch.optim.Optimizer:
        """Return the run's optimizer, or one that changes nothing if it was not one of torch's."""
        record = self.postmortem.record
        made = getattr(torch.optim, record["optimizer"], None)
        if not (isinstance(made, type) and issubclass(made, torch.optim.Optimizer)):
            return torch.optim.SGD(self.parameters.values(), lr=0.0)
        # an optimizer's state dict numbers the parameters through all groups
        places: dict[str, int] = {}
        groups = []
        parameters = []
        for group in record["groups"]:
            names = group["params"]
            parameters.append({"params": [self.parameters[name] for name in names]})
            places |= {name: place for place, name in enumerate(names, len(places))}
            groups.append({**group, "params": [places[name] for name in names]})
        optimizer: torch.optim.Optimizer = made(parameters)  # type: ignore[call-arg]
        state = self._state(places, any(group.get("fused") for group in groups))
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        return optimizer

    def _state(self, places: Mapping[str, int], fused: bool) -> dict[int, dict[str, Any]]:
        """Return the optimizer's state by the places of the parameters."""
        state: dict[int, dict[str, Any]] = {}
        for name, value in self.postmortem.moments.items():
            key, _, parameter = name.partition(" of ")
            shape = torch.Size([]) if key == "step" else self.weights[parameter].shape
            # a fused kernel reads and writes beyond the end of one that is too small
            if fused and getattr(value, "shape", None) != shape:
                raise ValueError(f"{name} does not have the shape {list(shape)}")
            # a copy: the step changes it, and every attempt starts from the stored one
            if isinstance(value, Tensor):
                value = value.clone()
            state.setdefault(places[parameter], {})[key] = value
        return state
