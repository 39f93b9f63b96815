"""The default device: a GPU if the machine has one."""

import os
import warnings

import pytest
import torch

import npt
from npt import device as module
from npt.base.source import read_config
from npt.config import BaseConfig, DataConfig, NPTConfig, TrainConfig
from npt.device import default_device
from npt.doctor.plan import Workload
from npt.errors import ConfigError


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where torch says that it has a GPU; whatever is put there fails, as torch has
    none.
    """
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)


def test_tests_compute_on_the_cpu_on_a_machine_with_a_gpu(gpu: None) -> None:
    assert default_device() == torch.device("cpu")
    model, _ = npt.load_base("tiny", quantization="nf4")  # were it sent to the GPU, this would fail
    assert model.device.type == "cpu"
    workload = Workload.of(
        BaseConfig(), read_config("tiny"), NPTConfig(), TrainConfig(), DataConfig().max_length
    )
    assert workload.device.type == "cpu"


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


def test_a_gpu_that_torch_cannot_use_is_warned_of_once(tmp_path, monkeypatch) -> None:
    """A run would take days on the CPU, and say so in one word of one line."""
    monkeypatch.delenv("NPT_DEVICE")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr(module, "DRIVER", tmp_path / "version")
    for hiding in ("0", "-1", ""):  # first without a driver, then with the GPU hidden on purpose
        module._warn_of_idle_gpu.cache_clear()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hiding)
        with warnings.catch_warnings(action="error"):
            assert default_device().type == "cpu"
        module.DRIVER.touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    module._warn_of_idle_gpu.cache_clear()
    with pytest.warns(
        UserWarning, match="on the CPU: torch .* built for CUDA 13.0, cannot"
    ) as said:
        default_device()
        default_device()
    assert len(said) == 1
    module._warn_of_idle_gpu.cache_clear()
