"""Observers of a model in training. They record tensors and change nothing.

Public names are imported on first use, so that importing the package is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npt.recorder.callback import RecorderCallback as RecorderCallback
    from npt.recorder.health import check as check
    from npt.recorder.picture import write_pictures as write_pictures
    from npt.recorder.ranking import explosions as explosions
    from npt.recorder.ranking import gradients as gradients
    from npt.recorder.ranking import worst as worst
    from npt.recorder.record import Record as Record
    from npt.recorder.record import Row as Row
    from npt.recorder.recorder import Recorder as Recorder

_HOME = {
    "Record": "record",
    "Recorder": "recorder",
    "RecorderCallback": "callback",
    "Row": "record",
    "check": "health",
    "explosions": "ranking",
    "gradients": "ranking",
    "worst": "ranking",
    "write_pictures": "picture",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'npt.diagnostics' has no attribute {name!r}")
    value = getattr(import_module(f"npt.recorder.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
