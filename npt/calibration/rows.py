"""Rows of numbers on disk or on a device: a layer's inputs and outputs for every token.

The file has no name and is gone with its object, whatever ends the process. Its whole length is
reserved when it is made: written to lazily, a full disk would kill the process at some later page.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile

import torch
from torch import Tensor

from npt.calibration.placement import HOST
from npt.errors import ConfigError


class Rows:
    """[N, D] fp32 on a device, or for the CPU in a nameless temporary file.

    Raises:
        ConfigError: the disk of temporary files (TMPDIR) has no room.
    """

    def __init__(self, count: int, width: int, device: torch.device = HOST):
        self._rows = (
            _in_file(count, width) if device == HOST else torch.zeros(count, width, device=device)
        )

    @property
    def device(self) -> torch.device:
        return self._rows.device

    def __len__(self) -> int:
        return len(self._rows)

    def write(self, start: int, rows: Tensor) -> None:
        """Put [n, D] rows at `start`."""
        self._rows[start : start + len(rows)] = rows.to(self._rows.device, torch.float32)

    def read(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Return the rows from `start` up to `stop` on the device, [stop - start, D].

        From a file to a GPU they go through pinned memory, so that the host need not wait.
        """
        return self._moved(self._rows[start:stop], device)

    def take(self, index: Tensor, device: torch.device) -> Tensor:
        """Return the rows at `index` [n], best on the rows' own device, on the device: [n, D]."""
        return self._moved(self._rows[index.to(self._rows.device)], device)

    def _moved(self, rows: Tensor, device: torch.device) -> Tensor:
        if device.type == "cuda" and rows.device == HOST:
            return rows.pin_memory().to(device, non_blocking=True)
        return rows.to(device)


def _in_file(count: int, width: int) -> Tensor:
    size = 4 * count * width
    with tempfile.TemporaryFile(prefix="npt-calibration-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise ConfigError(
                f"calibration needs {size >> 20} MiB of disk at a time below "
                f"{tempfile.gettempdir()}: {error.strerror}; set TMPDIR to a larger disk, or lower "
                "--calibration_tokens"
            ) from error
        numbers = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.float32)
    return numbers.view(count, width)
