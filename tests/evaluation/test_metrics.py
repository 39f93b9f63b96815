"""Figures and their standard errors."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.testing import assert_close

from npt.evaluation import metrics
from npt.evaluation.metrics import (
    COLUMNS,
    Figures,
    change_of,
    compare_pairs,
    compare_tokens,
    figures,
    mean_and_error,
    per_sample_sums,
)

D, V, N = 6, 13, 9


@pytest.fixture
def head() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(D, V, bias=False).requires_grad_(False)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(N, D, generator=generator),
        torch.randn(N, D, generator=generator),
        torch.randint(0, V, (N,), generator=generator),
    )


def column(table: Tensor, name: str) -> Tensor:
    return table[:, COLUMNS.index(name)]


@pytest.mark.parametrize("chunk", [1, 4 * V, 1 << 26])
def test_each_token_is_compared_as_its_definition_says(head, monkeypatch, chunk) -> None:
    monkeypatch.setattr(metrics, "LOGIT_CHUNK", chunk)
    student, teacher, targets = inputs()
    table = compare_tokens(student, teacher, targets, head, V)
    assert table.shape == (N, len(COLUMNS)) and table.dtype == torch.float32
    for i in range(N):
        q = (head.weight.double() @ student[i].double()).softmax(-1)
        p = (head.weight.double() @ teacher[i].double()).softmax(-1)
        expected = {
            "teacher_nll": -math.log(p[targets[i]]),
            "nll": -math.log(q[targets[i]]),
            "kl": float((p * (p / q).log()).sum()),
            "top1": float(p.argmax() == q.argmax()),
            "acceptance": float(torch.minimum(p, q).sum()),
            "tokens": 1.0,
        }
        for name, value in expected.items():
            # fp32 against fp64
            assert float(column(table, name)[i]) == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("apart", [0.0, 1e-7, 1e-3])
def test_acceptance_never_exceeds_one_over_a_large_vocabulary(apart) -> None:
    """In fp32 the probabilities of one token come to 1.00001 or 0.99999."""
    generator = torch.Generator().manual_seed(0)
    teacher = 3.0 * torch.randn(40, 20_000, generator=generator)
    student = teacher + apart * torch.randn(40, 20_000, generator=generator)
    head, targets = nn.Identity(), torch.zeros(40, dtype=torch.int64)
    found = compare_pairs(
        {"s": student, "t": teacher}, {"s": head, "t": head}, targets, 20_000, [("s", "t")]
    )["s", "t"]
    acceptance = column(found, "acceptance")
    assert float(acceptance.max()) <= 1.0 and (apart > 0 or bool((acceptance == 1.0).all()))
    exact = torch.minimum(teacher.double().softmax(-1), student.double().softmax(-1)).sum(dim=-1)
    # each probability is rounded, and so is their sum
    assert_close(acceptance.double(), exact, rtol=0.0, atol=2e-6)
    mean, error = mean_and_error(acceptance.double(), torch.ones(40, dtype=torch.float64))
    assert mean <= 1.0 and (apart > 0 or error == 0.0)


@pytest.mark.parametrize("chunk", [1, 4 * V, 1 << 26])
def test_many_pairs_equal_each_alone_with_one_head_pass_per_model(head, monkeypatch, chunk) -> None:
    monkeypatch.setattr(metrics, "LOGIT_CHUNK", chunk)
    student, teacher, targets = inputs()
    own = nn.Linear(D, V, bias=False).requires_grad_(False)
    rows: dict[str, int] = {"one": 0, "own": 0}
    for name, module in (("one", head), ("own", own)):
        module.register_forward_hook(
            lambda _module, given, _output, name=name: rows.update(
                {name: rows[name] + len(given[0])}
            )
        )
    hidden = {"student": student, "teacher": teacher, "base": student + teacher}
    heads = {"student": head, "teacher": head, "base": own}
    pairs = [
        ("teacher", "teacher"),
        ("student", "teacher"),
        ("student", "base"),
        ("teacher", "base"),
    ]
    together = compare_pairs(hidden, heads, targets, V, pairs)
    assert rows == {"one": 2 * N, "own": N}
    for pair in pairs:
        alone = compare_pairs(hidden, heads, targets, V, [pair])[pair]
        assert torch.equal(together[pair], alone)


def test_nothing_to_predict_gives_no_rows(head) -> None:
    student, teacher, targets = inputs()
    assert compare_tokens(student[:0], teacher[:0], targets[:0], head, V).shape == (0, len(COLUMNS))


@pytest.mark.parametrize("broken", ["student", "teacher", "both"])
def test_a_model_that_says_nan_agrees_in_nothing(head, broken) -> None:
    student, teacher, targets = inputs()
    for name, states in (("student", student), ("teacher", teacher)):
        if broken in (name, "both"):
            states[2, 1] = math.nan
    table = compare_tokens(student, teacher, targets, head, V)
    for name in ("kl", "top1", "acceptance"):
        assert column(table, name).isnan().nonzero().flatten().tolist() == [2], name


@given(seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_the_divergence_bounds_the_acceptance(seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (2 * torch.randn(N, V, generator=generator) for _ in range(2))
    table = compare_tokens(student, teacher, torch.zeros(N, dtype=torch.int64), nn.Identity(), V)
    # 1 - acceptance is the total variation, which Pinsker's inequality bounds; 1e-6 for fp32 sums
    # of V terms
    assert (1 - column(table, "acceptance") <= (column(table, "kl") / 2).sqrt() + 1e-6).all()


def test_figures_are_read_back_with_nan_for_null_and_without_those_of_earlier_versions() -> None:
    full = figures(TABLE)
    read = Figures.from_dict({**full.as_dict(), "kl_se": None, "top5": 0.5, "reverse_kl": 0.1})
    assert math.isnan(read.kl_se) and read.as_dict().keys() == full.as_dict().keys()
    assert Figures.from_dict(full.as_dict()) == full
    with pytest.raises(KeyError):
        Figures.from_dict({"kl": 0.5})


def test_tokens_are_summed_by_the_sample_they_belong_to(head) -> None:
    table = compare_tokens(*inputs(), head, V)
    rows = torch.tensor([0, 0, 2, 2, 2, 3, 3, 3, 3])
    sums = per_sample_sums(table, rows, 5)
    # samples 1 and 4 have none
    assert sums.dtype == torch.float64 and column(sums, "tokens").tolist() == [2.0, 3.0, 4.0]
    torch.testing.assert_close(sums[1], table[2:5].double().sum(dim=0))


def test_the_error_of_a_ratio_by_hand() -> None:
    sums, counts = (
        torch.tensor([2.0, 6.0, 1.0], dtype=torch.float64),
        torch.tensor([2.0, 4.0, 4.0], dtype=torch.float64),
    )
    mean, error = mean_and_error(sums, counts)
    assert mean == pytest.approx(0.9)
    residuals = [2.0 - 1.8, 6.0 - 3.6, 1.0 - 3.6]
    assert error == pytest.approx(math.sqrt(3 / 2 * sum(r * r for r in residuals)) / 10)


def test_one_sample_has_no_error() -> None:
    sums, counts = torch.tensor([[3.0], [4.0]], dtype=torch.float64)
    mean, error = mean_and_error(sums, counts)
    assert mean == 0.75 and math.isnan(error)


def per_sample(**columns: list[float]) -> Tensor:
    return torch.tensor([columns[name] for name in COLUMNS], dtype=torch.float64).T


TABLE = per_sample(
    teacher_nll=[4.0, 9.0, 8.0],
    nll=[5.0, 9.0, 9.0],
    kl=[0.5, 0.1, 0.4],
    top1=[1.0, 2.0, 3.0],
    acceptance=[1.5, 2.5, 3.5],
    tokens=[2.0, 3.0, 4.0],
)


def test_figures_are_means_per_token_and_exponentials_of_them() -> None:
    f = figures(TABLE)
    assert f.tokens == 9
    assert f.perplexity == pytest.approx(math.exp(23 / 9))
    assert f.perplexity_ratio == pytest.approx(math.exp(2 / 9))
    assert (f.kl, f.top1, f.acceptance) == pytest.approx((1.0 / 9, 6.0 / 9, 7.5 / 9))


def test_errors_of_figures_are_paired_and_linearised() -> None:
    f = figures(TABLE)
    counts = TABLE[:, -1]
    assert f.kl_se == mean_and_error(TABLE[:, COLUMNS.index("kl")], counts)[1]
    assert f.perplexity_se == pytest.approx(f.perplexity * mean_and_error(TABLE[:, 1], counts)[1])
    assert f.perplexity_ratio_se == pytest.approx(
        f.perplexity_ratio * mean_and_error(TABLE[:, 1] - TABLE[:, 0], counts)[1]
    )
    assert f.perplexity_ratio_se < f.perplexity_se  # what both models find hard cancels in the pair


@pytest.mark.parametrize(("nll", "perplexity"), [(1e5, math.inf), (math.nan, math.nan)])
def test_a_perplexity_beyond_floating_point_is_infinite_and_one_of_nan_is_nan(
    nll, perplexity
) -> None:
    table = TABLE.clone()
    table[:, COLUMNS.index("nll")] = nll
    assert figures(table).perplexity == pytest.approx(perplexity, nan_ok=True)


@pytest.mark.parametrize("name", ["kl", "perplexity"])
def test_a_change_is_measured_by_pairs_of_samples(name) -> None:
    index = COLUMNS.index("nll" if name == "perplexity" else name)
    later = TABLE.clone()
    later[:, index] += 0.01 * TABLE[:, -1]  # the same more for every token
    before, after = figures(TABLE), figures(later)
    found = change_of(name, before, after, TABLE.tolist(), later.tolist())
    assert found.change == pytest.approx(getattr(after, name) - getattr(before, name))
    assert found.change_se == pytest.approx(0, abs=1e-9) and found.before_se > 0.01
    unpaired = math.hypot(found.before_se, found.after_se)
    for earlier in ([], TABLE[:2].tolist(), (TABLE + 1).tolist()):  # unknown, or other samples
        assert change_of(name, before, after, earlier, later.tolist()).change_se == unpaired
    bad = [[None, None, None, 0.0, 0.0, tokens] for tokens in TABLE[:, -1].tolist()]
    assert math.isnan(change_of(name, before, after, bad, later.tolist()).change_se)
