"""Rows of numbers on disk: what a layer reads and gives for every calibration token, without holding it in memory.

The file has no name and is gone with its object, whatever ends the process. Its whole length is reserved when it is made: written to
lazily, a full disk would kill the process at some later page instead of refusing here.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile

import torch
from torch import Tensor

from npt.errors import ConfigError


class Rows:
    """[N, D] fp32 in a nameless temporary file, written and read in slices.

    Args:
        count: N.
        width: D.

    Raises:
        ConfigError: there is no room for it where temporary files go (TMPDIR).
    """

    def __init__(self, count: int, width: int):
        size = 4 * count * width
        with tempfile.TemporaryFile(prefix="npt-calibration-") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                raise ConfigError(
                    f"calibration needs {size >> 20} MiB of disk at a time below {tempfile.gettempdir()}: {error.strerror}; set TMPDIR to "
                    "a larger disk, or lower --calibration_tokens"
                ) from error
            self._rows = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.float32).view(count, width)

    def __len__(self) -> int:
        return len(self._rows)

    def write(self, start: int, rows: Tensor) -> None:
        """Put [n, D] rows at `start`."""
        self._rows[start : start + len(rows)] = rows.to("cpu", torch.float32)

    def read(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Rows from `start` up to `stop`, on the device: [stop - start, D]."""
        return self._rows[start:stop].to(device)
