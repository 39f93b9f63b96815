"""What Weights & Biases has written of an offline run, as its own messages: what `wandb sync` would
upload.
"""

import json
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BLOCK, _HEADER, _FILE_HEADER = 32768, struct.Struct("<IHB"), 7


@dataclass
class Told:
    """history: a dict for each logged step. artifacts: (name, type, aliases, metadata). exit: the
    run's exit code.
    """

    run: Any = None
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    artifacts: list[tuple[str, str, list[str], dict[str, Any]]] = field(default_factory=list)
    files: list[list[str]] = field(default_factory=list)
    alerts: list[tuple[str, str]] = field(default_factory=list)
    exit: int | None = None


def records(path: Path) -> list[Any]:
    """The messages of a `.wandb` file: a log of blocks, in which a message may be cut into several
    pieces (LevelDB's format).
    """
    from wandb.proto import wandb_internal_pb2

    content, place, parts, found = path.read_bytes(), _FILE_HEADER, b"", []
    while place + _HEADER.size <= len(content):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER.size:
            place += left
            continue
        _, size, kind = _HEADER.unpack_from(content, place)
        if not kind:
            break
        place += _HEADER.size
        parts += content[place : place + size]
        place += size
        if kind in (1, 4):  # the whole of it, or its end
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return found


def told(run_folder: Path) -> Told:
    """Return what the one run below a folder was told, once it has ended; another process writes
    it, in its own time.
    """
    until = time.monotonic() + 30
    while True:
        (path,) = (run_folder / "wandb").glob("offline-run-*/*.wandb")
        found = _read(path)
        if found.exit is not None or time.monotonic() > until:
            return found
        time.sleep(0.05)


def _read(path: Path) -> Told:
    told = Told()
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            told.run = record.run
            told.config |= _values(record.run.config.update)
        elif kind == "config":
            told.config |= _values(record.config.update)
        elif kind == "history":
            told.history.append(_values(record.history.item))
        elif kind == "summary":
            told.summary |= _values(record.summary.update)
        elif kind == "artifact":
            one = record.artifact
            metadata = json.loads(one.metadata or "{}")
            told.artifacts.append((one.name, one.type, list(one.aliases), metadata))
            told.files.append(sorted(entry.path for entry in one.manifest.contents))
        elif kind == "alert":
            told.alerts.append((record.alert.title, record.alert.text))
        elif kind == "exit":
            told.exit = record.exit.exit_code
    return told


def _values(items: Any) -> dict[str, Any]:
    return {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
