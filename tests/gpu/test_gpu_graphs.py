"""A CUDA graph of a micro-batch proves itself on a card, is used, and has the usual bits."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from gpu_student import micro_batch, student
from torch import Tensor
from windows import StudentStep

import npt
from npt.adapters.converted import adapter_parameters
from npt.distill.graphed import SIGHTS, STEPS, record
from npt.distill.local import local, takes_graphs

pytestmark = pytest.mark.gpu

FORMS = ({}, {"active": 4, "token_rank": 8}, {"residual": "keep"})


def need_graphs() -> None:
    if not takes_graphs(torch.zeros(1, device="cuda")):
        pytest.skip(f"NOT TESTED: torch {torch.__version__} may not survive a failed capture")


def fill_free_memory() -> list[Tensor]:
    """Return tensors of NaN, in memory that a graph might wrongly read or write."""
    gc.collect()
    torch.cuda.empty_cache()
    sizes = (1 << 8, 1 << 16, 1 << 20, 1 << 24)
    return [torch.full((size,), torch.nan, device="cuda") for size in sizes for _ in range(4)]


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_is_used_and_has_the_usual_bits(form) -> None:
    """While the adapters are trained, in place, and others use the memory that is free."""
    need_graphs()
    model, _ = student()
    npt.detach(model)
    npt.attach(model, npt.NPTConfig(additive_scale=1.0, rank=16, **form), seed=0)
    parameters = adapter_parameters(model).values()
    config = npt.TrainConfig(regularization_lambda=0.1)

    def step(seed: int, graph: bool) -> list[Tensor]:
        for parameter in parameters:
            parameter.grad = None
        batch = micro_batch(seed, "full").to(torch.device("cuda"))
        sums = local(model, batch, config, graph=graph)
        return [sums.report, *(p.grad for p in parameters if p.grad is not None)]

    def compare(seed: int) -> None:
        others = fill_free_memory()
        found = step(seed, graph=True)
        for one, other in zip(found, step(seed, graph=False), strict=True):
            assert torch.equal(one, other)
        assert all(other.isnan().all() for other in others)

    train_step = StudentStep(model, local, config, [1e-3])
    outcomes = []
    with warnings.catch_warnings():
        # of a graph that does not prove itself
        warnings.filterwarnings("error", message="Training runs without a CUDA graph")
        for seed in range(SIGHTS + 3):
            compare(seed)
            with torch.no_grad():
                for parameter in parameters:
                    parameter.grad = None
                    parameter.mul_(1.01)
            outcomes += train_step.run([micro_batch(seed, "full")])
    outcomes += train_step.guard.flush()
    assert all(outcome.applied for outcome in outcomes) and len(outcomes) == SIGHTS + 3
    assert STEPS[model].graph is not None


def test_a_failed_capture_leaves_the_card_as_it_was() -> None:
    need_graphs()
    model, _ = student()
    ids = micro_batch(0, "full").input_ids.to("cuda")
    with torch.no_grad():
        before = model(ids).logits
        stream = torch.cuda.current_stream()
        with pytest.raises(RuntimeError):
            record(lambda: torch.ones(1, device="cuda").tolist())  # the host waits
        torch.cuda.empty_cache()
        torch.rand(1, device="cuda")
        assert torch.cuda.current_stream() == stream
        # bitsandbytes ends the process on an error that is still pending
        assert torch.equal(model(ids).logits, before)
