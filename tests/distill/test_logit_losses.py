"""Losses on logits against their formulas in fp64, at their limits, and in chunks through the
head.
"""

import contextlib
import copy
import math
import weakref
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from npt.config import LOGIT_LOSSES, TrainConfig
from npt.distill import logit_losses
from npt.distill.logit_losses import (
    draw_words,
    forward_kl,
    reverse_kl,
    row_loss,
    sampled_forward_kl,
    sampling_words,
    through_head,
    token_cross_entropy,
)

N, D, V = 5, 6, 11

DIVERGENCES: dict[str, Callable[..., Tensor]] = {"kl": forward_kl, "reverse_kl": reverse_kl}
every = pytest.mark.parametrize("name", DIVERGENCES)

# A divergence is what logarithms of size 1 and more leave over; in fp32 it is known to some units
# of 2^-24 of them.
LEFT_OVER = 1e-6


def logits(
    seed: int = 0, rows: int = N, scale: float = 2.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    s, t = (
        scale * torch.randn(rows, V, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(2)
    )
    return s.requires_grad_(), t


def reference(name: str, student: Tensor, teacher: Tensor) -> Tensor:
    """From probabilities in fp64, the plain way."""
    q, p = (torch.softmax(x.double(), -1) for x in (student, teacher))

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum()

    return {"kl": kl(p, q), "reverse_kl": kl(q, p)}[name]


def value(of: Tensor) -> float:
    return of.sum().item()


def gradient_of(name: str, s: Tensor, t: Tensor) -> Tensor:
    return torch.autograd.grad(DIVERGENCES[name](s, t).sum(), s)[0]


# --- values and gradients


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_the_formulas_in_fp32_whatever_the_input(name, dtype) -> None:
    s, t = logits(dtype=dtype)
    losses = DIVERGENCES[name](s, t)
    assert (losses.dtype, losses.shape) == (torch.float32, (N,))
    expected = reference(name, s.detach(), t).item()
    assert value(losses) == pytest.approx(expected, rel=1e-5, abs=LEFT_OVER)
    assert torch.isfinite(gradient_of(name, s, t)).all()


@every
def test_fp64_stays_fp64_and_gradients_equal_finite_differences(name) -> None:
    s, t = logits(dtype=torch.float64)
    losses = DIVERGENCES[name](s, t)
    assert losses.dtype == torch.float64
    assert value(losses) == pytest.approx(reference(name, s.detach(), t).item(), rel=1e-12)
    assert torch.autograd.gradcheck(lambda s: DIVERGENCES[name](s, t), s)


def test_a_kl_goes_from_its_first_distribution_to_its_second() -> None:
    p, q = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.5, 0.5]])
    forward = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    backward = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert value(forward_kl(q.log(), p.log())) == pytest.approx(forward, rel=1e-6)
    assert value(reverse_kl(q.log(), p.log())) == pytest.approx(backward, rel=1e-6)


# --- what a divergence is


@every
@given(seed=st.integers(0, 10**6), scale=st.floats(1e-3, 30.0), shift=st.floats(-50, 50))
@settings(deadline=None, max_examples=30, derandomize=True)
def test_never_negative_zero_at_equality_and_blind_to_a_shift(name, seed, scale, shift) -> None:
    s, t = logits(seed, scale=scale)
    losses = value(DIVERGENCES[name](s, t))
    assert losses >= -N * LEFT_OVER
    same = t.clone().requires_grad_()
    assert abs(value(DIVERGENCES[name](same, t))) <= N * LEFT_OVER
    assert float(gradient_of(name, same, t).abs().max()) <= LEFT_OVER
    # Logits of 50 and more in fp32: known to 4e-6 each.
    assert value(DIVERGENCES[name](s + shift, t - shift)) == pytest.approx(
        losses, rel=1e-4, abs=1e-4
    )


# --- where others make NaN


