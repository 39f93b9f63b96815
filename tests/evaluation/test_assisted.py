"""The student as draft model: the teacher's text to the token, and a count of drafts that a slow
look confirms.
"""

from __future__ import annotations

import math

import pytest
import torch
from slow_greedy import alone

import npt
from npt.adapters.converted import npt_layers
from npt.errors import ConfigError, ModelError
from npt.evaluation.assisted import Drafts, expected_acceptance, write_assisted
from npt.evaluation.generate import Decoding, write

PROMPT = [9, 17, 40, 3, 77, 21, 8]
LIMIT = 14


class Names:
    """A tokenizer of which only the end token and decoding are asked."""

    eos_token_id, pad_token_id = None, 2

    def decode(self, ids, skip_special_tokens=False) -> str:
        return " ".join(map(str, ids))


@pytest.fixture
def endless(student):
    student.generation_config.eos_token_id = None
    return student


@pytest.mark.parametrize("draft_tokens", [1, 5, 50])
def test_the_text_is_the_teachers_own_and_the_drafts_are_counted(endless, draft_tokens) -> None:
    teacher, student = npt.teacher_view(endless), npt.student_view(endless)
    text = alone(teacher, PROMPT, LIMIT)
    written, drafts = write_assisted(
        endless, Names(), PROMPT, Decoding(LIMIT), draft_tokens=draft_tokens
    )
    assert list(written.ids) == text
    # The slow look: what the student would draft after each pass, without any cache.
    passes, done = [], 0
    while done < LIMIT:
        drafted = alone(student, [*PROMPT, *text[:done]], min(draft_tokens, LIMIT - done - 1))
        kept = next(
            (i for i, (a, b) in enumerate(zip(drafted, text[done:], strict=False)) if a != b),
            len(drafted),
        )
        passes.append((len(drafted), kept))
        done += kept + 1
    assert drafts.passes == tuple(passes)
    assert 0 < drafts.accepted < drafts.drafted  # the student is neither its teacher nor nonsense


def test_a_student_that_is_its_teacher_is_always_accepted(load_model) -> None:
    model = load_model()
    npt.attach(model, npt.NPTConfig(rank=4, layers="all", residual="keep"))
    model.generation_config.eos_token_id = None
    _, drafts = write_assisted(model, Names(), PROMPT, Decoding(LIMIT), draft_tokens=4)
    assert drafts.acceptance == 1.0 and drafts.drafted == drafts.judged == drafts.accepted
    drawn, drafts = write_assisted(
        model, Names(), PROMPT, Decoding(LIMIT, temperature=1.0), draft_tokens=4
    )
    assert drafts.acceptance == 1.0
    assert expected_acceptance(model, PROMPT, drawn.ids, Decoding(LIMIT, temperature=1.0)) == 1.0


def test_a_draft_that_ends_the_text_is_accepted(load_model) -> None:
    model = load_model()
    npt.attach(model, npt.NPTConfig(rank=4, layers="all", residual="keep"))
    model.generation_config.eos_token_id = None
    text = alone(model, PROMPT, LIMIT)
    end = next(i for i, token in enumerate(text) if token not in text[:i] and i > 3)
    model.generation_config.eos_token_id = text[end]
    for draft_tokens in (1, 3, 4, 5, LIMIT):
        written, drafts = write_assisted(
            model, Names(), PROMPT, Decoding(LIMIT), draft_tokens=draft_tokens
        )
        assert list(written.ids) == text[: end + 1] and written.ended
        assert drafts.acceptance == 1.0, draft_tokens


