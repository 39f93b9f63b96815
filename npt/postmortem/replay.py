"""Replaying a post-mortem bundle: does what stopped the run recur, where does it arise, and is it
the data or the state?

The window is taken through a transaction again, with the optimizer, the learning rate and the
limits of the time, so that what it refused as a whole recurs as well. What recurs is traced. Then
other batches are taken in the same state: those that were accepted around the window, and fresh
ones of random tokens that the refused ones do not have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from npt.adapters.attach import npt_layers
from npt.data.batch import IGNORE_INDEX, Batch, find_fault
from npt.diagnostics.tracer.verdict import Verdict
from npt.errors import ConfigError
from npt.postmortem.bundle import Bundle, read_bundle
from npt.postmortem.restore import RestoredState, Tried, restored
from npt.postmortem.write import first_fault, suspect
from npt.runs.run_folder import versions
from npt.step.window_result import MicroBatchRecord, Refusal

Classification = Literal["data", "state", "transient"]

FRESH = 4
"""Batches, or windows, of random tokens that are tried."""

TRACED = 3
"""Refused micro-batches that are traced; more of them say the same."""


@dataclass(frozen=True)
class Trial:
    """Other batches in the bundle's state. name: which. fresh: of random tokens, not of the run's."""

    name: str
    fresh: bool
    refusals: tuple[Refusal, ...]

    @property
    def failed(self) -> bool:
        return bool(self.refusals)


@dataclass(frozen=True)
class Replay:
    """What a replay came to.

    device: it was replayed on. found: refusals of the replayed window. traces: of its
    micro-batches. findings: what is not finite in adapters, moments and base before anything is
    computed. verdicts: (micro-batch, where its first bad number arose, None where it has none).
    trials: other batches.
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
        """Whether exactly the recorded refusals recurred: the same micro-batches, for the same
        reason.
        """
        return _places(self.found) == _places(self.bundle.refusals)

    @property
    def verdict(self) -> Verdict | None:
        """Of the first traced micro-batch that has one."""
        return next((verdict for _, verdict in self.verdicts if verdict is not None), None)

    @property
    def same_fault(self) -> bool | None:
        """Whether the first bad number is the recorded one: the same tensor, the same index; None
        where one of them is unknown.
        """
        recorded = self.bundle.said["verdict"]
        found = dict(self.verdicts).get(self.bundle.said["micro_batch"])
        if recorded is None or found is None:
            return None
        now = found.as_dict()
        return all(
            recorded.get(key) == now[key]
            for key in ("phase", "module", "operation", "tensor", "index")
        )

    @property
    def base_changed(self) -> bool | None:
        """Whether the base in the run's memory was another one when it stopped than when it
        started; None where unknown.
        """
        now = self.bundle.said["base_hash_at_stop"]
        return None if now is None else now != self.bundle.base.hash

    def count(self, fresh: bool) -> tuple[int, int]:
        """How many trials of a kind failed, and how many there were."""
        chosen = [trial.failed for trial in self.trials if trial.fresh == fresh]
        return sum(chosen), len(chosen)

    def as_dict(self) -> dict[str, Any]:
        fresh, accepted = self.count(True), self.count(False)
        verdicts = [
            {"micro_batch": index, "verdict": None if v is None else v.as_dict()}
            for index, v in self.verdicts
        ]
        return {
            "bundle": str(self.bundle.folder),
            "step": self.bundle.step,
            "reason": self.bundle.reason,
            "classification": self.classification,
            "reproduced": self.reproduced,
            "recorded": [asdict(r) for r in self.bundle.refusals],
            "found": [asdict(r) for r in self.found],
            "verdict": None if self.verdict is None else self.verdict.as_dict(),
            "recorded_verdict": self.bundle.said["verdict"],
            "same_fault": self.same_fault,
            "verdicts": verdicts,
            "fresh_failed": fresh[0],
            "fresh_total": fresh[1],
            "accepted_failed": accepted[0],
            "accepted_total": accepted[1],
            "findings": dict(self.findings),
            "recorded_findings": self.bundle.said["findings"],
            "base_changed": self.base_changed,
            "micro_batches": [
                {key: value for key, value in asdict(t).items() if key != "window"}
                for t in self.traces
            ],
            "device": self.device,
            "recorded_device": self.bundle.device,
            "versions": _differing(self.bundle.versions),
        }

    def __str__(self) -> str:
        base = self.bundle.base
        lines = [
            f"{self.bundle.folder}: stopped after step {self.bundle.step}, {self.bundle.reason}",
            (
                f"base {base.name} ({base.hash[:12]}), recorded on {self.bundle.device}, replayed"
                f" on {self.device}"
            ),
            *(
                f"  {name} was {then}, is {now}"
                for name, (then, now) in _differing(self.bundle.versions).items()
            ),
            *_listed("recorded", self.bundle.refusals),
            *_listed("replayed", self.found),
            self._compared(),
            "",
            f"verdict: {self.classification}. {self._why()}",
            *(
                f"  {name}: {finding}"
                for name, finding in self.findings.items()
                if finding is not None
            ),
        ]
        record = self.bundle.said
        if self.base_changed:
            lines.append(
                f"  when the run stopped its base in memory was {record['base_hash_at_stop'][:12]}:"
                " it had changed there"
            )
        there = {
            name: finding
            for name, finding in record["findings"].items()
            if finding not in (None, self.findings[name])
        }
        lines += [f"  {name}, when the run stopped: {finding}" for name, finding in there.items()]
        for index, verdict in self.verdicts:
            samples = ", ".join(self.bundle.window[index].sample_ids)
            fault = next(
                (r.detail for r in self.found if r.micro_batch == index and r.kind == "data"), None
            )
            said = (
                _verdict_lines(verdict)
                if fault is None
                else [f"{fault}; nothing is computed on it"]
            )
            lines += [
                "",
                f"micro-batch {index} (samples {samples}):",
                *(f"  {line}" for line in said),
            ]
        return "\n".join([*lines, "", f"what to do: {self._remedy()}"])

    def _compared(self) -> str:
        if self.reproduced:
            same = {
                True: ", at the same first bad number",
                False: ", at another first bad number",
                None: "",
            }[self.same_fault]
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
        samples = ", ".join(
            dict.fromkeys(name for refusal in self.found for name in refusal.sample_ids)
        )
        if self.classification == "data":
            named = f"sample {samples}" if samples else "the samples of this window"
            if self.verdict is None:
                return f"leave out or repair {named}; the last checkpoint can be used"
            return (
                f"leave out {named}, or mend what the trace names, which no other batch met; the"
                " last checkpoint can be used"
            )
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


