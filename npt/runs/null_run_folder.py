"""The run folder of a process that does not write: process 0 does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from npt.adapters.files.run_layout import ADAPTER, BEST
from npt.base.identity import BaseIdentity
from npt.runs.run_folder import RunFolder


class NullRunFolder(RunFolder):
    """A run folder that nothing is written to.

    Args:
        path: the folder of process 0.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.lines_lost = 0

    def write(self, name: str, value: Any) -> None: ...

    def metrics(self, values: dict[str, Any]) -> None: ...

    def event(self, event: str, /, **details: Any) -> None: ...

    def save_checkpoint(self, step: int, write: Callable[[Path], None], keep: int | None) -> Path:
        raise AssertionError("process 0 saves")

    def checkpoints(self) -> list[Path]:
        return []

    def set_aside(self, checkpoint: Path, why: str) -> Path:
        return checkpoint

    def save_best(
        self, model: PreTrainedModel, base: BaseIdentity, figures: dict[str, Any]
    ) -> Path:
        return self.path / BEST

    def save_final(
        self, model: PreTrainedModel, base: BaseIdentity, fidelity: dict[str, Any]
    ) -> Path:
        return self.path / ADAPTER

    def discard(self) -> None: ...

    def close(self) -> None: ...
