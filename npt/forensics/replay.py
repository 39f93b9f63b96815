"""Replay a post-mortem: does the fault recur, where does it arise, is it the data or the state?

The last window's step is made again from the state of then, with the optimizer and limits of the
run, so that a refusal of the whole window recurs too. Refusals that recur are traced. Then other
micro-batches are tried in the same state: accepted ones, and fresh ones of random tokens.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from npt.distributed.processes import ProcessGroup
from npt.errors import BundleError, ConfigError, NPTError, printable_lines
from npt.forensics.bundle import Postmortem, StoredMicroBatch, leaves, read_postmortem
from npt.guard.finding import Finding, traced
from npt.guard.forensics import Kept
from npt.guard.guard import Guard
from npt.guard.ids import IGNORED
from npt.guard.outcome import MicroBatchRecord, Outcome, Refusal
from npt.guard.parameters import plain_name
from npt.guard.traces import Buffers
from npt.random_state import kept_random_state, set_random_state
from npt.versions import versions

if TYPE_CHECKING:
    from npt.tracer.watchdogs import BadNumber

Classification = Literal["data", "state", "transient", "undecided"]

FRESH = 4
"""Micro-batches, or windows, of random tokens that are tried."""

TRACED = 3
"""Refused micro-batches that are traced; more would say the same."""


class LossMissing(NPTError):
    """The model returns no loss, and the caller gives none."""


@dataclass(frozen=True)
class Tried:
    """The result of a window.

    Attributes:
        refusals: of micro-batches by their index in the window, or of the whole window.
        records: loss and gradient norm of the micro-batches that were computed.
    """

    refusals: tuple[Refusal, ...]
    records: tuple[MicroBatchRecord, ...]


class ModelState:
    """A model in the state that a post-mortem's window found; every attempt starts from it.

    Args:
        postmortem: of the run.
        model: the one that was trained.
        loss: makes the loss from the model and a micro-batch's inputs.

    Raises:
        BundleError: weights, moments or optimizer do not fit the model.
    """

    weights_name = "weights"

    def __init__(
        self,
        postmortem: Postmortem,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Any] | None = None,
    ):
        self.postmortem, self.model, self.loss = postmortem, model, loss
        own = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        self.weights = {plain_name(n): w for n, w in postmortem.weights.items()}
        for name, weight in self.weights.items():
            if name not in own or own[name].shape != weight.shape:
                there = f"of shape {tuple(own[name].shape)}" if name in own else "none"
                raise BundleError(
                    f"{postmortem.folder} has {name} of shape {tuple(weight.shape)}, the model has"
                    f" {there}; give the model that was trained"
                )
        self.parameters = {name: own[name] for name in self.weights}
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))

    @torch.no_grad()
    def restore(self) -> None:
        """Give the parameters the stored weights, and remove gradients."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.weights[name])
            parameter.grad = None

    def window(
        self, micro_batches: Sequence[StoredMicroBatch], limits: tuple[float, float] | None = None
    ) -> Tried:
        """Make one step, as the run would have, with limits of the spike guard, if any; the state
        is the post-mortem's before and after.
        """
        self.restore()
        buffers = Buffers(self.model)
        copies = buffers.copy()
        with self.guard() as guard:
            if limits is None:
                guard.window.spikes = None
            elif guard.window.spikes is not None:
                guard.window.spikes.limits = limits
            for micro_batch in micro_batches:
                self.add(guard, micro_batch)
            made = guard.step()
            outcomes: list[Outcome] = (made if guard.lists else [made]) + guard.flush()
            tried = Tried(outcomes[0].refused, tuple(guard.window.history))
        buffers.restore(copies)
        self.restore()
        return tried

    def guard(self) -> Guard:
        """Return a guard over the run's optimizer, its moments as stored."""
        settings = self.postmortem.record["settings"]
        known = ("max_grad_norm", "loss", "undo", "spike_sigmas")
        chosen = {name: settings[name] for name in known if settings.get(name) is not None}
        if chosen.get("loss") == "share":  # each is a mean here, weighted by its tokens
            chosen["loss"] = "mean"
        refuse = [getattr(builtins, str(name), None) for name in settings.get("refuse") or ()]
        errors = [e for e in refuse if isinstance(e, type) and issubclass(e, Exception)]
        try:
            return Guard(
                self.model,
                self._optimizer(),
                max_refused=float("inf"),
                processes=ProcessGroup(),
                refuse=tuple(errors) or (FloatingPointError,),
                **chosen,
            )
        except (ConfigError, TypeError, ValueError) as error:
            raise BundleError(
                f"{self.postmortem.folder} has settings that cannot work: {error}"
            ) from error

    def _optimizer(self) -> torch.optim.Optimizer:
        """Return the run's optimizer; of one that is not torch's, whose step cannot be made again,
        one that changes nothing.
        """
        record = self.postmortem.record
        made = getattr(torch.optim, record["optimizer"], None)
        if not (isinstance(made, type) and issubclass(made, torch.optim.Optimizer)):
            return torch.optim.SGD(self.parameters.values(), lr=0.0)
        names, options = set(self.parameters), inspect.signature(made).parameters
        groups = []
        for group in record["groups"]:
            params = group["params"] if isinstance(group, dict) else None
            if not isinstance(params, list) or not names.issuperset(map(str, params)):
                raise BundleError(
                    f"{self.postmortem.folder} has groups of parameters that it does not hold; copy"
                    " it again"
                )
            known = {key: group[key] for key in options if group.get(key) is not None}
            groups.append({**known, "params": [self.parameters[name] for name in params]})
        optimizer: torch.optim.Optimizer = made(groups)  # type: ignore[call-arg]
        for name, value in self.postmortem.moments.items():
            key, _, parameter = name.partition(" of ")
            owner = self.parameters.get(plain_name(parameter))
            if owner is not None:
                moment = value.clone() if isinstance(value, Tensor) else value
                if isinstance(moment, Tensor) and moment.shape == owner.shape:
                    moment = moment.to(owner.device)
                optimizer.state[owner][key] = moment
        return optimizer

    def add(self, guard: Guard, micro_batch: StoredMicroBatch) -> None:
        """Compute a micro-batch in the guard's window."""
        with guard.micro_batch(int(micro_batch.tokens), micro_batch.sample_ids) as micro:
            outcome = self.compute(micro_batch)
            loss = _loss_of(outcome)
            if loss is None:
                raise LossMissing("the model returns no loss")
            micro.loss = loss
            loss.backward()

    def compute(self, micro_batch: StoredMicroBatch) -> Any:
        """Return the loss, or the model's outputs, from the random state of then."""
        with ExitStack() as stack:
            for kind, dtype in micro_batch.autocast.items():
                stack.enter_context(torch.autocast(kind, getattr(torch, dtype)))
            try:
                set_random_state(micro_batch.random)
            except (RuntimeError, TypeError, ValueError) as error:
                raise BundleError(
                    f"{self.postmortem.folder} holds no random state that torch knows: {error};"
                    " copy it again"
                ) from error
            inputs = tree_map_only(Tensor, lambda t: t.to(self.device), micro_batch.inputs)
            if self.loss is not None:
                return self.loss(self.model, inputs)
            return self.model(**inputs) if isinstance(inputs, Mapping) else self.model(*inputs)

    def trace(self, micro_batch: StoredMicroBatch, refusal: Refusal | None) -> Finding:
        """Look for the operation that made the first bad number; `refusal` is why it was refused,
        None if it was not.
        """
        self.restore()
        plain = Refusal("none", "", sample_ids=micro_batch.sample_ids)
        kept = Kept(micro_batch.random, micro_batch.inputs, partial(self.compute, micro_batch))
        found = traced(self.model, refusal or plain, kept, exploded=refusal is not None)
        self.restore()
        if refusal is None and found.verdict is None:
            return replace(found, why="no operation made a number that is not finite")
        return found

    def fault(self, micro_batch: StoredMicroBatch) -> str | None:
        """Return what is wrong with the inputs themselves, or None."""
        for name, leaf in leaves(micro_batch.inputs):
            held = isinstance(leaf, Tensor) and leaf.is_floating_point()
            if held and not bool(torch.isfinite(leaf).all()):
                return f"the input {name} holds a number that is not finite"
        return None

    def fresh(
        self, like: StoredMicroBatch, avoid: Sequence[StoredMicroBatch], seed: int
    ) -> StoredMicroBatch | None:
        """Return a micro-batch of random tokens in the shape of another; None if it has no tokens.

        Ids of the micro-batches to `avoid` are not drawn, unless they are the whole vocabulary: a
        broken token is the data's fault, not the state's.
        """
        ids = like.inputs.get("input_ids") if isinstance(like.inputs, Mapping) else None
        embedding = getattr(self.model, "get_input_embeddings", lambda: None)()
        if not isinstance(ids, Tensor) or ids.is_floating_point() or embedding is None:
            return None
        used = torch.cat([_tokens(each.inputs) for each in avoid]).unique()
        drawn = fresh_ids(ids, used, int(embedding.num_embeddings), seed)
        inputs = {**like.inputs, "input_ids": drawn}
        labels = inputs.get("labels")
        if isinstance(labels, Tensor) and labels.shape == ids.shape:
            inputs["labels"] = torch.where(labels == IGNORED, IGNORED, drawn)
        names = tuple(f"fresh-{seed}-{row}" for row in range(len(like.sample_ids)))
        return replace(like, inputs=inputs, sample_ids=names, refusal=None)

    def findings(self) -> dict[str, str | None]:
        """Return what is not finite in weights, moments and the rest of the model."""
        from npt.tracer.watchdogs import moments_fault, tensor_fault

        moments = {n: v for n, v in self.postmortem.moments.items() if isinstance(v, Tensor)}
        faults = {
            self.weights_name: tensor_fault(self.weights),
            "moments": moments_fault(moments),
            "base": self.base_fault(),
        }
        return {name: None if fault is None else str(fault) for name, fault in faults.items()}

    def base_fault(self) -> BadNumber | None:
        """Return what is not finite in the rest of the model, which is not trained."""
        from npt.tracer.watchdogs import tensor_fault

        trained = {id(parameter) for parameter in self.parameters.values()}
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        return tensor_fault(
            {n: t for n, t in tensors if id(t) not in trained and t.is_floating_point()}
        )

    def heading(self) -> str:
        """Return a line about what is replayed."""
        return f"recorded on {self.postmortem.record['device']}, replayed on {self.device}"

    def base_changed(self) -> bool | None:
        """Return whether the frozen base had changed when the run stopped; None if unknown."""
        return None


@dataclass(frozen=True)
class Attempt:
    """Another micro-batch, or window, in the post-mortem's state.

    Attributes:
        fresh: of random tokens, not of the run's.
        refusals: of it.
    """

    fresh: bool
    refusals: tuple[Refusal, ...]

    @property
    def failed(self) -> bool:
        return bool(self.refusals)


@dataclass(frozen=True)
class Replay:
    """The result of a replay.

    Attributes:
        postmortem: that was replayed.
        heading: a line about it.
        device: of the replay.
        refusals: of the replayed window.
        records: of its micro-batches.
        findings: numbers in weights, moments and base that are not finite before anything is
            computed.
        traces: by index of a micro-batch, what the tracer found.
        trials: other micro-batches.
        classification: whose fault it is.
        base_changed: whether the frozen base had changed when the run stopped; None if unknown.
    """

    postmortem: Postmortem
    heading: str
    device: str
    refusals: tuple[Refusal, ...]
    records: tuple[MicroBatchRecord, ...]
    findings: Mapping[str, str | None]
    traces: Mapping[int, Finding]
    trials: tuple[Attempt, ...]
    classification: Classification
    base_changed: bool | None

    @property
    def reproduced(self) -> bool:
        """True if exactly the recorded refusals recurred, of the same micro-batches and kinds."""
        return self._places() == self._recorded()

    @property
    def verdict(self) -> Any:
        """The first one found."""
        verdicts = (finding.verdict for finding in self.traces.values())
        return next((verdict for verdict in verdicts if verdict is not None), None)

    @property
    def recorded_verdict(self) -> Mapping[str, Any] | None:
        """The verdict of when the run went on, if one of these micro-batches was traced there."""
        return next(iter(self._recorded_verdicts().values()), None)

    @property
    def same_fault(self) -> bool | None:
        """True if a first bad number has the recorded tensor and index; None if unknown."""
        keys = ("phase", "module", "operation", "tensor", "index")
        for index, recorded in self._recorded_verdicts().items():
            finding = self.traces.get(index)
            if finding is not None and finding.verdict is not None:
                now = finding.verdict.as_dict()
                return all(recorded.get(key) == now[key] for key in keys)
        return None

    def count(self, fresh: bool) -> tuple[int, int]:
        """Return how many trials of a kind failed, and how many were made."""
        chosen = [trial.failed for trial in self.trials if trial.fresh == fresh]
        return sum(chosen), len(chosen)

    def as_dict(self) -> dict[str, Any]:
        fresh, accepted = self.count(True), self.count(False)
        records = [asdict(record) for record in self.records]
        verdicts = {i: f.verdict and f.verdict.as_dict() for i, f in self.traces.items()}
        return {
            "bundle": str(self.postmortem.folder),
            "step": self.postmortem.step,
            "reason": self.postmortem.record["reason"],
            "classification": self.classification,
            "reproduced": self.reproduced,
            "recorded": [refusal.as_dict() for refusal, _ in self.postmortem.recorded],
            "found": [refusal.as_dict() for refusal in self.refusals],
            "verdict": self.verdict and self.verdict.as_dict(),
            "recorded_verdict": self.recorded_verdict,
            "same_fault": self.same_fault,
            "verdicts": [{"micro_batch": i, "verdict": v} for i, v in verdicts.items()],
            "fresh_failed": fresh[0],
            "fresh_total": fresh[1],
            "accepted_failed": accepted[0],
            "accepted_total": accepted[1],
            "findings": dict(self.findings),
            "base_changed": self.base_changed,
            "micro_batches": [
                {key: value for key, value in record.items() if key != "window"}
                for record in records
            ],
            "device": self.device,
            "recorded_device": self.postmortem.record["device"],
            "versions": self._differing(),
        }

    def __str__(self) -> str:
        postmortem = self.postmortem
        reason = postmortem.record["reason"]
        lines = [f"{postmortem.folder}: stopped after step {postmortem.step}, {reason}"]
        lines.append(self.heading)
        for name, (then, now) in self._differing().items():
            lines.append(f"  {name} was {then}, is {now}")
        recorded = [refusal for refusal, _ in postmortem.recorded]
        for title, refusals in (("recorded", recorded), ("replayed", self.refusals)):
            lines += [f"{title}: {refusal}" for refusal in map(str, refusals)]
            lines += [] if refusals else [f"{title}: no refusal"]
        lines += [self._compared(), "", f"verdict: {self.classification}. {self._why()}"]
        lines += [f"  {name}: {message}" for name, message in self.findings.items() if message]
        if self.base_changed:
            lines.append("  the base in the run's memory had changed when it stopped")
        for index, finding in self.traces.items():
            samples = ", ".join(postmortem.micro_batches[index].sample_ids)
            named = f" (samples {samples})" if samples else ""
            lines += ["", f"micro-batch {index}{named}:"]
            lines += [f"  {line}" for line in finding.told.splitlines()]
        return printable_lines([*lines, "", f"what to do: {self._remedy()}"])

    def _places(self) -> set[tuple[str, int | None]]:
        return {(refusal.kind, refusal.micro_batch) for refusal in self.refusals}

    def _recorded(self) -> set[tuple[str, int | None]]:
        return {(refusal.kind, place) for refusal, place in self.postmortem.recorded}

    def _recorded_verdicts(self) -> dict[int, Mapping[str, Any]]:
        """Return the verdicts of the run by the index of their micro-batch."""
        found = {}
        for entry in self.postmortem.record["findings"]:
            for index, micro_batch in enumerate(self.postmortem.micro_batches):
                refusal = micro_batch.refusal
                if entry["verdict"] and refusal == Refusal.from_dict(entry["refusal"]):
                    found[index] = entry["verdict"]
        return found

    def _differing(self) -> dict[str, tuple[str, str]]:
        """Return versions of packages that differ, then and now."""
        recorded = self.postmortem.record["versions"]
        now = {name: (str(recorded.get(name)), version) for name, version in versions().items()}
        return {name: pair for name, pair in now.items() if recorded.get(name) != pair[1]}

    def _compared(self) -> str:
        if self.reproduced:
            places = {
                True: ", at the same first bad number",
                False: ", at another first bad number",
            }
            same = "" if self.same_fault is None else places[self.same_fault]
            return f"reproduced: every refusal recurs{same}"
        recorded, now = self._recorded(), self._places()
        return (
            f"not reproduced as recorded: {len(now & recorded)} of {len(recorded)} refusals recur,"
            f" {len(now - recorded)} are new"
        )

    def _why(self) -> str:
        if self.classification == "transient":
            return "Nothing is refused when the same batches are computed in the same state."
        if self.classification == "undecided":
            return "There is no other micro-batch to compare with."
        if not self.trials:
            return "The batch itself is unusable."
        (fresh, tried), (failed, accepted) = self.count(True), self.count(False)
        parts = [f"{fresh} of {tried} fresh ones"] if tried else []
        parts += [f"{failed} of {accepted} accepted ones"] if accepted else []
        return f"Of other batches in the same state, {' and '.join(parts)} fail."

    def _remedy(self) -> str:
        names = dict.fromkeys(name for refusal in self.refusals for name in refusal.sample_ids)
        samples = f"sample {', '.join(names)}" if names else "the samples of this window"
        if self.classification == "data":
            deed = f"leave out or repair {samples}"
            if self.verdict is not None:
                deed = f"leave out {samples}, or mend what the trace names: no other batch met it"
            return f"{deed}; the last checkpoint can be used"
        if self.classification == "state":
            if any(self.findings.values()):
                return "what is not finite is named above; no batch will help before it is replaced"
            return (
                "go back to an earlier checkpoint and lower the learning rate; leaving out samples"
                " will not help"
            )
        if self.classification == "undecided":
            return (
                f"look at {samples}; if the loss is made outside of the model, give"
                " replay(..., loss=...), which computes more"
            )
        return (
            "start the run again; if this recurs there and never here, suspect the machine (memory,"
            " an unstable GPU) or what else ran in the process"
        )


def replay(
    folder: str | Path, model: nn.Module, loss: Callable[[nn.Module, Any], Any] | None = None
) -> Replay:
    """Make the last window of a run that gave up again, trace the refusals that recur, and say
    whether data or state is to blame.

    *transient*: no refusal recurs. *data*: the inputs themselves are unusable, or other
    micro-batches are clean in this state. *state*: weights, moments or the rest of the model hold a
    number that is not finite, or another micro-batch fails too. *undecided*: there is no other
    micro-batch, or no loss.

    Args:
        folder: of the post-mortem.
        model: the one that was trained, in the same mode (`train` or `eval`). Its weights, buffers
            and gradients are put back afterwards, and the random state.
        loss: makes the loss from the model and a micro-batch's inputs; default `model(**inputs)`,
            which is enough if the model returns its loss.

    Raises:
        BundleError: it is no post-mortem, or of another model.
        CheckpointError: a file is not the one that was written.
    """
    postmortem = read_postmortem(folder)
    if postmortem.record["student"] is not None:
        raise BundleError(
            f"{postmortem.folder} is of an NPT run, which knows its model; replay it with: npt"
            f" replay {postmortem.folder}"
        )
    state = ModelState(postmortem, model, loss)
    with kept_random_state(), _unchanged(state):
        return replayed(state)


