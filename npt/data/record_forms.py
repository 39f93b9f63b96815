"""Forms of records other than texts: prompts, conversations, Alpaca's records, token ids.

    {"prompt": ..., "completion": ...}                          or columns of other names
    {"instruction": ..., "input": ..., "output": ...}           Alpaca; the input may be missing
    {"conversations": [{"from": "human", "value": ...}, ...]}   ShareGPT, perhaps with a "system"
    {"messages": [{"role": "user", "content": ...}, ...]}       as chat templates take them
    {"input_ids": [...]}                                        perhaps with labels and a mask

A prompt may be a list of messages. The tokenizer's chat template writes conversations; the last
answer whose `weight` is not 0 is the completion.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from npt.config import DataConfig
from npt.data.chat import has_template, render
from npt.data.content import FORMS, Content
from npt.data.encoding import check_characters, plain_text, text_of
from npt.data.source import Record
from npt.errors import DataError, first_line, kind_of

PROMPT, COMPLETION = "prompt", "completion"
INSTRUCTION, INPUT, OUTPUT = "instruction", "input", "output"
EARLIER = "earlier answers taken as context"
AFTER = "messages after the last answer left out"
WEIGHT = "weight"  # key of a message or a turn: 0 if it is not to be trained
UNWRITTEN = "messages that the chat template does not write as they are"
_INT64_MAX = 2**63 - 1

ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
"""Roles of chat templates by ShareGPT's speakers."""

NO_ANSWER = frozenset({"system", "developer", "user", "tool"})
"""Roles whose messages are no answers."""

_TASK = "Below is an instruction that describes a task"
_ASKED = "Write a response that appropriately completes the request."
ALPACA = f"{_TASK}. {_ASKED}\n\n### Instruction:\n%s\n\n### Response:\n"
ALPACA_WITH_INPUT = (
    f"{_TASK}, paired with an input that provides further context. {_ASKED}\n\n"
    "### Instruction:\n%s\n\n### Input:\n%s\n\n### Response:\n"
)
"""The prompts of Stanford's Alpaca, as its data set has them."""


def prompt_texts(name: str, record: Record, tokenizer: Any, config: DataConfig) -> Content:
    """Read a prompt and its completion, from the columns asked for or the usual ones."""
    column, answer = config.prompt_column, config.completion_column
    if column is None:
        if config.text_column in record:
            return plain_text(name, record, tokenizer, config)
        column, answer = PROMPT, COMPLETION
    if isinstance(record.get(column), list):
        return FORMS["messages"].read(name, record, tokenizer, config)
    if answer is None:
        text_of(name, record, column, "--prompt_column")
        remedy = "name the answer's field with --completion_column"
        raise DataError(f"record {name}: {column!r} is no list of messages; {remedy}")
    return Content((column, answer))


def is_alpaca(record: Record, config: DataConfig) -> bool:
    """Return whether a record has Alpaca's keys, and no text of another name is asked for: its
    column `text` repeats the others."""
    texts = config.text_column in record and config.text_column != DataConfig.text_column
    return INSTRUCTION in record and OUTPUT in record and not texts


def alpaca(name: str, record: Record, tokenizer: Any, config: DataConfig) -> Content:
    """Read an Alpaca record: as a conversation, or without a chat template as Alpaca's prompt."""
    if not is_alpaca(record, config):
        return plain_text(name, record, tokenizer, config)
    instruction = text_of(name, record, INSTRUCTION, "--prompt_column")
    answer = text_of(name, record, OUTPUT, "--prompt_column")
    given = record.get(INPUT) is not None
    further = text_of(name, record, INPUT, "--prompt_column") if given else ""
    used = (INSTRUCTION, INPUT, OUTPUT)
    if getattr(tokenizer, "chat_template", None) is None:
        return Content(texts=(alpaca_prompt(instruction, further), answer), used=used)
    messages = [alpaca_message(instruction, further), {"role": "assistant", "content": answer}]
    return replace(templated(name, tokenizer, messages[:1], messages[1:]), used=used)


def alpaca_prompt(instruction: str, further: str) -> str:
    """Return the prompt of an instruction and its input, if it has one."""
    return ALPACA_WITH_INPUT % (instruction, further) if further.strip() else ALPACA % instruction


def alpaca_message(instruction: str, further: str) -> dict[str, str]:
    """Return the same as a message for a chat template."""
    content = f"{instruction}\n\n{further}" if further.strip() else instruction
    return {"role": "user", "content": content}


