"""What looks at a run's steps and steers nothing: metrics, recorded tensors, divergence."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from npt.adapters.converted import npt_layers
from npt.data.batch import Batch
from npt.distill.local import REPORTED
from npt.errors import StoppedError
from npt.evaluation.evaluate import Fidelity
from npt.guard.outcome import Outcome
from npt.train.refusals import Refusals
from npt.train.run_context import RunContext

if TYPE_CHECKING:
    from npt.evaluation.modulation import Modulation

FEW = 5
"""Steps whose median loss is the start's, and as many whose median is the present one."""

FAR = 3.0
"""A loss is far above its start beyond this many times that; batches differ by less."""

SATURATED_SHARE = 0.1
"""Share of all multipliers at their bounds beyond which a run is ruined."""

LOOK_EVERY = 10
"""Steps between looks at the multipliers, each a forward pass of one sample; step 2 is looked at as
well: too high a learning rate saturates them at once."""


class StepMetrics:
    """Makes the lines of `metrics.jsonl`.

    Attributes:
        since: time of the last line; time that was not spent on training is added to it.
        logged_tokens: up to that line.
    """

    def __init__(self, context: RunContext):
        self._processes, self._config = context.processes, context.config
        self._layers = [index for index, _ in npt_layers(context.model)]
        self.since, self.logged_tokens = time.perf_counter(), 0

    def line(self, result: Outcome, steps: int, tokens: int, refusals: Refusals) -> dict[str, Any]:
        """Return means per valid token over the survivors of all processes; the loss on the logits
        is a mean per predicted token. `steps` and `tokens` of the run include this step.
        """
        config, named = self._config, len(REPORTED)
        # From the reports, which came with the record: the survivors' own tensors may wait in a
        # queue of newer windows.
        reported = [sum(report[i] for report in result.reports) for i in range(named)]
        layers = torch.tensor([report[named:] for report in result.reports], dtype=torch.float32)
        nmses = layers.sum(dim=0).tolist() if result.reports else [0.0] * len(self._layers)
        sums = self._processes.sums([*reported, *nmses])
        total = dict(zip(REPORTED, sums, strict=False))
        now = time.perf_counter()
        metrics = {
            "step": steps,
            "loss": total["loss"] / result.tokens,
            "loss_reg": total["reg"] / result.tokens,
            "grad_norm": result.grad_norm,
            "lr": result.rate,
            "tokens": tokens,
            "tokens_per_second": (tokens - self.logged_tokens) / (now - self.since),
            "refused_total": refusals.total,
            **{f"refused.{kind}": count for kind, count in sorted(refusals.by_kind.items())},
        }
        self.since, self.logged_tokens = now, tokens
        if config.logit_kl_weight:
            mean = total["logit"] / total["scored"] if total["scored"] else math.nan
            metrics[f"loss_{config.logit_loss}"] = mean
        if config.hidden_weight:  # hidden states were compared
            metrics["loss_nmse"] = total["nmse"] / result.tokens
            means = (torch.tensor(sums[named:]) / result.tokens).tolist()
            names = [f"layers.{index}.nmse" for index in self._layers]
            metrics |= dict(zip(names, means, strict=True))
        return metrics


