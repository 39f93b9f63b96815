"""The devices that a calibration keeps its matrices on, and the host where they do not fit."""

import io
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from simulated_cuda import Simulated, simulated_cuda, to_cuda
from test_calibrate import calibrate, student, weights
from torch import Tensor

from npt.adapters.converted import attached
from npt.base.precision import fp32_products
from npt.calibration import sensitivity
from npt.calibration.cut import Cut
from npt.calibration.together import HOST

CUDA = torch.device("cuda", 0)
TINY = {"layers": "1-2", "rank": 8}
SHORT = {"tokens": 300, "batch_size": 8}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A simulated GPU. Torch makes no generator for it; the host's gives the CPU's draws."""
    made = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": made())
    with simulated_cuda():
        yield


def on_cuda(load_model: Callable[..., Any], **form: Any) -> Any:
    return to_cuda(student(load_model, **{**TINY, **form}))


def held(model: Any) -> dict[str, Tensor]:
    return {name: x.held if isinstance(x, Simulated) else x for name, x in weights(model).items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.fixture(scope="module")
def expected(load_model) -> dict[str, Tensor]:
    """The host's adapters."""
    model = student(load_model, **TINY)
    calibrate(model, SimpleNamespace(pad_token_id=2), **SHORT)
    return weights(model)


@pytest.mark.parametrize("fails", [False, True], ids=["factorised there", "on the host"])
def test_a_calibration_on_a_device_gives_the_hosts_adapters(
    fails, expected, load_model, tokenizer, cuda, monkeypatch
) -> None:
    """The simulated device computes as the CPU does: whatever is kept where, no bit may differ."""
    eigh = torch.linalg.eigh

    def failing(matrix: Tensor) -> Any:
        if matrix.device.type == "cuda":
            raise torch.linalg.LinAlgError("linalg.eigh: failed to converge")
        return eigh(matrix)

    if fails:
        monkeypatch.setattr(torch.linalg, "eigh", failing)
    model, console = on_cuda(load_model), Console(file=io.StringIO(), width=400)
    calibrate(model, tokenizer, **SHORT, console=console)
    assert all(isinstance(x, Simulated) for x in weights(model).values())
    assert_equal(held(model), expected)
    assert ("failed to converge; retrying" in console.file.getvalue()) == fails


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines.")


def test_without_memory_for_the_grams_the_host_begins_the_walk_again(
    expected, load_model, tokenizer, cuda, monkeypatch
) -> None:
    original, calls = sensitivity._moved, []

    def moved(gram: Tensor, device: torch.device) -> Tensor:
        calls.append(device)
        if len(calls) == 5:
            raise out_of_memory()
        return original(gram, device)

    monkeypatch.setattr(sensitivity, "_moved", moved)
    model, console = on_cuda(load_model), Console(file=io.StringIO(), width=400)
    calibrate(model, tokenizer, **SHORT, console=console)
    assert_equal(held(model), expected)
    assert set(calls[:5]) == {CUDA} and set(calls[5:]) == {HOST}
    (line,) = [line for line in console.file.getvalue().splitlines() if "out of memory" in line]
    assert "retrying with its matrices on the host" in line


def test_without_memory_on_the_host_path_either_nothing_is_changed(
    load_model, tokenizer, cuda, monkeypatch
) -> None:
    def of(*_: Any) -> Any:
        raise out_of_memory()

    monkeypatch.setattr(Cut, "of", of)
    model = on_cuda(load_model)
    before = held(model)
    with pytest.raises(torch.OutOfMemoryError):
        calibrate(model, tokenizer, **SHORT)
    assert_equal(held(model), before)
    assert attached(model).random_start


def test_tf32_reaches_no_product_of_the_matrices(load_model, tokenizer, monkeypatch) -> None:
    seen, product_of = [], sensitivity.product

    def watched(*rows: Tensor) -> Tensor:
        inside.append(1)
        try:
            return product_of(*rows)
        finally:
            inside.pop()

    product, inside = torch.Tensor.__matmul__, []

    def matmul(one: Tensor, other: Tensor) -> Tensor:
        seen.append(torch.get_float32_matmul_precision()) if inside else None
        return product(one, other)

    monkeypatch.setattr(torch.Tensor, "__matmul__", matmul)
    monkeypatch.setattr(sensitivity, "product", watched)
    model = student(load_model, **TINY)
    torch.set_float32_matmul_precision("high")
    try:
        calibrate(model, tokenizer, **SHORT)
        assert torch.get_float32_matmul_precision() == "high"
        with pytest.raises(ValueError, match="inside"), fp32_products("highest"):
            raise ValueError("inside")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert set(seen) == {"highest"}


def test_a_calibration_within_no_grad_is_the_same(expected, load_model, tokenizer) -> None:
    model = student(load_model, **TINY)
    with torch.no_grad():
        calibrate(model, tokenizer, **SHORT)
    assert_equal(weights(model), expected)
