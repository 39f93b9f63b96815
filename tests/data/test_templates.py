"""A chat template that does not end, or that fills the memory, is one line; any thread may ask."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from npt.base.source import load_tokenizer
from npt.config import DataConfig
from npt.data import templates
from npt.data.chat import render
from npt.data.samples import cut
from npt.data.template_process import CHARACTERS, MEMORY
from npt.data.templates import TemplateError, TemplateLimitError, render_template
from npt.errors import DataError
from npt.evaluation.generate import prompt_ids

RANGE = "{% for i in range(99999) %}"
END = "{% endfor %}"
MACRO = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
GROWING = "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = "

TOO_LONG = {
    "nested loops": RANGE * 3 + END * 3,
    "one operation": "{{ 10 ** (10 ** 9) > 0 }}",
    "a loop of operations": RANGE + "{{ 7 ** i % 3 }}" + END,
    "calls": MACRO + "{{ f(90) }}",
}
TOO_LARGE = {
    "a string that doubles": GROWING + "n.x ~ n.x %}" + END,
    "a sum": GROWING + "n.x + n.x %}" + END,
    "a replacement": GROWING + "n.x.replace('a', n.x) %}" + END,
    "a product": "{{ 'a' * 10 ** 11 }}",
    "a width": "{{ '%99999999999d' % 1 }}",
    "a list": "{{ (range(99999) | list) * 99999 }}",
}
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    render_template("", conversations=[[]])  # the process is there
    monkeypatch.setattr(templates, "RENDER_SECONDS", 0.5)


def render_talk(template: str) -> str:
    return render_template(template, conversations=[TALK])


@pytest.mark.slow
@pytest.mark.parametrize("template", TOO_LONG.values(), ids=TOO_LONG)
def test_what_does_not_end_is_ended(soon, template) -> None:
    with pytest.raises(TemplateLimitError, match=r"did not finish within 0\.5 seconds"):
        render_talk(template)


@pytest.mark.slow
@pytest.mark.parametrize("template", TOO_LARGE.values(), ids=TOO_LARGE)
def test_what_fills_the_memory_is_ended(template) -> None:
    with pytest.raises(TemplateLimitError, match=f"needs more than {MEMORY >> 30} GiB of memory"):
        render_talk(template)
    assert render_talk("{{ messages[1].content }}") == "b"


def test_a_text_without_end_is_refused() -> None:
    with pytest.raises(TemplateError, match=f"more than {CHARACTERS:,}"):
        render_talk(f"{{{{ 'a' * {CHARACTERS + 1} }}}}")


@pytest.mark.slow
def test_a_record_and_a_prompt_name_the_template(soon) -> None:
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = TOO_LONG["nested loops"]
    with pytest.raises(DataError, match=r"record 7: the chat template did not finish within"):
        list(cut([{"id": "7", "messages": TALK}], tokenizer, DataConfig()))
    with pytest.raises(DataError, match=r"did not finish within 0\.5 seconds; add --raw"):
        prompt_ids(tokenizer, "hello")


def test_every_thread_gets_its_own_answer() -> None:
    written: dict[int, str] = {}

    def ask(number: int) -> None:
        template = "{{ messages[0].content }}" * 2000
        message = {"role": "user", "content": f"{number:04}"}
        written[number] = render_template(template, conversations=[[message]])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert written == {number: f"{number:04}" * 2000 for number in range(16)}


@pytest.mark.parametrize(
    "messages",
    [
        TALK,
        [{"role": "user", "content": "é\ud800\u2028 😀\n\x00", "n": 1.5, "none": None}],
        [{"role": "user", "content": "a", "deep": json.loads("[" * 150 + "]" * 150)}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}], "tool_calls": [{"x": {}}]}],
    ],
)
def test_a_conversation_is_written_as_transformers_writes_it(messages: list[Any]) -> None:
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{{ m.content }}{% endfor %}\n"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    for to_answer in (False, True):
        told = {"add_generation_prompt": to_answer, "tokenize": False}
        expected = tokenizer.apply_chat_template(messages, **told)
        assert render(tokenizer, messages, to_answer=to_answer) == expected
