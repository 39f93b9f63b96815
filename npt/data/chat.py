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
from functools import partial
from typing import Any

from npt.data.messages import from_json, messages_of
from npt.data.source import Record, Skipped
from npt.data.templates import TemplateLimitError, render_template
from npt.errors import DataError, first_line

WEIGHT = "weight"  # key of a message; 0 excludes it from training

NO_ANSWER = frozenset({"system", "developer", "user", "tool"})
"""Roles whose messages are not answers."""

TOOLS = "tools"
VARIABLES = "chat_template_kwargs"
"""Columns beside a conversation: tools that the assistant may call, and variables by name."""

_GIVEN = {
    "conversations",
    "chat_template",
    "add_generation_prompt",
    "documents",
    TOOLS,
    "return_assistant_tokens_mask",
    "continue_final_message",
}
"""Arguments of transformers' renderer, which a record cannot set as variables."""

_DATE = "_npt_date"
_CLOCK = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
"""A template's call of transformers' function that writes the current time."""


def has_template(tokenizer: Any) -> bool:
    return getattr(tokenizer, "chat_template", None) is not None


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    to_answer: bool,
    tools: list[Any] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return the messages as the template writes them; `to_answer` opens the assistant's turn."""
    at = datetime.fromisoformat(date_of(tokenizer))
    template = tokenizer.get_chat_template(tools=tools)
    dated = _CLOCK.sub(lambda call: repr(at.strftime(call[2])), template)
    filled = []
    for message in messages:  # as transformers' apply_chat_template does
        filled.append({key: value for key, value in message.items() if value is not None})
    return render_template(
        dated,
        **{**tokenizer.special_tokens_map, **(variables or {})},
        conversations=[filled],
        tools=tools,
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
    prompt, answer = _prompt_and_answer(name, record, column, answer_column)
    _check_answer(prompt, answer)
    if not has_template(tokenizer):
        raise DataError(
            f"record {name} is a conversation, but the tokenizer has no chat template; choose the"
            " --model_name of a chat model, or use prompt and completion texts"
        )
    prompt = list(map(_without_nulls, prompt))
    answer = list(map(_without_nulls, answer))
    tools = _tools(name, record)
    variables = _variables(name, record)
    write = partial(render, tokenizer, tools=tools, variables=variables)
    # twice, because a template tells where a message ends, but not where an answer begins
    try:
        start = write(prompt, to_answer=True)
        whole = write([*prompt, *answer], to_answer=False)
    except TemplateLimitError as error:
        raise TemplateLimitError(
            f"record {name}: the chat template {error}; correct the template, or use prompt and"
            " completion texts"
        ) from error
    except Exception as error:  # of the tokenizer or the template
        message = f"the chat template refuses it: {first_line(error)[:200]}; correct the record"
        raise DataError(f"record {name}: {message}") from error
    # so the answer is what the template adds to the prompt
    if not whole.startswith(start):
        raise DataError(
            f"record {name}: the chat template changes the prompt when an answer follows, so the"
            " answer's tokens cannot be identified; use prompt and completion texts"
        )
    return start, whole[len(start) :], json.dumps([prompt, answer], sort_keys=True, default=str)


def _prompt_and_answer(
    name: str, record: Record, column: str, answer_column: str | None
) -> tuple[list[Any], list[Any]]:
    """Return the messages before the answer to train, and the answer's, as the record has them."""
    prompt = list(record[column])
    answer: list[Any] | None
    if answer_column is None:
        last = _last_answer(prompt)
        answer = prompt[last : last + 1]
        prompt = prompt[:last]
    elif isinstance(record.get(answer_column), str):
        answer = [{"role": "assistant", "content": record[answer_column]}]
    else:
        answer = messages_of(name, record.get(answer_column))
    for where, messages in ((column, prompt), (answer_column or column, answer)):
        if messages is None or not all(map(_is_message, messages)):
            wanted = '{"role": "user", "content": ...}'
            raise DataError(f"record {name}: {where!r} is not a list of messages like {wanted}")
    assert answer is not None
    return prompt, answer


def columns_read(tokenizer: Any, record: Record) -> list[str]:
    """Return the columns beside a conversation that the template reads, by the names in it."""
    template = tokenizer.get_chat_template(tools=record.get(TOOLS))
    read = [TOOLS] if TOOLS in template else []
    variables = from_json(record.get(VARIABLES) or {})
    if any(name in template for name in variables):
        read.append(VARIABLES)
    return read


def _tools(name: str, record: Record) -> list[Any] | None:
    """Return a record's tools, as JSON schemas, for the template."""
    tools = _without_any_nulls(messages_of(name, record.get(TOOLS, []), as_json=True))
    if tools is None or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(
            f"record {name}: {TOOLS!r} is not a list of JSON schemas; correct it or remove the"
            " column"
        )
    return tools or None  # some templates write a heading for an empty list


def _variables(name: str, record: Record) -> dict[str, Any]:
    """Return a record's variables for the template."""
    variables = _without_any_nulls(from_json(record.get(VARIABLES) or {}))
    if not isinstance(variables, dict):
        raise DataError(
            f'record {name}: {VARIABLES!r} is not an object like {{"enable_thinking": false}};'
            " correct it or remove the column"
        )
    fixed = _GIVEN & variables.keys()
    if fixed:
        raise DataError(f"record {name}: {VARIABLES!r} cannot set {min(fixed)!r}; remove it there")
    return variables


def _without_any_nulls(value: Any) -> Any:
    """Return a value without the null keys, at any depth, that rows of a table have in common."""
    if isinstance(value, Mapping):
        return {k: _without_any_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_any_nulls(each) for each in value]
    return value


def _last_answer(messages: list[Any]) -> int:
    """Return the index of the last answer to train, else the last answer, else the last message."""
    answers = [
        number
        for number, message in enumerate(messages)
        if isinstance(message, Mapping) and message.get("role", "user") not in NO_ANSWER
    ]
    trained = [number for number in answers if messages[number].get(WEIGHT) != 0]
    # the last of the best that there is
    return [len(messages) - 1, *answers, *trained][-1]


def _is_message(entry: Any) -> bool:
    """Return whether an entry is a message. One with tool calls may lack a content."""
    if not isinstance(entry, Mapping) or "role" not in entry:
        return False
    return "content" in entry or bool(entry.get("tool_calls"))


def _check_answer(prompt: list[Any], answer: list[Any]) -> None:
    if not answer:
        raise Skipped("empty completion")
    last = answer[-1]
    if last.get(WEIGHT) == 0:
        raise Skipped("answer of weight 0")
    content = str(last.get("content") or "").strip()
    says = content or last.get("tool_calls")
    if last["role"] in NO_ANSWER or not says:
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
