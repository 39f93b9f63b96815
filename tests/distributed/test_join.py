"""Who joins a run, and which device each process computes on."""

from __future__ import annotations

import json
import socket
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from npt.distributed.join import _check_devices, _own_device, join_processes
from npt.errors import ConfigError, ProcessError


def placed(gpus: list[str]) -> list[str]:
    """Return what `_check_devices` says to each process, by the GPU that each has ("" for none)."""
    store, said = dist.HashStore(), {}

    def check(process: int) -> None:
        device = torch.device("cuda" if gpus[process] else "cpu")
        try:
            _check_devices(store, process, len(gpus), device)
        except ConfigError as error:
            said[process] = str(error)

    uuids = iter(gpus)
    with mock.patch("torch.cuda.get_device_properties", lambda device: mock.Mock(uuid=next(uuids))):
        for process, gpu in enumerate(gpus[:-1]):  # what the others will have written
            store.set(f"npt/device/{process}", json.dumps([socket.gethostname(), gpu]))
        uuids = iter(gpus[-1:])
        check(len(gpus) - 1)
    return list(said.values())


def test_two_processes_on_one_gpu_are_named() -> None:
    assert placed(["GPU-a", "GPU-b"]) == [] and placed(["", ""]) == []
    (said,) = placed(["GPU-a", "GPU-b", "GPU-a"])
    assert said.startswith(
        f"process 0 and process 2 would share the GPU GPU-a of {socket.gethostname()}; "
    )
    (said,) = placed(["GPU-a", ""])
    assert said.startswith("process 0 computes on a GPU and process 1 finds none that it can use; ")


@pytest.mark.parametrize(("count", "local_rank", "index"), [(1, 0, 0), (1, 3, 0), (4, 3, 3)])
def test_a_process_that_is_shown_one_gpu_takes_it(
    monkeypatch: pytest.MonkeyPatch, count: int, local_rank: int, index: int
) -> None:
    chosen: list[int] = []
    monkeypatch.setenv("NPT_DEVICE", "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    assert _own_device({}, local_rank) == torch.device("cuda", index) and chosen == [index]
    if count > 1:
        with pytest.raises(
            ConfigError,
            match=(
                "process 4 of this machine has no GPU of its own, there are 4; start at most 4 here"
            ),
        ):
            _own_device({}, 4)


SEVERAL = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "2"}, "WORLD_SIZE is 2, but RANK is 2; start the processes with torchrun"),
        ({"WORLD_SIZE": "two"}, "are whole numbers: .*'two'"),
        ({"MASTER_ADDR": None}, "WORLD_SIZE is 2, but MASTER_ADDR is not set; start"),
        ({"RANK": None}, "WORLD_SIZE is 2, but RANK is not set; start"),
    ],
)
def test_variables_that_do_not_fit_together_are_named(changed, message) -> None:
    environment = {k: v for k, v in {**SEVERAL, **changed}.items() if v is not None}
    with pytest.raises(ConfigError, match=message):
        join_processes(environment=environment)


def test_who_does_not_come_is_said() -> None:
    with pytest.raises(ProcessError, match="process 1 did not meet the 1 other processes"):
        join_processes(0.1, SEVERAL)


@pytest.mark.parametrize("environment", [{}, {**SEVERAL, "WORLD_SIZE": "1"}])
def test_one_process_is_alone(environment: dict[str, str]) -> None:
    assert join_processes(environment=environment).size == 1
