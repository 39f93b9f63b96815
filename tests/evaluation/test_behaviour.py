"""Answers, agreement, positions and needles, each against a plain computation of the same."""

from __future__ import annotations

import io
import json
import math
from itertools import pairwise

import pytest
import torch
from rich.console import Console

import npt
from npt.adapters.converted import adapter_mode, adapter_parameters
from npt.config import DataConfig
from npt.data import prose as prose_module
from npt.data.batch import Sample
from npt.errors import ConfigError, NumericalError
from npt.evaluation.behaviour import documents as documents_module
from npt.evaluation.behaviour import measure as measure_module
from npt.evaluation.behaviour import needles as needles_module
from npt.evaluation.behaviour import positions as positions_module
from npt.evaluation.behaviour.agreement import equal_shares, measure_agreement
from npt.evaluation.behaviour.answers import compare_answers
from npt.evaluation.behaviour.documents import beginnings, heldout_documents
from npt.evaluation.behaviour.measure import Behaviour, measure_behaviour
from npt.evaluation.behaviour.needles import Needle, find_needles, make_needles
from npt.evaluation.behaviour.positions import chosen_positions, measure_positions, rows_of
from npt.evaluation.behaviour.prompts import PROMPTS, Prompt
from npt.evaluation.behaviour.table import print_behaviour
from npt.evaluation.greedy import Comparison, continue_greedily
from npt.evaluation.metrics import COLUMNS
from npt.files import to_json

NONE = frozenset[int]()


class Letters:
    """A tokenizer of the random Llama: a token is an ASCII character."""

    bos_token_id, eos_token_id, pad_token_id = 0, 1, 2

    def __init__(self, chat: bool = False):
        self.chat_template = "{{ messages }}" if chat else None

    def __call__(self, texts, add_special_tokens=True, **_):
        def ids(text):
            return [0] * add_special_tokens + [3 + ord(c) % 125 for c in text]

        return {"input_ids": ids(texts) if isinstance(texts, str) else [ids(t) for t in texts]}

    def decode(self, ids, skip_special_tokens=False, **_):
        return "".join(chr(i - 3) for i in ids if i >= 3)

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        return f"<{messages[0]['content']}>"


def samples(count: int, length: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(3)
    return [
        Sample(str(i), tuple(torch.randint(3, 128, (length,), generator=generator).tolist()))
        for i in range(count)
    ]


def logits_of(model, ids, mode) -> torch.Tensor:
    with torch.no_grad(), adapter_mode(model, mode):
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1)


class TestPositions:
    def test_a_few_of_each_octave_are_measured_and_all_of_the_first(self):
        found = chosen_positions(2048)
        assert found[:128] == list(range(128))  # 64-127 are 64 positions, which all fit
        assert all(a < b for a, b in pairwise(found)) and found[-1] <= 2046
        for first in (128, 256, 512, 1024):
            assert sum(first <= p < 2 * first for p in found) == positions_module.PER_OCTAVE

    @pytest.mark.parametrize("tokens", [2, 3, 4, 5, 9, 300])
    def test_no_position_lies_beyond_the_last_that_predicts(self, tokens):
        found = chosen_positions(tokens)
        assert found[0] == 0 and found[-1] <= tokens - 2
        assert len(set(found)) == len(found) == tokens - 1 if tokens < 128 else True

    def test_documents_that_fill_a_row_come_first_then_joined_ones(self):
        lengths = (4, 9, 3, 12, 2, 5)
        some = [Sample(str(i), (i,) * n) for i, n in enumerate(lengths)]
        rows, whole = rows_of(some, 8, 4)
        assert [row.input_ids for row in rows[:2]] == [(1,) * 8, (3,) * 8] and whole == 2
        assert [row.input_ids for row in rows[2:]] == [(0, 0, 0, 0, 2, 2, 2, 4)]
        assert rows_of(some, 8, 1)[0] == rows[:1]
        assert rows_of(some[:1], 8, 4)[0][0].input_ids == (0,) * 4  # less than a row
        assert rows_of([], 8, 4) == ([], 0)

    def test_figures_are_those_of_whole_logits(self, student, monkeypatch):
        monkeypatch.setattr(positions_module, "_AT_ONCE", 5)
        rows = samples(3, 20)
        octaves = measure_positions(student, rows)
        assert [(o.first, o.last) for o in octaves] == [(0, 1), (2, 3), (4, 7), (8, 15), (16, 18)]
        for octave in octaves:
            means = []
            for row in rows:
                p, q = (logits_of(student, row.input_ids, m) for m in ("teacher", "student"))
                at = torch.arange(octave.first, octave.last + 1)
                target = torch.tensor(row.input_ids)[at + 1]
                kl = (p.exp() * (p - q)).sum(dim=-1)[at]
                means.append([-p[at, target].mean(), -q[at, target].mean(), kl.mean()])
            by_row = torch.tensor(means)
            mean, error = by_row.mean(dim=0), by_row.std(dim=0) / math.sqrt(len(rows))
            found = (octave.teacher, octave.student, octave.kl)
            errors = (octave.teacher_se, octave.student_se, octave.kl_se)
            # rounding of fp32 logits of some units
            assert found == pytest.approx(mean.tolist(), abs=1e-5)
            assert errors == pytest.approx(error.tolist(), abs=1e-5)
            assert octave.excess == pytest.approx(octave.student - octave.teacher, abs=1e-6)
            assert octave.tokens == len(rows) * (octave.last - octave.first + 1)

    def test_a_student_that_is_its_teacher_loses_nothing(self, load_model):
        model = load_model()
        npt.attach(model, npt.NPTConfig(rank=4, residual="keep", init="random"))
        with torch.no_grad():
            for parameter in adapter_parameters(model).values():
                parameter.zero_()
        for octave in measure_positions(model, samples(2, 9)):
            assert octave.excess == 0.0 and octave.kl == 0.0


