"""Presets for `--config` (this folder) and studies for `npt sweep` (`studies`)."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def presets() -> dict[str, Path]:
    """Return the file of each preset, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def settings_file(name: str) -> Path:
    """Return the file that `--config` names: one on disk, else a preset."""
    path = Path(name)
    return path if path.exists() else presets().get(name, path)


def studies() -> dict[str, Path]:
    """Return the file of each study in the package, by name."""
    return {path.stem: path for path in sorted((FOLDER / "studies").glob("*.yaml"))}


def study_file(name: str) -> Path:
    """Return the file that `npt sweep` names: one on disk, else a study of the package."""
    path = Path(name)
    return path if path.exists() else studies().get(name, path)