def conversation_column(record: Record, config: DataConfig) -> str | None:
    """Return the column of a conversation under a known key, in a record that has no text."""
    if config.text_column not in record:
        for column in ("conversations", "messages"):
            if isinstance(record.get(column), list):
                return column
    return None


def conversation(name: str, record: Record, tokenizer: Any, config: DataConfig) -> Content:
    """Read a conversation. Its completion is its last answer, or in a column of its own."""
    column, answer_column = config.prompt_column, config.completion_column
    if column is None and isinstance(record.get(PROMPT), list) and COMPLETION in record:
        column, answer_column = PROMPT, COMPLETION
    elif column is None:
        column = conversation_column(record, config)
    if column is None:
        return plain_text(name, record, tokenizer, config)
    prompt, answer, after = _prompt_and_answer(name, record, column, answer_column)
    content = templated(name, tokenizer, prompt, answer)
    columns = (column,) if answer_column is None else (column, answer_column)
    lists = {c: record[c] for c in columns if isinstance(record.get(c), list)}
    unused = {
        f"{c}.{key}" for c, entries in lists.items() for entry in entries for key in _unused(entry)
    }
    turns = any(is_turn(entry) for entries in lists.values() for entry in entries)
    with_system = turns and prompt and prompt[0].get("content") == record.get("system")
    earlier = sum(message["role"] not in NO_ANSWER for message in prompt)
    noted = {**content.noted, EARLIER: earlier, AFTER: after}
    return replace(
        content,
        used=(*columns, "system") if with_system else columns,
        unused=tuple(sorted(unused)),
        noted={what: count for what, count in noted.items() if count},
    )


def _prompt_and_answer(
    name: str, record: Record, column: str, answer_column: str | None
) -> tuple[list[Any], list[Any], int]:
    """Return the messages before the last answer to train, those of it, and the number after."""
    prompt, after, answer = messages_of(name, record, column), 0, None
    if answer_column is None:
        answers = [
            number
            for number, message in enumerate(prompt)
            if isinstance(message, Mapping) and message.get("role", "user") not in NO_ANSWER
        ]
        # the last one that is to be trained, if any is
        answers = [number for number in answers if prompt[number].get(WEIGHT) != 0] or answers
        last = answers[-1] if answers else len(prompt) - 1
        after = max(0, len(prompt) - last - 1)
        prompt, answer = prompt[:last], prompt[last : last + 1]
    elif isinstance(record.get(answer_column), list):
        answer = messages_of(name, {answer_column: record[answer_column]}, answer_column)
    elif isinstance(record.get(answer_column), str):
        answer = [{"role": "assistant", "content": record[answer_column]}]
    for where, messages in ((column, prompt), (answer_column or column, answer)):
        if messages is None or not all(map(_is_message, messages)):
            wanted = '{"role": "user", "content": ...}'
            raise DataError(f"record {name}: {where!r} is no list of messages like {wanted}")
    assert answer is not None
    return prompt, answer, after


def _is_message(entry: Any) -> bool:
    """Return whether an entry is a message: one that calls functions may lack a content."""
    written = isinstance(entry, Mapping) and ("content" in entry or bool(entry.get("tool_calls")))
    return written and "role" in entry


