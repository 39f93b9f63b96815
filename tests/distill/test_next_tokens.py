"""Which token each position is held to, by hand, and what must not change it."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from npt.distill import logit_losses
from npt.distill.next_tokens import cross_entropy, multi_token_prediction_loss

V, D, HEADS = 7, 4, 3
IGNORED = -100


def log_probability(logits: Tensor, target: int) -> float:
    """Of one position's logits, in fp64 by the formula."""
    values = logits.double().tolist()
    most = max(values)
    return values[target] - most - math.log(sum(math.exp(v - most) for v in values))


def random_logits(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, V, generator=torch.Generator().manual_seed(seed))


# --- by hand
# ----------------------------------------------------------------------------------------------------------


def test_logits_at_t_are_held_to_the_label_at_t_plus_1() -> None:
    """One row "a b C D <pad>": a prompt of two tokens, a completion of two, so b predicts C and C
    predicts D.
    """
    logits = torch.log(
        torch.tensor(
            [
                [
                    [0.1, 0.2, 0.3, 0.4],
                    [0.1, 0.2, 0.5, 0.2],
                    [0.2, 0.1, 0.1, 0.6],
                    [0.7, 0.1, 0.1, 0.1],
                    [0.25, 0.25, 0.25, 0.25],
                ]
            ]
        )
    )
    labels = torch.tensor([[IGNORED, IGNORED, 2, 3, IGNORED]])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    total, count = cross_entropy(logits, labels, mask)
    assert count == 2
    assert total.item() == pytest.approx(-math.log(0.5) - math.log(0.6), rel=1e-6)  # fp32


def test_each_head_is_held_to_the_token_that_it_looks_ahead_to() -> None:
    """Two rows of five: "3 1 4 1 5", whole, and "2 6 5" padded on the left, its 6 no target."""
    labels = torch.tensor([[3, 1, 4, 1, 5], [IGNORED, IGNORED, 2, IGNORED, 5]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    logits = [random_logits(2, 5, seed=k) for k in range(HEADS)]
    pairs = {  # head: (row, position, target)
        0: [(0, 0, 1), (0, 1, 4), (0, 2, 1), (0, 3, 5), (1, 3, 5)],
        1: [(0, 0, 4), (0, 1, 1), (0, 2, 5), (1, 2, 5)],
        2: [(0, 0, 1), (0, 1, 5)],
    }
    expected = [
        -sum(log_probability(logits[k][row, t], target) for row, t, target in pairs[k])
        for k in range(HEADS)
    ]
    total, count, per_head = multi_token_prediction_loss(logits, labels, mask)
    assert [n for _, n in per_head] == [5, 4, 2] and count == 11
    assert [part.item() for part, _ in per_head] == pytest.approx(expected, rel=1e-6)  # fp32
    assert total.item() == pytest.approx(sum(expected), rel=1e-6)


def test_no_token_of_a_packed_document_is_held_to_the_next_documents() -> None:
    labels = torch.tensor([[3, 1, 4, 2, 6, 5]])  # two documents of three
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    logits = [random_logits(1, 6, seed=k) for k in range(HEADS)]
    _, _, per_head = multi_token_prediction_loss(logits, labels, torch.ones_like(labels), positions)
    assert [n for _, n in per_head] == [4, 2, 0]
    apart = multi_token_prediction_loss([x.view(2, 3, V) for x in logits], labels.view(2, 3))
    # fp32 sums
    assert [p.item() for p, _ in per_head] == pytest.approx(
        [p.item() for p, _ in apart[2]], rel=1e-6
    )


def test_without_a_mask_labels_alone_count() -> None:
    logits, labels = random_logits(1, 4), torch.tensor([[3, 1, IGNORED, 5]])
    total, count = cross_entropy(logits, labels)
    assert count == 2
    # fp32
    assert total.item() == pytest.approx(
        -log_probability(logits[0, 0], 1) - log_probability(logits[0, 2], 5), rel=1e-6
    )


def test_another_ignore_index_is_taken() -> None:
    logits, labels = (
        random_logits(2, 5),
        torch.randint(1, V, (2, 5), generator=torch.Generator().manual_seed(1)),
    )
    labels[:, 2] = 0
    assert cross_entropy(logits, labels, ignore_index=0)[1] == 6
    assert torch.equal(
        cross_entropy(logits, labels, ignore_index=0)[0],
        cross_entropy(logits, torch.where(labels == 0, -100, labels))[0],
    )


# --- what counts and what does not
# -----------------------------------------------------------------------------------


class Rows:
    """A ragged batch: each row's labels and each head's logits, to be laid out with padding that is
    full of garbage.
    """

    def __init__(self, lengths: list[int], seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.labels = [torch.randint(0, V, (n,), generator=generator) for n in lengths]
        for row in self.labels:
            row[torch.rand(len(row), generator=generator) < 0.2] = IGNORED
        self.logits = [
            [torch.randn(n, V, generator=generator).requires_grad_() for n in lengths]
            for _ in range(HEADS)
        ]

    def loss(self, order: list[int], left: int, right: int) -> tuple[Tensor, int]:
        """Rows in this order, with so much padding on either side of the longest."""
        width = left + max(len(self.labels[i]) for i in order) + right
        labels, mask = (
            torch.full((len(order), width), 3),
            torch.zeros(len(order), width, dtype=torch.int64),
        )
        laid = [torch.full((len(order), width, V), math.nan) for _ in range(HEADS)]
        for place, i in enumerate(order):
            columns = slice(left, left + len(self.labels[i]))
            labels[place, columns], mask[place, columns] = self.labels[i], 1
            for k in range(HEADS):
                laid[k][place, columns] = self.logits[k][i]
        total, count, _ = multi_token_prediction_loss(laid, labels, mask)
        return total, count

    def gradients(self, total: Tensor) -> list[Tensor]:
        leaves = [leaf for head in self.logits for leaf in head]
        found = torch.autograd.grad(total, leaves, allow_unused=True)
        return [
            torch.zeros_like(leaf) if g is None else g
            for g, leaf in zip(found, leaves, strict=True)
        ]


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
@settings(deadline=None, max_examples=40, derandomize=True)
def test_padding_order_and_split_change_neither_loss_nor_gradient(lengths, seed, data) -> None:
    rows = Rows(lengths, seed)
    everything = list(range(len(lengths)))
    total, count = rows.loss(everything, 0, 0)
    gradients = rows.gradients(total)
    assert all(torch.isfinite(g).all() for g in gradients)
    order = data.draw(st.permutations(everything))
    at = data.draw(st.integers(0, len(order)))
    parts = [
        rows.loss(part, data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4)))
        for part in (order[:at], order[at:])
        if len(part) > 0
    ]
    assert sum(n for _, n in parts) == count
    again = torch.stack([part for part, _ in parts]).sum()
    torch.testing.assert_close(again, total, rtol=1e-5, atol=1e-6)  # an fp32 sum in another order
    for one, other in zip(rows.gradients(again), gradients, strict=True):
        # row by row the same; kernels may round differently
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@given(length=st.integers(2, 8), seed=st.integers(0, 10**6), data=st.data())
@settings(deadline=None, max_examples=30, derandomize=True)
def test_a_changed_target_or_prediction_changes_the_loss(length, seed, data) -> None:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, V, (1, length), generator=generator)
    logits = [torch.randn(1, length, V, generator=generator) for _ in range(HEADS)]
    before = multi_token_prediction_loss(logits, labels)[0]
    other = labels.clone()
    t = data.draw(st.integers(1, length - 1))  # nothing predicts the first token
    other[0, t] = (other[0, t] + 1) % V
    assert not torch.equal(multi_token_prediction_loss(logits, other)[0], before)
    logits[0][0, t - 1, labels[0, t]] += 1.0
    assert not torch.equal(multi_token_prediction_loss(logits, labels)[0], before)