class TestNeedles:
    prose = Letters()("Once upon a time there was a tree. " * 8, add_special_tokens=False)

    @pytest.fixture(autouse=True)
    def _near(self, monkeypatch):
        monkeypatch.setattr(needles_module, "DEPTHS", (10, 30))
        monkeypatch.setattr(needles_module, "BEFORE", 12)

    @pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
    def test_the_fact_is_told_once_and_lies_as_far_back_as_is_said(self, chat):
        tokenizer = Letters(chat)
        needles = make_needles(tokenizer, self.prose["input_ids"], 1000)
        assert [n.depth for n in needles] == [10] * 3 + [30] * 3
        assert len({n.code for n in needles}) == 6
        for n in needles:
            assert n.text.count(n.code) == 1 and len(n.code) == 4
            assert (n.text[0] == "<") is chat
            end = n.text.index(f"is {n.code}.") + len(n.code) + 4
            assert n.back == len(n.text) - end  # a character is a token
            assert tokenizer.decode(n.answer) == f" {n.code}"
            assert n.text.endswith(" is") and n.back > n.depth / 2

    def test_they_are_the_same_every_time(self):
        one, other = (make_needles(Letters(), self.prose["input_ids"], 1000) for _ in range(2))
        assert one == other

    def test_what_has_no_room_is_left_out(self):
        needles = make_needles(Letters(), self.prose["input_ids"], 1000)
        longest = len(needles[3].ids) + len(needles[3].answer)
        assert make_needles(Letters(), self.prose["input_ids"], longest - 1) == needles[:3]
        assert make_needles(Letters(), self.prose["input_ids"], 8) == []

    def test_log_probability_and_success_are_those_of_a_plain_pass(self, student):
        prompts, needles = samples(4, 12), []
        with adapter_mode(student, "teacher"):
            own = continue_greedily(student, [p.input_ids for p in prompts], [3] * 4, NONE, "abcd")
        for i, (prompt, answer) in enumerate(zip(prompts, own, strict=True)):
            right = answer if i < 3 else [answer[0], answer[1], (answer[2] + 1) % 128]
            depth = 10 if i < 2 else 30
            needles.append(Needle(depth, "0000", "", prompt.input_ids, tuple(right), 12 + i))
        found = find_needles(student, needles)
        expected = {"teacher": [], "student": []}
        for mode, values in expected.items():
            for n in needles:
                logs = logits_of(student, (*n.ids, *n.answer), mode)[len(n.ids) - 1 : -1]
                values.append(logs.gather(-1, torch.tensor([n.answer]).T).sum().item())
        total = found.total
        assert (total.needles, total.back, total.depth) == (4, 13.5, None)
        for mode, values in expected.items():
            logs = torch.tensor(values)
            # rounding of fp32 logits
            assert getattr(total, f"{mode}_log_prob") == pytest.approx(float(logs.mean()), abs=1e-4)
            error = logs.std() / 2
            assert getattr(total, f"{mode}_log_prob_se") == pytest.approx(float(error), abs=1e-4)
        assert [f.depth for f in found.by_depth] == [10, 30]
        assert [f.teacher_retrieved for f in found.by_depth] == [1.0, 0.5]
        assert total.teacher_retrieved == 0.75