def test_the_greedy_expectation_is_the_agreement_on_the_teachers_text(endless) -> None:
    text = alone(npt.teacher_view(endless), PROMPT, LIMIT)
    student = npt.student_view(endless)
    agree = [alone(student, [*PROMPT, *text[:i]], 1)[0] == text[i] for i in range(LIMIT)]
    assert expected_acceptance(endless, PROMPT, text, Decoding(LIMIT)) == pytest.approx(
        sum(agree) / LIMIT
    )
    assert math.isnan(expected_acceptance(endless, PROMPT, [], Decoding(LIMIT)))


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 1.0), (1.3, 0.6)])
def test_the_drawn_expectation_is_the_overlap_of_what_is_drawn_from(
    endless, temperature, top_p
) -> None:
    text = alone(npt.teacher_view(endless), PROMPT, 5)
    overlaps = []
    for i in range(5):
        probabilities = []
        for view in (npt.teacher_view(endless), npt.student_view(endless)):
            with torch.no_grad():
                logits = (
                    view(input_ids=torch.tensor([[*PROMPT, *text[:i]]])).logits[0, -1].double()
                    / temperature
                )
            p, order = logits.softmax(-1).sort(descending=True)
            kept = p.cumsum(-1) - p < top_p  # the fewest tokens that reach top_p
            p = torch.where(kept, p, 0.0)
            probabilities.append(torch.zeros_like(p).scatter(0, order, p / p.sum()))
        overlaps.append(float(torch.minimum(*probabilities).sum()))
    found = expected_acceptance(
        endless, PROMPT, text, Decoding(5, temperature=temperature, top_p=top_p)
    )
    assert found == pytest.approx(sum(overlaps) / 5, rel=1e-4)  # fp32 against fp64
    assert found < 0.99


def test_drawn_drafts_are_accepted_as_often_as_expected(endless) -> None:
    """Speculative sampling accepts a draft with probability sum(min(p, q)): over some eighty
    drafts, within four standard errors.
    """
    accepted = judged = weighted = 0.0
    for seed in range(3):
        decoding = Decoding(48, temperature=0.6, top_p=0.9, seed=seed)
        written, drafts = write_assisted(endless, Names(), PROMPT, decoding, draft_tokens=2)
        accepted, judged = accepted + drafts.accepted, judged + drafts.judged
        weighted += drafts.judged * expected_acceptance(endless, PROMPT, written.ids, decoding)
    expected = weighted / judged
    assert judged > 75 and 0.3 < expected < 0.95
    assert abs(accepted / judged - expected) < 4 * math.sqrt(expected * (1 - expected) / judged)


def test_the_models_mode_and_settings_stay(endless) -> None:
    before = endless.generation_config.to_dict()
    write_assisted(endless, Names(), PROMPT, Decoding(8))
    assert endless.generation_config.to_dict() == before
    assert {layer.npt.mode for _, layer in npt_layers(endless)} == {"student"}
    assert not endless._forward_pre_hooks


def test_transformers_own_settings_give_the_teachers_text_as_well(endless) -> None:
    teacher, student = npt.teacher_view(endless), npt.student_view(endless)
    ids = torch.tensor([PROMPT])
    found = teacher.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=LIMIT,
        do_sample=False,
        assistant_model=student,
    )
    assert found[0, len(PROMPT) :].tolist() == alone(teacher, PROMPT, LIMIT)


def test_counts_by_hand() -> None:
    drafts = Drafts(((5, 5), (5, 2), (5, 0), (1, 1)))
    assert (drafts.drafted, drafts.accepted, drafts.judged) == (16, 8, 5 + 3 + 1 + 1)
    assert drafts.acceptance == 0.8
    assert math.isnan(Drafts(((0, 0),)).acceptance)


def test_no_drafts_and_no_adapters_are_refused(endless, load_model) -> None:
    with pytest.raises(ConfigError, match="draft_tokens is 0"):
        write_assisted(endless, Names(), PROMPT, Decoding(8), draft_tokens=0)
    with pytest.raises(ModelError, match=r"npt\.attach"):
        write_assisted(load_model(), Names(), PROMPT, Decoding(8))


def test_a_text_of_one_token_needs_no_draft(endless) -> None:
    written, drafts = write_assisted(endless, Names(), PROMPT, Decoding(1))
    assert written.ids == write(npt.teacher_view(endless), Names(), PROMPT, Decoding(1)).ids
    assert drafts.drafted == 0
