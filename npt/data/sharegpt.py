"""ShareGPT's turns, `{"from": "human", "value": ...}`, and its names of roles."""

from __future__ import annotations

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


def as_message(name: str, entry: Any) -> Any:
    """Return a turn as a message, and a message with the usual name of its role; any other entry as
    it is. DataError, which names the record `name`, for an unknown speaker."""
    if not isinstance(entry, Mapping):
        return entry
    role = entry.get("role")
    if isinstance(role, str) and role in ROLES:
        return {**entry, "role": ROLES[role]}
    if "from" not in entry or "value" not in entry:
        return entry
    others = {key: value for key, value in entry.items() if key not in ("from", "value")}
    speaker = str(entry["from"]).lower()
    if speaker not in _KNOWN:
        raise DataError(
            f"record {name}: a turn is from {speaker[:40]!r}; rename it to one of"
            f" {', '.join(sorted(_KNOWN))}"
        )
    return {"role": ROLES.get(speaker, speaker), "content": entry["value"], **others}


def with_system(messages: list[Any], text: Any) -> list[Any]:
    """Return messages after a system text, unless it is empty or they begin with one."""
    first = messages[0] if messages else None
    begun = isinstance(first, Mapping) and first.get("role") == "system"
    if begun or not isinstance(text, str) or not text.strip():
        return messages
    return [{"role": "system", "content": text}, *messages]