@contextmanager
def _unchanged(state: ModelState) -> Iterator[None]:
    """Give the parameters back what they had after the context."""
    before = [(p, p.detach().clone(), p.grad) for p in state.parameters.values()]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value, gradient in before:
                parameter.copy_(value)
                parameter.grad = gradient


def replayed(state: ModelState, micro_batch: int | None = None) -> Replay:
    """Replay a post-mortem in its state.

    Args:
        state: of the model.
        micro_batch: trace this one, refused or not, instead of the refused ones.
    """
    postmortem = state.postmortem
    stored, findings = postmortem.micro_batches, state.findings()
    trials: list[Attempt] = []
    try:
        tried = state.window(stored, postmortem.limits)
        chosen = suspects(tried.refusals, tried.records)
        trials = _trials(state, tried.refusals)
    except LossMissing:  # what was recorded can still be traced
        tried = Tried(tuple(replace(r, micro_batch=i) for r, i in postmortem.recorded), ())
        chosen = [i for i, micro in enumerate(stored) if micro.refusal is not None]
    refused = {refusal.micro_batch: refusal for refusal in tried.refusals}
    unusable = all(i is not None and state.fault(stored[i]) is not None for i in refused)
    traces = {}
    for index in chosen[:TRACED] if micro_batch is None else [micro_batch]:
        refusal = refused.get(index, refused.get(None))
        if refusal is not None and refusal.kind == "data":
            message = f"{state.fault(stored[index])}; nothing is computed on it"
            traces[index] = Finding(refusal, None, message)
        else:
            traces[index] = state.trace(stored[index], refusal)
    return Replay(
        postmortem,
        state.heading(),
        str(state.device),
        tried.refusals,
        tried.records,
        findings,
        traces,
        tuple(trials),
        classify(tried.refusals, findings, trials, unusable),
        state.base_changed(),
    )


