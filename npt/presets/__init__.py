"""Settings by name for `--config`: the files beside this one, each of which says in its head what was measured with it."""

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


def about(path: Path) -> str:
    """What a file of settings says of itself, the comment at its head, as one line."""
    head = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        head.append(line.removeprefix("#").strip())
    return " ".join(head)
