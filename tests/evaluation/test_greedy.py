"""Greedy continuation in a padded batch with a cache is what one gets without either; where two
greedy texts part, and what is said of those that do not.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from slow_greedy import alone
from students import moved, random_samples

import npt
from npt.adapters.converted import adapter_mode
from npt.batch import Sample
from npt.config import NPTConfig
from npt.errors import ConfigError, DataError, NumericalError
from npt.evaluation.greedy import (
    PROMPT_TOKENS,
    Comparison,
    compare_prompts,
    continue_greedily,
    divergence,
    end_ids,
    measure_divergence,
    parting_prompts,
)
from npt.evaluation.metrics import COLUMNS

PROMPTS = [[5], [9, 17, 40, 3, 77, 21, 8], [60, 61, 62], [9, 17, 40, 3]]
NAMES = list("abcd")


@pytest.mark.parametrize("mode", ["teacher", "student", "floor"])
def test_a_batch_gives_what_each_prompt_gives_alone(student, mode) -> None:
    with adapter_mode(student, mode):
        found = continue_greedily(student, PROMPTS, [12] * 4, (), NAMES)
        assert found == [alone(student, prompt, 12) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in found}) > 1


def test_rows_end_at_their_own_end_or_limit(student) -> None:
    free = continue_greedily(student, PROMPTS, [12] * 4, (), NAMES)
    ends = {free[1][4], free[2][0]}
    limits = [0, 12, 12, 3]
    found = continue_greedily(student, PROMPTS, limits, ends, NAMES)
    assert found == [
        alone(student, prompt, limit, ends) for prompt, limit in zip(PROMPTS, limits, strict=True)
    ]
    assert found[0] == [] and found[2] == free[2][:1]
    assert continue_greedily(student, [], [], (), []) == []
    assert continue_greedily(student, PROMPTS, [0] * 4, (), NAMES) == [[]] * 4


def test_no_query_is_ever_without_a_key(student, monkeypatch) -> None:
    seen = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, **kwargs):
        if attn_mask is not None:
            assert attn_mask.dtype == torch.bool
            seen.append(bool(attn_mask.any(dim=-1).all()))
        return attention(query, key, value, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    continue_greedily(student, PROMPTS, [3] * 4, (), NAMES)
    assert len(seen) == 3 * 4 and all(seen)  # steps, layers


def test_logits_that_are_not_finite_name_their_prompt(load_model) -> None:
    model = load_model()
    model.model.embed_tokens.weight.data[61] = math.nan
    with pytest.raises(NumericalError, match=r"the logits after token 3 of c are not finite"):
        continue_greedily(model, PROMPTS, [5] * 4, (), NAMES)
    assert len(continue_greedily(model, PROMPTS[:2], [5] * 2, (), NAMES)[0]) == 5


@pytest.mark.parametrize(("settings", "expected"), [(None, {1}), (7, {1, 7}), ([7, 8], {1, 7, 8})])
def test_the_ends_are_the_tokenizers_and_the_models(tokenizer, settings, expected) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=settings))
    assert end_ids(model, tokenizer) == expected
    assert (
        end_ids(SimpleNamespace(generation_config=None), SimpleNamespace(eos_token_id=None))
        == frozenset()
    )


def prompts(count: int = 12) -> list[Sample]:
    return random_samples(2 + i % 5 for i in range(count))


def test_the_position_is_that_at_which_two_texts_decoded_apart_part(load_model) -> None:
    student = load_model()
    # near enough to its teacher to agree for some tokens
    npt.attach(student, NPTConfig(rank=4, layers="1,3", residual="keep"))
    moved(student, 0.06)
    limit, ends, positions = 12, frozenset({9, 30, 77}), []
    for prompt, found in zip(
        prompts(), compare_prompts(student, prompts(), limit, ends), strict=True
    ):
        texts = {}
        for mode in ("teacher", "student"):
            with adapter_mode(student, mode):
                texts[mode] = alone(student, list(prompt.input_ids), limit, ends)
        pairs = enumerate(zip(texts["teacher"], texts["student"], strict=False))
        expected = next((i for i, (a, b) in pairs if a != b), None)
        assert found.position == expected and list(found.completion) == texts["teacher"]
        if expected is not None:
            assert list(found.student_start) == texts["student"][: expected + 1]
        positions.append(expected)
    # the comparison is of something
    assert None in positions and len(set(positions)) > 3


def test_a_student_that_is_its_teacher_never_parts(load_model) -> None:
    model = load_model()
    npt.attach(model, NPTConfig(rank=4, layers="all", residual="keep"))
    found = compare_prompts(model, prompts(), 6, frozenset())
    assert {(c.position, len(c.completion)) for c in found} == {(None, 6)}
    same = measure_divergence(model, prompts(), frozenset(), 6, 4)
    assert (same.parted, same.tokens, same.agreed) == (0, 72, 6.0)


def test_what_is_no_token_or_not_finite_is_refused_and_named(load_model) -> None:
    model = load_model()
    npt.attach(model, NPTConfig(rank=4, layers="1"))
    with pytest.raises(DataError, match=r"999.*there"):
        compare_prompts(model, [Sample("there", (5, 999))], 4, frozenset())
    with torch.no_grad():
        model.model.layers[1].npt.A[0, 0] = math.nan
    with pytest.raises(NumericalError, match="not finite"):
        compare_prompts(model, prompts(2), 4, frozenset())


@pytest.mark.parametrize("batch_size", [5, 100])
def test_the_figures_are_those_of_the_comparisons_in_batches_of_any_size(
    student, batch_size
) -> None:
    calls, ends = [], frozenset({9})
    expected = divergence(compare_prompts(student, prompts(), 8, ends), 8)
    found = measure_divergence(
        student, prompts(), ends, 8, batch_size, between=lambda: calls.append(1)
    )
    assert found == expected and found.parted and len(calls) == -(-12 // batch_size)


def compared(position: int | None, length: int) -> Comparison:
    figures = torch.zeros(length, len(COLUMNS))
    return Comparison(Sample("p", (3,)), (5,) * length, figures, position, position and 7)


def test_figures_by_hand() -> None:
    # Parted after 2, 0 and 4 tokens; two still the same at the limit of 6; one that ended after 3
    # tokens, the same throughout.
    texts = [(2, 6), (0, 6), (4, 6), (None, 6), (None, 6), (None, 3)]
    found = divergence([compared(*text) for text in texts], 6)
    assert (found.prompts, found.parted, found.tokens) == (6, 3, 33)
    assert found.agreed == pytest.approx((2 + 0 + 4 + 6 + 6 + 3) / 6)
    one = divergence([compared(2, 6)], 6)
    assert one.agreed == 2.0 and math.isnan(one.agreed_se)


def test_prompts_are_the_text_before_a_completion_or_its_beginning() -> None:
    ids = tuple(range(10, 110))
    cases = [
        (Sample("completion", ids[:8], (*(-100,) * 5, *ids[5:8])), ids[:5]),
        (Sample("text", ids[:9]), ids[:4]),
        (Sample("long", ids), ids[:PROMPT_TOKENS]),
        (Sample("two", ids[:2]), ids[:1]),
        (Sample("packed", ids[:20], None, (6, 14)), ids[:3]),
        (Sample("masked first", ids[:20], (*(-100,) * 8, *ids[8:20]), (6, 14)), ids[:3]),
        (Sample("nothing in front", ids[:8], ids[:8]), ids[:4]),
    ]
    found = parting_prompts([sample for sample, _ in cases], 16, 256)
    assert [(p.id, p.input_ids) for p in found] == [(s.id, prompt) for s, prompt in cases]


def test_a_prompt_that_would_not_fit_loses_its_front() -> None:
    ids = tuple(range(10, 60))
    # the end of its first half
    assert parting_prompts([Sample("a", ids)], 10, 16)[0].input_ids == ids[19:25]
    for limit in (0, 16, 17):
        with pytest.raises(ConfigError, match=f"max_new_tokens {limit} must"):
            parting_prompts([Sample("a", ids)], limit, 16)
