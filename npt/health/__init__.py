"""Watching the numbers of a model in training: what is found is said, nothing is steered.

The public names are imported when they are first used, so that a look at one costs nothing for the
others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npt.health.callback import RecorderCallback
    from npt.health.ranking import explosions, gradients
    from npt.health.record import Record, Row
    from npt.health.recorder import Recorder
    from npt.health.table import print_record

_HOME = {
    "Record": "npt.health.record",
    "Recorder": "npt.health.recorder",
    "RecorderCallback": "npt.health.callback",
    "Row": "npt.health.record",
    "explosions": "npt.health.ranking",
    "gradients": "npt.health.ranking",
    "print_record": "npt.health.table",
}

__all__ = [
    "Record",
    "Recorder",
    "RecorderCallback",
    "Row",
    "explosions",
    "gradients",
    "print_record",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'npt.health' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
