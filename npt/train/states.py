"""States of frozen layers for text that a run reads again.

Nothing below the first converted layer is trained, and neither is the teacher. So a text has the
same states there in every epoch, and a run that reads it again keeps them on disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from npt.batch import Batch

STATES = "states.sqlite"
"""The file in the run folder. It is removed when the run is complete."""

SHARE = 4
"""The states take at most one part in so many of the disk space that was free."""

KeptState = tuple[bytes, int, bytes]
"""Hash of what a text's states depend on, checksum of the third, and the states [T, D]."""


class KeptStates:
    """The states of a run's texts, in a database. They are bit-equal to those that were computed.

    States that are not finite, or that the disk has changed, are computed again. If the database
    fails, it is given up, and training goes on without.

    Args:
        path: of the database; it may exist.
        about: what the states depend on besides the text.
        say: prints a line.
    """

    def __init__(self, path: Path, about: str, say: Callable[[str], None]):
        self.path = path
        self._about = about
        self._say = say
        self._new: list[KeptState] = []
        self._database: sqlite3.Connection | None = None
        self._room = 0
        with self._given_up_on_error():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path)
            used = path.stat().st_size
            most = (shutil.disk_usage(path.parent).free + used) // SHARE
            self._room = most - used
            # only a power failure could then cost states, and the checksums would tell
            self._database.execute("PRAGMA synchronous = OFF")
            columns = "key BLOB PRIMARY KEY, checksum INTEGER, states BLOB"
            self._database.execute(f"CREATE TABLE IF NOT EXISTS kept ({columns})")
            say(f"{path} keeps what is computed for text read again, up to {most / 2**30:.1f} GiB")

    def of(self, batch: Batch) -> Batch:
        """Return a batch that reads these states."""
        teacher = None if batch.teacher is None else replace(batch.teacher, kept=self)
        return replace(batch, teacher=teacher, kept=self)

    def states(self, batch: Batch, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """Return a batch's states [B, T, D] with zeros at padding: those that are kept, and the
        result of `compute` for texts without. `name` tells these states from others of the text.
        """
        if self._database is None:
            return compute()
        keys = []
        for *_, ids in batch.texts:
            keys.append(hashlib.sha256(f"{self._about} {name} ".encode() + ids).digest())
        known = [self._read(key) for key in keys]
        given = [states for states in known if states is not None]
        if given and len(given) == len(known):
            size = given[0].shape[-1]
            hidden = given[0].new_zeros(*batch.input_ids.shape, size)
        else:
            # a copy, since kept states of a text hold before those that another batch gives it
            hidden = compute().cpu().clone()
        for (row, columns, _), key, states in zip(batch.texts, keys, known, strict=True):
            if states is not None:
                hidden[row, columns] = states
            elif hidden[row, columns].isfinite().all():
                stored = save({"states": hidden[row, columns].contiguous()})
                self._new.append((key, zlib.crc32(stored), stored))
        return hidden.to(batch.input_ids.device)

    def take(self) -> list[KeptState]:
        """Return and forget what was computed since the last call."""
        new = self._new
        self._new = []
        return new

    def keep(self, new: Iterable[KeptState]) -> None:
        """Keep states while there is room."""
        for each in new:
            size = len(each[-1])
            if self._database is None or size > self._room:
                return
            self._room -= size
            with self._given_up_on_error(), self._database:
                self._database.execute("INSERT OR IGNORE INTO kept VALUES (?, ?, ?)", each)

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
        self._database = None

    def _read(self, key: bytes) -> Tensor | None:
        with self._given_up_on_error():
            if self._database is None:
                return None
            row = self._database.execute("SELECT checksum, states FROM kept WHERE key = ?", (key,))
            for checksum, stored in row:
                if zlib.crc32(stored) == checksum:
                    return load(stored)["states"]
        return None

    @contextlib.contextmanager
    def _given_up_on_error(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            self._say(f"warning: {self.path} is not used any more: {error}")
            self.close()
