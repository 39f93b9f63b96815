"""Where two greedy texts part: against two texts decoded apart, and what is said of those that do
not part.
"""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import npt
from npt.adapters.converted import adapter_mode, adapter_parameters
from npt.config import NPTConfig
from npt.data.batch import Sample
from npt.errors import ConfigError, DataError, NumericalError
from npt.evaluation.greedy import (
    PROMPT_TOKENS,
    Comparison,
    Divergence,
    continue_greedily,
    divergence,
    measure_divergence,
    parting_prompts,
)
from npt.evaluation.metrics import COLUMNS, nan_for_null

NONE = frozenset[int]()


@pytest.fixture(scope="module")
def student(load_model):
    model = load_model()
    # near enough to its teacher to agree for some tokens
    npt.attach(model, NPTConfig(rank=4, layers="1,3", residual="keep"))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.copy_(0.06 * torch.randn(parameter.shape, generator=generator))
    return model


def prompts(count: int = 12) -> list[Sample]:
    generator = torch.Generator().manual_seed(3)
    return [
        Sample(str(i), tuple(torch.randint(3, 128, (2 + i % 5,), generator=generator).tolist()))
        for i in range(count)
    ]


def compared(position: int | None, length: int) -> Comparison:
    return Comparison(
        Sample("p", (3,)),
        (5,) * length,
        torch.zeros(length, len(COLUMNS)),
        position,
        None if position is None else 7,
    )


# --- where they part
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [frozenset({9, 30, 77})])
def test_the_position_is_that_at_which_two_texts_decoded_apart_part(student, ends) -> None:
    limit = 12
    some = prompts()
    texts = {}
    for mode in ("teacher", "student"):
        with adapter_mode(student, mode):
            texts[mode] = [
                continue_greedily(student, [p.input_ids], [limit], ends, [p.id])[0] for p in some
            ]
    expected = []
    for teacher, own in zip(texts["teacher"], texts["student"], strict=True):
        expected.append(
            next((i for i, (a, b) in enumerate(zip(teacher, own, strict=False)) if a != b), None)
        )
        assert expected[-1] is not None or teacher == own
    found = measure_divergence(student, some, ends, max_new_tokens=limit, batch_size=5)
    assert found.parted == sum(position is not None for position in expected)
    agreed = [
        len(text) if position is None else position
        for text, position in zip(texts["teacher"], expected, strict=True)
    ]
    assert found.agreed == pytest.approx(sum(agreed) / len(agreed))
    assert found.tokens == sum(map(len, texts["teacher"]))
    assert 0 < found.parted < len(some) and len(set(agreed)) > 3  # the comparison is of something


def test_a_student_that_is_its_teacher_never_parts(load_model) -> None:
    model = load_model()
    npt.attach(model, NPTConfig(rank=4, layers="all", residual="keep"))
    found = measure_divergence(model, prompts(), NONE, max_new_tokens=6, batch_size=4)
    assert (found.parted, found.censored, found.ended) == (0, 12, 0)
    assert (found.agreed, found.rate) == (6.0, 0.0) and math.isnan(found.median)


def test_the_batch_size_does_not_change_where_they_part(student) -> None:
    whole = measure_divergence(student, prompts(), NONE, max_new_tokens=8, batch_size=100)
    single = measure_divergence(student, prompts(), NONE, max_new_tokens=8, batch_size=1)
    assert repr(single) == repr(whole)  # where no two part, the median is NaN


def test_what_is_no_token_or_not_finite_is_refused_and_named(student, load_model) -> None:
    with pytest.raises(DataError, match=r"999.*there"):
        measure_divergence(
            student, [Sample("there", (5, 999))], NONE, max_new_tokens=4, batch_size=1
        )
    broken = load_model()
    npt.attach(broken, NPTConfig(rank=4, layers="1"))
    with torch.no_grad():
        broken.model.layers[1].npt.A[0, 0] = math.nan
    with pytest.raises(NumericalError, match="not finite"):
        measure_divergence(broken, prompts(2), NONE, max_new_tokens=4, batch_size=2)


# --- what is made of it
# ----------------------------------------------------------------------------------------------


