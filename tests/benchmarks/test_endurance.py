"""A short form of the campaign of `crash.py`: kills at random instants, flipped bits."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked import status_of

import crash


def with_openmp(act: Callable[[], int]) -> int:
    """The status of an act of a forked process in which OpenMP has a second thread, as it has by
    default once something has computed.
    """

    def computing() -> int:
        # for its own children; spinning they would cost fourfold
        os.environ.update(OMP_NUM_THREADS="2", OMP_WAIT_POLICY="PASSIVE")
        torch.set_num_threads(2)
        before = len(os.listdir("/proc/self/task"))
        (torch.ones(1 << 20) + 1).sum()
        return act() if len(os.listdir("/proc/self/task")) > before else 71

    return status_of(computing)


def test_killed_at_random_instants_a_run_loses_nothing(tmp_path: Path) -> None:
    """From a process with OpenMP's threads: a child forked from them would wait for ever for
    those that it does not have.
    """

    def campaign() -> int:
        with (tmp_path / "figures").open("w") as out, contextlib.redirect_stdout(out):
            flags = ["--kills", "1", "--bit_flips", "20", "--steps", "3", "--json"]
            return crash.main(flags)

    status = with_openmp(campaign)
    figures = json.loads((tmp_path / "figures").read_text())
    assert status == 0, figures["problems"]
    assert all(figures[name] == 1 for name in ("kills", "resumed", "bit_equal"))
    assert figures["lost"] == 0 and figures["bit_flips"] == figures["bit_flips_found"] == 20


def test_the_campaign_finds_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that nobody compares."""
    monkeypatch.setattr(crash, "verify_checkpoint", lambda folder: None)
    checkpoint = tmp_path / "reference" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    campaign = crash.Campaign(tmp_path, 0, 1)
    campaign.flip_bits(6)
    assert (campaign.figures.bit_flips, campaign.figures.bit_flips_found) == (6, 0)