def classify(
    refusals: Sequence[Refusal],
    findings: Mapping[str, str | None],
    trials: Sequence[Attempt],
    unusable: bool = False,
) -> Classification:
    """Return the class that `replay` describes; unusable: every refused input is."""
    if not refusals:
        return "transient"
    if all(refusal.kind == "data" for refusal in refusals):
        return "data"
    if any(findings.values()) or any(trial.failed for trial in trials):
        return "state"
    return "data" if trials or unusable else "undecided"


def suspects(refusals: Sequence[Refusal], records: Sequence[MicroBatchRecord]) -> list[int]:
    """Return the micro-batches of a window to trace: those refused for their numbers, else, if the
    whole window was refused, the computed one with the largest gradient; else those refused for
    their inputs.
    """
    own = [(r.micro_batch, r.kind) for r in refusals if r.micro_batch is not None]
    computed = [index for index, kind in own if kind != "data"]
    if not computed and len(own) < len(refusals) and records:
        return [max(records, key=lambda record: record.grad_norm).micro_batch]
    return computed or [index for index, _ in own]


def fresh_ids(like: Tensor, avoid: Tensor, vocab_size: int, seed: int) -> Tensor:
    """Return random token ids in the shape of others, none to `avoid` unless they are all."""
    ids = torch.arange(vocab_size)
    choice = ids[~torch.isin(ids, avoid)]
    choice = choice if len(choice) else ids
    generator = torch.Generator().manual_seed(seed)
    return choice[torch.randint(len(choice), like.shape, generator=generator)]