@dataclass(frozen=True)
class BatchReplay:
    """One micro-batch in the bundle's state.

    fault: what the check on the host finds; nothing is computed then. loss: mean per valid token.
    layer_nmse: by layer, likewise. gradient_norms: by tensor, of the summed loss.
    """

    micro_batch: int
    sample_ids: tuple[str, ...]
    tokens: int
    fault: str | None = None
    loss: float | None = None
    layer_nmse: Mapping[int, float] | None = None
    gradient_norms: Mapping[str, float] | None = None
    verdict: Verdict | None = None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": None if self.verdict is None else self.verdict.as_dict()}

    def __str__(self) -> str:
        head = (
            f"micro-batch {self.micro_batch} (samples {', '.join(self.sample_ids)}), {self.tokens}"
            " valid tokens"
        )
        if self.loss is None or self.layer_nmse is None or self.gradient_norms is None:
            return f"{head}: {self.fault}; nothing is computed on it"
        width = max(map(len, self.gradient_norms))
        return "\n".join(
            [
                head,
                f"loss per token {self.loss:.6g}",
                *(f"layer {index:3} NMSE {value:.6g}" for index, value in self.layer_nmse.items()),
                *(
                    f"{name:{width}} gradient norm {value:.6g}"
                    for name, value in self.gradient_norms.items()
                ),
                *_verdict_lines(self.verdict),
            ]
        )


