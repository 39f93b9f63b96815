"""The public names of npt.guard, each with its home: the only list of them."""

from npt.errors import TooManyRefusalsError as TooManyRefusalsError
from npt.forensics.bundle import Postmortem as Postmortem
from npt.forensics.bundle import read_postmortem as read_postmortem
from npt.forensics.replay import replay as replay
from npt.guard.forensics import Finding as Finding
from npt.guard.guard import Guard as Guard
from npt.guard.lightning import LightningGuard as LightningGuard
from npt.guard.outcome import MicroBatch as MicroBatch
from npt.guard.outcome import Outcome as Outcome
from npt.guard.outcome import Refusal as Refusal
from npt.guard.report import Report as Report
from npt.guard.settings import GuardSettings as GuardSettings
from npt.guard.traces import Seeded as Seeded
from npt.guard.trainer import TrainerMixin as TrainerMixin
from npt.guard.trainer import protect as protect

__all__: list[str]
