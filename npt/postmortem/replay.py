"""Replay a post-mortem: does the fault recur, where does it arise, is it the data or the state?

The window's step is made again, with the optimizer, learning rate and limits of the run, so that a
refusal of the whole window recurs too. Refusals that recur are traced. Then other batches are tried
in the same state: those accepted around the window, and fresh ones of random tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from npt.data.batch import IGNORE_INDEX, Batch, find_fault
from npt.errors import ConfigError, printable_lines
from npt.guard.outcome import MicroBatchRecord, Refusal
from npt.postmortem.bundle import Bundle, read_bundle
from npt.postmortem.restore import RestoredState, Tried, restored
from npt.postmortem.write import suspect
from npt.tracer.trace import first_fault
from npt.tracer.verdict import Verdict
from npt.versions import versions

Classification = Literal["data", "state", "transient"]

FRESH = 4
"""Batches, or windows, of random tokens that are tried."""

TRACED = 3
"""Refused micro-batches that are traced; more would say the same."""


@dataclass(frozen=True)
class Trial:
    """Other batches in the bundle's state. fresh: of random tokens, not of the run's."""

    name: str
    fresh: bool
    refusals: tuple[Refusal, ...]

    @property
    def failed(self) -> bool:
        return bool(self.refusals)


@dataclass(frozen=True)
class Replay:
    """The result of a replay.

    device: of the replay. found: refusals of the replayed window. traces: of its micro-batches.
    findings: numbers in adapters, moments and base that are not finite before anything is computed.
    verdicts: (micro-batch, source of its first bad number or None). trials: other batches.
    """

    bundle: Bundle
    device: str
    found: tuple[Refusal, ...]
    traces: tuple[MicroBatchRecord, ...]
    findings: Mapping[str, str | None]
    verdicts: tuple[tuple[int, Verdict | None], ...]
    trials: tuple[Trial, ...]

    @property
    def classification(self) -> Classification:
        return classify(self.found, self.findings, self.trials)

    @property
    def reproduced(self) -> bool:
        """True if exactly the recorded refusals recurred, of the same micro-batches and kinds."""
        return _places(self.found) == _places(self.bundle.refusals)

    @property
    def verdict(self) -> Verdict | None:
        """The first one found."""
        return next((verdict for _, verdict in self.verdicts if verdict is not None), None)

    @property
    def same_fault(self) -> bool | None:
        """True if the first bad number has the recorded tensor and index; None if unknown."""
        recorded = self.bundle.said["verdict"]
        found = dict(self.verdicts).get(self.bundle.said["micro_batch"])
        if recorded is None or found is None:
            return None
        keys = ("phase", "module", "operation", "tensor", "index")
        now = found.as_dict()
        return all(recorded.get(key) == now[key] for key in keys)

    @property
    def base_changed(self) -> bool | None:
        """True if the base in the run's memory had changed when it stopped; None if unknown."""
        now = self.bundle.said["base_hash_at_stop"]
        return None if now is None else now != self.bundle.base.hash

    def count(self, fresh: bool) -> tuple[int, int]:
        """Return how many trials of a kind failed, and how many were made."""
        chosen = [trial.failed for trial in self.trials if trial.fresh == fresh]
        return sum(chosen), len(chosen)

    def as_dict(self) -> dict[str, Any]:
        fresh, accepted = self.count(True), self.count(False)
        traces = [asdict(trace) for trace in self.traces]
        return {
            "bundle": str(self.bundle.folder),
            "step": self.bundle.step,
            "reason": self.bundle.reason,
            "classification": self.classification,
            "reproduced": self.reproduced,
            "recorded": [r.as_dict() for r in self.bundle.refusals],
            "found": [r.as_dict() for r in self.found],
            "verdict": _as_dict(self.verdict),
            "recorded_verdict": self.bundle.said["verdict"],
            "same_fault": self.same_fault,
            "verdicts": [{"micro_batch": i, "verdict": _as_dict(v)} for i, v in self.verdicts],
            "fresh_failed": fresh[0],
            "fresh_total": fresh[1],
            "accepted_failed": accepted[0],
            "accepted_total": accepted[1],
            "findings": dict(self.findings),
            "recorded_findings": self.bundle.said["findings"],
            "base_changed": self.base_changed,
            "micro_batches": [
                {key: value for key, value in trace.items() if key != "window"} for trace in traces
            ],
            "device": self.device,
            "recorded_device": self.bundle.device,
            "versions": _differing(self.bundle),
        }

    def __str__(self) -> str:
        bundle, base, said = self.bundle, self.bundle.base, self.bundle.said
        lines = [
            f"{bundle.folder}: stopped after step {bundle.step}, {bundle.reason}",
            f"base {base.name} ({base.hash[:12]}), recorded on {bundle.device}, replayed on"
            f" {self.device}",
        ]
        for name, (then, now) in _differing(bundle).items():
            lines.append(f"  {name} was {then}, is {now}")
        for title, refusals in (("recorded", bundle.refusals), ("replayed", self.found)):
            lines += [f"{title}: {refusal}" for refusal in refusals or ["no refusal"]]
        lines += [self._compared(), "", f"verdict: {self.classification}. {self._why()}"]
        lines += [f"  {name}: {found}" for name, found in self.findings.items() if found]
        if self.base_changed:
            lines.append(
                f"  when the run stopped its base in memory was {said['base_hash_at_stop'][:12]}:"
                " it had changed there"
            )
        for name, finding in said["findings"].items():
            if finding not in (None, self.findings[name]):
                lines.append(f"  {name}, when the run stopped: {finding}")
        data = {r.micro_batch: r.detail for r in reversed(self.found) if r.kind == "data"}
        for index, verdict in self.verdicts:
            samples = ", ".join(bundle.window[index].sample_ids)
            lines += ["", f"micro-batch {index} (samples {samples}):"]
            told = verdict_lines(verdict)
            if index in data:
                told = [f"{data[index]}; nothing is computed on it"]
            lines += [f"  {line}" for line in told]
        return printable_lines([*lines, "", f"what to do: {self._remedy()}"])

    def _compared(self) -> str:
        if self.reproduced:
            places = {
                True: ", at the same first bad number",
                False: ", at another first bad number",
            }
            same = "" if self.same_fault is None else places[self.same_fault]
            return f"reproduced: every refusal recurs{same}"
        recurred = len(set(_places(self.found)) & set(_places(self.bundle.refusals)))
        return (
            f"not reproduced as recorded: {recurred} of {len(self.bundle.refusals)} refusals recur,"
            f" {len(self.found) - recurred} are new"
        )

    def _why(self) -> str:
        if self.classification == "transient":
            return "Nothing is refused when the same batches are computed in the same state."
        if not self.trials:
            return "The batch itself is unusable; nothing was computed on it."
        (fresh, tried), (failed, accepted) = self.count(True), self.count(False)
        parts = [f"{fresh} of {tried} fresh ones"] if tried else []
        parts += [f"{failed} of {accepted} accepted ones"] if accepted else []
        return f"Of other batches in the same state fail {' and '.join(parts)}."

    def _remedy(self) -> str:
        if self.classification == "data":
            names = dict.fromkeys(name for refusal in self.found for name in refusal.sample_ids)
            named = f"sample {', '.join(names)}" if names else "the samples of this window"
            deed = f"leave out or repair {named}"
            if self.verdict is not None:
                deed = f"leave out {named}, or mend what the trace names, which no other batch met"
            return f"{deed}; the last checkpoint can be used"
        if self.classification == "state":
            if any(self.findings.values()):
                return "what is not finite is named above; no batch will help before it is replaced"
            return (
                "go back to an earlier checkpoint and lower --learning_rate; leaving out samples"
                " will not help"
            )
        return (
            "start the run again; if this recurs there and never here, suspect the machine (memory,"
            " an unstable GPU) or what else ran in the process"
        )


