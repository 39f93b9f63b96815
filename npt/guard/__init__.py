"""A guard for any training loop: a micro-batch that yields NaN or Inf changes nothing in the run.

    guard = npt.guard.Guard(model, optimizer, max_grad_norm=1.0, scheduler=scheduler, loss="mean")
    for window in windows:
        for batch in window:
            with guard.micro_batch(tokens=batch.tokens, ids=batch.ids) as micro:
                micro.loss = loss = model(**batch.inputs).loss
                loss.backward()
        outcome = guard.step()

NPT's own trainer takes the same step. The guard itself needs only torch; the parts
for a Trainer or a post-mortem are imported when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from npt.errors import TooManyRefusalsError
from npt.guard.forensics import Finding
from npt.guard.guard import Guard
from npt.guard.outcome import MicroBatch, Outcome, Refusal
from npt.guard.settings import GuardSettings
from npt.guard.traces import Seeded

if TYPE_CHECKING:
    from npt.forensics.bundle import Postmortem, read_postmortem
    from npt.forensics.replay import replay
    from npt.guard.lightning import LightningGuard
    from npt.guard.report import Report
    from npt.guard.trainer import TrainerMixin, protect

_LATER = {
    "LightningGuard": "npt.guard.lightning",
    "Postmortem": "npt.forensics.bundle",
    "Report": "npt.guard.report",
    "TrainerMixin": "npt.guard.trainer",
    "protect": "npt.guard.trainer",
    "read_postmortem": "npt.forensics.bundle",
    "replay": "npt.forensics.replay",
}

__all__ = [
    "Finding",
    "Guard",
    "GuardSettings",
    "LightningGuard",
    "MicroBatch",
    "Outcome",
    "Postmortem",
    "Refusal",
    "Report",
    "Seeded",
    "TooManyRefusalsError",
    "TrainerMixin",
    "protect",
    "read_postmortem",
    "replay",
]


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'npt.guard' has no attribute {name!r}")
    value = getattr(import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
