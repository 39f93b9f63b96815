"""Cards of other generations are refused or warned of when a model is loaded, in one line."""

import warnings

import pytest
import torch
from simulated_cuda import simulated_cuda

import npt
from npt.base.precision import fp32_products, set_matmul_precision
from npt.device import check_card
from npt.errors import ConfigError

CUDA = torch.device("cuda")


def test_a_card_without_kernels_is_refused_before_weights_are_read(monkeypatch) -> None:
    monkeypatch.setattr("npt.base.load._read_weights", lambda *_, **__: pytest.fail("read"))
    for load in (npt.load_base, npt.load_teacher):
        with simulated_cuda(capability=(7, 0)), pytest.raises(ConfigError) as refusal:
            load("tiny", device="cuda")
        line = str(refusal.value)
        assert "simulated (compute capability 7.0), only sm_75 sm_80" in line
        assert "whl/cu126" in line and "NPT_DEVICE=cpu" in line and "\n" not in line


def test_kernels_run_on_later_cards_of_their_generation_and_as_ptx() -> None:
    for capability in ((7, 5), (8, 0), (8, 9), (9, 0), (12, 1), (13, 0)):
        with simulated_cuda(capability=capability):
            check_card(CUDA)
    for capability in ((7, 2), (11, 0)):
        with simulated_cuda(capability=capability), pytest.raises(ConfigError, match="no kernels"):
            check_card(CUDA)


def test_a_device_that_is_not_there_is_named() -> None:
    for context in (simulated_cuda(devices=2), warnings.catch_warnings()):
        with context, pytest.raises(ConfigError, match=r"no device cuda:2 \(torch sees [02] GPUs"):
            npt.load_base(device="cuda:2")


@pytest.mark.parametrize(
    "arguments", [{"quantization": "nf4", "compute_dtype": "bf16"}, {"dtype": "bf16"}]
)
def test_bf16_before_ampere_is_warned_of(monkeypatch, arguments) -> None:
    class Loading(Exception): ...

    def begin(*_: object, **__: object) -> None:
        raise Loading

    monkeypatch.setattr("npt.base.load._read_weights", begin)
    with (
        simulated_cuda(capability=(7, 5)),
        pytest.raises(Loading),
        pytest.warns(UserWarning, match=r"simulated \(.* 7.5\) emulates bf16.*compute in fp32"),
    ):
        npt.load_base(device="cuda", **arguments)
    for capability, others in (((8, 0), arguments), ((7, 5), {"quantization": "nf4"})):
        quiet = warnings.catch_warnings(action="error")
        with simulated_cuda(capability=capability), pytest.raises(Loading), quiet:
            npt.load_base(device="cuda", **others)


def test_tf32_before_ampere_is_warned_of() -> None:
    with simulated_cuda(capability=(7, 5)), fp32_products("highest"):
        model = torch.nn.Linear(2, 2, device="cuda")
        with pytest.warns(UserWarning, match=r"7.5\) has no TF32.*remove --matmul_precision high"):
            set_matmul_precision("high", model)