@every
@given(
    seed=st.integers(0, 10**6),
    power=st.floats(-3, 5),
    masked=st.lists(st.tuples(st.integers(0, 2), st.integers(0, V - 1)), max_size=8),
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_where_the_value_is_finite_the_gradient_is(name, seed, power, masked) -> None:
    s, t = logits(seed, scale=10.0**power)
    with torch.no_grad():
        for side, column in masked:  # of the student, the teacher, or both
            for which, tensor in ((0, s), (1, t)):
                if side in (which, 2):
                    tensor[:, column] = -math.inf
    losses = DIVERGENCES[name](s, t).sum()
    assert not losses.isnan()
    if torch.isfinite(losses):
        assert torch.isfinite(torch.autograd.grad(losses, s)[0]).all()


@every
def test_vocabulary_that_both_sides_mask_is_as_if_it_were_not_there(name) -> None:
    s, t = logits()
    wide_s, wide_t = (torch.cat([x.detach(), torch.full((N, 3), -math.inf)], -1) for x in (s, t))
    wide_s.requires_grad_()
    # fp32 sums
    assert value(DIVERGENCES[name](wide_s, wide_t)) == pytest.approx(
        value(DIVERGENCES[name](s, t)), rel=1e-6
    )
    gradient = gradient_of(name, wide_s, wide_t)
    assert not gradient[:, V:].any()
    torch.testing.assert_close(gradient[:, :V], gradient_of(name, s, t))


def test_what_one_side_alone_masks_makes_its_kl_infinite() -> None:
    s, t = logits()
    shut = s.detach().clone()
    shut[:, 4] = -math.inf
    assert value(forward_kl(shut, t)) == math.inf and math.isfinite(value(reverse_kl(shut, t)))
    assert value(reverse_kl(t, shut)) == math.inf and math.isfinite(value(forward_kl(t, shut)))


@every
@pytest.mark.parametrize("who", ["student", "teacher"])
def test_a_nan_among_the_logits_is_never_masked_away(name, who) -> None:
    s, t = logits()
    with torch.no_grad():
        (s if who == "student" else t)[3, 7] = math.nan
    assert math.isnan(value(DIVERGENCES[name](s, t)))
    assert not gradient_of(name, s, t)[:3].isnan().any()


# --- cross-entropy


def test_cross_entropy_is_minus_the_log_of_the_targets_probability() -> None:
    s, _ = logits()
    targets = torch.tensor([3, 0, V - 1, 5, 5])
    expected = [
        -torch.softmax(s.detach().double()[i], -1)[target].log().item()
        for i, target in enumerate(targets)
    ]
    assert token_cross_entropy(s, targets).tolist() == pytest.approx(expected, rel=1e-6)
    wide = s.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda s: token_cross_entropy(s, targets), wide)


# --- through the head


@pytest.fixture
def head() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(D, V, bias=False).requires_grad_(False)


def config_for(name: str) -> TrainConfig:
    return TrainConfig(strategy="end_to_end", logit_kl_weight=1.0, logit_loss=name)


def plain(name: str, s: Tensor, other: Tensor) -> Tensor:
    """The loss that `config_for(name)` asks for, of whole logits."""
    if name == "cross_entropy":
        return token_cross_entropy(s, other).sum()
    return DIVERGENCES[name](s, other).sum()


def head_states(name: str, rows: int = 10) -> tuple[Tensor, Tensor]:
    """Student's state, teacher's state or targets."""
    generator = torch.Generator().manual_seed(1)
    student, teacher = (torch.randn(rows, D, generator=generator) for _ in range(2))
    targets = torch.randint(0, V, (rows,), generator=generator)
    return student.requires_grad_(), targets if name == "cross_entropy" else teacher


through = pytest.mark.parametrize("name", LOGIT_LOSSES)


@through
@pytest.mark.parametrize("chunk", [1, V, 3 * V, 7 * V, 1000 * V])
def test_value_and_gradient_do_not_depend_on_the_chunk(head, monkeypatch, name, chunk) -> None:
    monkeypatch.setattr(logit_losses, "CHUNK", chunk)
    student, other = head_states(name)
    total = through_head(head, row_loss(config_for(name)), student, other, V)
    expected = plain(name, head(student), other if name == "cross_entropy" else head(other))
    # The default fp32 tolerances: log_softmax and a sum over 11 words, nothing ill-conditioned.
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(
        torch.autograd.grad(total, student)[0], torch.autograd.grad(expected, student)[0]
    )


@through
def test_logits_exist_for_a_chunk_at_a_time_and_are_computed_once(head, monkeypatch, name) -> None:
    monkeypatch.setattr(logit_losses, "CHUNK", 3 * V)
    rows: list[int] = []
    head.register_forward_hook(lambda _, args, __: rows.append(len(args[0])))
    student, other = head_states(name)
    through_head(head, row_loss(config_for(name)), student, other, V).backward()
    assert max(rows) == 3
    # student, teacher; forward alone
    assert sum(rows) == (1 if name == "cross_entropy" else 2) * 10


