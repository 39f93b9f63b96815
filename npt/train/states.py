"""States of frozen layers for text that a run reads again.

Nothing below the first converted layer is trained, and neither is the teacher. So a text has the
same states there in every epoch, and a run on a CPU keeps them on disk. On a GPU, reading them
would take longer than computing them.
"""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from npt.batch import Batch, batch_from_tensors

STATES = "states.sqlite"
"""The file in the run folder. It is removed when the run is complete."""

SHARE = 4
"""The states take at most one part in so many of the disk space that was free."""


class KeptStates:
    """The states of a run's texts, in a database.

    Each text is computed alone, since the last bits of its states depend on the rows beside it. So
    it has the same states whether they are kept or computed, and a run has the same bits whatever
    became of the database. Not kept are states that are not finite or that random numbers went
    into. Those that the disk has changed are computed again.

    Args:
        path: of the database; it may exist.
        about: what the states depend on besides the text.
        warn: is told why the database is not used any more.
    """

    def __init__(self, path: Path, about: str, warn: Callable[[str], None]):
        self.path = path
        self._about = about
        self._warn = warn
        self._database: sqlite3.Connection | None = None
        self.room = 0
        try:
            self._database = sqlite3.connect(path, isolation_level=None)
            used = path.stat().st_size
            self.room = (shutil.disk_usage(path.parent).free + used) // SHARE - used
            # a kill loses nothing, and a checksum tells what a power failure mixed up
            self._database.execute("PRAGMA synchronous = OFF")
            columns = "key BLOB PRIMARY KEY, checksum INTEGER, states BLOB"
            self._database.execute(f"CREATE TABLE IF NOT EXISTS kept ({columns})")
        except (sqlite3.Error, OSError) as error:
            self._give_up(error)

    def of(self, batch: Batch) -> Batch:
        """Return a batch that reads these states."""
        teacher = None if batch.teacher is None else replace(batch.teacher, kept=self)
        return replace(batch, teacher=teacher, kept=self)

    def states(self, batch: Batch, name: str, compute: Callable[[Batch], Tensor]) -> Tensor:
        """Return a batch's states [B, T, D] of this name, with zeros at padding. `compute` returns
        those of a batch of one text, [1, T, D].
        """
        found = []
        for *_, ids in batch.texts:
            key = hashlib.sha256(f"{self._about} {name} ".encode() + ids.numpy().tobytes()).digest()
            of_text = self._read(key)
            if of_text is None:
                alone = batch_from_tensors(ids.unsqueeze(0), torch.ones_like(ids).unsqueeze(0))
                drawn = torch.get_rng_state()
                of_text = compute(self.of(alone)).squeeze(0)
                if torch.equal(drawn, torch.get_rng_state()) and of_text.isfinite().all():
                    self._keep(key, of_text)
            found.append(of_text)
        hidden = found[0].new_zeros(*batch.input_ids.shape, found[0].shape[-1])
        for (row, columns, _), of_text in zip(batch.texts, found, strict=True):
            hidden[row, columns] = of_text
        return hidden

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
        self._database = None

    def _read(self, key: bytes) -> Tensor | None:
        if self._database is None:
            return None
        try:
            rows = self._database.execute("SELECT checksum, states FROM kept WHERE key = ?", (key,))
            for checksum, stored in rows:
                if checksum == zlib.crc32(stored, zlib.crc32(key)):
                    return load(stored)["states"]
        except sqlite3.Error as error:
            self._give_up(error)
        return None

    def _keep(self, key: bytes, states: Tensor) -> None:
        size = states.nbytes
        if self._database is None or size > self.room:
            return
        stored = save({"states": states.contiguous()})
        row = (key, zlib.crc32(stored, zlib.crc32(key)), stored)
        try:
            self._database.execute("INSERT OR REPLACE INTO kept VALUES (?, ?, ?)", row)
            self.room -= size
        except (sqlite3.Error, OverflowError) as error:  # a full disk, or a text of 2 GiB
            self._warn(f"{self.path} keeps no more states: {error}")
            self.room = 0

    def _give_up(self, error: Exception) -> None:
        self._warn(f"{self.path} is not used any more: {error}")
        self.close()
