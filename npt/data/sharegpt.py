"""ShareGPT's conversations, `{"from": "human", "value": ...}`, and its names of roles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npt.data.encoding import CONVERSATIONS
from npt.data.source import Record
from npt.errors import DataError

SYSTEM = "system"
"""The column of a text that stands before a conversation."""

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "function": "tool",
    "observation": "tool",
}
_KNOWN = {*ROLES, *ROLES.values(), "system"}


def with_messages(record: Record) -> Record:
    """Return a record whose conversations are messages with the roles of chat templates."""
    changed: dict[str, Any] = {}
    for column, entries in record.items():
        is_list = isinstance(entries, list | tuple) and len(entries) > 0
        if is_list and all(isinstance(entry, Mapping) for entry in entries):
            messages = [_message(record, entry) for entry in entries]
            if messages != list(entries):
                changed[column] = messages
    system = record.get(SYSTEM)
    if CONVERSATIONS in changed and isinstance(system, str):
        record = {column: value for column, value in record.items() if column != SYSTEM}
        if system.strip() and changed[CONVERSATIONS][0].get("role") != "system":
            changed[CONVERSATIONS].insert(0, {"role": "system", "content": system})
    return {**record, **changed} if changed else record


def _message(record: Record, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a turn as a message, and a message with the usual name of its role; else the entry."""
    role = entry.get("role")
    if isinstance(role, str) and role in ROLES:
        return {**entry, "role": ROLES[role]}
    if "from" not in entry or "value" not in entry:
        return entry
    others = {key: value for key, value in entry.items() if key not in ("from", "value")}
    speaker = str(entry["from"]).lower()
    if speaker not in _KNOWN:
        raise DataError(
            f"record {record.get('id', '')}: a turn is from {speaker[:40]!r}; rename it to one of"
            f" {', '.join(sorted(_KNOWN))}"
        )
    return {"role": ROLES.get(speaker, speaker), "content": entry["value"], **others}