def replay(
    folder: str | Path,
    *,
    model_name: str | None = None,
    device: str | torch.device | None = None,
    micro_batch: int | None = None,
) -> Replay:
    """Restore a bundle's state, make its step again, trace the refusals that recur and classify
    them. The process's random state stays.

    *transient*: no refusal recurs. *data*: the batch was refused before any computation, or other
    batches are clean in this state. *state*: adapters, moments or base hold a number that is not
    finite, or another batch fails too.

    Args:
        folder: of the bundle.
        model_name: of the base; default the recorded name.
        device: default the recorded kind.
        micro_batch: trace this one, refused or not, instead of the refused ones.

    Raises:
        BundleError: the bundle or its base cannot be used.
        ConfigError: there is no such micro-batch.
    """
    bundle = read_bundle(folder)
    if micro_batch is not None:
        check_index(bundle, micro_batch)
    with restored(bundle, model_name=model_name, device=device) as state:
        findings = state.findings()
        tried = state.window(bundle.window, bundle.limits)
        refused = {r.micro_batch for r in tried.refusals}
        indices = _refused(tried) if micro_batch is None else [micro_batch]
        verdicts = [
            (index, trace_again(state, index, index in refused or None in refused))
            for index in indices
        ]
        trials = tuple(_trials(state, tried.refusals))
        found, traces = tried.refusals, tried.traces
        return Replay(bundle, str(state.device), found, traces, findings, tuple(verdicts), trials)


def classify(
    found: Sequence[Refusal], findings: Mapping[str, str | None], trials: Iterable[Trial]
) -> Classification:
    """Return the class that `replay` describes."""
    if not found:
        return "transient"
    if all(refusal.kind == "data" for refusal in found):
        return "data"
    return "state" if any(findings.values()) or any(trial.failed for trial in trials) else "data"