class StepRecording:
    """Records the first micro-batch that the main process computes of each chosen step.

    It says what it did. A failure ends nothing, and the micro-batch is computed once in any case.
    """

    def __init__(self, context: RunContext):
        from npt.diagnostics.recorder import recorder, recording  # few runs record

        self._model, self._say, c = context.model, context.say, context.config
        self._recorder, self._describe = recorder.Recorder, recording.describe
        self._recording = recording.Recording(context.folder.path / "trace", c.trace_steps)
        self._step: int | None = None  # the open window's, until its first micro-batch is recorded
        self._seconds = 0.0

    def announce(self) -> None:
        self._say(str(self._recording))

    def open(self, step: int) -> None:
        """Begin a window that will be `step` if it is applied."""
        self._step = step if self._recording.wants(step) else None

    @contextlib.contextmanager
    def observe(self, batch: Batch, index: int) -> Iterator[None]:
        """Record forward and backward of this micro-batch, if it is the one to record."""
        step, self._step = self._step, None
        if step is None:
            yield
            return
        self._recording.begin(step)
        recorder: Any = None
        with contextlib.ExitStack() as stack:
            with self._survived(f"step {step} could not be recorded"):
                valid = batch.attention_mask.bool() if batch.padded else None
                recorder = stack.enter_context(self._recorder(self._model, valid=valid))
            yield
        if recorder is not None:
            since = time.perf_counter()
            with self._survived(f"step {step} could not be recorded"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of sites that were skipped
                record = recorder.record(step, index)
                self._say(self._describe(record, self._recording.keep(record)))
            self._seconds += time.perf_counter() - since

    def take_seconds(self) -> float:
        """Return the seconds spent on records since this was asked for the last time."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def draw(self) -> None:
        """Draw pictures of the records, however the run ended."""
        with self._survived(f"the records in {self._recording.folder} could not be drawn"):
            if pictures := self._recording.draw():
                self._say(f"pictures of the recorded steps: {', '.join(map(str, pictures))}")

    @contextlib.contextmanager
    def _survived(self, failure: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # an observer must not end the run that it looks at
            self._say(f"{failure}: {named(error)}")


class Divergence:
    """Says when a run is ruined although all of its numbers are finite, and at its end.

    Three things show it, none of which is refused: a loss far above its start, multipliers at their
    bounds with next to no gradient left, and a student that is worse than the floor, which has no
    adapters: further from its teacher, or of a higher perplexity if it learns the data's own
    tokens.

    modulation: measures the multipliers on a sample; None for adapters without any.
    """

    def __init__(self, context: RunContext, modulation: Callable[[], Modulation] | None = None):
        self._context, self._modulation = context, modulation
        self._first: list[float] = []
        self._last: list[float] = []
        self._causes: dict[str, str] = {}
        self._warned: set[str] = set()

    @property
    def causes(self) -> list[str]:
        """The signs that hold at present, as clauses."""
        return list(self._causes.values())

    def state(self) -> dict[str, Any]:
        """Return the part of a checkpoint that says where the loss began."""
        return {"first_losses": self._first}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned; checkpoints of earlier versions say nothing."""
        self._first = list(state.get("first_losses", []))

    def forget_losses(self) -> None:
        """Forget the losses: another strategy has others."""
        self._first, self._last = [], []
        self._causes.pop("loss", None)

    def after_step(self, step: int, loss: float) -> None:
        """Judge the loss of an applied step, and on some steps the multipliers."""
        self._first = [*self._first, loss][:FEW]
        self._last = [*self._last, loss][-FEW:]
        if len(self._last) == FEW:
            start, now = median(self._first), median(self._last)
            cause = f"the loss is {now:.4g}, {now / max(start, 1e-30):.3g} times that of the start"
            self._judge("loss", step, cause, now > FAR * start)
        if self._modulation is None or (step != 2 and step % LOOK_EVERY):
            return
        try:
            modulation = self._modulation()
        except StoppedError:  # the loop looks at the signal itself
            return
        except Exception as error:  # an observer must not end the run that it looks at
            self._modulation = None
            self._warn(step, f"the multipliers are no longer watched: {named(error)}"[:500])
            return
        self._look(step, modulation)

    def after_evaluation(self, step: int, fidelity: Fidelity) -> None:
        """Judge the student against its floor, beyond one standard error."""
        figure = self._context.config.judged_by
        student, floor = getattr(fidelity.student, figure), getattr(fidelity.floor, figure)
        name = "KL to its teacher" if figure == "kl" else figure
        least = student - getattr(fidelity.student, f"{figure}_se")
        cause = f"the student's {name} is {student:.4g}, the floor's {floor:.4g}"
        self._judge("floor", step, cause, least > floor)

    def at_end(self, step: int, fidelity: Fidelity, modulation: Modulation | None) -> None:
        """Judge the figures of a run that has come to its end."""
        self.after_evaluation(step, fidelity)
        if modulation is not None:
            self._look(step, modulation)

    def _look(self, step: int, modulation: Modulation) -> None:
        share, worst = modulation.saturated
        cause = f"{share:.0%} of the multipliers are at their bounds (most in {worst})"
        self._judge("saturation", step, cause, share > SATURATED_SHARE)

    def _judge(self, kind: str, step: int, cause: str, holds: bool) -> None:
        """Take in what one of the three looks like now; warn the first time that it is bad."""
        if not holds:
            self._causes.pop(kind, None)
            return
        self._causes[kind] = cause
        if kind not in self._warned:
            self._warned.add(kind)
            advice = "a smaller --learning_rate or a longer --warmup_steps helps as a rule"
            self._warn(step, f"the run has diverged: {cause}; {advice}", kind)

    def _warn(self, step: int, message: str, kind: str | None = None) -> None:
        self._context.say(f"warning: step {step}: {message}")
        self._context.folder.event("warning", step=step, message=message, diverged=kind)
        self._context.trackers.alert("npt: the run has diverged", message)


def named(error: BaseException) -> str:
    """Return an error with its type, for what an observer reports."""
    return f"{type(error).__name__}: {error}"
