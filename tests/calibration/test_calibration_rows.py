"""Rows on disk: what is written is read, and a full disk is one line."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from npt.calibration.rows import Rows
from npt.errors import ConfigError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_written_is_read_back_in_fp32(dtype) -> None:
    values = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = Rows(10, 3)
    rows.write(2, values)
    assert torch.equal(rows.read(2, 9, torch.device("cpu")), values.float())
    assert not rows.read(0, 2, torch.device("cpu")).any()
    assert len(rows) == 10


def test_a_full_disk_is_one_line_before_anything_is_written(monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        ConfigError, match=r"calibration needs 4 MiB of disk.*No space left.*TMPDIR"
    ):
        Rows(1024, 1024)
