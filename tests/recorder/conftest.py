"""The part of the recorder that draws, replaced by one that notes what it is given."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

import npt.recorder
from npt.recorder.record import Record


@pytest.fixture
def drawn(monkeypatch) -> list[tuple[list[int], Path]]:
    """The steps that are handed to the part that draws, and the folder."""
    calls: list[tuple[list[int], Path]] = []
    picture = ModuleType("npt.recorder.picture")

    def write_pictures(records: list[Record], folder: Path, refused: int = 0) -> list[Path]:
        calls.append(([record.step for record in records], folder))
        return [folder / "health.png"]

    picture.write_pictures = write_pictures
    monkeypatch.setitem(sys.modules, "npt.recorder.picture", picture)
    monkeypatch.setattr(npt.recorder, "picture", picture, raising=False)
    return calls