def replay(
    folder: str | Path,
    *,
    model_name: str | None = None,
    device: str | torch.device | None = None,
    micro_batch: int | None = None,
) -> Replay:
    """Rebuild a bundle's state, take its window again, trace what recurs and classify it. The
    process's random state stays.

    *transient*: no refusal recurs. *data*: what recurs was found on the host, or other batches are
    clean in this state. *state*: adapters, moments or base hold a number that is not finite, or
    another batch fails too.

    Args:
        folder: of the bundle.
        model_name: of the base, where it is not to be found under the recorded name.
        device: default the recorded kind.
        micro_batch: trace this one, refused or not, instead of those that are refused.

    Raises:
        BundleError: the bundle or its base cannot be used.
        ConfigError: there is no such micro-batch.
    """
    bundle = read_bundle(folder)
    if micro_batch is not None:
        _check_index(bundle, micro_batch)
    with restored(bundle, model_name=model_name, device=device) as state:
        findings = state.findings()
        tried = state.window(bundle.window, bundle.limits)
        return Replay(
            bundle=bundle,
            device=str(state.device),
            found=tried.refusals,
            traces=tried.traces,
            findings=findings,
            verdicts=tuple(
                (
                    index,
                    _verdict(
                        state, index, any(r.micro_batch in (index, None) for r in tried.refusals)
                    ),
                )
                for index in _to_trace(bundle, tried, micro_batch)
            ),
            trials=tuple(_trials(state, tried.refusals)),
        )


def replay_batch(
    folder: str | Path,
    micro_batch: int,
    *,
    model_name: str | None = None,
    device: str | torch.device | None = None,
) -> BatchReplay:
    """One micro-batch of a bundle alone: its loss, layers and gradients, and where its first bad
    number arises.

    Args:
        folder: of the bundle.
        micro_batch: index in its window.
        model_name, device: as for `replay`.

    Raises:
        BundleError, ConfigError: as `replay`.
    """
    bundle = read_bundle(folder)
    _check_index(bundle, micro_batch)
    batch = bundle.window[micro_batch]
    with restored(bundle, model_name=model_name, device=device) as state:
        fault = find_fault(batch, state.model.config.vocab_size)
        if fault is not None:
            return BatchReplay(micro_batch, batch.sample_ids, batch.tokens, fault=fault)
        sums = state.fill(batch)
        norms = {
            name: float(torch.linalg.vector_norm(p.grad))
            for name, p in state.parameters.items()
            if p.grad is not None
        }
        exploded = not math.isfinite(
            float(sums.loss) + float(torch.linalg.vector_norm(torch.tensor([*norms.values()])))
        )
        layers = [index for index, _ in npt_layers(state.model)]
        return BatchReplay(
            micro_batch,
            batch.sample_ids,
            batch.tokens,
            loss=float(sums.loss) / sums.tokens,
            layer_nmse=(
                dict(zip(layers, (sums.layer_nmse / sums.tokens).tolist(), strict=True))
                if bundle.train_config.hidden_weight
                else {}
            ),
            gradient_norms=norms,
            verdict=_verdict(state, micro_batch, exploded),
        )


def classify(
    found: Sequence[Refusal], findings: Mapping[str, str | None], trials: Iterable[Trial]
) -> Classification:
    """See `replay`."""
    if not found:
        return "transient"
    if all(refusal.kind == "data" for refusal in found):
        return "data"
    return "state" if any(findings.values()) or any(trial.failed for trial in trials) else "data"


def fresh_batch(like: Batch, avoid: torch.Tensor, vocab_size: int, seed: int) -> Batch:
    """A batch of random tokens in the shape and with the padding of another.

    Args:
        like: whose shape and padding it has.
        avoid: token ids that it does not have, unless they are the whole vocabulary: a broken token
            is the data's, not the state's.
        vocab_size: V.
        seed: of the draw.
    """
    ids = torch.arange(vocab_size)
    choice = ids[~torch.isin(ids, avoid)]
    choice = choice if len(choice) else ids
    drawn = choice[
        torch.randint(
            len(choice), like.input_ids.shape, generator=torch.Generator().manual_seed(seed)
        )
    ]
    return replace(
        like,
        input_ids=drawn,
        labels=torch.where(like.attention_mask.bool(), drawn, IGNORE_INDEX),
        sample_ids=tuple(f"fresh-{seed}-{row}" for row in range(len(drawn))),
    )


