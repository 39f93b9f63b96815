"""The columns of a record."""

from __future__ import annotations

from npt.data.source import Record

PIECE = "npt:piece"  # key of a piece of a longer text: whether it is the first, and the last one


def filled(record: Record) -> Record:
    """Return a record's columns that are not null; all of them if it has a name at most besides.

    Merged tables have null in the columns of other forms.
    """
    columns = {column: value for column, value in record.items() if value is not None}
    return columns if columns.keys() - {"id", PIECE} else record
