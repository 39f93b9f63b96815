"""The manifest of a checkpoint: sha256 and size of each file, and its own sha256."""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path
from typing import Any

from npt.errors import CheckpointError
from npt.stored import read_json, shown

MANIFEST = "manifest.json"
POSTMORTEM = "postmortem.json"


def write_manifest(folder: Path) -> None:
    """Write the manifest of all files below a folder."""
    files = {name: _sums(path) for name, path in _files(folder).items()}
    (folder / MANIFEST).write_text(_text(files), encoding="utf-8")


def verify_checkpoint(folder: Path) -> None:
    """Check a checkpoint and its manifest; CheckpointError if a file has changed."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} is incomplete (no {MANIFEST}): use another one")
    manifest = read_json(path, CheckpointError)
    files = manifest.get("files")
    try:
        # first its own sum, which vouches for the others
        if not isinstance(files, dict) or path.read_bytes() != _text(files).encode():
            raise CheckpointError(f"{path} is damaged (wrong sha256); restore it from the original")
        present = _files(folder)
        odd = sorted(files.keys() ^ present.keys())
        if odd:
            kind = "lacks the file" if odd[0] in files else "has the extra file"
            raise CheckpointError(f"{folder} {kind} {shown(odd[0])} ({len(odd)} in all)")
        for name, sums in files.items():
            now = _sums(present[name])
            if now != sums:
                raise CheckpointError(
                    f"{present[name]} is damaged: sha256 {now['sha256'][:12]} of {now['bytes']}"
                    f" bytes, but {MANIFEST} has {shown(sums)}"
                )
    except (OSError, RecursionError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error


def _files(folder: Path) -> dict[str, Path]:
    """Return the files below a folder by relative path; CheckpointError for links and devices."""
    files = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            files[path.relative_to(folder).as_posix()] = path
        elif not stat.S_ISDIR(mode):
            what = "link" if stat.S_ISLNK(mode) else "special file"
            raise CheckpointError(f"{path} is a {what}; a checkpoint holds only plain files")
    files.pop(MANIFEST, None)
    return files


def _sums(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"sha256": digest, "bytes": path.stat().st_size}


def _text(files: Any) -> str:
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return json.dumps({"files": files, "sha256": digest}, indent=2, sort_keys=True) + "\n"
