"""Greedy continuation in a padded batch with a cache is what one gets without either."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from slow_greedy import alone

import npt
from npt.adapters.converted import adapter_mode
from npt.errors import NumericalError
from npt.evaluation.greedy import continue_greedily, end_ids

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
