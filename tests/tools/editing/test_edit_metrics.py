import math

import pytest
import torch
from students import random_samples
from token_students import student

import npt
from npt.data.batch import Sample
from npt.errors import ConfigError, DataError, ModelError, NumericalError
from npt.tools.editing.edit_metrics import (
    STREAMS,
    Baseline,
    encode_fact,
    largest_alpha,
    log_probability,
    made,
)

TEXT = "a fact"


def samples(count: int, seed: int) -> list[Sample]:
    return random_samples((8 + i % 5 for i in range(count)), seed)


@pytest.fixture
def model(load_model):
    return student(load_model)


@pytest.fixture
def fact(tokenizer):
    return encode_fact(tokenizer, TEXT)


def test_a_fact_has_the_same_tokens_alone_and_in_context(tokenizer):
    alone = encode_fact(tokenizer, TEXT)
    assert (
        alone.alone[0] == 0
        and alone.scored == len(TEXT)
        and alone.in_context == (*alone.alone, *alone.alone[1:])
    )
    told = encode_fact(tokenizer, TEXT, "said before: ")
    assert told.alone == alone.alone and told.in_context[-told.scored :] == alone.alone[1:]
    assert len(told.in_context) == 1 + len("said before: ") + len(TEXT)


def test_without_a_start_token_the_first_token_is_not_predicted(tokenizer):
    class Startless(type(tokenizer)):
        bos_token_id = None

        def __call__(self, texts, add_special_tokens=True, **_):
            return super().__call__(texts, add_special_tokens=False)

    fact = encode_fact(Startless(), TEXT)
    assert len(fact.alone) == len(TEXT) and fact.scored == len(TEXT) - 1
    with pytest.raises(ConfigError, match="--text 'x' has no token to predict"):
        encode_fact(Startless(), "x")


@torch.no_grad()
@pytest.mark.parametrize("stream", STREAMS)
def test_the_log_probability_is_the_sum_over_the_scored_tokens(model, fact, stream):
    with npt.adapter_mode(model, stream):
        log_p = torch.log_softmax(model(torch.tensor([fact.in_context])).logits[0].double(), -1)
    expected = sum(
        float(log_p[-fact.scored - 1 + i, token])
        for i, token in enumerate(fact.in_context[-fact.scored :])
    )
    # fp32 against fp64
    assert log_probability(model, fact.in_context, fact.scored, stream) == pytest.approx(
        expected, rel=1e-5
    )


@torch.no_grad()
def test_the_figures_are_those_of_the_two_models_themselves(model, tokenizer, fact):
    text = samples(6, 1)
    before = Baseline(model, fact, text, batch_size=3)
    old = [
        torch.log_softmax(model(torch.tensor([s.input_ids])).logits[0, :-1].double(), -1)
        for s in text
    ]
    update = npt.update_from(npt.modulation_of(model, fact.alone), 0.5)
    with made(model, update):
        found = before.against(model)
        new = [
            torch.log_softmax(model(torch.tensor([s.input_ids])).logits[0, :-1].double(), -1)
            for s in text
        ]
    p, q = torch.cat(old), torch.cat(new)
    targets = torch.tensor([token for s in text for token in s.input_ids[1:]]).unsqueeze(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    # fp32, padded batches against single rows
    assert found["forgetting"]["student"]["kl"] == pytest.approx(float(kl), rel=1e-3)
    assert found["forgetting"]["student"]["perplexity_ratio"] == pytest.approx(
        float((p - q).gather(-1, targets).mean().exp()), rel=1e-4
    )
    assert npt.consolidated(model) == ()
    assert found["recall"]["student"]["gain"] != 0


@pytest.mark.parametrize("max_kl", [1e-4, 1e-2])
def test_alpha_is_the_largest_that_keeps_the_bound(model, tokenizer, fact, max_kl):
    before = Baseline(model, fact, samples(8, 2))
    modulation = npt.modulation_of(model, fact.alone)

    def reached(alpha: float) -> float:
        with made(model, npt.update_from(modulation, alpha)):
            return max(
                f.kl + 2 * f.kl_se for f in (before.forgetting(model, stream) for stream in STREAMS)
            )

    alpha = largest_alpha(model, before, lambda a: npt.update_from(modulation, a), 1.0, max_kl)
    assert 0 < alpha < 1 and reached(alpha) <= max_kl < reached(1.5 * alpha)
    assert npt.consolidated(model) == ()


def test_without_a_bound_or_far_below_it_alpha_is_the_one_asked_for(model, tokenizer, fact):
    before = Baseline(model, fact, samples(4, 2))
    modulation = npt.modulation_of(model, fact.alone)
    for max_kl in (math.inf, 1e3):
        assert (
            largest_alpha(model, before, lambda a: npt.update_from(modulation, a), 0.7, max_kl)
            == 0.7
        )
    for max_kl in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match=r"--max_kl .* must be"):
            largest_alpha(model, before, lambda a: npt.update_from(modulation, a), 0.7, max_kl)


def test_what_cannot_be_measured_is_refused(load_model, model, tokenizer, fact):
    with pytest.raises(DataError, match="no held-out token"):
        Baseline(model, fact, [Sample("x", (5,))])
    with pytest.raises(ModelError, match="no NPT adapters"):
        Baseline(load_model(), fact, samples(2, 0))
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    with pytest.raises(NumericalError, match="student's log-probability of the fact is NaN"):
        Baseline(model, fact, samples(2, 0))
