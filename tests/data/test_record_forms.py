"""Alpaca's and ShareGPT's records, told by their keys: nothing of them is lost, labels are on the
answer alone, the rest is counted.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import npt
from npt.base.load import load_tokenizer
from npt.cli.main import main
from npt.data.encoding import Counts
from npt.data.record_forms import (
    AFTER,
    ALPACA,
    ALPACA_WITH_INPUT,
    EARLIER,
    ROLES,
    UNWRITTEN,
    alpaca_message,
    alpaca_prompt,
)
from npt.data.report import lost
from npt.data.samples import cut
from npt.errors import DataError
from npt.tools.collect.prompts import prompt_record

SHARED = settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SPEAKERS = {
    "user": ("human", "user", "Human"),
    "assistant": ("gpt", "assistant", "chatgpt", "bing"),
    "tool": ("tool", "function", "observation"),
}


@pytest.fixture(scope="module")
def plain() -> Any:
    return load_tokenizer("tiny")


@pytest.fixture(scope="module")
def chatting() -> Any:
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = CHAT
    return tokenizer


def config(**more: Any) -> npt.DataConfig:
    return npt.DataConfig(**{"max_length": 4096, **more})


def one(
    record: dict[str, Any], tokenizer: Any, counts: Counts | None = None, **more: Any
) -> tuple[str, str]:
    """Prompt and completion of a record's only sample, as text; the labels are the completion's
    tokens.
    """
    (sample,) = cut([record], tokenizer, config(**more), counts)
    start = next(i for i, label in enumerate(sample.labels) if label != -100)
    assert sample.labels == (-100,) * start + sample.input_ids[start:]
    return tuple(
        tokenizer.decode(list(ids)) for ids in (sample.input_ids[:start], sample.input_ids[start:])
    )


def said(*turns: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": speaker, "value": text} for speaker, text in turns], **more}


def task(instruction: str, output: str, **more: Any) -> dict[str, Any]:
    return {"instruction": instruction, "output": output, **more}


class TestAlpaca:
    def test_without_a_chat_template_it_is_alpacas_own_prompt(self, plain) -> None:
        expected = (
            "Below is an instruction that describes a task, paired with an input that provides"
            " further context. Write a response that appropriately completes the request.\n\n###"
            " Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n"
        )
        prompt, completion = one(task("Add.", "3", input="1 2"), plain)
        assert prompt.removeprefix("<s>") == expected and completion == "3</s>"
        for record in (
            task("Add.", "3"),
            task("Add.", "3", input=""),
            task("Add.", "3", input=None),
            task("Add.", "3", input=" \n"),
        ):
            assert one(record, plain)[0].removeprefix("<s>") == ALPACA % "Add."

    def test_with_one_it_is_a_conversation(self, chatting) -> None:
        assert one(task("Add.", "3", input="1 2"), chatting) == (
            "[user]Add.\n\n1 2</s>[assistant]",
            "3</s>",
        )
        assert one(task("Add.", "3"), chatting) == ("[user]Add.</s>[assistant]", "3</s>")

    def test_a_text_beside_it_is_the_same_written_out_and_is_not_used(self, plain) -> None:
        counts = Counts()
        record = task("Add.", "3", text="Below is an instruction ...")
        assert one(record, plain, counts)[1] == "3</s>" and counts.unused == {"text": 1}
        (sample,) = cut([{**record, "body": "x = 1"}], plain, config(text_column="body"))
        assert sample.labels is None  # a text of another name was asked for

    def test_an_answer_of_nothing_is_counted_and_what_is_no_text_named(self, plain) -> None:
        counts = Counts()
        assert list(cut([task("Add.", " ")], plain, config(), counts)) == [] and counts.skipped == {
            "empty completion": 1
        }
        for record, key in (
            (task(3, "3"), "instruction"),
            (task("a", None), "output"),
            (task("a", "b", input=[1]), "input"),
        ):
            with pytest.raises(DataError, match=rf"record 0 has .* as '{key}'"):
                list(cut([record], plain, config()))

    def test_its_prompt_needs_no_output(self, plain, chatting) -> None:
        for tokenizer in (plain, chatting):
            whole = prompt_record(0, task("Add.", "3", input="1 2"), tokenizer, config(), 512)[
                "input_ids"
            ]
            assert (
                prompt_record(0, {"instruction": "Add.", "input": "1 2"}, tokenizer, config(), 512)[
                    "input_ids"
                ]
                == whole
            )
            (sample,) = cut([task("Add.", "3", input="1 2")], tokenizer, config())
            assert (
                list(sample.input_ids[: len(whole)]) == whole and sample.labels[len(whole)] != -100
            )

    @SHARED
    @given(
        instruction=st.text(max_size=20),
        further=st.text(max_size=20),
        output=st.text(min_size=1, max_size=20),
    )
    def test_no_token_of_it_is_lost_and_labels_are_the_outputs(
        self, plain, chatting, instruction, further, output
    ) -> None:
        record = task(instruction, output, input=further)
        for tokenizer in (plain, chatting):
            counts = Counts()
            samples = list(cut([record], tokenizer, config(), counts))
            if not output.strip():
                assert samples == [] and counts.skipped.total() == 1
                continue
            (sample,) = samples
            start = sample.labels.count(-100)
            if tokenizer is plain:
                prompt, answer = alpaca_prompt(instruction, further), output
            else:
                prompt, answer = (
                    f"[user]{alpaca_message(instruction, further)['content']}</s>[assistant]",
                    f"{output}</s>",
                )
            ids = [
                tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer)
            ]
            assert list(sample.input_ids[:start])[-len(ids[0]) :] == ids[0]
            rest = list(sample.input_ids[start:])
            assert rest[: len(ids[1])] == ids[1] and rest[len(ids[1]) :] in (
                [],
                [tokenizer.eos_token_id],
            )
            assert list(sample.labels[start:]) == rest and set(sample.labels[:start]) == {-100}
            assert not lost(counts)

    def test_the_two_prompts_differ_where_there_is_an_input_alone(self) -> None:
        assert alpaca_prompt("a%s", "b%s") == ALPACA_WITH_INPUT.replace("%s", "{}").format(
            "a%s", "b%s"
        )
        assert alpaca_prompt("a", "") == alpaca_prompt("a", "  ") != alpaca_prompt("a", "b")


class TestShareGPT:
    def test_it_goes_through_the_chat_template_like_any_conversation(self, chatting) -> None:
        record = said(
            ("system", "Be."), ("human", "hi"), ("gpt", "yes"), ("observation", "7"), ("gpt", "so")
        )
        expected = "[system]Be.</s>[user]hi</s>[assistant]yes</s>[tool]7</s>[assistant]"
        assert one(record, chatting) == (expected, "so</s>")
        assert one({"chat": record["conversations"]}, chatting, prompt_column="chat") == (
            expected,
            "so</s>",
        )
        names = {turn["from"]: ROLES[turn["from"]] for turn in record["conversations"]}
        messages = [
            {"role": names[turn["from"]], "content": turn["value"]}
            for turn in record["conversations"]
        ]
        assert one({"messages": messages}, chatting) == (expected, "so</s>")

    @pytest.mark.parametrize(("speaker", "role"), ROLES.items())
    def test_every_speaker_has_a_role(self, chatting, speaker, role) -> None:
        assert (
            f"[{role}]well</s>" in one(said((speaker.title(), "well"), ("gpt", "so")), chatting)[0]
        )

    def test_a_system_text_beside_the_turns_is_the_first_message(self, chatting) -> None:
        counts = Counts()
        assert one(said(("human", "hi"), ("gpt", "so"), system="Be."), chatting, counts)[
            0
        ].startswith("[system]Be.</s>[user]hi")
        assert not counts.unused
        assert (
            one(
                said(("system", "Own."), ("human", "hi"), ("gpt", "so"), system="Be."),
                chatting,
                counts,
            )[0].count("[system]")
            == 1
        )
        assert counts.unused == {"system": 1}

    def test_earlier_answers_are_context_and_later_messages_counted(self, chatting) -> None:
        counts = Counts()
        record = said(
            ("human", "a"),
            ("gpt", "b"),
            ("human", "c"),
            ("gpt", "d"),
            ("human", "e"),
            ("tool", "f"),
        )
        assert one(record, chatting, counts) == (
            "[user]a</s>[assistant]b</s>[user]c</s>[assistant]",
            "d</s>",
        )
        assert (
            counts.noted == {EARLIER: 1, AFTER: 2}
            and lost(counts) == "2 messages after the last answer left out"
        )
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
        assert (
            one({"m": messages}, chatting, counts, prompt_column="m")[1] == "b</s>"
            and counts.noted[AFTER] == 3
        )
        assert list(
            cut([said(("human", "a"))], chatting, config(), counts)
        ) == [] and counts.skipped == {"empty completion": 1}

    def test_what_is_not_used_is_counted_by_its_key(self, chatting) -> None:
        counts = Counts()
        record = said(("human", "a"), ("gpt", "b"), tools="[]", weight=1.0, source="", id="7")
        record["conversations"][1] |= {"score": 0, "markdown": None}
        one(record, chatting, counts)
        assert counts.unused == {"tools": 1, "weight": 1, "conversations.score": 1}
        one({"prompt": "a", "completion": "b", "url": "c"}, chatting, counts)
        list(
            cut(
                [{"text": "a", "url": "c"}, {"input_ids": [5, 6], "text": "x"}],
                chatting,
                config(),
                counts,
            )
        )
        assert counts.unused == {
            "tools": 1,
            "weight": 1,
            "conversations.score": 1,
            "url": 2,
            "text": 1,
        }
        list(cut([{"text": "a", f"k{i}": 1} for i in range(99)], chatting, config(), counts))
        # names of columns may be data as well
        assert len(counts.unused) == 33 and counts.unused["others"] == 72

    def test_a_message_that_the_template_leaves_out_is_counted(self) -> None:
        tokenizer = load_tokenizer("tiny")
        tokenizer.chat_template = CHAT.replace(
            "{% for m in messages %}", "{% for m in messages if m['role'] != 'tool' %}"
        )
        counts = Counts()
        assert (
            "7.5"
            not in one(said(("human", "a"), ("tool", "7.5"), ("gpt", "b")), tokenizer, counts)[0]
        )
        assert counts.noted == {UNWRITTEN: 1} and UNWRITTEN in lost(counts)

    @pytest.mark.parametrize(
        ("turn", "told"),
        [
            (
                {"from": "narrator", "value": "a"},
                "turn 2 is from 'narrator'; rename it to one of human, user, gpt",
            ),
            ({"from": None, "value": "a"}, "turn 2 is from 'None'"),
            ({"from": "gpt", "value": None}, "turn 2 has a NoneType as 'value'; write a text"),
        ],
    )
    def test_who_is_unknown_and_what_is_no_text_is_named_in_one_line(
        self, chatting, turn, told
    ) -> None:
        record = said(("human", "a"), ("gpt", "b"), id="mine")
        record["conversations"].insert(1, turn)
        with pytest.raises(DataError, match="record mine: ") as refusal:
            list(cut([record], chatting, config()))
        assert told in str(refusal.value)

    def test_without_a_chat_template_it_is_refused_in_one_line(self, plain) -> None:
        with pytest.raises(
            DataError, match="record 0 is a conversation, but the tokenizer has no chat template"
        ):
            list(cut([said(("human", "a"), ("gpt", "b"))], plain, config()))

    def test_its_prompt_is_all_up_to_the_last_answer(self, chatting) -> None:
        open_, answered = (
            said(("human", "a"), ("gpt", "b"), ("human", "c")),
            said(("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d")),
        )
        expected = chatting(
            "[user]a</s>[assistant]b</s>[user]c</s>[assistant]", add_special_tokens=False
        )["input_ids"]
        for record in (open_, answered):
            assert prompt_record(0, record, chatting, config(), 512)["input_ids"] == expected

    @SHARED
    @given(
        turns=st.lists(
            st.tuples(st.sampled_from(sorted(SPEAKERS)), st.text(min_size=1, max_size=12)),
            max_size=5,
        ),
        answer=st.text(max_size=12),
    )
    def test_no_token_of_a_message_is_lost_and_the_last_answer_labelled(
        self, chatting, turns, answer
    ) -> None:
        record = said(
            *((SPEAKERS[role][len(text) % 3], text) for role, text in turns), ("gpt", answer)
        )
        counts = Counts()
        samples = list(cut([record], chatting, config(), counts))
        if not answer.strip() or not turns:
            assert samples == [] and counts.skipped == {
                "answer to nothing" if answer.strip() else "empty completion": 1
            }
            return
        (sample,) = samples
        start = sample.labels.count(-100)
        prompt = "".join(f"[{role}]{text}</s>" for role, text in turns) + "[assistant]"
        ids = [
            chatting(text, add_special_tokens=False)["input_ids"]
            for text in (prompt, f"{answer}</s>")
        ]
        assert [list(sample.input_ids[:start]), list(sample.input_ids[start:])] == ids
        assert list(sample.labels) == [-100] * start + ids[1]
        assert not lost(counts) and counts.noted[EARLIER] == sum(
            role == "assistant" for role, _ in turns
        )


class TestOrder:
    def test_ids_a_named_column_a_text_and_a_prompt_go_first(self, chatting) -> None:
        turns = said(("human", "a"), ("gpt", "b"))
        (sample,) = cut([{**turns, "text": "x = 1"}], chatting, config())
        assert sample.labels is None
        assert one({**turns, "prompt": "q", "completion": "r"}, chatting)[1] == "r</s>"
        assert one({**task("i", "o"), **turns}, chatting)[1] == "o</s>"
        assert (
            one(
                {**task("i", "o"), "q": "x", "a": "y"},
                chatting,
                prompt_column="q",
                completion_column="a",
            )[1]
            == "y</s>"
        )
        (sample,) = cut([{**task("i", "o"), "input_ids": [5, 6]}], chatting, config())
        assert sample.input_ids == (5, 6)


def test_the_doctor_says_what_was_not_used(tmp_path, capsys) -> None:
    path = tmp_path / "alpaca.jsonl"
    path.write_text(
        "".join(
            json.dumps(task(f"Say {i}.", str(i), input="x" if i % 2 else "", weight=1)) + "\n"
            for i in range(40)
        )
    )
    assert main(["doctor", "--data", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["data"]
    assert (found["records"], found["samples"], found["unused"], found["noted"]) == (
        40,
        40,
        {"weight": 40},
        {},
    )
    main(["doctor", "--data", str(path)])
    out = capsys.readouterr().out
    assert (
        "columns not used" in out
        and "'weight' of 40 records" in out
        and "of conversations" not in out
    )