@through
def test_a_head_that_is_trained_has_its_gradient(monkeypatch, name) -> None:
    monkeypatch.setattr(logit_losses, "CHUNK", 3 * V)
    torch.manual_seed(0)
    head = nn.Linear(D, V)
    student, other = head_states(name)
    given_ = [*head.parameters(), student]
    losses = torch.autograd.grad(
        through_head(head, row_loss(config_for(name)), student, other, V), given_
    )
    taught = other if name == "cross_entropy" else head(other).detach()
    expected = torch.autograd.grad(plain(name, head(student), taught), given_)
    for one, another in zip(losses, expected, strict=True):
        torch.testing.assert_close(one, another)  # the default fp32 tolerances, as above


def test_a_gradient_is_kept_only_if_it_is_wanted(head) -> None:
    student, other = head_states("kl")
    loss = row_loss(config_for("kl"))
    total = through_head(head, loss, student, other, V)
    (3.0 * total).backward()
    (once,) = torch.autograd.grad(through_head(head, loss, student, other, V), student)
    torch.testing.assert_close(student.grad, 3.0 * once, rtol=1e-6, atol=0)  # one product, rounded
    with torch.no_grad():
        assert torch.equal(through_head(head, loss, student, other, V), total)
    assert not through_head(head, loss, student.detach(), other, V).requires_grad