def test_figures_by_hand() -> None:
    # Parted after 2, 0 and 4 tokens; two still the same at the limit of 6; one that ended after 3
    # tokens, the same throughout.
    found = divergence(
        [
            compared(2, 6),
            compared(0, 6),
            compared(4, 6),
            compared(None, 6),
            compared(None, 6),
            compared(None, 3),
        ],
        6,
    )
    assert (found.prompts, found.parted, found.censored, found.ended, found.tokens) == (
        6,
        3,
        2,
        1,
        33,
    )
    assert found.agreed == pytest.approx((2 + 0 + 4 + 6 + 6 + 3) / 6)
    # At 0: 6 at risk, survival 5/6. At 2: 5, 4/6. At 4: the one that ended is gone, 3 at risk, 4/9.
    assert found.median == 4.0
    assert found.rate == pytest.approx(3 / (21 + 3))


def test_with_one_prompt_there_is_no_error() -> None:
    found = divergence([compared(2, 6)], 6)
    assert (found.agreed, found.median, found.rate) == (2.0, 2.0, pytest.approx(1 / 3))
    assert math.isnan(found.agreed_se) and math.isnan(found.rate_se)


def test_figures_read_back() -> None:
    found = divergence([compared(None, 6), compared(1, 6)], 6)
    values = {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in found.as_dict().items()
    }
    assert Divergence(**nan_for_null(values)) == found


@given(outcomes=st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=30))
@settings(deadline=None, max_examples=80, derandomize=True)
def test_the_parts_make_up_the_whole_and_bounds_hold(outcomes) -> None:
    limit = 8
    found = divergence(
        [
            compared(n, limit) if parts and n < limit else compared(None, max(n, 1))
            for n, parts in outcomes
        ],
        limit,
    )
    assert found.parted + found.censored + found.ended == found.prompts == len(outcomes)
    assert 0 <= found.agreed <= limit and 0 <= found.rate <= 1
    assert math.isnan(found.median) or 0 <= found.median < limit
    if 2 * found.parted < found.prompts - found.ended and not found.ended:
        assert math.isnan(found.median)  # fewer than half part, and nothing left the count early


@given(rate=st.sampled_from([0.02, 0.1, 0.4]), seed=st.integers(0, 100))
@settings(deadline=None, max_examples=20, derandomize=True)
def test_the_rate_is_found_whatever_the_limit_cuts_off(rate, seed) -> None:
    """Texts that part at a constant rate, and a limit below what most of them live: the estimate is
    not drawn towards the limit.
    """
    limit, count = 10, 4000
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    first = (uniform.log() / math.log1p(-rate)).floor().to(torch.int64).tolist()
    found = divergence([compared(n if n < limit else None, limit) for n in first], limit)
    # of 20 draws none beyond 4.5 standard errors
    assert abs(found.rate - rate) < 4.5 * found.rate_se


# --- prompts
# --------------------------------------------------------------------------------------------------


def test_prompts_are_the_text_before_a_completion_or_its_beginning() -> None:
    ids = tuple(range(10, 110))
    some = [
        Sample("completion", ids[:8], (*(-100,) * 5, *ids[5:8])),
        Sample("text", ids[:9]),
        Sample("long", ids),
        Sample("two", ids[:2]),
        Sample("packed", ids[:20], None, (6, 14)),
        Sample("nothing in front", ids[:8], ids[:8]),
    ]
    found = parting_prompts(some, 99, 16, 256)
    assert [(p.id, p.input_ids) for p in found] == [
        ("completion", ids[:5]),
        ("text", ids[:4]),
        ("long", ids[:PROMPT_TOKENS]),
        ("two", ids[:1]),
        ("packed", ids[:3]),
        ("nothing in front", ids[:4]),
    ]
    assert [p.id for p in parting_prompts(some, 2, 16, 256)] == ["completion", "text"]


def test_a_prompt_that_would_not_fit_loses_its_front() -> None:
    ids = tuple(range(10, 60))
    # the end of its first half
    assert parting_prompts([Sample("a", ids)], 1, 10, 16)[0].input_ids == ids[19:25]
    for limit in (0, 16, 17):
        with pytest.raises(ConfigError, match=f"max_new_tokens is {limit}"):
            parting_prompts([Sample("a", ids)], 1, limit, 16)
