"""Each head is held to the token that it looks ahead to, and to nothing else."""

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from npt.batch import Batch, batch_from_tensors

PATH = Path(__file__).resolve().parents[2] / "examples" / "multi_token_prediction.py"
V, HEADS = 7, 3
IGNORED = -100


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("multi_token_prediction", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, spec.name, module)  # for its dataclasses
        spec.loader.exec_module(module)
        yield module


def batch_of(labels: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Batch:
    mask = torch.ones_like(labels) if mask is None else mask
    batch = replace(batch_from_tensors(labels.clamp(min=0), mask), labels=labels)
    return batch if positions is None else replace(batch, position_ids=positions)


class Columns(nn.Module):
    """A head whose logits are its own columns of the hidden state."""

    def __init__(self, k: int):
        super().__init__()
        self.columns = slice(k * V, (k + 1) * V)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[:, self.columns]


def losses(example, hidden: Tensor, batch: Batch) -> list[tuple[Tensor, int]]:
    return example.prediction_losses(hidden, batch, [Columns(k) for k in range(HEADS)], V)


def random_hidden(*shape: int) -> Tensor:
    return torch.randn(*shape, HEADS * V, generator=torch.Generator().manual_seed(0))


def test_each_head_is_held_to_the_token_it_looks_ahead_to(example) -> None:
    """Two rows of six: "3 1 4 1 5 2", whole, and "2 6 5 1" padded on the left, its 6 no target."""
    labels = torch.tensor([[3, 1, 4, 1, 5, 2], [IGNORED, IGNORED, 2, IGNORED, 5, 1]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    pairs = {  # head: (row, position, target)
        0: [(0, 0, 4), (0, 1, 1), (0, 2, 5), (0, 3, 2), (1, 2, 5), (1, 3, 1)],
        1: [(0, 0, 1), (0, 1, 5), (0, 2, 2), (1, 2, 1)],
        2: [(0, 0, 5), (0, 1, 2)],
    }
    hidden = random_hidden(2, 6)
    log_q = hidden.double().unflatten(-1, (HEADS, V)).log_softmax(dim=-1)
    for k, (total, count) in enumerate(losses(example, hidden, batch_of(labels, mask))):
        expected = -sum(float(log_q[row, t, k, target]) for row, t, target in pairs[k])
        assert count == len(pairs[k])
        assert float(total) == pytest.approx(expected, rel=1e-6)  # fp32


def test_no_head_predicts_a_token_of_the_next_document(example) -> None:
    labels = torch.tensor([[3, 1, 4, 2, 6, 5]])  # two documents of three
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    hidden = random_hidden(1, 6)
    packed = losses(example, hidden, batch_of(labels, positions=positions))
    apart = losses(example, hidden.view(2, 3, -1), batch_of(labels.view(2, 3)))
    assert [count for _, count in packed] == [count for _, count in apart] == [2, 0, 0]
    torch.testing.assert_close([s for s, _ in packed], [s for s, _ in apart])  # sums of fp32


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_reaches_neither_loss_nor_gradient(example, side) -> None:
    labels, hidden = torch.tensor([[3, 1, 4, 1, 5]]), random_hidden(1, 5)
    width, at = 9, slice(4, 9) if side == "left" else slice(0, 5)
    padded = torch.full((1, width, HEADS * V), math.nan)
    wide, mask = torch.full((1, width), 3), torch.zeros(1, width, dtype=torch.int64)
    padded[:, at], wide[:, at], mask[:, at] = hidden, labels, 1
    found = []
    for given, batch in ((hidden, batch_of(labels)), (padded, batch_of(wide, mask))):
        given.requires_grad_()
        sums = losses(example, given, batch)
        (gradient,) = torch.autograd.grad(sum(total for total, _ in sums), given)
        found.append((sums, gradient))
    (bare, expected), (sums, gradient) = found
    assert sums == bare
    assert torch.equal(gradient[:, at], expected)
    assert int(gradient.count_nonzero()) == int(expected.count_nonzero())


def test_nothing_to_predict_is_zero_with_a_gradient_of_zeros(example) -> None:
    hidden = torch.full((1, 4, HEADS * V), math.inf, requires_grad=True)
    sums = losses(example, hidden, batch_of(torch.full((1, 4), IGNORED)))
    assert [(total.item(), count) for total, count in sums] == [(0.0, 0)] * HEADS
    sum(total for total, _ in sums).backward()
    assert hidden.grad is not None and not hidden.grad.any()


def test_the_script_prints_a_falling_loss_for_every_head(example, capsys) -> None:
    assert example.main(["--heads", "2", "--steps", "6"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "t", "+", "2", "t", "+", "3"] and len(lines) == 6
    first, last = ([float(x) for x in line.split()[1:]] for line in (lines[0], lines[-1]))
    assert all(end < 0.95 * start for start, end in zip(first, last, strict=True))
