"""The chunked logit KL against the plain one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from npt.distill import losses
from npt.distill.losses import kl_sum

D, V = 6, 20


@pytest.fixture
def head() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(D, V, bias=False).requires_grad_(False)


def states(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, D, generator=generator).requires_grad_(), torch.randn(n, D, generator=generator).requires_grad_()


def plain(student: Tensor, teacher: Tensor, head: nn.Linear) -> Tensor:
    log_q = torch.log_softmax(student.double() @ head.weight.double().T, -1)
    log_p = torch.log_softmax(teacher.double() @ head.weight.double().T, -1)
    return nn.functional.kl_div(log_q, log_p, log_target=True, reduction="sum")


@pytest.mark.parametrize("chunk", [1, V, 3 * V, 7 * V, 1000 * V])
def test_value_and_gradient_are_those_of_the_plain_kl_whatever_the_chunk(head, monkeypatch, chunk) -> None:
    monkeypatch.setattr(losses, "LOGIT_CHUNK", chunk)
    student, teacher = states(10)
    total = kl_sum(student, teacher, head, V)
    expected = plain(student, teacher, head)
    (gradient,) = torch.autograd.grad(total, student)
    (expected_gradient,) = torch.autograd.grad(expected, student)
    # The default fp32 tolerances: log_softmax and a sum over 20 words, nothing ill-conditioned.
    torch.testing.assert_close(total, expected.float())
    torch.testing.assert_close(gradient, expected_gradient)


def test_no_more_logits_than_a_chunk_exist_at_once(head, monkeypatch) -> None:
    monkeypatch.setattr(losses, "LOGIT_CHUNK", 3 * V)
    rows: list[int] = []
    head.register_forward_hook(lambda _, args, __: rows.append(len(args[0])))
    student, teacher = states(10)
    kl_sum(student, teacher, head, V).backward()
    assert max(rows) == 3
    assert sum(rows) == 2 * 2 * 10  # student and teacher, in forward and again in backward


def test_the_teacher_gets_no_gradient(head) -> None:
    student, teacher = states(4)
    kl_sum(student, teacher, head, V).backward()
    assert teacher.grad is None
    assert student.grad.any()


def test_equal_states_have_no_divergence_and_no_tokens_have_none(head) -> None:
    student = states(5)[0].detach()
    assert float(kl_sum(student, student.clone(), head, V)) == 0.0
    assert float(kl_sum(torch.zeros(0, D), torch.zeros(0, D), head, V)) == 0.0
