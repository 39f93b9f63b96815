"""The Triton kernels, interpreted on the CPU, against the plain form, and compiled for GPUs."""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launches import Launches
from simulated_cuda import no_waits, simulated_cuda
from test_fused import (
    assert_same,
    form_of,
    gradients,
    modulated,
    modulated_product,
    modulation_of,
    normal,
    weights_of,
)
from test_trained import FORMS, run, student
from torch import Tensor
from torch.nn import functional as F

import compile_kernels
import fill
import npt.adapters.kernels
from npt.adapters import trained
from npt.adapters.converted import decoder_layers
from npt.adapters.trained import TorchModulation
from npt.base.precision import fp32_products

triton = pytest.importorskip("triton")

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@pytest.fixture(scope="module")
def kernels() -> Any:
    """A copy of the module whose kernels are interpreted."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(triton.knobs.runtime, "interpret", True)
        spec = importlib.util.find_spec("npt.adapters.kernels")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    # several tiles and blocks of few numbers: a program takes the interpreter milliseconds
    module.ROOM, tile = 12_000, {"BM": 16, "BN": 64, "num_warps": 4}
    module.TILES = dict.fromkeys(module.TILES, tile)
    return module


@pytest.fixture(params=["high", "highest"], ids=["multiplied by kernels", "multiplied by torch"])
def compared(request, kernels, monkeypatch) -> Iterator[Any]:
    """Calls a function with the kernels in use, and without."""

    def both(act: Callable[[], Any]) -> tuple[Any, Any]:
        monkeypatch.setattr(trained, "_backend", lambda _: kernels.TritonModulation)
        computed = act()
        monkeypatch.setattr(trained, "_backend", lambda _: TorchModulation)
        return computed, act()

    with fp32_products(request.param):
        yield both


@pytest.mark.parametrize(
    ("rows", "columns", "rank", "terms", "count", "of_products", "regularised"),
    [
        (37, 150, 5, (1, 1, 1, 1), 2, True, True),
        (37, 150, 1, (1, 1, 1, 1), 2, False, False),
        (48, 128, 16, (1, 1, 1, 1), 2, True, True),
        (30, 130, 48, (1, 1, 1, 1), 2, True, True),
        (25, 70, 16, (1, 0, 1, 0), 2, True, True),
        (25, 70, 16, (0, 1, 0, 1), 2, True, True),
        (20, 40, 4, (1, 0, 0, 1), 2, True, True),
        (20, 40, 4, (0, 0, 1, 1), 2, False, True),
        (25, 70, 3, (0, 0, 0, 0), 2, True, False),
        (0, 8, 2, (1, 1, 1, 1), 2, True, True),
        (33, 129, 7, (0, 1), 1, True, False),
        (9, 40, 2, (1, 0), 1, False, True),
        (40, 64, 16, (1, 1), 1, True, True),
    ],
)
def test_kernels_are_the_plain_form(
    compared, rows, columns, rank, terms, count, of_products, regularised
):
    """Rows and columns that tiles do not divide, terms and gradients left out."""
    products = [normal(i, rows, columns).requires_grad_(of_products) for i in range(count)]
    weights = zip(weights_of(rank, columns, True, True, 3), terms, strict=False)
    inputs = [
        *products,
        normal(2, rows, rank).requires_grad_(),
        *(w if t else None for w, t in weights),
    ]
    act = modulated_product if count == 2 else modulated
    assert_same(*compared(lambda: gradients(act, inputs, form_of(0.4, 0.3), regularised)))


def test_the_gradient_of_a_summed_energy_is_one_number_for_all_rows(compared):
    grad, gate, up = (normal(i, 20, 40) for i in range(3))
    weights = [w.detach() for w in weights_of(4, 40, True, True, 3)]

    def act(of_energy: Tensor) -> list[Tensor]:
        modulation = modulation_of(form_of(0.5, 0.3), normal(4, 20, 4), (gate, up), weights)
        grad_z, grads = modulation.backward(grad, of_energy, [None, None])
        return [grad_z, *grads]

    expanded, _ = compared(lambda: act(torch.tensor(3.0).expand(20)))
    assert_same(expanded, act(torch.full((20,), 3.0)))


def test_the_teachers_product_comes_out_of_the_same_pass(compared):
    gate, up, of_gate, of_up = (normal(i, 20, 40) for i in range(4))
    weights = [w.detach() for w in weights_of(4, 40, True, True, 3)]

    def act() -> tuple[Tensor, ...]:
        out, taught = of_gate.clone(), of_up.clone()
        modulation = modulation_of(form_of(0.5, 0.3), normal(4, 20, 4), (gate, up), weights)
        return modulation.forward(out, taught), out, taught

    computed, plain = compared(act)
    assert_same(computed, plain)
    assert_same(computed[2:], (F.silu(of_gate) * of_up,))


@pytest.mark.parametrize("form", FORMS[:5], ids=str)
@pytest.mark.parametrize(("teach", "graph"), [(True, False), (False, True)])
def test_a_layer_computes_the_same(compared, load_model, form, teach, graph):
    layer = decoder_layers(student(load_model, form))[1]
    assert_same(*compared(lambda: tuple(run(layer, teach=teach, graph=graph))))


def test_the_gradient_of_a_transpose_lies_by_columns(compared, load_model):
    layer = decoder_layers(student(load_model, FORMS[0]))[1]

    def act() -> tuple[Tensor, ...]:
        layer.npt.zero_grad()
        hidden, attention = (normal(i, 40, 64).requires_grad_() for i in range(2))
        output, energy, _ = trained.trained_output(layer, hidden, attention)
        ((output.t().contiguous() * normal(2, 64, 40)).sum() + energy.sum()).backward()
        return *(p.grad.clone() for p in layer.npt.parameters()), hidden.grad, attention.grad

    assert_same(*compared(act))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["gate", "up", "z", "M", "B"])
def test_a_bad_number_reaches_what_it_reaches_in_the_plain_form(compared, value, where):
    inputs: list[Any] = [normal(i, 30, 70).requires_grad_() for i in range(2)]
    inputs += [normal(2, 30, 5).requires_grad_(), *weights_of(5, 70, True, True, 3)]
    with torch.no_grad():
        inputs[["gate", "up", "z", "M", "B"].index(where)].view(-1)[6] = value
    act = lambda: gradients(modulated_product, inputs, form_of(0.5, 0.3), True)  # noqa: E731
    for one, other in zip(*compared(act), strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())
        assert_same((one.nan_to_num(0, 0, 0),), (other.nan_to_num(0, 0, 0),))


def test_on_a_card_they_wait_for_nothing_and_are_few_launches(kernels, monkeypatch):
    tensors = [normal(0, n, m) for n, m in [(20, 64)] * 3 + [(20, 5)] + [(64, 5)] * 4]

    def step() -> tuple[list[Tensor], int]:
        with simulated_cuda():
            gate, up, grad, *others = (tensor.to("cuda") for tensor in tensors)
            z, *weights = others
            modulation = modulation_of(form_of(0.5, 0.3), z, (gate, up), weights)
            out = torch.empty_like(gate)
            with no_waits(), Launches() as launches:
                energy = modulation.forward(out)
                grad_z, grads = modulation.backward(grad, energy, [None, None])
            parts = out, grad_z, *grads
            return [part.cpu() for part in parts], launches.counts.total()

    plain, many = step()
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())  # not simulated
    monkeypatch.setattr(trained, "_backend", lambda _: kernels.TritonModulation)
    computed, _ = step()
    assert_same(tuple(computed), tuple(plain))
    started: list[Any] = []
    monkeypatch.setattr(kernels._Work, "launch", lambda *_: started.append(_))
    _, few = step()
    assert (len(started), few + len(started), many) == (2, 16, 92)


def test_what_they_cannot_compute_takes_the_plain_form(monkeypatch):
    assert trained._backend(torch.ones(1)) is TorchModulation
    with simulated_cuda():
        assert trained._backend(torch.ones(1, device="cuda")) is TorchModulation
    on_card = SimpleNamespace(is_cuda=True, get_device=lambda: 0)
    monkeypatch.setattr(trained, "Tensor", SimpleNamespace)
    module, uncached = npt.adapters.kernels, trained._backend_on.__wrapped__
    monkeypatch.setattr(trained, "_backend_on", uncached)
    monkeypatch.setattr(module, "_nothing", None)
    with pytest.warns(UserWarning, match="Triton cannot build kernels for cuda:0: .* C compiler"):
        assert trained._backend(on_card) is TorchModulation
    monkeypatch.setattr(module, "try_out", lambda device: None)
    assert trained._backend(on_card) is module.TritonModulation
    with monkeypatch.context() as broken, pytest.warns(UserWarning, match="cuda:0: .*halted"):
        broken.delattr(npt.adapters, "kernels")
        broken.setitem(sys.modules, module.__name__, None)
        assert trained._backend(on_card) is TorchModulation
    monkeypatch.setattr(trained, "installed", lambda _: False)
    assert trained._backend(on_card) is TorchModulation


@pytest.mark.parametrize("precision", ["high", "highest"])
@pytest.mark.parametrize(
    ("width", "rank", "terms"), [(8, 4, 1), (576, 64, 2), (1 << 17, 1 << 14, 4)]
)
def test_a_launch_has_no_more_rows_than_grids_and_offsets_reach(precision, width, rank, terms):
    gate, z, weight = (
        torch.empty(*s, device="meta") for s in ((1 << 22, width), (1 << 22, rank), (width, rank))
    )
    with fp32_products(precision):
        weights = [weight] * terms + [None] * (4 - terms)
        modulation = modulation_of(form_of(0.5, 0.3), z, (gate, gate), weights)
        work = npt.adapters.kernels._Work(modulation, leaves=True)
    assert triton.cdiv(work.length, work.tile["BM"]) < 1 << 16
    assert work.length * max(width, work.columns) < 1 << 31


@pytest.mark.parametrize("architecture", compile_kernels.ARCHITECTURES)
def test_they_compile_without_a_gpu_and_no_register_spills(architecture):
    rows = json.loads((fill.RESULTS / "kernels.json").read_text())["kernels"]
    listed = {(r["kernel"], r["rank"]) for r in rows if r["architecture"] == architecture}
    cases = set(compile_kernels.cases(architecture))
    assert cases == listed and len(cases) == (2 if architecture == 75 else 6)
    for case in cases:
        made = compile_kernels.compiled(*case, architecture)
        assert made["spilled"] == 0 and 16 < made["registers"] <= 255, case
