"""A guard for anybody's training loop: a bad micro-batch leaves no trace in the run.

    guard = npt.guard.Guard(model, optimizer, max_grad_norm=1.0, scheduler=scheduler, loss="mean")
    for window in windows:
        for batch in window:
            with guard.micro_batch(tokens=batch.tokens, ids=batch.ids) as micro:
                micro.loss = loss = model(**batch.inputs).loss
                loss.backward()
        outcome = guard.step()

The step is that of the distillation trainer (`npt.step`): one implementation. Nothing here needs
more than torch.
"""

from npt.errors import TooManyRefusalsError
from npt.guard.forensics import Finding
from npt.guard.guard import Guard, MicroBatch, Outcome
from npt.guard.memory import Memory
from npt.guard.postmortem import Postmortem, read_postmortem
from npt.guard.replay import replay
from npt.guard.settings import GuardSettings
from npt.guard.trainer import TrainerMixin, protect
from npt.step.window_result import Refusal

__all__ = [
    "Finding",
    "Guard",
    "GuardSettings",
    "Memory",
    "MicroBatch",
    "Outcome",
    "Postmortem",
    "Refusal",
    "TooManyRefusalsError",
    "TrainerMixin",
    "protect",
    "read_postmortem",
    "replay",
]
