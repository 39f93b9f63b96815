"""The work around the loop: closed-form start, evaluations, `run.json`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from transformers import PreTrainedModel

from npt.adapters.attach import AttachReport
from npt.adapters.converted import attached_config, is_sharded
from npt.base.identity import BaseIdentity
from npt.base.precision import audit_precision, policy_dtype
from npt.batch import Batch, batches
from npt.distill.step import MicroBatchSplitter, free_memory, oom_message
from npt.runs.resume import plain_settings
from npt.train.data import RunData, makes_start
from npt.train.setup import RunSetup
from npt.versions import versions

if TYPE_CHECKING:
    from npt.calibration.report import Calibration
    from npt.evaluation.evaluate import Fidelity, Reference

T = TypeVar("T")


def fitting(
    model: PreTrainedModel, act: Callable[[], T], splitter: MicroBatchSplitter, batch: Batch
) -> T:
    """Return the result of `act`, retried with fewer samples at once until it fits in memory.

    Each failure shrinks `splitter`, starting from `batch`, the largest one. Raise NoMemoryError if
    a single sample does not fit.
    """
    while True:
        try:
            return act()
        except (RuntimeError, MemoryError) as error:
            message = oom_message(error)
            # on a sharded base a retry would put this process out of step with the others
            if message is None or is_sharded(model):
                raise
        free_memory(model.device)  # inside the handler the error holds the graph
        splitter.shrink(batch, message)


def calibrated(setup: RunSetup, data: RunData) -> Calibration | None:
    """Compute the closed-form start; None if the adapters were loaded or calibrated before."""
    config = setup.config
    model = setup.model
    processes = setup.processes
    if not makes_start(model):
        return None

    from npt.calibration.calibrate import calibrate
    from npt.calibration.report import print_calibration

    # The graph spans the whole teacher, so an OOM here says nothing about a training micro-batch.
    own = min(config.batch_size, setup.splitter.samples)
    size = min(processes.gather(own))
    splitter = MicroBatchSplitter(size, partial(setup.say_lack, "the calibration"))

    def solve() -> Calibration:
        return calibrate(
            model,
            setup.tokenizer,
            data.start_samples,
            config.calibration_tokens,
            batch_size=splitter.samples,
            seed=config.seed,
            console=setup.console,
            processes=processes,
        )

    # the same on every process, so that all halve alike
    first = next(batches(data.start_samples, size), None) or data.first_batch()
    calibration = fitting(model, solve, splitter, first)
    print_calibration(calibration, setup.console)
    line = f"training skips the {data.start.begun} samples that calibration used"
    if not data.start.begun:
        line = "too few samples to skip those used for calibration: the first losses are on them"
    setup.say(line)
    return calibration


def evaluator(setup: RunSetup, data: RunData) -> Callable[[], Fidelity]:
    """Return a function that evaluates the student, with no more samples at once than training."""
    samples = data.eval_samples
    report = partial(setup.say_lack, "an evaluation")
    splitter = MicroBatchSplitter(setup.config.batch_size, report)

    @cache
    def reference() -> Reference | None:
        """Return the outputs of a separate teacher, which never changes."""
        from npt.evaluation.evaluate import reference_outputs

        if setup.teacher is None:
            return None
        return reference_outputs(setup.teacher, samples, batch_size=splitter.samples)

    def measure() -> Fidelity:
        from npt.evaluation.evaluate import evaluate

        return evaluate(
            setup.model,
            setup.tokenizer,
            samples,
            batch_size=splitter.samples,
            unquantized=reference(),
            between=setup.check_stop,
        )

    def evaluated() -> Fidelity:
        # training may have had to halve them since
        splitter.samples = min(splitter.samples, setup.splitter.samples)
        largest = next(batches(samples, splitter.samples))
        return fitting(setup.model, measure, splitter, largest)

    return evaluated


def run_record(
    setup: RunSetup, data: RunData, base: BaseIdentity, calibration: Calibration | None
) -> dict[str, Any]:
    """Return settings, model, precision, device and data of a run, for `run.json`."""
    model = setup.model
    report = AttachReport.of(model)
    form = plain_settings(asdict(attached_config(model)))  # including the ranks of the start
    return {
        "settings": {**setup.settings, **form},
        "layers": list(report.layers),
        "trainable_parameters": report.trainable_parameters,
        "seed": setup.config.seed,
        "date": setup.date,
        **base.as_record(),
        "precision": asdict(audit_precision(model, policy_dtype(model))),
        "device": str(setup.device),
        "deterministic": setup.deterministic,
        "processes": setup.processes.size,
        "versions": versions(),
        "heldout": data.heldout,
        "sources": [
            {"name": source.label, "dataset": source.dataset, "share": source.share}
            for source in data.sources
        ],
        "calibration": None if calibration is None else calibration.as_dict(),
    }