def fresh_batch(like: Batch, avoid: torch.Tensor, vocab_size: int, seed: int) -> Batch:
    """Return a batch of random tokens in the shape and with the padding of another.

    Ids to `avoid` are not drawn, unless they are the whole vocabulary: a broken token is the data's
    fault, not the state's.
    """
    ids = torch.arange(vocab_size)
    choice = ids[~torch.isin(ids, avoid)]
    choice = choice if len(choice) else ids
    generator = torch.Generator().manual_seed(seed)
    drawn = choice[torch.randint(len(choice), like.input_ids.shape, generator=generator)]
    return replace(
        like,
        input_ids=drawn,
        labels=torch.where(like.attention_mask.bool(), drawn, IGNORE_INDEX),
        sample_ids=tuple(f"fresh-{seed}-{row}" for row in range(len(drawn))),
    )


def _trials(state: RestoredState, found: Sequence[Refusal]) -> list[Trial]:
    """Try other batches in the same state, each as a window of its own, if a computed one was
    refused.
    """
    computed = [refusal for refusal in found if refusal.kind != "data"]
    if not computed:
        return []
    bundle, vocab_size = state.bundle, state.model.config.vocab_size
    refused = [refusal.micro_batch for refusal in computed if refusal.micro_batch is not None]
    if not refused:
        return _window_trials(state, spike=computed[0].kind == "spike")
    bad = {refusal.micro_batch for refusal in found}
    # as the replayed window has shown
    clean = [index for index in range(len(bundle.window)) if index not in bad]
    trials = [Trial(f"micro-batch {index}", False, ()) for index in clean]
    for index, batch in enumerate(bundle.accepted):
        refusals = state.window([batch]).refusals
        trials.append(Trial(f"accepted micro-batch {index}", False, refusals))
    like, avoid = bundle.window[refused[0]], _ids(bundle.window[index] for index in refused)
    for seed in range(FRESH):
        refusals = state.window([fresh_batch(like, avoid, vocab_size, seed)]).refusals
        trials.append(Trial(f"fresh batch {seed}", True, refusals))
    return trials


def _window_trials(state: RestoredState, spike: bool) -> list[Trial]:
    """Try other windows, if this one was refused as a whole. Random tokens are no text: whether
    they spike says nothing.
    """
    bundle, vocab_size = state.bundle, state.model.config.vocab_size
    trials = []
    if bundle.accepted:
        refusals = state.window(bundle.accepted, bundle.limits if spike else None).refusals
        trials.append(Trial("accepted window", False, refusals))
    if spike:
        return trials
    avoid, size = _ids(bundle.window), len(bundle.window)
    for number in range(FRESH):
        fresh = [
            fresh_batch(like, avoid, vocab_size, number * size + index)
            for index, like in enumerate(bundle.window)
        ]
        trials.append(Trial(f"fresh window {number}", True, state.window(fresh).refusals))
    return trials


def _ids(batches: Iterable[Batch]) -> torch.Tensor:
    return torch.cat([batch.input_ids.flatten()[batch.valid_index] for batch in batches]).unique()


def _refused(tried: Tried) -> list[int]:
    """Return the micro-batches to trace."""
    refusals = tried.refusals
    refused = [r.micro_batch for r in refusals if r.micro_batch is not None and r.kind != "data"]
    if not refused and refusals:
        loudest = suspect(refusals, tried.traces)
        refused = [] if loudest is None else [loudest]
    return refused[:TRACED]


def trace_again(state: RestoredState, index: int, exploded: bool) -> Verdict | None:
    batch = state.bundle.window[index]
    if find_fault(batch, state.model.config.vocab_size) is not None:
        return None
    state.restore()
    return first_fault(state.model, batch, lambda: state.fill(batch), exploded=exploded)


def check_index(bundle: Bundle, micro_batch: int) -> None:
    last = len(bundle.window) - 1
    if not 0 <= micro_batch <= last:
        raise ConfigError(
            f"--micro_batch is {micro_batch}, the bundle has micro-batches 0 to {last}"
        )


def _places(refusals: Iterable[Refusal]) -> list[tuple[str, int | None]]:
    return [(refusal.kind, refusal.micro_batch) for refusal in refusals]


def _differing(bundle: Bundle) -> dict[str, tuple[str, str]]:
    """Return versions of packages that differ, then and now."""
    recorded = bundle.checkpoint.record.get("versions", {})
    now = {name: (str(recorded.get(name)), version) for name, version in versions().items()}
    return {name: pair for name, pair in now.items() if recorded.get(name) != pair[1]}


def _as_dict(verdict: Verdict | None) -> dict[str, Any] | None:
    return None if verdict is None else verdict.as_dict()


def verdict_lines(verdict: Verdict | None) -> list[str]:
    if verdict is None:
        return ["no operation made a number that is not finite"]
    return str(verdict).splitlines()
