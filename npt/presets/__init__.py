"""Settings by name: for `--config` the files beside this one, for `npt sweep` those of `studies`;
each says in its head what it is.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def presets() -> dict[str, Path]:
    """The file of each preset, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def settings_file(name: str) -> Path:
    """The file that `--config` means: one of that name on disk, else a preset."""
    path = Path(name)
    return path if path.exists() else presets().get(name, path)


def studies() -> dict[str, Path]:
    """The specification of each study that comes with the package, by name."""
    return {path.stem: path for path in sorted((FOLDER / "studies").glob("*.yaml"))}


def study_file(name: str) -> Path:
    """The file that `npt sweep` means: one of that name on disk, else a study that comes with the
    package.
    """
    path = Path(name)
    return path if path.exists() else studies().get(name, path)
