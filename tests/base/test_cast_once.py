"""A 16-bit head is cast to fp32 once per call, not once per chunk of rows or per token; nothing
else changes.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from updates import random_patch

from npt.adapters.attach import attach
from npt.base.linear import UpcastLinear, cast_once
from npt.base.patched import set_patch
from npt.batch import Batch
from npt.config import TrainConfig
from npt.distill import logit_losses
from npt.distill.logit_losses import row_loss, through_head
from npt.distill.strategies import end_to_end
from npt.evaluation import metrics
from npt.evaluation.greedy import continue_greedily
from npt.evaluation.metrics import compare_tokens

V, D, N = 96, 64, 10


class Casts(TorchDispatchMode):
    """Counts the fp32 copies that are made of 16-bit tensors of these shapes."""

    def __init__(self, *modules: nn.Module):
        super().__init__()
        self.count = 0
        self._shapes = {module.weight.shape for module in modules}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (
            func is torch.ops.aten._to_copy.default
            and out.dtype == torch.float32
            and out.shape in self._shapes
        ):
            self.count += 1
        return out


def upcast_head(seed: int = 0, bias: bool = False) -> nn.Linear:
    torch.manual_seed(seed)
    head = nn.Linear(D, V, bias=bias).to(torch.bfloat16).requires_grad_(False)
    head.__class__ = UpcastLinear
    return head


def states() -> tuple[Tensor, Tensor, Tensor]:
    """Student's and teacher's states, targets."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(N, D, generator=generator).requires_grad_(),
        torch.randn(N, D, generator=generator),
        torch.randint(0, V, (N,), generator=generator),
    )


@pytest.mark.parametrize("own", [False, True], ids=["shared head", "teacher's own"])
@pytest.mark.parametrize("logit_loss", ["kl", "reverse_kl", "cross_entropy"])
def test_a_loss_casts_each_head_once_and_has_the_same_bits(
    monkeypatch, logit_loss: str, own: bool
) -> None:
    monkeypatch.setattr(logit_losses, "CHUNK", 3 * V)
    head, (rows, taught, targets) = upcast_head(), states()
    guide = upcast_head(1) if own else head
    dense = {part: nn.Linear(D, V, bias=False).requires_grad_(False) for part in (head, guide)}
    for part, plain in dense.items():
        plain.weight.data = part.weight.float()
    loss = row_loss(TrainConfig(strategy="end_to_end", logit_kl_weight=1.0, logit_loss=logit_loss))
    other = targets if logit_loss == "cross_entropy" else taught
    with Casts(head) as casts:
        total = through_head(head, loss, rows, other, V, teacher_head=guide)
        (grad,) = torch.autograd.grad(total, rows)
    assert casts.count == (2 if own and logit_loss != "cross_entropy" else 1)  # of four chunks
    expected = through_head(dense[head], loss, rows, other, V, teacher_head=dense[guide])
    assert torch.equal(total, expected)
    assert torch.equal(grad, torch.autograd.grad(expected, rows)[0])


def test_a_training_step_casts_the_head_once(
    load_model: Callable[..., Any], batch: Batch, monkeypatch
) -> None:
    model = load_model()
    attach(model)
    monkeypatch.setattr(logit_losses, "CHUNK", 2 * model.config.vocab_size)
    with Casts(model.lm_head) as casts:
        end_to_end(model, batch, TrainConfig(strategy="end_to_end", logit_kl_weight=1.0))
    assert casts.count == 1


def test_an_evaluation_batch_casts_each_head_once_to_equal_figures(monkeypatch) -> None:
    head, (rows, taught, targets) = upcast_head(), states()
    whole = compare_tokens(rows.detach(), taught, targets, head, V)
    monkeypatch.setattr(metrics, "LOGIT_CHUNK", 3 * V)
    with Casts(head) as casts:
        found = compare_tokens(rows.detach(), taught, targets, head, V)
    assert casts.count == 1
    # sums over 96 words in blocks of another number of rows
    torch.testing.assert_close(found, whole)
    with Casts(head) as casts:
        metrics.most_likely(taught, head, V)
    assert casts.count == 1


def test_generation_casts_the_head_once_and_writes_the_same_tokens(
    load_model: Callable[..., Any], tokenizer: Any
) -> None:
    model, prompts = load_model(), [[5, 6, 7], [8, 9]]
    with Casts(model.lm_head) as casts:
        new = continue_greedily(model, prompts, [6, 6], (), ["a", "b"])
    assert casts.count == 1 and [len(row) for row in new] == [6, 6]
    reference = load_model()
    reference.lm_head.weight.data = reference.lm_head.weight.float()
    assert continue_greedily(reference, prompts, [6, 6], (), ["a", "b"]) == new


def test_the_context_ends_with_it_and_nests() -> None:
    head, x = upcast_head(), torch.randn(2, D)
    before = set(vars(head))
    with Casts(head) as casts:
        with cast_once(head, head, nn.Linear(2, 2)):
            head(x)
            with cast_once(head):
                head(x)
            head(x)
            assert casts.count == 1
        head(x)
        assert casts.count == 2
    assert set(vars(head)) == before
    with pytest.raises(RuntimeError), cast_once(head):
        head(x)
        raise RuntimeError
    assert set(vars(head)) == before


def test_hooks_patches_and_biases_of_a_head_take_part() -> None:
    head, x, seen = upcast_head(bias=True), torch.randn(4, D), []
    set_patch(head, random_patch(head))
    expected = head(x)
    head.register_forward_hook(lambda *_: seen.append(1))
    with Casts(head) as casts, cast_once(head):
        assert torch.equal(head(x), expected) and torch.equal(head(x), expected)
    assert (len(seen), casts.count) == (2, 1)


def test_a_head_that_is_trained_keeps_its_gradient() -> None:
    head, (rows, _, _) = upcast_head(), states()
    head.weight.requires_grad_()
    with cast_once(head):
        (one,) = torch.autograd.grad(head(rows).sum(), head.weight)
        (two,) = torch.autograd.grad(head(rows).sum(), head.weight)
    assert torch.equal(one, two) and one.any()
