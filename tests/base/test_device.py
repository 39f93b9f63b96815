"""The default device: a GPU if the machine has one, and a warning if it cannot be used."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import npt
from npt.base import device as module
from npt.base.device import default_device, unusable_gpu
from npt.base.load import read_config
from npt.config import BaseConfig, DataConfig, NPTConfig, TrainConfig
from npt.distributed.join import join_processes
from npt.errors import ConfigError
from npt.planning.memory import Workload

CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Oct 19 17:36:10 UTC 2023\nGCC version:"
    "  gcc version 12.3.0\n"
)
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build "
    " (dvs-builder@U16)\n"
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where torch says that it has a GPU; whatever is put there fails, as torch has
    none.
    """
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`machine(driver, cuda)`: the root of a machine with a GPU and this driver (None: no driver),
    for a torch built for `cuda`.
    """

    def make(
        driver: str | None, cuda: str | None, words: str = CLOSED, visible: str | None = None
    ) -> Path:
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / "nvidia0").touch()
        if driver is not None:
            (tmp_path / "proc/driver/nvidia").mkdir(parents=True, exist_ok=True)
            (tmp_path / "proc/driver/nvidia/version").write_text(
                words.format(driver), encoding="utf-8"
            )
        monkeypatch.setattr("torch.version.cuda", cuda)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return tmp_path

    return make


# --- tests are for the CPU unless they are marked gpu
# ----------------------------------------------------------------


def test_tests_compute_on_the_cpu_on_a_machine_with_a_gpu(gpu: None) -> None:
    assert default_device() == torch.device("cpu")
    model, _ = npt.load_base("tiny", quantization="nf4")  # were it sent to the GPU, this would fail
    assert model.device.type == "cpu"
    workload = Workload.of(
        BaseConfig(), read_config("tiny"), NPTConfig(), TrainConfig(), DataConfig().max_length
    )
    assert workload.device.type == "cpu"


def test_processes_of_a_test_compute_on_the_cpu_despite_a_gpu(gpu: None) -> None:
    environment = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    # had a GPU been chosen, torch would have refused it
    with pytest.raises(npt.NPTError, match="did not meet"):
        join_processes(0.1, environment)


def test_processes_that_a_test_starts_inherit_the_choice() -> None:
    # read by what the tests above are of; importing torch would take seconds
    code = "import os; print(os.environ['NPT_DEVICE'])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "cpu\n"
    )


def test_a_test_marked_gpu_gets_the_gpu(gpu: None, request: pytest.FixtureRequest) -> None:
    root = str(request.config.rootpath / "tests" / "conftest.py")
    (conftest,) = [
        plugin
        for plugin in request.config.pluginmanager.get_plugins()
        if getattr(plugin, "__file__", None) == root
    ]
    request.node.add_marker("gpu")
    try:
        conftest.pytest_runtest_setup(request.node)
        assert default_device() == torch.device("cuda")
    finally:
        os.environ["NPT_DEVICE"] = "cpu"


# --- the choice itself
# -----------------------------------------------------------------------------------------------


def test_the_variable_decides(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, chosen in (("", "cuda"), ("cuda", "cuda"), ("cpu", "cpu")):
        monkeypatch.setenv("NPT_DEVICE", value)
        assert default_device().type == chosen
    monkeypatch.setenv("NPT_DEVICE", "tpu")
    with pytest.raises(ConfigError, match="NPT_DEVICE is 'tpu'; set it to cpu or cuda"):
        default_device()


def test_a_gpu_that_is_asked_for_and_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("NPT_DEVICE", "cuda")
    with pytest.raises(ConfigError, match="NPT_DEVICE is cuda, but "):
        default_device()


@pytest.mark.parametrize(
    ("driver", "cuda", "words", "said"),
    [
        (
            "535.129.03",
            "13.0",
            CLOSED,
            (
                "takes NVIDIA driver 580 or newer, and the driver here is 535.129.03; update the"
                " driver"
            ),
        ),
        (
            "560.35.03",
            "13.0",
            OPEN,
            "takes NVIDIA driver 580 or newer, and the driver here is 560.35.03; update the driver",
        ),
        (
            "470.10",
            "12.8",
            CLOSED,
            "takes NVIDIA driver 525 or newer, and the driver here is 470.10; update the driver",
        ),
        (
            None,
            "13.0",
            CLOSED,
            "is built for CUDA 13.0 and finds no NVIDIA driver; install driver 580 or newer",
        ),
        (
            "580.65.06",
            "13.0",
            OPEN,
            (
                "built for CUDA 13.0, cannot use the GPU with NVIDIA driver 580.65.06; see what"
                " nvidia-smi says"
            ),
        ),
        ("999.1", "14.2", OPEN, "cannot use the GPU with NVIDIA driver 999.1"),
    ],
)
def test_what_a_gpu_lacks_is_named(machine, driver, cuda, words, said) -> None:
    reason = unusable_gpu(machine(driver, cuda, words))
    assert reason is not None and said in reason and "\n" not in reason


def test_a_cpu_that_is_meant_is_not_warned_of(machine, tmp_path: Path) -> None:
    assert unusable_gpu(machine("535.1", None)) is None  # torch's build for the CPU
    for hiding in ("", "-1"):
        assert unusable_gpu(machine("535.1", "13.0", visible=hiding)) is None
    assert unusable_gpu(machine("535.1", "13.0", visible="0")) is not None
    machine(None, "13.0")
    assert unusable_gpu(tmp_path / "a machine without a GPU") is None


def test_the_warning_comes_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPT_DEVICE")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(module, "unusable_gpu", lambda: "the driver is too old")
    module._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="^computing on the CPU: the driver is too old$"):
        assert default_device().type == "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        default_device()
    module._warn_once.cache_clear()