def _unused(entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of a turn or a message that nothing is made of; the template has the rest."""
    for key, value in entry.items():
        used = not is_turn(entry) or key in ("from", "value")
        if key == WEIGHT:
            used = value in (0, 1)
        if value is not None and not used:
            yield key


def is_turn(entry: Any) -> bool:
    """Return whether an entry of a conversation is a turn of ShareGPT."""
    return isinstance(entry, Mapping) and "from" in entry and "value" in entry


def messages_of(name: str, record: Record, column: str) -> list[Any]:
    """Return a column's list as messages; turns of ShareGPT and their system text are renamed."""
    entries = list(record[column])
    if not (entries and all(map(is_turn, entries))):
        return entries
    messages = []
    for number, turn in enumerate(entries, start=1):
        speaker, said = turn["from"], turn["value"]
        role = ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
        if role is None:
            known = f"rename it to one of {', '.join(ROLES)}"
            raise DataError(f"record {name}: turn {number} is from {str(speaker)[:40]!r}; {known}")
        if not isinstance(said, str):
            has = f"turn {number} has {kind_of(said)} as 'value'"
            raise DataError(f"record {name}: {has}; write a text, or leave the turn out")
        messages.append({"role": role, "content": said, WEIGHT: turn.get(WEIGHT)})
    system = record.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def templated(name: str, tokenizer: Any, prompt: list[Any], answer: list[Any]) -> Content:
    """Return a conversation as the chat template writes it, start and end tokens included."""
    if not has_template(tokenizer):
        said = "is a conversation, but the tokenizer has no chat template"
        raise DataError(f"record {name} {said}; use prompt and completion texts")
    last = answer[-1] if answer else {"role": "user"}
    if last.get(WEIGHT) == 0:
        return Content(skipped="answer of weight 0")
    prompt, answer = ([_given_keys(m) for m in messages] for messages in (prompt, answer))
    silent = not str(last.get("content") or "").strip()
    if last["role"] in NO_ANSWER or (silent and not answer[-1].keys() - {"role", "content"}):
        return Content(skipped="empty completion")
    if not prompt:  # no template writes an answer to nothing
        return Content(skipped="answer to nothing")
    try:
        start = render(tokenizer, prompt, to_answer=True)
        whole = render(tokenizer, [*prompt, *answer], to_answer=False)
    except Exception as error:  # templates raise what their authors wrote into them
        said = f"the chat template refuses it: {first_line(error)[:200]}; mend the record"
        raise DataError(f"record {name}: {said}") from error
    if not whole.startswith(start):
        raise DataError(
            f"record {name}: the chat template writes the prompt differently with an answer after"
            " it, so the answer's tokens cannot be told; use prompt and completion texts"
        )
    if silent and _is_blank(tokenizer, [*prompt, *answer], whole):
        return Content(skipped="empty completion")
    texts = start, whole[len(start) :]
    for what, text in zip(("prompt", "answer"), texts, strict=True):
        check_characters(name, what, text)
    contents = [message.get("content") for message in (*prompt, *answer)]
    spoken = [content.strip() for content in contents if isinstance(content, str)]
    noted = {UNWRITTEN: sum(text not in whole for text in spoken)}
    said = json.dumps([prompt, answer], sort_keys=True, default=str)
    return Content(texts=texts, opened=False, closed=False, noted=noted, said=said)


def _given_keys(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as a template should see it: without its weight, and without keys that are
    null because other messages of its table have them."""
    return {
        key: value
        for key, value in message.items()
        if key == "content" or (key != WEIGHT and value is not None)
    }


def _is_blank(tokenizer: Any, messages: list[dict[str, Any]], whole: str) -> bool:
    """Return whether the template writes no more of a last message without a text than of one that
    calls no functions either."""
    last = {"role": messages[-1]["role"], "content": messages[-1].get("content")}
    try:
        return whole == render(tokenizer, [*messages[:-1], last], to_answer=False)
    except Exception:  # no form for an answer of nothing
        return False


def given_ids(name: str, record: Record, *_: Any) -> Content:
    """Read token ids, with labels or without; padding that came with them stays out."""
    found = {
        key: _integers(name, key, record[key])
        for key in ("input_ids", "labels", "attention_mask")
        if record.get(key) is not None or key == "input_ids"
    }
    ids, labels, mask = found["input_ids"], found.get("labels"), found.get("attention_mask")
    for what, values in (("an attention_mask", mask), ("labels", labels)):
        if values is not None and len(values) != len(ids):
            has = f"{len(ids)} input_ids but {what} of {len(values)}"
            raise DataError(f"record {name} has {has}; the two belong together")
    other = next((value for value in mask or () if value not in (0, 1)), None)
    if other is not None:
        raise DataError(
            f"record {name} has {other} in its attention_mask, expected 0 (padding) or 1 (a token);"
            " give packed documents as records of their own"
        )
    if mask is not None:
        keep = [i for i, real in enumerate(mask) if real]
        ids, labels = [ids[i] for i in keep], None if labels is None else [labels[i] for i in keep]
    return Content(ids=ids, labels=labels, used=("input_ids", "labels", "attention_mask"))


def _integers(name: str, key: str, values: Any) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else values  # an array or a tensor
    whole = isinstance(values, list | tuple) and all(
        isinstance(i, numbers.Integral) and not isinstance(i, bool) for i in values
    )
    if not whole or any(abs(i) > _INT64_MAX for i in values):
        said = f"{key} that are no list of 64-bit integers: {str(values)[:60]}"
        raise DataError(f"record {name} has {said}")
    return [int(i) for i in values]
