"""The devices that a calibration keeps its matrices on, and the host where they do not fit."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rich.console import Console
from simulated_cuda import Simulated, simulated_cuda, to_cuda
from test_calibrate import calibrate, student, weights
from torch import Tensor

import npt
from live_memory import peak_bytes
from npt.adapters.attach import at_random_start
from npt.base.precision import fp32_products
from npt.base.random_base import random_base
from npt.calibration import calibrate as module
from npt.calibration import cut, sensitivity
from npt.calibration.placement import HOST, Placement, Plan, free_bytes, or_on_host, plan
from npt.data.batch import batch_from_tensors
from npt.doctor.shape import Shape, llama_config

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


@pytest.fixture
def expected(load_model, tokenizer) -> dict[str, Tensor]:
    """The host's adapters."""
    model = student(load_model, **TINY)
    calibrate(model, tokenizer, **SHORT)
    return weights(model)


FREE = {"all": 60 << 30, "none": 0}


@pytest.mark.parametrize("free", FREE)
def test_a_calibration_on_a_device_gives_the_hosts_adapters(
    free, expected, load_model, tokenizer, cuda, monkeypatch
) -> None:
    """The simulated device computes as the CPU does: whatever is kept where, no bit may differ."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (FREE[free], 80 << 30))
    model, console = on_cuda(load_model), Console(file=io.StringIO(), width=400)
    calibrate(model, tokenizer, **SHORT, console=console)
    assert all(isinstance(x, Simulated) for x in weights(model).values())
    assert_equal(held(model), expected)
    said = console.file.getvalue().splitlines()[0]
    if free == "all":
        assert "; matrices on cuda:0, factorisations on cuda:0" in said
        assert "61,440 MiB free on cuda:0" in said
    else:
        assert "; matrices on the host, factorisations on the host" in said


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
    assert "begun again with matrices on the host, factorisations on the host" in line


def test_without_memory_on_the_host_path_either_nothing_is_changed(
    load_model, tokenizer, cuda, monkeypatch
) -> None:
    def of(*_: Any) -> Any:
        raise out_of_memory()

    monkeypatch.setattr(module.Cut, "of", of)
    model = on_cuda(load_model)
    before = held(model)
    with pytest.raises(torch.OutOfMemoryError):
        calibrate(model, tokenizer, **SHORT)
    assert_equal(held(model), before)
    assert at_random_start(model)


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    tried: list[Placement] = []

    def act(where: Placement) -> None:
        tried.append(where)
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        or_on_host(act, Placement(HOST, CUDA), lambda line: None)
    assert len(tried) == 1


def sized(**bytes_of: int) -> Plan:
    """A plan in which each thing takes 100 bytes unless told otherwise; its D is 1."""
    names = ("graph", "sums", "factor")
    return Plan(**{"gram": 4, **dict.fromkeys(names, 100), **bytes_of})


@pytest.mark.parametrize(
    ("free", "placement"),
    [
        (223, Placement(CUDA, CUDA)),  # 200 while a layer is factorised
        (222, Placement(HOST, CUDA)),
        (110, Placement()),
        (0, Placement()),
    ],
)
def test_what_fits_is_kept_on_the_device(free, placement) -> None:
    assert sized().place(CUDA, free) == placement


def test_memory_that_the_allocator_holds_unused_counts_as_free(cuda, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 500)
    assert free_bytes(CUDA) == 1200


@pytest.mark.parametrize(
    ("shape", "rows"),
    [(Shape(4, 256, 768, 4, 2, 64, 512), 4), (Shape(5, 128, 512, 4, 4, 32, 2048), 2)],
)
def test_the_graph_of_a_batch_is_predicted(shape, rows) -> None:
    config = llama_config(shape, 64)
    model = random_base(config, device="cpu")
    npt.attach(model, npt.NPTConfig(layers="1", rank=4))
    ids = torch.randint(3, 500, (rows, 64), generator=torch.Generator().manual_seed(0))
    batch = batch_from_tensors(ids, torch.ones_like(ids))
    made = plan(config, (1,), batch=(rows, 64))
    taken = peak_bytes(lambda: sensitivity.measure(model, [batch], 0, lambda b: None), "cpu")
    assert made.graph + made.sums == pytest.approx(taken, rel=0.15)


def test_tf32_reaches_no_product_of_the_matrices(load_model, tokenizer, monkeypatch) -> None:
    seen, gram = [], sensitivity._gram

    def watched(rows: Tensor) -> Tensor:
        inside.append(1)
        try:
            return gram(rows)
        finally:
            inside.pop()

    product, inside = torch.Tensor.__matmul__, []

    def matmul(one: Tensor, other: Tensor) -> Tensor:
        seen.append(torch.get_float32_matmul_precision()) if inside else None
        return product(one, other)

    monkeypatch.setattr(torch.Tensor, "__matmul__", matmul)
    monkeypatch.setattr(sensitivity, "_gram", watched)
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


def test_an_eigendecomposition_that_fails_is_repeated_on_the_host(cuda, monkeypatch) -> None:
    original, tried = torch.linalg.eigh, []

    def eigh(matrix: Tensor) -> Any:
        tried.append(matrix.device.type)
        if matrix.device.type == "cuda":
            raise torch.linalg.LinAlgError("linalg.eigh: failed to converge")
        return original(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    matrix = torch.diag(torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64)).to(CUDA)
    values, vectors = cut.eigh(matrix)
    assert tried == ["cuda", "cpu"] and values.device == vectors.device == CUDA
    assert values.tolist() == [1.0, 2.0, 3.0]


def test_a_calibration_within_no_grad_is_the_same(expected, load_model, tokenizer) -> None:
    model = student(load_model, **TINY)
    with torch.no_grad():
        calibrate(model, tokenizer, **SHORT)
    assert_equal(weights(model), expected)
