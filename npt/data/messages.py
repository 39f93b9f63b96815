"""Conversations as lists of messages, from JSON and from ShareGPT's turns,
`{"from": "human", "value": ...}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from npt.errors import DataError

SYSTEM = "system"
"""The column of the text that stands before a conversation."""

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "function": "tool",
    "observation": "tool",
}
_KNOWN = {*ROLES, *ROLES.values(), "system"}


def messages_of(name: str, value: Any, *, as_json: bool = False) -> list[Any] | None:
    """Return a list of messages from a list, a tuple, an array or, with `as_json`, JSON text; None
    if the value is none of these. Turns of ShareGPT become messages; DataError for a speaker that
    is unknown."""
    value = as_lists(value)
    if as_json:
        value = from_json(value)
    if not isinstance(value, list | tuple):
        return None
    return [as_message(name, entry) for entry in value]


def as_lists(value: Any) -> Any:
    """Return an array or a tensor as lists, any other value as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def from_json(value: Any) -> Any:
    """Return what JSON text stands for, or the value itself if it is not JSON text."""
    if not isinstance(value, str):  # bytes are not text, though `json` reads them
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def as_message(name: str, entry: Any) -> Any:
    """Return a turn as a message, and a message with the usual name of its role; any other entry as
    it is. DataError, which names the record `name`, for an unknown speaker."""
    if not isinstance(entry, Mapping):
        return entry
    role = str(entry.get("role"))
    if role in ROLES:
        return {**entry, "role": ROLES[role]}
    if "from" not in entry or "value" not in entry:
        return entry
    others = dict(entry)
    content = others.pop("value")
    speaker = str(others.pop("from")).lower()
    if speaker not in _KNOWN:
        raise DataError(
            f"record {name}: a turn is from {speaker[:40]!r}; rename it to one of"
            f" {', '.join(sorted(_KNOWN))}"
        )
    return {"role": ROLES.get(speaker, speaker), "content": content, **others}


def with_system(messages: list[Any], text: Any) -> list[Any]:
    """Return messages after a system text, unless it is empty or they begin with one."""
    first = messages[0] if messages else None
    begun = isinstance(first, Mapping) and first.get("role") == "system"
    if begun or not isinstance(text, str) or not text.strip():
        return messages
    return [{"role": "system", "content": text}, *messages]
