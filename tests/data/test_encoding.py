"""Records to tokens and targets: aligned teacher forcing, start and end tokens, conversations, and
what is left out.
"""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import npt
from npt.base.source import EMBEDDED_FOLDER
from npt.batch import collate
from npt.data.encoding import RecordCounts, lost
from npt.data.samples import cut
from npt.data.source import PIECE
from npt.errors import DataError
from npt.evaluation.generate import prompt_ids
from npt.tools.editing.probes import Fact, wordings

BOS, EOS, PAD = 0, 1, 2  # of the tokenizer fixture and of the embedded one
SHARED = settings(
    deadline=None,
    max_examples=80,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

PLAIN = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{%"
    " endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def config(**settings: Any) -> npt.DataConfig:
    return npt.DataConfig(**{"max_length": 16, **settings})


def asked(**settings: Any) -> npt.DataConfig:
    return config(prompt_column="prompt", completion_column="completion", **settings)


def pair(prompt: Any, completion: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, **more}


def special(
    before: tuple[str, ...] = ("<s>",),
    after: tuple[str, ...] = (),
    chat_template: str | None = None,
    **tokens: Any,
) -> Any:
    """The embedded tokenizer with other special tokens around a text."""
    backend = Tokenizer.from_file(str(EMBEDDED_FOLDER / "tokenizer.json"))
    names = {"<s>": BOS, "</s>": EOS, "<pad>": PAD}
    backend.post_processor = TemplateProcessing(
        single=[*before, "$A", *after], pair="$A $B", special_tokens=list(names.items())
    )
    given = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", **tokens}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{name: token for name, token in given.items() if token is not None},
    )
    tokenizer.chat_template = chat_template
    return tokenizer


class TestAlignedTeacherForcing:
    """The tokenizer fixture turns a character into 3 + ord % 125: a is 100, b 101, and so on."""

    def test_ids_and_labels_are_those_written_by_hand(self, tokenizer):
        short, long = cut(
            [pair("ab", "cd", id="one"), pair("abcd", "e", id="two")], tokenizer, config()
        )
        assert short.input_ids == (BOS, 100, 101, 102, 103, EOS)
        assert short.labels == (-100, -100, -100, 102, 103, EOS)
        assert long.input_ids == (BOS, 100, 101, 102, 103, 104, EOS)
        assert long.labels == (-100, -100, -100, -100, -100, 104, EOS)
        batch = collate([short, long], PAD)
        assert batch.input_ids.tolist() == [
            [0, 100, 101, 102, 103, 1, 2],
            [0, 100, 101, 102, 103, 104, 1],
        ]
        assert batch.labels.tolist() == [
            [-100, -100, -100, 102, 103, 1, -100],
            [-100, -100, -100, -100, -100, 104, 1],
        ]
        assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1, 1, 0], [1] * 7]

    @SHARED
    @given(
        prompt=st.text(max_size=30), completion=st.text(max_size=30), max_length=st.integers(2, 40)
    )
    def test_the_targets_are_the_end_of_the_sample_whatever_is_cut(
        self, tokenizer, prompt, completion, max_length
    ):
        counts = RecordCounts()
        samples = list(
            cut([pair(prompt, completion)], tokenizer, asked(max_length=max_length), counts)
        )
        if not completion.strip():
            assert samples == [] and counts.skipped == {"empty completion": 1}
            return
        (sample,) = samples
        opened = [BOS, *tokenizer([prompt], add_special_tokens=False)["input_ids"][0]]
        answer = [*tokenizer([completion], add_special_tokens=False)["input_ids"][0], EOS]
        room = min(len(answer), max_length - 1)
        kept = min(len(opened), max_length - room)
        assert list(sample.input_ids) == opened[len(opened) - kept :] + answer[:room]
        assert list(sample.labels) == [-100] * kept + answer[:room]
        assert (counts.cut_prompts, counts.cut_completions) == (
            int(kept < len(opened)),
            int(room < len(answer)),
        )
        assert (counts.records, counts.samples, counts.tokens) == (1, 1, len(sample.input_ids))


def test_nothing_that_continues_a_text_begins_after_its_end() -> None:
    """With a tokenizer that puts an end token after every text, as a flag or a GGUF may say."""
    tokenizer = special(("<s>",), ("</s>",))
    (trained,) = cut([pair("def f", "(x):")], tokenizer, config(max_length=64))
    prompt = prompt_ids(tokenizer, "def f", chat=False)
    assert prompt == list(trained.input_ids[: len(prompt)]) and EOS not in prompt
    for probe in wordings(tokenizer, Fact("x =", " 1"), "y = 2", 0):
        assert EOS not in probe.context + probe.tail


class TestSpecialTokens:
    @pytest.mark.parametrize(
        ("before", "after", "tokens", "opening"),
        [
            (("<s>",), (), {}, [BOS]),
            ((), (), {}, []),
            (("<s>",), ("</s>",), {}, [BOS]),
            ((), ("</s>",), {}, []),
            (("</s>",), (), {"bos_token": "</s>"}, [EOS]),  # one token for both
            (("<s>", "<pad>"), (), {}, [BOS, PAD]),
            (("<s>",), (), {"pad_token": None}, [BOS]),
            (("<s>",), (), {"pad_token": "</s>"}, [BOS]),
        ],
    )
    def test_a_sample_is_opened_and_closed_once_by_any_tokenizer(
        self, before, after, tokens, opening
    ):
        tokenizer = special(before, after, **tokens)

        def bare(text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        text, prompted = cut(
            [{"text": "x = 1"}, pair("def f", "(x):")], tokenizer, config(max_length=64)
        )
        assert list(text.input_ids) == [*opening, *bare("x = 1"), EOS]
        assert text.labels is None
        assert list(prompted.input_ids) == [*opening, *bare("def f"), *bare("(x):"), EOS]
        assert list(prompted.labels) == [-100] * (len(opening) + len(bare("def f"))) + [
            *bare("(x):"),
            EOS,
        ]

    def test_no_token_reaches_across_the_border(self):
        tokenizer = special()
        joined = tokenizer("import os", add_special_tokens=False)["input_ids"]
        (sample,) = cut([pair("impo", "rt os")], tokenizer, config(max_length=64))
        assert tokenizer.decode(sample.input_ids[1:-1]) == "import os"
        assert list(sample.input_ids[1:-1]) != joined  # one token there

    def test_an_end_token_that_is_written_out_is_not_doubled_and_not_lost(self):
        tokenizer = special()
        text, prompted = cut(
            [{"text": "x</s>"}, pair("question</s>", "answer</s>")],
            tokenizer,
            config(max_length=64),
        )
        assert text.input_ids.count(EOS) == 1 and text.input_ids[-1] == EOS
        # the prompt's own one stays
        assert prompted.input_ids.count(EOS) == 2 and prompted.input_ids[-1] == EOS
        assert prompted.labels.count(EOS) == 1

    @pytest.mark.parametrize("tokens", [{"pad_token": "</s>"}, {"pad_token": None}])
    def test_padding_that_is_the_end_token_hides_no_real_one(self, tokens):
        tokenizer = special(**tokens)
        samples = list(
            cut([{"text": "x"}, pair("a", "b c d"), {"text": "x</s>y"}], tokenizer, config())
        )
        for side in ("left", "right"):
            batch = collate(samples, EOS, side=side, length=12)
            assert (batch.labels == EOS).sum(dim=-1).tolist() == [1, 1, 2]
            assert ((batch.input_ids == EOS) & batch.attention_mask.bool()).sum(
                dim=-1
            ).tolist() == [1, 1, 2]
            assert (batch.labels[~batch.attention_mask.bool()] == -100).all()

    def test_the_pieces_of_a_long_text_are_opened_and_closed_once(self, tokenizer):
        records = [
            {"text": text, "id": str(i), PIECE: (i == 0, i == 2)}
            for i, text in enumerate(("ab", "cd", "ef"))
        ]
        ids = [s.input_ids for s in cut(records, tokenizer, config())]
        assert ids == [(BOS, 100, 101), (102, 103), (104, 105, EOS)]


class TestWhatIsLeftOut:
    @pytest.mark.parametrize(
        ("record", "reason"),
        [
            (pair("ab", ""), "empty completion"),
            (pair("ab", " \n\t"), "empty completion"),
            (pair("", ""), "empty completion"),
            ({"text": ""}, "empty text"),
            ({"input_ids": []}, "fewer than two tokens"),
            ({"input_ids": [5]}, "fewer than two tokens"),
            ({"input_ids": [5, 6], "attention_mask": [0, 1]}, "fewer than two tokens"),
            ({"input_ids": [5, 6, 7], "labels": [-100, -100, -100]}, "no target"),
            # the first token is predicted by nothing
            ({"input_ids": [5, 6, 7], "labels": [5, -100, -100]}, "no target"),
        ],
    )
    def test_is_counted_by_its_reason_and_harms_no_neighbour(self, tokenizer, record, reason):
        counts = RecordCounts()
        assert (
            len(list(cut([{"text": "a"}, record, pair("c", "d")], tokenizer, config(), counts)))
            == 2
        )
        assert (counts.records, counts.samples, counts.skipped) == (3, 2, {reason: 1})
        assert lost(counts) == f"1 skipped ({reason})"
        assert counts.as_dict()["skipped"] == {reason: 1}

    def test_a_single_token_that_nothing_precedes_is_no_sample(self):
        bare = special(before=(), eos_token=None)
        counts = RecordCounts()
        assert list(cut([pair("", "a")], bare, config(), counts)) == []
        assert counts.skipped == {"no target": 1}

    @pytest.mark.parametrize("prompt", ["", " "])
    def test_a_prompt_may_be_empty(self, tokenizer, prompt):
        (sample,) = cut([pair(prompt, "ab")], tokenizer, config())
        assert sample.labels == (*[-100] * (1 + len(prompt)), 100, 101, EOS)

    def test_a_text_of_spaces_is_a_text(self, tokenizer):
        assert len(list(cut([{"text": "  "}], tokenizer, config()))) == 1


class TestGivenIds:
    def test_labels_come_along_through_the_cutting(self, tokenizer):
        record = {"input_ids": [10, 11, 12, 13, 14, 15], "labels": [-100, 11, -100, -100, -100, 15]}
        samples = list(cut([record], tokenizer, config(max_length=3)))
        assert [(s.input_ids, s.labels) for s in samples] == [
            ((10, 11, 12), (-100, 11, -100)),
            ((13, 14, 15), (-100, -100, 15)),
        ]
        counts = RecordCounts()
        record["labels"][-1] = -100
        assert len(list(cut([record], tokenizer, config(max_length=3), counts))) == 1
        assert counts.skipped == {"no target": 1}

    def test_labels_lose_what_the_mask_leaves_out_and_arrays_are_lists(self, tokenizer):
        record = {
            "input_ids": torch.tensor([2, 5, 6, 7, 2]),
            "labels": torch.tensor([-100, -100, 6, 7, -100]).numpy(),
            "attention_mask": [0, 1, 1, 1, 0],
        }
        (sample,) = cut([record], tokenizer, config())
        assert (sample.input_ids, sample.labels) == ((5, 6, 7), (-100, 6, 7))

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            ({"labels": [5, 6]}, "3 input_ids, but labels has length 2; they must be equally"),
            ({"attention_mask": [1]}, "3 input_ids, but attention_mask has length 1"),
            (
                {"attention_mask": [1, 2, 2]},
                r"2 in its attention_mask, expected 0 \(padding\) or 1",
            ),
            ({"labels": [5, 6, 1.5]}, "labels that are not a list of 64-bit integers"),
            ({"labels": "abc"}, "labels that are not a list of 64-bit integers"),
            ({"labels": [True, False, True]}, "labels that are not a list of 64-bit integers"),
            ({"labels": b"abc"}, "labels that are not a list of 64-bit integers"),
            ({"labels": {5: 1, 6: 1, 7: 1}}, "labels that are not a list of 64-bit integers"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, tokenizer, more, message):
        with pytest.raises(DataError, match=f"record 0 has {message}"):
            list(cut([{"input_ids": [5, 6, 7], **more}], tokenizer, config()))


class TestColumns:
    def test_prompt_and_completion_are_found_where_nothing_is_asked_for(self, tokenizer):
        assert next(cut([pair("a", "b")], tokenizer, config())).labels is not None
        # a text is a text
        assert next(cut([pair("a", "b", text="c")], tokenizer, config())).labels is None

    def test_named_columns_are_the_ones(self, tokenizer):
        named = config(prompt_column="q", completion_column="a")
        (sample,) = cut(
            [{"q": "ab", "a": "c", "text": "other", "prompt": "x", "completion": "y"}],
            tokenizer,
            named,
        )
        assert sample.labels == (-100, -100, -100, 102, EOS)

    @pytest.mark.parametrize(
        ("record", "message"),
        [
            ({"text": "x"}, r"record 0 has no column 'q' \(columns: text\); set --prompt_column"),
            ({"q": "x"}, r"record 0 has no column 'a' \(columns: q\); set --completion_column"),
            ({"q": None, "a": None}, "record 0 has null as 'q'"),
            # what the readers add is no field of the user's
            (
                {"id": "f.jsonl:1", "npt:piece": (True, True), "x": "y"},
                r"record f.jsonl:1 has no column 'q' \(columns: x\); set",
            ),
            ({"q": 3, "a": "x"}, r"record 0 has an int as 'q'"),
            ({"q": "x", "a": ["y"]}, r"record 0 has a list as 'a'"),
            ({"q": "x", "a": None}, r"record 0 has null as 'a'"),
            ({"q": b"x", "a": "y"}, r"record 0 has a bytes as 'q'"),
        ],
    )
    def test_a_record_without_them_says_what_it_has(self, tokenizer, record, message):
        with pytest.raises(DataError, match=message):
            list(cut([record], tokenizer, config(prompt_column="q", completion_column="a")))

    def test_a_prompt_that_is_text_needs_its_answers_column(self, tokenizer):
        with pytest.raises(
            DataError, match=r"'q' is not a list of messages; set --completion_column"
        ):
            list(cut([{"q": "x", "a": "y"}], tokenizer, config(prompt_column="q")))

    @pytest.mark.parametrize(
        "record", [{"text": "ab\ud800c"}, pair("ab\ud800c", "x"), pair("x", "ab\ud800c")]
    )
    def test_half_a_character_is_refused_with_its_place(self, record):
        with pytest.raises(DataError, match=r"record 0: '\w+' is damaged at character 2 \(surr"):
            list(cut([record], special(), config()))


def chat(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


class TestConversations:
    @pytest.fixture
    def tokenizer(self):
        return special(chat_template=PLAIN)

    MESSAGES = chat(("user", "1+1?"), ("assistant", "2"), ("user", "2+2?"), ("assistant", "(4)"))

    @pytest.mark.parametrize(
        "record",
        [
            {"messages": MESSAGES},
            {"messages": MESSAGES[:-1], "answer": MESSAGES[-1:]},
            {"messages": MESSAGES[:-1], "answer": "(4)"},
        ],
    )
    def test_the_last_message_is_the_completion_the_others_the_prompt(self, tokenizer, record):
        settings = config(
            max_length=64,
            prompt_column="messages",
            completion_column="answer" if "answer" in record else None,
        )
        (sample,) = cut([record], tokenizer, settings)
        prompt = "<s>[user]1+1?</s>[assistant]2</s>[user]2+2?</s>[assistant]"
        assert tokenizer.decode(sample.input_ids) == prompt + "(4)</s>"
        start = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer = [*tokenizer("(4)", add_special_tokens=False)["input_ids"], EOS]
        # no token across the border, though "](" is one when it is alone
        assert list(sample.input_ids) == start + answer
        assert list(sample.labels) == [-100] * len(start) + answer
        assert sample.input_ids.count(BOS) == 1

    def test_default_columns_hold_conversations_as_well(self, tokenizer):
        (sample,) = cut(
            [pair(self.MESSAGES[:1], self.MESSAGES[1:2])], tokenizer, config(max_length=64)
        )
        assert tokenizer.decode([i for i in sample.labels if i != -100]) == "2</s>"

    def test_what_is_too_long_loses_the_front_of_its_prompt(self, tokenizer):
        counts = RecordCounts()
        whole = next(
            cut([{"m": self.MESSAGES}], tokenizer, config(max_length=64, prompt_column="m"))
        )
        (sample,) = cut(
            [{"m": self.MESSAGES}], tokenizer, config(max_length=10, prompt_column="m"), counts
        )
        assert sample.input_ids == whole.input_ids[-10:] and sample.labels == whole.labels[-10:]
        assert counts.cut_prompts == 1

    @pytest.mark.parametrize(
        "messages",
        [
            [],
            chat(("user", "a")),
            chat(("system", "a")),
            *(chat(("user", "a"), ("assistant", content)) for content in ("", " \n", None)),
        ],
    )
    def test_a_conversation_without_an_answer_is_skipped_and_counted(self, tokenizer, messages):
        counts = RecordCounts()
        assert list(cut([{"m": messages}], tokenizer, config(prompt_column="m"), counts)) == []
        assert counts.skipped == {"empty completion": 1}

    @pytest.mark.parametrize(
        "messages",
        ["text", [1], [{"role": "user"}], [{"content": "a"}], [{"from": "human", "said": "a"}]],
    )
    def test_what_is_no_list_of_messages_is_refused(self, tokenizer, messages):
        with pytest.raises(DataError, match=r"record 0: 'm' is not a list of messages"):
            list(cut([{"m": messages}], tokenizer, config(prompt_column="m")))

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            (
                "{{ raise_exception('roles must alternate') }}",
                "the chat template refuses it: roles must alternate; correct the record",
            ),
            ("{{ messages[0]['content'] + 1 }}", "the chat template refuses it: "),
            (
                "{% for m in messages %}{{ loop.length }}{{ m['content'] }}{% endfor %}",
                "the chat template changes the prompt when an answer follows",
            ),
        ],
    )
    def test_a_template_that_cannot_serve_is_one_line_with_the_record(self, template, message):
        with pytest.raises(DataError) as refusal:
            list(
                cut(
                    [{"m": self.MESSAGES, "id": "mine"}],
                    special(chat_template=template),
                    config(prompt_column="m"),
                )
            )
        assert str(refusal.value).startswith(f"record mine: {message}")
        assert "\n" not in str(refusal.value)

    def test_a_template_that_drops_the_answer_gives_no_sample(self):
        counts = RecordCounts()
        tokenizer = special(chat_template="{{ messages[0]['content'] }}")
        assert list(cut([{"m": self.MESSAGES}], tokenizer, config(prompt_column="m"), counts)) == []
        assert counts.skipped == {"empty completion": 1}

    def test_a_tokenizer_without_a_template_is_said_so(self):
        with pytest.raises(
            DataError, match="record 0 is a conversation, but the tokenizer has no chat template"
        ):
            list(cut([{"m": self.MESSAGES}], special(), config(prompt_column="m")))


@SHARED
@given(kinds=st.lists(st.sampled_from(["text", "empty", "pair", "ids", "unanswered"]), max_size=80))
def test_records_of_all_forms_mix_in_order_and_each_is_counted_once(tokenizer, kinds) -> None:
    forms = {
        "text": {"text": "abc"},
        "empty": {"text": ""},
        "pair": pair("a", "b"),
        "ids": {"input_ids": [5, 6]},
        "unanswered": pair("a", ""),
    }
    counts = RecordCounts()
    samples = list(cut([forms[kind] for kind in kinds], tokenizer, config(), counts))
    assert [s.id for s in samples] == [
        f"{i}@0" for i, kind in enumerate(kinds) if kind not in ("empty", "unanswered")
    ]
    alone = {kind: next(cut([forms[kind]], tokenizer, config()), None) for kind in forms}
    expected = [alone[kind] for kind in kinds if alone[kind] is not None]
    assert [(s.input_ids, s.labels) for s in samples] == [(s.input_ids, s.labels) for s in expected]
    assert (counts.records, counts.samples) == (len(kinds), len(samples))
    assert counts.skipped.total() == len(kinds) - len(samples)