class Alive(TorchDispatchMode):
    """Bytes of the living tensors that operations made, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return out

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@through
def test_logits_of_all_tokens_never_exist_even_once(monkeypatch, name) -> None:
    rows, vocabulary = 256, 512
    torch.manual_seed(0)
    head = nn.Linear(D, vocabulary, bias=False).requires_grad_(False)
    student, other = head_states(name, rows)

    def peak(chunk: int) -> float:
        """In units of [N, V] in fp32."""
        monkeypatch.setattr(logit_losses, "CHUNK", chunk)
        with Alive() as alive:
            through_head(head, row_loss(config_for(name)), student, other, vocabulary).backward()
        student.grad = None
        return alive.peak / (4 * rows * vocabulary)

    # of 32 chunks; at most sixteen tensors of a chunk's size, and the [N, D] states
    assert peak(8 * vocabulary) < 0.6
    assert peak(rows * vocabulary) > 2  # the meter sees what it is to see


@through
def test_the_teacher_gets_no_gradient_through_the_head(head, name) -> None:
    student, other = head_states(name)
    if other.is_floating_point():
        other.requires_grad_()
    through_head(head, row_loss(config_for(name)), student, other, V).backward()
    assert other.grad is None and student.grad.any()


@through
def test_no_states_give_zero_and_equal_ones_no_divergence(head, name) -> None:
    student, other = head_states(name, rows=0)
    total = through_head(head, row_loss(config_for(name)), student, other, V)
    assert total.item() == 0.0
    assert torch.autograd.grad(total, student)[0].shape == (0, D)
    same = head_states(name)[0].detach()
    if name != "cross_entropy":
        assert value(through_head(head, row_loss(config_for(name)), same, same.clone(), V)) == 0.0


@pytest.mark.parametrize(("vocab", "rows"), [(128_256, 256), (2048, 16_384), (1 << 20, 32)])
def test_a_cards_chunk_is_of_whole_tiles(vocab, rows) -> None:
    assert logit_losses.chunk_rows(torch.device("cuda"), vocab) == rows
    assert logit_losses.chunk_rows(torch.device("cpu"), vocab) == (1 << 24) // vocab


# --- sampled


WORDS = 400


def sampled_states(rows: int = 4) -> tuple[nn.Linear, Tensor, Tensor]:
    """A head, the student's states and the teacher's, close to them."""
    torch.manual_seed(0)
    head = nn.Linear(D, WORDS).requires_grad_(False)
    teacher = 3 * torch.randn(rows, D)
    return head, (teacher + 0.2 * torch.randn(rows, D)).requires_grad_(), teacher


def estimate(head: nn.Linear, student: Tensor, teacher: Tensor, top: int, draws: int) -> Tensor:
    words, weights = draw_words(head(teacher), top, draws)
    apart = torch.einsum("nd,nkd->nk", student - teacher, head.weight[words])
    return sampled_forward_kl(apart, weights)


def test_a_sampled_kl_is_exact_with_all_words() -> None:
    head, student, teacher = sampled_states()
    ours = estimate(head, student, teacher, WORDS, 1)
    exact = forward_kl(head(student), head(teacher))
    torch.testing.assert_close(ours, exact, rtol=0, atol=LEFT_OVER)


def test_the_mean_of_sampled_gradients_is_the_exact_gradient() -> None:
    head, student, teacher = sampled_states()
    of_exact = torch.autograd.grad(forward_kl(head(student), head(teacher)).sum(), student)[0]
    many = 4000
    copies = student.detach().repeat(many, 1).requires_grad_()
    values = estimate(head, copies, teacher.repeat(many, 1), 8, 32)
    each = torch.autograd.grad(values.sum(), copies)[0].view(many, *student.shape)
    error = (each.mean(0) - of_exact).norm() / of_exact.norm()
    noise = (each - of_exact).norm(dim=(1, 2)).mean() / of_exact.norm()
    # the bias of a ratio of means is of the order of noise^2 / 2, beside noise / sqrt(many)
    assert error < noise**2 + 4 * noise / math.sqrt(many)
    assert noise > 0.02  # there was something to average


def test_the_gradient_of_given_draws_is_right() -> None:
    head, student, teacher = sampled_states()
    words, weights = draw_words(head(teacher).double(), 8, 16)
    logits = (head(student) - head(teacher)).detach().double()
    apart = logits.gather(1, words).requires_grad_()
    assert torch.autograd.gradcheck(lambda d: sampled_forward_kl(d, weights), apart)


def test_a_word_without_probability_is_never_drawn() -> None:
    head, student, teacher = sampled_states()
    head.bias[20:] = -math.inf
    words, weights = draw_words(head(teacher), 8, 64)
    assert (words[weights > 0] < 20).all()
    # more words for certain than there are
    exact = forward_kl(head(student), head(teacher))
    ours = estimate(head, student, teacher, 32, 64)
    torch.testing.assert_close(ours, exact, rtol=0, atol=LEFT_OVER)
    assert torch.autograd.grad(ours.sum(), student)[0].isfinite().all()


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a_nan_reaches_the_sampled_loss(side) -> None:
    head, student, teacher = sampled_states()
    states = {"student": student.detach(), "teacher": teacher}
    states[side][1, 2] = math.nan
    of_rows = estimate(head, states["student"], states["teacher"], 8, 16)
    assert of_rows.isnan().tolist() == [False, True, False, False]


@pytest.fixture
def few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of WORDS is large beside the sampled ones."""
    monkeypatch.setattr(logit_losses, "TOP", 4)
    monkeypatch.setattr(logit_losses, "DRAWS", 2)


@pytest.mark.usefixtures("few_words")
def test_the_seed_alone_decides_the_draws_through_the_head() -> None:
    head, student, teacher = sampled_states()

    def gradient(seed: int) -> Tensor:
        torch.manual_seed(seed)
        with sampling_words(True):
            total = through_head(head, forward_kl, student, teacher, WORDS)
        return torch.autograd.grad(total, student)[0]

    assert torch.equal(gradient(1), gradient(1))
    assert not torch.equal(gradient(1), gradient(2))


@pytest.mark.usefixtures("few_words")
@pytest.mark.parametrize(
    "why", ["far", "reverse", "trainable", "hooked", "small vocabulary", "own head", "outside"]
)
def test_a_loss_that_cannot_be_sampled_is_exact(why, monkeypatch) -> None:
    head, student, teacher = sampled_states()
    loss = reverse_kl if why == "reverse" else forward_kl
    of_teacher = copy.deepcopy(head) if why == "own head" else None
    head.weight.requires_grad_(why == "trainable")
    if why == "hooked":
        head.register_forward_hook(lambda *_: None)
    if why == "small vocabulary":
        monkeypatch.setattr(logit_losses, "TOP", WORDS)
    with contextlib.nullcontext() if why == "outside" else sampling_words(why != "far"):
        total = through_head(head, loss, student, teacher, WORDS, teacher_head=of_teacher)
    exact = loss(head(student), head(teacher)).sum()
    torch.testing.assert_close(total, exact, rtol=0, atol=LEFT_OVER)