@pytest.mark.parametrize(
    "labels", [[[IGNORED] * 4], [[5]], [[]], [[5, IGNORED, IGNORED, IGNORED]]], ids=str
)
def test_nothing_to_predict_gives_zero_a_count_of_zero_and_a_gradient_of_zeros(labels) -> None:
    labels = torch.tensor(labels, dtype=torch.int64)
    logits = torch.full((*labels.shape, V), math.inf, requires_grad=True)
    total, count, per_head = multi_token_prediction_loss([logits] * HEADS, labels)
    assert (total.item(), count, [n for _, n in per_head]) == (0.0, 0, [0] * HEADS)
    total.backward()
    assert logits.grad.shape == logits.shape and not logits.grad.any()
    assert cross_entropy(logits, labels)[1] == 0


def test_what_stands_where_nothing_is_predicted_reaches_neither_value_nor_gradient() -> None:
    labels = torch.tensor([[1, 2, 3, IGNORED, 5]])
    logits = random_logits(1, 5)
    clean = logits.clone().requires_grad_()
    spoilt = logits.clone()
    spoilt[0, [2, 4]] = math.nan  # 2 looks at a label that does not count, 4 is the last
    spoilt.requires_grad_()
    values = [cross_entropy(x, labels)[0] for x in (clean, spoilt)]
    assert torch.equal(*values)
    assert torch.equal(
        *(torch.autograd.grad(v, x)[0] for v, x in zip(values, (clean, spoilt), strict=True))
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_of_other_types_are_computed_in_fp32_at_least(dtype) -> None:
    labels = torch.tensor([[1, 2, 3, 4]])
    logits = (100 * random_logits(1, 4)).to(dtype)
    total, _ = cross_entropy(logits, labels)
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = -sum(log_probability(logits[0, t], t + 2) for t in range(3))
    assert total.item() == pytest.approx(expected, rel=1e-6)
    wide = logits.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, labels)[0], wide)


# --- through heads
# ----------------------------------------------------------------------------------------------------


@pytest.fixture
def heads() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(D, V, bias=False) for _ in range(HEADS)]


@pytest.mark.parametrize("chunk", [V, 3 * V, 1000 * V])
def test_states_through_heads_give_what_their_logits_give(heads, monkeypatch, chunk) -> None:
    monkeypatch.setattr(logit_losses, "CHUNK", chunk)
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(2, 6, D, generator=generator).requires_grad_()
    labels = torch.randint(0, V, (2, 6), generator=generator)
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    leaves = [states, *(head.weight for head in heads)]
    found = multi_token_prediction_loss([states] * HEADS, labels, mask, heads=heads, vocab_size=V)
    expected = multi_token_prediction_loss([head(states) for head in heads], labels, mask)
    assert found[1] == expected[1]
    # the fp32 defaults: the same sums in another order
    torch.testing.assert_close(found[0], expected[0])
    for one, other in zip(
        torch.autograd.grad(found[0], leaves), torch.autograd.grad(expected[0], leaves), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("states", "arguments", "message"),
    [
        ([], {}, "no logits"),
        ([torch.zeros(2, 4, V)], {}, r"\(2, 4, 7\) for labels of shape \(2, 5\)"),
        ([torch.zeros(10, V)], {}, r"\(10, 7\) for labels of shape \(2, 5\)"),
        ([torch.zeros(2, 5, V)], {"heads": [], "vocab_size": V}, "0 heads for 1 states"),
        ([torch.zeros(2, 5, V)], {"heads": [nn.Identity()]}, "vocab_size None"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(states, arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        multi_token_prediction_loss(states, torch.zeros(2, 5, dtype=torch.int64), **arguments)
