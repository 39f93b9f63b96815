"""Greedy continuation in a padded batch with a cache is what one gets without either."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from slow_greedy import alone

import npt
from npt.adapters.converted import adapter_mode, adapter_parameters
from npt.config import NPTConfig
from npt.data.batch import Sample
from npt.errors import DataError, NumericalError
from npt.evaluation.greedy import compare_prompts, continue_greedily, end_ids

PROMPTS = [[5], [9, 17, 40, 3, 77, 21, 8], [60, 61, 62], [9, 17, 40, 3]]
NAMES = list("abcd")


@pytest.mark.parametrize("mode", ["teacher", "student", "floor"])
def test_a_batch_gives_what_each_prompt_gives_alone(student, mode) -> None:
    with adapter_mode(student, mode):
        found = continue_greedily(student, PROMPTS, [12] * 4, (), NAMES)
        assert found == [alone(student, prompt, 12) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in found}) > 1


def test_transformers_own_greedy_generation_gives_the_same(student) -> None:
    with npt.adapters_disabled(student):
        ids = torch.tensor([PROMPTS[1]])
        generated = student.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=-1,
        )
        assert continue_greedily(student, [PROMPTS[1]], [12], (), ["b"]) == [
            generated[0, 7:].tolist()
        ]


def test_rows_end_at_their_own_end_or_limit(student) -> None:
    free = continue_greedily(student, PROMPTS, [12] * 4, (), NAMES)
    ends = {free[1][4], free[2][0]}
    limits = [0, 12, 12, 3]
    found = continue_greedily(student, PROMPTS, limits, ends, NAMES)
    assert found == [
        alone(student, prompt, limit, ends) for prompt, limit in zip(PROMPTS, limits, strict=True)
    ]
    assert found[0] == [] and found[2] == free[2][:1]


def test_nothing_comes_of_nothing(student) -> None:
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


def test_a_broken_embedding_of_the_pad_token_is_not_read(load_model) -> None:
    model = load_model()
    before = continue_greedily(model, PROMPTS, [5] * 4, (), NAMES)
    model.model.embed_tokens.weight.data[2] = math.nan
    assert continue_greedily(model, PROMPTS, [5] * 4, (), NAMES) == before


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
    generator = torch.Generator().manual_seed(3)
    return [
        Sample(str(i), tuple(torch.randint(3, 128, (2 + i % 5,), generator=generator).tolist()))
        for i in range(count)
    ]


def test_the_position_is_that_at_which_two_texts_decoded_apart_part(load_model) -> None:
    student = load_model()
    # near enough to its teacher to agree for some tokens
    npt.attach(student, NPTConfig(rank=4, layers="1,3", residual="keep"))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in adapter_parameters(student).values():
            parameter.copy_(0.06 * torch.randn(parameter.shape, generator=generator))
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


def test_what_is_no_token_or_not_finite_is_refused_and_named(load_model) -> None:
    model = load_model()
    npt.attach(model, NPTConfig(rank=4, layers="1"))
    with pytest.raises(DataError, match=r"999.*there"):
        compare_prompts(model, [Sample("there", (5, 999))], 4, frozenset())
    with torch.no_grad():
        model.model.layers[1].npt.A[0, 0] = math.nan
    with pytest.raises(NumericalError, match="not finite"):
        compare_prompts(model, prompts(2), 4, frozenset())
