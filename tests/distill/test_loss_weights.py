"""Weights of layers and tokens: their mean is 1, and they depend on nothing that they must not
depend on.
"""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from npt.config import TrainConfig
from npt.distill.hidden_losses import disagreement_weights, layer_weights
from npt.errors import ConfigError

D = 6


@pytest.mark.parametrize(
    ("given_weights", "count", "expected"),
    [
        ("uniform", 3, [1.0, 1.0, 1.0]),
        ("linear", 1, [1.0]),
        ("linear", 3, [0.5, 1.0, 1.5]),
        ("1,2,5", 3, [0.375, 0.75, 1.875]),
        (" 2, 2 ", 2, [1.0, 1.0]),
        ((0.1, 0.1, 0.1), 3, [1.0, 1.0, 1.0]),
        ([1, 3], 2, [0.5, 1.5]),
        ("1e308,1e308", 2, [1.0, 1.0]),
    ],
)
def test_layer_weights_have_mean_1(given_weights, count, expected) -> None:
    assert layer_weights(TrainConfig(layer_weights=given_weights), count) == pytest.approx(
        expected, rel=1e-15
    )


@pytest.mark.parametrize("count", range(1, 65))
def test_uniform_weights_are_exactly_1(count) -> None:
    assert layer_weights(TrainConfig(), count) == [1.0] * count


def test_a_list_of_another_length_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"--layer_weights has 2 weights \(1,2\), but 3 layers are converted"
    ):
        layer_weights(TrainConfig(layer_weights="1,2"), 3)


def rows(seed: int, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """o, t and the documents' lengths."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    t = torch.randn(n, D, generator=generator)
    size = torch.rand(n, 1, generator=generator)
    return (
        t + size * torch.randn(n, D, generator=generator),
        t,
        torch.tensor(lengths, dtype=torch.int64),
    )


def test_weights_are_half_one_and_half_the_share_of_the_disagreement() -> None:
    t = torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    o = torch.tensor([[2.0, 1.0], [2.0, 2.0**0.5], [0.0, 1.0], [0.5, 1.0], [9.0, 1.0]])
    # NMSE 1/4 and 1/2 in the first document; 0, 1/4 and 81, counted as 1, in the second.
    expected = [
        0.5 + 0.5 * x for x in (0.25 / 0.375, 0.5 / 0.375, 0.0, 0.25 / (1.25 / 3), 1 / (1.25 / 3))
    ]
    assert disagreement_weights(o, t, torch.tensor([2, 3])).tolist() == pytest.approx(
        expected, rel=1e-6
    )


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
@settings(deadline=None, max_examples=40, derandomize=True)
def test_a_documents_weights_have_mean_1_and_depend_on_it_alone(lengths, seed, data) -> None:
    o, t, n = rows(seed, lengths)
    weights = disagreement_weights(o, t, n)
    assert weights.dtype == torch.float32 and float(weights.min()) >= 0.5
    order = data.draw(st.permutations(range(len(lengths))))
    parts = {
        i: (a, b, w)
        for i, (a, b, w) in enumerate(
            zip(o.split(lengths), t.split(lengths), weights.split(lengths), strict=True)
        )
    }
    for _, (a, b, w) in parts.items():
        assert float(w.mean()) == pytest.approx(1.0, rel=1e-6)  # fp32
        assert torch.equal(disagreement_weights(a, b, torch.tensor([len(a)])), w)
    shuffled = [torch.cat([parts[i][which] for i in order]) for which in range(3)]
    assert torch.equal(disagreement_weights(shuffled[0], shuffled[1], n[list(order)]), shuffled[2])
    scaled = disagreement_weights(4 * o, 4 * t, n)  # a power of two: nothing is rounded
    assert torch.equal(scaled, weights)


def test_agreement_everywhere_weighs_1_and_a_bad_number_is_not_hidden() -> None:
    _, t, n = rows(0, [3, 2])
    assert torch.equal(disagreement_weights(t.clone(), t, n), torch.ones(5))
    o = t.clone()
    o[1, 2] = math.nan
    assert disagreement_weights(o, t, n).isnan().tolist() == [True] * 3 + [False] * 2
    assert disagreement_weights(t[:0], t[:0], n[:0]).shape == (0,)


def test_no_gradient_flows_through_a_weight() -> None:
    o, t, n = rows(1, [4])
    assert not disagreement_weights(o.requires_grad_(), t, n).requires_grad
