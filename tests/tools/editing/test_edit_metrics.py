import math

import pytest
import torch
from students import random_samples
from token_students import student
from updates import random_update

import npt
from npt.adapters.consolidate import apply_update
from npt.adapters.converted import npt_layers
from npt.batch import Sample
from npt.errors import DataError, NumericalError
from npt.tools.editing.edit_metrics import Baseline, Forgetting, mean_log_probability
from npt.tools.editing.probes import Probe

ANSWERS = [Probe((0, 9, 8, 7, 5), (0, 7, 5), (30, 12)), Probe((0, 9, 5), (0, 5), (44,))]
STREAMS = ("student", "teacher")


def samples(count: int, seed: int) -> list[Sample]:
    return random_samples((8 + i % 5 for i in range(count)), seed)


@pytest.fixture
def model(load_model):
    return student(load_model)


def log_p(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)


@pytest.mark.parametrize("stream", STREAMS)
def test_the_log_probability_is_summed_over_an_answer_and_averaged_over_answers(model, stream):
    expected = []
    for probe in ANSWERS:
        ids = probe.context + probe.tail
        with npt.adapter_mode(model, stream):
            each = log_p(model, ids)
        places = range(len(probe.context) - 1, len(ids) - 1)
        expected.append(sum(float(each[n, ids[n + 1]]) for n in places))
    found = mean_log_probability(model, [probe.read() for probe in ANSWERS], stream)
    # fp32 against fp64
    assert found == pytest.approx(sum(expected) / 2, rel=1e-5)


def test_the_figures_are_those_of_the_two_models_themselves(model):
    text = samples(6, 1)
    baseline = Baseline(model, text, ANSWERS, ANSWERS[:1], [(0, 5, 9), (0, 7)])
    old = [log_p(model, s.input_ids)[:-1] for s in text]
    words = [int(log_p(model, ids)[-1].argmax()) for ids in ((0, 5, 9), (0, 7))]
    apply_update(model, random_update(model))
    found = baseline.against(model)
    new = [log_p(model, s.input_ids)[:-1] for s in text]
    after = [int(log_p(model, ids)[-1].argmax()) for ids in ((0, 5, 9), (0, 7))]
    p, q = torch.cat(old), torch.cat(new)
    targets = torch.tensor([token for s in text for token in s.input_ids[1:]]).unsqueeze(-1)
    forgetting, recall = found["forgetting"]["student"], found["recall"]["student"]
    # fp32, padded batches against single rows
    assert forgetting["kl"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    ratio = float((p - q).gather(-1, targets).mean().exp())
    assert forgetting["perplexity_ratio"] == pytest.approx(ratio, rel=1e-4)
    assert recall["neighbours_same"] == sum(a == b for a, b in zip(words, after, strict=True)) / 2
    assert recall["gain"] == pytest.approx(recall["after"] - recall["before"])
    assert recall["gain"] != 0 != recall["paraphrases_gain"]
    assert (recall["answers"], recall["tokens"]) == (2, 3)
    assert set(found["recall"]) == set(STREAMS)


def test_the_share_through_the_code_is_that_of_the_codes_put_in(model):
    """With all layers converted, context reaches the last position only through codes: putting the
    codes of the same text in changes nothing.
    """
    same = [Probe(probe.before, probe.before, probe.tail) for probe in ANSWERS]
    layers = npt_layers(model)
    baseline = Baseline(model, samples(2, 0), ANSWERS)
    assert all(layer.npt.recode is None and layer.npt.observer is None for _, layer in layers)
    recall = baseline.against(model)["recall"]
    share = recall["student"]["share_through_code"]
    assert math.isfinite(share) and share not in (0.0, 1.0)
    assert "share_through_code" not in recall["teacher"]
    through = Baseline(model, samples(2, 0), same)._through_code(model)
    alone = mean_log_probability(model, [probe.alone() for probe in same])
    assert through == pytest.approx(alone, rel=1e-6)


def test_a_model_without_adapters_is_measured_too(load_model):
    found = Baseline(load_model(), samples(2, 0), ANSWERS).against(load_model())
    assert set(found["recall"]) == {"student"} == set(found["forgetting"])
    assert found["recall"]["student"]["gain"] == 0 == found["forgetting"]["student"]["kl"]


def test_the_bound_holds_with_a_margin(model):
    forgetting = Forgetting(model, samples(6, 1), (1,))
    apply_update(model, random_update(model))
    both = [forgetting.figures(model, stream) for stream in STREAMS]
    expected = max(each.kl + 2 * each.kl_se for each in both)
    assert forgetting.upper_kl(model) == pytest.approx(expected)


def test_what_cannot_be_measured_is_refused(model):
    with pytest.raises(DataError, match="no held-out token"):
        Forgetting(model, [Sample("x", (5,))], (1,))
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    with pytest.raises(NumericalError, match="student's log-probability of a text is NaN"):
        mean_log_probability(model, [probe.alone() for probe in ANSWERS])
