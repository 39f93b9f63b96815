"""Conversations through a tokenizer's chat template: `messages`, or a prompt that is a list.

The last answer whose `weight` is not 0 is the completion. Everything before it is the prompt.

Some templates (Llama 3.2, SmolLM3, Granite) write today's date, so a record's tokens would change
from day to day. Here a tokenizer's date is fixed at its first use, or to the date that a run or
file recorded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from npt.data.encoding import Skipped, check_characters
from npt.data.source import Record
from npt.data.templates import TemplateLimitError, render_template
from npt.errors import DataError, first_line

WEIGHT = "weight"  # key of a message; 0 excludes it from training

NO_ANSWER = frozenset({"system", "developer", "user", "tool"})
"""Roles whose messages are not answers."""

_DATE = "_npt_date"
_CLOCK = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
"""A template's call of transformers' function that writes the current time."""


def has_template(tokenizer: Any) -> bool:
    return getattr(tokenizer, "chat_template", None) is not None


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, to_answer: bool) -> str:
    """Return the messages as the template writes them; `to_answer` opens the assistant's turn."""
    at = datetime.fromisoformat(date_of(tokenizer))
    dated = _CLOCK.sub(lambda call: repr(at.strftime(call[2])), tokenizer.get_chat_template())
    # as transformers' apply_chat_template does
    filled = [{k: v for k, v in message.items() if v is not None} for message in messages]
    return render_template(
        dated,
        **tokenizer.special_tokens_map,
        conversations=[filled],
        add_generation_prompt=to_answer,
    )


def date_of(tokenizer: Any) -> str:
    """Return the date and time that the tokenizer's template writes, as ISO 8601."""
    if getattr(tokenizer, _DATE, None) is None:
        fix_date(tokenizer, datetime.now().isoformat(timespec="seconds"))
    return str(getattr(tokenizer, _DATE))


def fix_date(tokenizer: Any, date: str) -> None:
    """Make the tokenizer's template write this date from now on."""
    setattr(tokenizer, _DATE, date)


def read_conversation(
    name: str, tokenizer: Any, record: Record, column: str, answer_column: str | None
) -> tuple[str, str, str]:
    """Return the text before the last answer to train, that answer, and the messages as JSON, which
    does not depend on the date.

    Raises:
        Skipped: there is nothing to train.
        DataError: a message is malformed, or the template is missing or refuses the messages.
    """
    prompt: list[Any] = list(record[column])
    answer = None
    if answer_column is None:
        last = _last_answer(prompt)
        prompt, answer = prompt[:last], prompt[last : last + 1]
    elif isinstance(record.get(answer_column), list):
        answer = list(record[answer_column])
    elif isinstance(record.get(answer_column), str):
        answer = [{"role": "assistant", "content": record[answer_column]}]
    for where, messages in ((column, prompt), (answer_column or column, answer)):
        if messages is None or not all(map(_is_message, messages)):
            wanted = '{"role": "user", "content": ...}'
            raise DataError(f"record {name}: {where!r} is not a list of messages like {wanted}")
    assert answer is not None
    _check_answer(prompt, answer)
    if not has_template(tokenizer):
        raise DataError(
            f"record {name} is a conversation, but the tokenizer has no chat template; use prompt"
            " and completion texts"
        )
    prompt, answer = ([_without_nulls(m) for m in messages] for messages in (prompt, answer))
    try:
        start = render(tokenizer, prompt, to_answer=True)
        whole = render(tokenizer, [*prompt, *answer], to_answer=False)
    except TemplateLimitError as error:
        raise TemplateLimitError(
            f"record {name}: the chat template {error}; correct the template, or use prompt and"
            " completion texts"
        ) from error
    except Exception as error:  # of the tokenizer or the template
        message = f"the chat template refuses it: {first_line(error)[:200]}; correct the record"
        raise DataError(f"record {name}: {message}") from error
    if not whole.startswith(start):
        raise DataError(
            f"record {name}: the chat template changes the prompt when an answer follows, so the"
            " answer's tokens cannot be identified; use prompt and completion texts"
        )
    check_characters(name, "conversation", whole)
    return start, whole[len(start) :], json.dumps([prompt, answer], sort_keys=True, default=str)


def _last_answer(messages: list[Any]) -> int:
    """Return the index of the last answer to train, else the last answer, else the last message."""
    answers = [
        number
        for number, message in enumerate(messages)
        if isinstance(message, Mapping) and message.get("role", "user") not in NO_ANSWER
    ]
    trained = [number for number in answers if messages[number].get(WEIGHT) != 0]
    return (trained or answers or [len(messages) - 1])[-1]


def _is_message(entry: Any) -> bool:
    """Return whether an entry is a message. One with tool calls may lack a content."""
    written = isinstance(entry, Mapping) and ("content" in entry or bool(entry.get("tool_calls")))
    return written and "role" in entry


def _check_answer(prompt: list[Any], answer: list[Any]) -> None:
    last = answer[-1] if answer else {"role": "user"}
    if last.get(WEIGHT) == 0:
        raise Skipped("answer of weight 0")
    silent = not str(last.get("content") or "").strip() and not last.get("tool_calls")
    if last["role"] in NO_ANSWER or silent:
        raise Skipped("empty completion")
    if not prompt:
        raise Skipped("answer without a prompt")  # no template supports it


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message for the template, without its weight and the nulls of a merged table."""
    return {
        key: value
        for key, value in message.items()
        if key == "content" or (key != WEIGHT and value is not None)
    }