class TestAnswers:
    prompts = tuple(Prompt(f"kind {i}", text) for i, text in enumerate(("Who?", "How far?", "Why")))

    @pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
    def test_both_texts_are_those_of_either_model_alone(self, student, chat):
        tokenizer = Letters(chat)
        found = compare_answers(student, tokenizer, self.prompts, 12)
        assert found.chat is chat and found.max_new_tokens == 12
        assert any(a.parting and a.parting.position for a in found.answers)
        for prompt, answer in zip(self.prompts, found.answers, strict=True):
            text = f"<{prompt.text}>" if chat else prompt.text
            ids = tokenizer(text, add_special_tokens=not chat)["input_ids"]
            for mode in ("teacher", "student"):
                with adapter_mode(student, mode):
                    (own,) = continue_greedily(student, [ids], [12], frozenset({1}), ["p"])
                assert answer.shared + getattr(answer, mode) == tokenizer.decode(own)

    def test_probabilities_where_they_part_are_those_of_a_plain_pass(self, student):
        tokenizer = Letters()
        found = compare_answers(student, tokenizer, self.prompts, 12)
        answers = [(p, a) for p, a in zip(self.prompts, found.answers, strict=True) if a.parting]
        assert answers
        for prompt, answer in answers:
            with adapter_mode(student, "teacher"):
                ids = tokenizer(prompt.text)["input_ids"]
                (own,) = continue_greedily(student, [ids], [12], NONE, ["p"])
            at = answer.parting
            before = [*ids, *own[: at.position]]
            p, q = (logits_of(student, before, m)[-1] for m in ("teacher", "student"))
            for choice, token in ((at.teacher, int(p.argmax())), (at.student, int(q.argmax()))):
                assert choice.token == tokenizer.decode([token])
                # rounding of fp32 logits
                assert choice.teacher_probability == pytest.approx(float(p[token].exp()), abs=1e-5)
                assert choice.student_probability == pytest.approx(float(q[token].exp()), abs=1e-5)
            assert at.kl == pytest.approx(float((p.exp() * (p - q)).sum()), abs=1e-5)

    def test_a_student_that_is_its_teacher_parts_nowhere(self, load_model):
        model = load_model()
        npt.attach(model, npt.NPTConfig(rank=4, residual="keep"))
        with torch.no_grad():
            for parameter in adapter_parameters(model).values():
                parameter.zero_()
        found = compare_answers(model, Letters(), self.prompts, 6)
        assert found.same == 3 and found.kl == 0.0
        assert all(a.parting is None and a.student == a.teacher == "" for a in found.answers)


def test_a_text_that_parts_after_two_tokens_is_the_same_for_two():
    def parting(position):
        token = None if position is None else 7
        prompt, figures = Sample("p", (3,)), torch.zeros(6, len(COLUMNS))
        return Comparison(prompt, (5,) * 6, figures, position, token)

    found = equal_shares([parting(2), parting(None), parting(0), parting(4)], 6)
    assert [(e.tokens, e.share) for e in found] == [(1, 0.75), (2, 0.75), (4, 0.5)]


def test_shares_of_equal_texts_never_grow_and_count_those_that_ended(student):
    found = measure_agreement(student, samples(9, 6), NONE, max_new_tokens=12, batch_size=4)
    assert [e.tokens for e in found.equal] == [1, 2, 4, 8]
    shares = [e.share for e in found.equal]
    assert shares == sorted(shares, reverse=True) and 0 < shares[1] < 1
    share = shares[1]
    # the standard error of a share of nine
    assert found.equal[1].share_se == pytest.approx(math.sqrt(share * (1 - share) / 8))
    assert found.divergence.prompts == 9
    every = frozenset(range(128))
    ended = measure_agreement(student, samples(9, 6), every, max_new_tokens=12, batch_size=4)
    assert ended.equal[0].share == ended.equal[-1].share > 0


