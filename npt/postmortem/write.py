"""Write a post-mortem when training stops for numerical reasons.

    postmortem/step-00000123/
      adapter/ state.safetensors state.json manifest.json   a checkpoint from before the window
      window.safetensors                                    the micro-batches of the window
      postmortem.json                                       refusals, settings, verdict, findings

The state, whatever its numbers, and the micro-batches are written first, as a whole or not at all.
To find out more, one micro-batch is computed again, which may fail in any way or be killed; its
findings are added to `postmortem.json` afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_parameters
from npt.base.identity import BaseIdentity, base_hash
from npt.base.precision import audit_precision, declared_dtype, policy_dtype, quantization_of
from npt.config import TrainConfig
from npt.data.batch import Batch
from npt.diagnostics.guards import Finding, base_fault, moments_fault, tensor_fault
from npt.diagnostics.tracer.passes import untouched
from npt.diagnostics.tracer.trace import first_fault
from npt.distill.local import BatchSums
from npt.errors import PrecisionError
from npt.files import new_folder, write_json
from npt.guard.forensics import weights_of
from npt.guard.outcome import MicroBatchRecord, Outcome, Refusal
from npt.guard.schedule import kind_of_run, rate_at
from npt.guard.window import GradientWindow
from npt.manifest import POSTMORTEM, write_manifest
from npt.random_state import random_state
from npt.runs.checkpoint import write_state

VERSION = 2
WINDOW = "window.safetensors"

ACCEPTED = 4
"""Micro-batches at most that are stored of the last window without a refusal, for comparison."""


@dataclass(frozen=True)
class Situation:
    """A run that gives up.

    model, gradients: with no window in flight. fill: gradients and sums of one micro-batch.
    window: the micro-batches that ended the run, as collated. result: theirs. accepted: the
    micro-batches of the last window without a refusal. step: applied steps before the window.
    total_steps: of the run, None if unknown. record: the content of `run.json`. samples_at_once:
    that `fill` computes of a micro-batch, None for all of it.
    """

    model: PreTrainedModel
    gradients: GradientWindow
    fill: Callable[[Batch], BatchSums]
    window: Sequence[Batch]
    result: Outcome
    reason: str
    step: int
    config: TrainConfig
    record: Mapping[str, Any]
    total_steps: int | None = None
    accepted: Sequence[Batch] = ()
    counters: Mapping[str, Any] = field(default_factory=dict)
    samples_at_once: int | None = None


def write_postmortem(run: Path, situation: Situation) -> Path:
    """Write `postmortem/step-XXXXXXXX` below the run folder and return it; model, optimizer and
    random state stay as they are.

    Raises:
        OSError: it could not be written.
    """
    folder = run / "postmortem" / f"step-{situation.step:08d}"
    known, record = _known(situation), situation.record
    state = {
        "step": situation.step,
        "base_hash": record["base_hash"],
        "versions": record["versions"],
        "counters": dict(situation.counters),
    }
    snapshot = situation.result.snapshot or situation.gradients.update.snapshot()
    base = BaseIdentity(**record["base_parts"], strict=record["base_hash"])
    try:
        with new_folder(folder) as temporary:
            write_state(temporary, situation.model, snapshot, state, base, {0: random_state()})
            save_file(_tokens(situation), temporary / WINDOW)
            write_manifest(temporary)
            write_json(temporary / POSTMORTEM, known)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    try:
        observed = _observed(situation)
    except Exception as error:  # a failing observer loses nothing
        observed = {"failures": {"observation": f"{type(error).__name__}: {error}"}}
    with contextlib.suppress(OSError):  # the bundle can be replayed without it
        write_json(folder / POSTMORTEM, known | observed)
    return folder


def suspect(refusals: Iterable[Refusal], traces: Iterable[MicroBatchRecord]) -> int | None:
    """Return the micro-batch of a window to trace: the first that was refused for its numbers,
    else, if the whole window was refused, the computed one with the largest gradient, if any.
    """
    refusals = list(refusals)
    own = [r.micro_batch for r in refusals if r.micro_batch is not None and r.kind != "data"]
    if own:
        return own[0]
    computed = list(traces)
    if not computed or all(r.kind == "data" for r in refusals):
        return None
    return max(computed, key=lambda t: t.grad_norm).micro_batch


def _known(situation: Situation) -> dict[str, Any]:
    """Return everything that needs no computation, and null for the rest."""
    c, result, total_steps = situation.config, situation.result, situation.total_steps
    accepted, gradients = situation.accepted[:ACCEPTED], situation.gradients
    kind = kind_of_run(c.scheduler_type, total_steps)
    at_once = situation.samples_at_once
    return {
        "version": VERSION,
        "reason": situation.reason,
        "refusals": [r.as_dict() for r in result.refused],
        "sample_ids": [list(b.sample_ids) for b in situation.window],
        "accepted_sample_ids": [list(b.sample_ids) for b in accepted],
        "offsets": [b.offset for b in situation.window],
        "accepted_offsets": [b.offset for b in accepted],
        "history": [asdict(t) for t in gradients.history],
        "schedule": {
            "learning_rate": c.learning_rate,
            "scheduler_type": kind,
            "warmup_steps": c.warmup_steps,
            "total_steps": total_steps,
            "next_rate": rate_at(
                situation.step, c.learning_rate, kind, c.warmup_steps, total_steps
            ),
        },
        "spike_limits": None if gradients.spikes is None else list(result.limits),
        "settings": {**situation.record["settings"], **asdict(c)},  # of this stage
        "base": {
            "quantization": quantization_of(situation.model),
            "dtype": str(declared_dtype(situation.model)).removeprefix("torch."),
            "matmul_precision": torch.get_float32_matmul_precision(),
        },
        "device": situation.record["device"],
        "base_hash_at_stop": None,
        "precision": None,
        "findings": {"adapters": None, "moments": None, "base": None},
        "samples_at_once": c.batch_size if at_once is None else at_once,
        "micro_batch": suspect(result.refused, _traces(situation)),
        "record": None,
        "verdict": None,
        "failures": {},
    }


def _traces(situation: Situation) -> list[MicroBatchRecord]:
    return [t for t in situation.gradients.history if t.window == situation.result.index]


def _tokens(situation: Situation) -> dict[str, Tensor]:
    named = {str(index): batch for index, batch in enumerate(situation.window)}
    accepted = situation.accepted[:ACCEPTED]
    named |= {f"accepted.{index}": batch for index, batch in enumerate(accepted)}
    return {
        f"{place}.{name}": tensor.detach().to("cpu", copy=True).contiguous()
        for place, batch in named.items()
        for name, tensor in batch.row_tensors.items()
    }


def _observed(situation: Situation) -> dict[str, Any]:
    """Return findings about the state before the window, and by name why one could not be had."""
    model, index = situation.model, suspect(situation.result.refused, _traces(situation))
    failures: dict[str, str] = {}

    def seen(name: str, look: Callable[[], Any]) -> Any:
        try:
            return look()
        except Exception as error:  # the others are still to be seen
            failures[name] = f"{type(error).__name__}: {error}"
            return None

    found: dict[str, Any] = {}
    with weights_of(situation.result.snapshot, situation.gradients.update):
        parameters = adapter_parameters(model)
        optimizer = situation.gradients.update.optimizer
        looks: dict[str, Callable[[], Finding | None]] = {
            "adapters": lambda: tensor_fault(parameters),
            "moments": lambda: moments_fault(parameters, optimizer),
            "base": lambda: base_fault(model),
        }
        findings = {name: seen(name, look) for name, look in looks.items()}
        found["findings"] = {name: f and f.message for name, f in findings.items()}
        found["base_hash_at_stop"] = seen("base_hash_at_stop", lambda: base_hash(model))
        found["precision"] = seen("precision", lambda: _precision(model))
        if index is not None:
            batch = situation.window[index]
            found["record"] = seen("record", lambda: _recorded(situation, index))
            verdict = seen(
                "verdict",
                lambda: first_fault(model, batch, lambda: situation.fill(batch), exploded=True),
            )
            found["verdict"] = None if verdict is None else verdict.as_dict()
    return found | {"failures": failures}


def _precision(model: PreTrainedModel) -> dict[str, Any] | str:
    """Return the findings of the audit, or its refusal."""
    try:
        return audit_precision(model, policy_dtype(model)).as_dict()
    except PrecisionError as error:
        return str(error)


def _recorded(situation: Situation, micro_batch: int) -> dict[str, Any]:
    """Return the record of every tensor of one micro-batch."""
    # here, so that all else can be had without it
    from npt.diagnostics.recorder.recorder import Recorder

    model = situation.model
    with untouched(model, None), Recorder(model) as recorder:
        situation.fill(situation.window[micro_batch])
    return replace(recorder.record(step=situation.step + 1), micro_batch=micro_batch).as_dict()