def _tokens(inputs: Mapping[str, Any]) -> Tensor:
    """Return the ids that are no padding, as far as a mask says so."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        ids = ids[mask.bool()]
    return ids.flatten()


def _trials(state: ModelState, refusals: Sequence[Refusal]) -> list[Attempt]:
    """Try other micro-batches in the same state, each as a window of its own, if a computed one
    was refused; other windows, if the window was refused as a whole.
    """
    postmortem = state.postmortem
    stored, accepted = postmortem.micro_batches, postmortem.accepted
    computed = [refusal for refusal in refusals if refusal.kind != "data"]
    if not computed:
        return []
    refused = [refusal.micro_batch for refusal in computed if refusal.micro_batch is not None]
    trials = []
    if refused:
        bad = {refusal.micro_batch for refusal in refusals} - {None}
        # the others were clean, as the replayed window has shown
        trials += [Attempt(False, ()) for _ in range(len(stored) - len(bad))]
        trials += [Attempt(False, state.window([each]).refusals) for each in accepted]
        like, avoid = [stored[refused[0]]], [stored[index] for index in refused]
    else:
        spike = computed[0].kind == "spike"
        if accepted:
            limits = postmortem.limits if spike else None
            trials.append(Attempt(False, state.window(accepted, limits).refusals))
        if spike:  # random tokens are no text: whether they spike says nothing
            return trials
        like, avoid = list(stored), list(stored)
    for number in range(FRESH):
        seeds = range(number * len(like), (number + 1) * len(like))
        fresh = [state.fresh(one, avoid, seed) for one, seed in zip(like, seeds, strict=True)]
        window = [each for each in fresh if each is not None]
        if len(window) == len(like):
            trials.append(Attempt(True, state.window(window).refusals))
    return trials


def _loss_of(outcome: Any) -> Tensor | None:
    """Return the scalar loss among a model's outputs, or None."""
    loss = outcome.get("loss") if isinstance(outcome, Mapping) else getattr(outcome, "loss", None)
    if loss is None and isinstance(outcome, Tensor) and outcome.dim() == 0:
        loss = outcome
    return loss if isinstance(loss, Tensor) and loss.requires_grad else None