class TestDocuments:
    def test_a_data_set_with_held_out_documents_gives_them(self, monkeypatch):
        monkeypatch.setattr(
            documents_module, "own_heldout", lambda config: [{"text": config.dataset_name}]
        )
        assert heldout_documents(DataConfig()) == ("builtin", [{"text": "builtin"}])
        assert heldout_documents(None)[0] == "builtin-prose"
        mixed = DataConfig(dataset_mix="a.txt:1,builtin:1")
        assert heldout_documents(mixed)[0] == "builtin-prose"

    def test_any_other_gets_prose_or_none_if_python_has_none(self, tmp_path, monkeypatch):
        name, found = heldout_documents(DataConfig(dataset_name="some/text"))
        assert name == "builtin-prose" and len(found) > 10
        monkeypatch.setattr(prose_module, "library", lambda: tmp_path)
        assert heldout_documents(DataConfig(dataset_name="some/text")) == (name, [])

    def test_beginnings_are_the_same_every_time_and_enough(self):
        records = [{"text": chr(65 + i) * 20} for i in range(30)]
        found = beginnings(records, Letters(), 8, 40, 128)
        assert found == beginnings(records, Letters(), 8, 40, 128)
        assert len({s.id for s in found}) == len(found) == 5  # 8 tokens each
        assert [s.input_ids[1] for s in found] != sorted(s.input_ids[1] for s in found)


def printed(found: Behaviour) -> str:
    console = Console(width=100, file=io.StringIO())
    print_behaviour(found, console)
    return console.file.getvalue()


@pytest.fixture
def small(monkeypatch) -> None:
    """Few prompts, short texts."""
    for name, value in {
        "PROMPTS": PROMPTS[:2], "ANSWER_TOKENS": 4, "AGREEMENT_TOKENS": 4, "AGREEMENT_PROMPTS": 3,
        "ROWS": 2,
    }.items():  # fmt: skip
        monkeypatch.setattr(measure_module, name, value)


RECORDS = [{"text": f"The {i}th of some documents says nothing. " * 12} for i in range(8)]


class TestMeasure:
    def test_every_part_is_measured_and_the_model_left_as_it_was(self, small, tiny):
        model, tokenizer = tiny
        model.train()
        before, state = model.training, torch.get_rng_state()
        found = measure_behaviour(
            model, tokenizer, samples(4, 20), ("prose", RECORDS), context_length=160
        )
        assert model.training is before and torch.equal(torch.get_rng_state(), state)
        model.eval()
        assert len(found.answers.answers) == 2 and found.answers.chat is False
        assert found.agreement.divergence.prompts == 3
        assert found.positions.rows == 2 and found.positions.octaves[-1].last == 158
        assert [n.depth for n in found.needles.by_depth] == [64]
        assert any("no chat template" in note for note in found.notes)
        assert any("at most 64 tokens of prose back" in note for note in found.notes)
        said = printed(found)
        for words in ("Greedy answers to 2 prompts", "By position", "Codes found", "note: "):
            assert words in said
        assert json.loads(to_json(found.as_dict()))["text"] == "prose"

    def test_a_model_of_few_positions_gets_what_fits_and_is_told(self, small, student):
        found = measure_behaviour(student, Letters(), samples(4, 20), ("prose", RECORDS))
        assert found.positions.context_length == 128  # the model's positions
        assert found.needles is None
        assert any("the model has 128 positions" in note for note in found.notes)
        assert any(note.startswith("no needles") for note in found.notes)

    def test_without_any_text_the_answers_are_left_and_notes_say_so(self, small, student):
        found = measure_behaviour(student, Letters(), [], ("prose", []), context_length=64)
        assert found.answers is not None
        assert found.agreement is found.positions is found.needles is None
        assert len([note for note in found.notes if note.startswith("no ")]) == 3
        assert "By position" not in printed(found)

    def test_a_student_that_is_not_finite_is_refused(self, small, load_model):
        model = load_model()
        npt.attach(model, npt.NPTConfig(rank=4, layers="1,3", init="random"))
        with torch.no_grad():
            next(iter(adapter_parameters(model).values())).fill_(math.nan)
        with pytest.raises(NumericalError, match="not finite"):
            measure_behaviour(model, Letters(), samples(4, 20), ("prose", RECORDS))

    def test_no_context_is_refused(self, student):
        with pytest.raises(ConfigError, match="--context_length is 1; it must be at least 2"):
            measure_behaviour(student, Letters(), [], ("prose", []), context_length=1)
