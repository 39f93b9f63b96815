"""The changes to the package that a page of the documentation prints, made in a copy of it."""

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]


def changed_package(page: Path, folder: Path) -> list[str]:
    """Copy npt below a folder, make the page's changes in it, and return the changed files."""
    leave = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(ROOT / "npt", folder / "npt", ignore=leave)
    files = []
    for name, hunk in re.findall(r"```diff\n--- (\S+)\n(.*?)```", page.read_text(), re.S):
        context, *added = hunk.rstrip("\n").split("\n")
        assert context.startswith(" ") and all(line.startswith("+") for line in added)
        path = folder / name
        text, found = path.read_text(encoding="utf-8"), context[1:] + "\n"
        assert text.count(found) == 1, f"{name} has no single line {found!r}"
        new = "".join(line[1:] + "\n" for line in added)
        path.write_text(text.replace(found, found + new), encoding="utf-8")
        files.append(name)
    return files
