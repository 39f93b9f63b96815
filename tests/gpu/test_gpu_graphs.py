"""A CUDA graph of a micro-batch proves itself on a card, is used, and has the usual bits."""

from __future__ import annotations

import warnings

import pytest
import torch
from gpu_student import micro_batch, student

import npt
from npt.adapters.converted import adapter_parameters
from npt.distill.graphed import SIGHTS, STEPS
from npt.distill.local import local, takes_graphs

pytestmark = pytest.mark.gpu

FORMS = ({}, {"active": 4, "token_rank": 8}, {"residual": "keep"})


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_is_used_and_has_the_usual_bits(form) -> None:
    model, _ = student()
    npt.detach(model)
    npt.attach(model, npt.NPTConfig(additive_scale=1.0, rank=16, **form), seed=0)
    parameters = adapter_parameters(model).values()
    config = npt.TrainConfig(regularization_lambda=0.1)

    def step(seed: int, graph: bool) -> list[torch.Tensor]:
        for parameter in parameters:
            parameter.grad = None
        batch = micro_batch(seed, "full").to(torch.device("cuda"))
        if not takes_graphs(batch.input_ids):
            pytest.skip(f"NOT TESTED: torch {torch.__version__} may not survive a failed capture")
        sums = local(model, batch, config, graph=graph)
        return [sums.report, *(p.grad for p in parameters if p.grad is not None)]

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a graph that does not prove itself
        found = [step(seed, graph=True) for seed in range(SIGHTS + 3)]
    assert STEPS[model].graph is not None
    for seed, each in enumerate(found):
        assert all(map(torch.equal, each, step(seed, graph=False)))
