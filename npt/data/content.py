"""The content of a record, and the registry of record forms (its table: npt/data/__init__.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from npt.config import DataConfig
from npt.data.source import Record

PIECE = "npt:piece"  # key of a piece of a longer text: whether it is the first, and the last one


@dataclass(frozen=True)
class Content:
    """The trainable part of a record: texts (one, or a prompt and its completion), columns to read
    these from, or ids with labels or without.

    used: further columns that it is made of. unused: keys inside them that it is not made of.
    opened, closed: add a start token, an end token. noted: messages by what became of them.
    skipped: why it is left out. said: what it says, if its tokens may be others tomorrow."""

    columns: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    ids: list[int] | None = None
    labels: list[int] | None = None
    used: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    opened: bool = True
    closed: bool = True
    noted: Mapping[str, int] = field(default_factory=dict)
    skipped: str | None = None
    said: str | None = None


def filled(record: Record) -> Record:
    """Return a record's columns that are not null; all of them if it has a name at most besides.

    Merged tables have null in the columns of other forms.
    """
    columns = {column: value for column, value in record.items() if value is not None}
    return columns if columns.keys() - {"id", PIECE} else record


Read = Callable[[str, Record, Any, DataConfig], Content]


class Form(NamedTuple):
    """A form of records: the columns that tell it, and `read(name, record, tokenizer, config)`."""

    columns: frozenset[str]
    read: Read


FORMS: dict[str, Form] = {}


def register_form(name: str, columns: Iterable[str], read: Read) -> None:
    """Add a form of records. A record that has all of its columns is of it, unless a form that was
    registered later has all of its own, or --prompt_column is given."""
    known = {other: form for other, form in FORMS.items() if other != name}
    FORMS.clear()
    FORMS.update({name: Form(frozenset(columns), read)} | known)
