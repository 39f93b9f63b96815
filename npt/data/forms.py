"""Forms of instruction data that are told by their keys: Alpaca's records, ShareGPT's conversations
and lists of messages.

    {"instruction": ..., "input": ..., "output": ...}                 Alpaca; the input may be
    missing or empty {"conversations": [{"from": "human", "value": ...}, ...]}         ShareGPT,
    with a "system" text beside them or without {"messages": [{"role": "user", "content": ...},
    ...]}             as chat templates take them

A text, and a prompt with its completion, go before all of them; Alpaca's keys go before a column
`text`, in which the data set of that name holds the same record written out, prompt and all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npt.config import DataConfig
from npt.errors import DataError, kind_of

INSTRUCTION, INPUT, OUTPUT = "instruction", "input", "output"
CONVERSATIONS, MESSAGES, SYSTEM = "conversations", "messages", "system"
FROM, VALUE = "from", "value"

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Who speaks in ShareGPT's turns, by the names that chat templates know."""

NO_ANSWER = frozenset({"system", "developer", "user", "tool"})
"""Roles whose messages are no answers."""

_TASK = "Below is an instruction that describes a task"
_ASKED = "Write a response that appropriately completes the request."
ALPACA = f"{_TASK}. {_ASKED}\n\n### Instruction:\n%s\n\n### Response:\n"
ALPACA_WITH_INPUT = (
    f"{_TASK}, paired with an input that provides further context. {_ASKED}\n\n###"
    " Instruction:\n%s\n\n### Input:\n%s\n\n### Response:\n"
)
"""The prompts of Stanford's Alpaca, as its data set has them written out."""


def is_alpaca(record: Mapping[str, Any], config: DataConfig) -> bool:
    """Whether a record has Alpaca's keys, and no text of another name is asked for."""
    texts = config.text_column in record and config.text_column != DataConfig.text_column
    return INSTRUCTION in record and OUTPUT in record and not texts


def conversation_column(record: Mapping[str, Any], config: DataConfig) -> str | None:
    """The key of a record that has a conversation under a known one, and no text."""
    if config.text_column in record:
        return None
    return next(
        (column for column in (CONVERSATIONS, MESSAGES) if isinstance(record.get(column), list)),
        None,
    )


def alpaca_prompt(instruction: str, further: str) -> str:
    """The prompt as plain text, for models without a chat template.

    Args:
        instruction: what to do.
        further: what to do it with; empty for nothing.
    """
    return ALPACA_WITH_INPUT % (instruction, further) if further.strip() else ALPACA % instruction


def alpaca_message(instruction: str, further: str) -> dict[str, str]:
    """The prompt as a message for a chat template; arguments as of `alpaca_prompt`."""
    return {
        "role": "user",
        "content": f"{instruction}\n\n{further}" if further.strip() else instruction,
    }


def is_turn(turn: Any) -> bool:
    """Whether an entry of a conversation is a turn of ShareGPT."""
    return isinstance(turn, Mapping) and FROM in turn and VALUE in turn


def message_of(name: str, number: int, turn: Mapping[str, Any]) -> dict[str, str]:
    """A turn of ShareGPT as a message.

    Args:
        name: of the record.
        number: of the turn, from 1.
        turn: with `from` and `value`.

    Raises:
        DataError: somebody unknown speaks, or says no text.
    """
    speaker, said = turn[FROM], turn[VALUE]
    role = ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        raise DataError(
            f"record {name}: turn {number} is from {str(speaker)[:40]!r}; rename it to one of"
            f" {', '.join(ROLES)}"
        )
    if not isinstance(said, str):
        raise DataError(
            f"record {name}: turn {number} has {kind_of(said)} as {VALUE!r}; write a text, or leave"
            " the turn out"
        )
    return {"role": role, "content": said}


def messages_of(name: str, record: Mapping[str, Any], column: str) -> list[Any]:
    """The list of a column as messages, with the system text that stands beside ShareGPT's turns;
    other entries as they are.

    Raises:
        DataError: as `message_of`.
    """
    entries = record[column]
    if not (entries and all(map(is_turn, entries))):
        return list(entries)
    messages = [message_of(name, number, turn) for number, turn in enumerate(entries, start=1)]
    system = record.get(SYSTEM)
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages
