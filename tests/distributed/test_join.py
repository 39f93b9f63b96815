"""Who joins a run, and which device each process computes on."""

from contextlib import nullcontext

import pytest
import torch

from npt.distributed.join import _own_device, join_processes
from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError, ProcessError


@pytest.mark.parametrize(
    ("gpus", "refused"),
    [("abc", False), ("aba", True), (["a", None, "b"], True), ([None] * 3, False)],
)
def test_processes_without_a_gpu_of_their_own_are_refused(monkeypatch, gpus, refused) -> None:
    for name, value in {"RANK": "2", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: None)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 2)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    monkeypatch.setattr(ProcessGroup, "gather", lambda self, gpu: list(gpus))
    words = "^the processes use the GPUs a, (b|None), (a|b); start one process per GPU"
    with pytest.raises(ConfigError, match=words) if refused else nullcontext():
        assert join_processes().size == 3


@pytest.mark.parametrize(("count", "local_rank", "index"), [(1, 0, 0), (1, 3, 0), (4, 3, 3)])
def test_a_process_that_is_shown_one_gpu_takes_it(
    monkeypatch: pytest.MonkeyPatch, count: int, local_rank: int, index: int
) -> None:
    chosen: list[int] = []
    monkeypatch.setenv("NPT_DEVICE", "")
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    assert _own_device() == torch.device("cuda", index) and chosen == [index]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=r"process 2 .* no GPU of its own, since there are 2"):
        _own_device()


SEVERAL = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, r"^process 1 did not join the 2 processes .*; start them with torchrun"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR expected, but not set; start them with torchrun"),
    ],
)
def test_who_does_not_come_is_said(monkeypatch, changed, message) -> None:
    for name, value in {**SEVERAL, **changed}.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    with pytest.raises(ProcessError, match=message):
        join_processes(0.1)


@pytest.mark.parametrize("size", [None, "1"])
def test_one_process_is_alone(monkeypatch: pytest.MonkeyPatch, size: str | None) -> None:
    monkeypatch.setenv("WORLD_SIZE", size) if size else monkeypatch.delenv("WORLD_SIZE", False)
    assert join_processes().size == 1