def _trials(state: RestoredState, found: Sequence[Refusal]) -> list[Trial]:
    """Other batches in the same state, each as a window of its own; none where nothing computed was
    refused.
    """
    computed = [refusal for refusal in found if refusal.kind != "data"]
    if not computed:
        return []
    bundle = state.bundle
    refused = [refusal.micro_batch for refusal in computed if refusal.micro_batch is not None]
    vocab_size = state.model.config.vocab_size
    if not refused:
        return _window_trials(state, spike=computed[0].kind == "spike")
    bad = {refusal.micro_batch for refusal in found}
    like, avoid = bundle.window[refused[0]], _ids(bundle.window[index] for index in refused)
    trials = [
        Trial(f"micro-batch {index}", False, ())
        for index in range(len(bundle.window))
        if index not in bad
    ]  # as the replayed window has shown
    trials += [
        Trial(f"accepted micro-batch {index}", False, state.window([batch]).refusals)
        for index, batch in enumerate(bundle.accepted)
    ]
    return trials + [
        Trial(
            f"fresh batch {seed}",
            True,
            state.window([fresh_batch(like, avoid, vocab_size, seed)]).refusals,
        )
        for seed in range(FRESH)
    ]


def _window_trials(state: RestoredState, spike: bool) -> list[Trial]:
    """The same where the window was refused as a whole. Random tokens are no text: whether they
    spike says nothing.
    """
    bundle, vocab_size = state.bundle, state.model.config.vocab_size
    limits = bundle.limits if spike else None
    trials = (
        [Trial("accepted window", False, state.window(bundle.accepted, limits).refusals)]
        if bundle.accepted
        else []
    )
    if spike:
        return trials
    avoid = _ids(bundle.window)
    for number in range(FRESH):
        seeds = range(number * len(bundle.window), (number + 1) * len(bundle.window))
        fresh = [
            fresh_batch(like, avoid, vocab_size, seed)
            for like, seed in zip(bundle.window, seeds, strict=True)
        ]
        trials.append(Trial(f"fresh window {number}", True, state.window(fresh).refusals))
    return trials


def _ids(batches: Iterable[Batch]) -> torch.Tensor:
    return torch.cat([batch.input_ids.flatten()[batch.valid_index] for batch in batches]).unique()


def _to_trace(bundle: Bundle, tried: Tried, micro_batch: int | None) -> list[int]:
    if micro_batch is not None:
        return [micro_batch]
    refused = [
        r.micro_batch for r in tried.refusals if r.micro_batch is not None and r.kind != "data"
    ]
    if not refused and tried.refusals:
        loudest = suspect(tried.refusals, tried.traces)
        refused = [] if loudest is None else [loudest]
    return refused[:TRACED]


def _verdict(state: RestoredState, index: int, exploded: bool) -> Verdict | None:
    batch = state.bundle.window[index]
    if find_fault(batch, state.model.config.vocab_size) is not None:
        return None
    state.restore()
    return first_fault(state.model, batch, lambda: state.fill(batch), exploded=exploded)


def _check_index(bundle: Bundle, micro_batch: int) -> None:
    if not 0 <= micro_batch < len(bundle.window):
        raise ConfigError(
            f"--micro_batch is {micro_batch}, the bundle has micro-batches 0 to"
            f" {len(bundle.window) - 1}"
        )


def _places(refusals: Iterable[Refusal]) -> list[tuple[str, int | None]]:
    return [(refusal.kind, refusal.micro_batch) for refusal in refusals]


def _differing(recorded: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    now = versions()
    return {
        name: (str(recorded.get(name)), version)
        for name, version in now.items()
        if recorded.get(name) != version
    }


def _listed(title: str, refusals: Sequence[Refusal]) -> list[str]:
    return [f"{title}: {refusal}" for refusal in refusals] or [f"{title}: no refusal"]


def _verdict_lines(verdict: Verdict | None) -> list[str]:
    return (
        ["no operation made a number that is not finite"]
        if verdict is None
        else str(verdict).splitlines()
    )
