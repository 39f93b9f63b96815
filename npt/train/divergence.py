"""A run that is ruined although all of its numbers are finite: said when it shows, and at the end.

Three things show it, none of which is refused: a loss far above its start, multipliers at their
bounds with next to no gradient left, and a student that is worse than the floor, which has no
adapters: further from its teacher, or of a higher perplexity if it learns the data's own tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from npt.errors import DivergedError, StoppedError
from npt.evaluation.evaluate import Fidelity
from npt.evaluation.modulation import Modulation
from npt.train.run_context import RunContext

FEW = 5
"""Steps whose median loss is the start's, and as many whose median is the present one."""

FAR = 3.0
"""A loss is far above its start beyond this many times that; batches differ by less."""

SATURATED_SHARE = 0.1
"""Share of all multipliers at their bounds beyond which a run is ruined."""

LOOK_EVERY = 10
"""Steps between looks at the multipliers, each a forward pass of one sample; step 2 is looked at
as well: too high a learning rate saturates them at once.
"""


class Divergence:
    """Watches a run.

    Args:
        context: of the run.
        modulation: measures the multipliers on a sample; None for adapters without any.
    """

    def __init__(self, context: RunContext, modulation: Callable[[], Modulation] | None = None):
        self._context, self._modulation = context, modulation
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=FEW)
        self._causes: dict[str, str] = {}
        self._said: set[str] = set()
        self._stops = context.config.stop_on_divergence

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
        self._first, self._last = [], deque(maxlen=FEW)
        self._causes.pop("loss", None)

    def after_step(self, step: int, loss: float) -> None:
        """Look at the loss of an applied step, and on some steps at the multipliers.

        Raises:
            DivergedError: the run is ruined, and `stop_on_divergence` is set.
        """
        if len(self._first) < FEW:
            self._first.append(loss)
        self._last.append(loss)
        if len(self._last) == FEW:
            start, now = median(self._first), median(self._last)
            far = f"the loss is {now:.4g}, {now / max(start, 1e-30):.3g} times that of the start"
            self._judge("loss", step, far if now > FAR * start else None)
        if self._modulation is None or (step != 2 and step % LOOK_EVERY):
            return
        try:
            found = self._modulation()
        except StoppedError:  # the loop looks at the signal itself
            return
        except Exception as error:  # an observer must not end the run that it looks at
            self._modulation = None
            said = f"the multipliers are no longer watched: {type(error).__name__}: {error}"
            self._warn(step, said[:500])
            return
        self.after_look(step, found)

    def after_look(self, step: int, modulation: Modulation) -> None:
        """Judge multipliers that were measured; errors as of `after_step`."""
        share, worst = modulation.saturated
        said = f"{share:.0%} of the multipliers are at their bounds (most in {worst})"
        self._judge("saturation", step, said if share > SATURATED_SHARE else None)

    def after_evaluation(self, step: int, fidelity: Fidelity) -> None:
        """Judge the student against its floor, beyond one standard error; errors as of
        `after_step`.
        """
        figure = self._context.config.judged_by
        student, floor = getattr(fidelity.student, figure), getattr(fidelity.floor, figure)
        name = "KL to its teacher" if figure == "kl" else figure
        said = f"the student's {name} is {student:.4g}, the floor's {floor:.4g}"
        least = student - getattr(fidelity.student, f"{figure}_se")
        self._judge("floor", step, said if least > floor else None)

    def at_end(self, step: int, fidelity: Fidelity, modulation: Modulation | None) -> None:
        """Judge the figures of a run that has come to its end, which nothing stops any more."""
        self._stops = False
        self.after_evaluation(step, fidelity)
        if modulation is not None:
            self.after_look(step, modulation)

    def _judge(self, kind: str, step: int, cause: str | None) -> None:
        """Take in what one of the three looks like now; say it the first time that it is bad."""
        if cause is None:
            self._causes.pop(kind, None)
            return
        self._causes[kind] = cause
        if kind not in self._said:
            self._said.add(kind)
            advice = "a smaller --learning_rate or a longer --warmup_steps helps as a rule"
            self._warn(step, f"the run has diverged: {cause}; {advice}", kind)
        if self._stops:
            said = f"stopped at step {step}: {cause} (--stop_on_divergence)"
            self._context.folder.event("stopped", step=step, reason=f"diverged: {cause}")
            raise DivergedError(f"{said}; start again with a smaller --learning_rate")

    def _warn(self, step: int, message: str, kind: str | None = None) -> None:
        context = self._context
        context.say(f"warning: step {step}: {message}")
        context.folder.event("warning", step=step, message=message, diverged=kind)
        context.trackers.alert("npt: the run has diverged", message)
