import pytest
import torch
from token_students import student

import npt
from npt.batch import IGNORE_INDEX
from npt.errors import ConfigError
from npt.tools.editing import probes
from npt.tools.editing.probes import (
    Fact,
    Probe,
    answer_probe,
    continuations,
    contrasts,
    log_probabilities,
    pieces,
    subjects,
    wordings,
)

FACT = Fact("the cat of ann is", " red")
CHAT = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def model(load_model):
    return student(load_model)


class Startless:
    """A tokenizer without a start token."""

    bos_token_id, chat_template = None, None

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens

    def __call__(self, texts, add_special_tokens=True, **_):
        return self._tokenizer(texts, add_special_tokens=False)


def ids(tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_a_text_is_the_same_tokens_after_its_context_and_without_it(tokenizer):
    probe = answer_probe(tokenizer, FACT, FACT.prompt, "said before")
    assert probe.tail == ids(tokenizer, " red")
    assert probe.before == (0, *ids(tokenizer, FACT.prompt))
    assert probe.context == (0, *ids(tokenizer, "said before\n" + FACT.prompt))
    read, alone = probe.read(), probe.alone()
    assert read.input_ids == probe.context + probe.tail
    for sample in (read, alone):
        assert sample.labels[-4:] == probe.tail and set(sample.labels[:-4]) == {IGNORE_INDEX}


def test_without_a_start_token_the_first_token_stays_as_it_is(tokenizer):
    startless = Startless(tokenizer)
    (first, *_) = wordings(startless, Fact("", "a fact"), "a fact.", 0)
    text = ids(tokenizer, "a fact.")
    assert (first.before, first.tail) == (text[:1], text[1:])
    assert first.context == ids(tokenizer, "a fact.\n") + text[:1]
    with pytest.raises(ConfigError, match="--text 'x' has no token to predict"):
        answer_probe(startless, Fact("", "x"), "", "x")


def test_wordings_change_the_words_from_the_subject_on(tokenizer):
    found = list(wordings(tokenizer, FACT, FACT.text, 4))
    assert len(found) == len(probes.LEADS)
    for probe, lead in zip(found, probes.LEADS, strict=True):
        assert probe.tail == ids(tokenizer, "cat of ann is red.")
        assert probe.before == (0, *ids(tokenizer, lead + "the "))


def test_the_pieces_of_a_context_are_all_of_it(tokenizer):
    text = "one two three four five"
    found = list(pieces(tokenizer, text))
    assert len(found) == probes.PIECES
    assert sum((probe.tail for probe in found), ()) == ids(tokenizer, text)
    assert {probe.before for probe in found} == {(0,)}
    assert {probe.context for probe in found} == {(0, *ids(tokenizer, text + "\n"))}


def test_continuations_are_written_after_the_context_and_equal_for_a_seed(model, tokenizer):
    before = torch.get_rng_state()
    one, other = (list(continuations(model, tokenizer, "some text", 3, seed)) for seed in (0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    again = list(continuations(model, tokenizer, "some text", 3, 0))
    assert one == again != other
    assert {probe.context for probe in one} == {(0, *ids(tokenizer, "some text"))}
    assert {len(probe.tail) for probe in one} == {probes.CONTINUATION_TOKENS}
    assert len({probe.tail for probe in one}) == 3


def test_with_a_chat_template_a_context_is_the_system_message():
    model, tokenizer = npt.load_base("tiny")
    tokenizer.chat_template = CHAT
    (probe,) = continuations(model, tokenizer, "Be brief.", 1, 0)
    read, alone = tokenizer.decode(probe.context), tokenizer.decode(probe.before)
    assert read.startswith("<system>Be brief.<user>") and read.endswith("<assistant>")
    assert read.removeprefix("<system>Be brief.") == alone
    *_, chat = wordings(tokenizer, FACT, FACT.text, 0)
    assert tokenizer.decode(chat.before) == f"<user>{probes.REQUEST}<assistant>"
    assert tokenizer.decode(chat.context).startswith(f"<system>{FACT.text}<user>")


def test_the_subject_is_what_surprises_and_contrasts_replace_it(model, tokenizer, monkeypatch):
    prompt = "the cat of ann is"
    surprise = [0.0] * 11 + [9.0, 9.0, 9.0] + [0.0] * 3
    monkeypatch.setattr(probes, "_surprise", lambda *_: [surprise, [0.0] * 17])
    found = subjects(model, tokenizer, [prompt, prompt])
    assert found == [(10, 14), (0, 0)]
    rows = contrasts(model, tokenizer, [prompt, prompt], found, 0)
    assert len(rows) == probes.CONTRASTS
    start, end = (0, *ids(tokenizer, "the cat of")), ids(tokenizer, " is")
    for probe in rows:
        row = probe.before + probe.tail
        assert row[: len(start)] == start and row[-len(end) :] == end
        assert len(row) - len(start) - len(end) in (2, 3, 4)


def test_contrasts_have_the_subjects_of_other_prompts(model, tokenizer):
    """But never are one of the prompts: "the dog of bob is" is to be changed, not kept."""
    prompts = ["the cat of ann is", "the dog of tim is", "the dog of bob is"]
    rows = contrasts(model, tokenizer, prompts, [(10, 14)] * 3, 0)
    written = [row.before[1:] + row.tail for row in rows]
    swapped = ["the cat of bob is", "the cat of tim is", "the dog of ann is"]
    assert written[:3] == [ids(tokenizer, text) for text in swapped]
    assert not set(written) & {ids(tokenizer, prompt) for prompt in prompts}
    fronts = {ids(tokenizer, "the cat of"), ids(tokenizer, "the dog of")}
    assert {row[:10] for row in written} == fronts


@torch.no_grad()
def test_log_probabilities_are_those_of_single_rows(model):
    rows = [Probe((), (0, 5, 7), (9, 11)), Probe((), (0,), (3, 4, 5, 6))]
    found = log_probabilities(model, [probe.alone() for probe in rows])
    for probe, each in zip(rows, found, strict=True):
        tokens = probe.before + probe.tail
        log_p = torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1)
        places = range(len(probe.before) - 1, len(tokens) - 1)
        expected = torch.stack([log_p[n, tokens[n + 1]] for n in places])
        # fp32, padded batches against single rows
        torch.testing.assert_close(each.double(), expected, rtol=1e-4, atol=1e-4)


def test_a_template_without_a_system_role_gets_the_context_in_the_users_turn():
    model, tokenizer = npt.load_base("tiny")
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer.chat_template = refusing + CHAT
    (probe,) = continuations(model, tokenizer, "Be brief.", 1, 0)
    assert tokenizer.decode(probe.context).startswith("<user>Be brief.\n\n")
