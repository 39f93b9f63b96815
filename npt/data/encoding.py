"""Records to token ids.

Ids are prompt, completion and end token; labels are -100 on the prompt, whose last token predicts
the completion's first. The two are tokenised separately, as in generation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from npt.config import DataConfig
from npt.data.content import FORMS, PIECE, Content, Form, filled
from npt.data.continuation import (
    bare_tokens,
    begins_with_space,
    continuation_tokens,
    opening_tokens,
)
from npt.data.source import Record
from npt.errors import DataError, kind_of

_FLAGS = (), ("--text_column",), ("--prompt_column", "--completion_column")
_COLUMNS_NAMED = 32

TEXT_AT_ONCE = 1 << 20
"""Characters that a tokenizer is given at once, of one text or of several. It takes some 200 bytes
for each, and ends the process if it does not get them."""


@dataclass
class Counts:
    """Counts of what became of the records, over every pass.

    skipped: records, or windows of given ids, by reason. cut_prompts, cut_completions: samples that
    lost tokens to `max_length`. unused: records by columns that nothing is made of."""

    records: int = 0
    samples: int = 0
    tokens: int = 0
    cut_prompts: int = 0
    cut_completions: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        return {k: dict(v) if isinstance(v, Counter) else v for k, v in vars(self).items()}

    def add(self, record: Record, content: Content) -> None:
        """Count a record, and the columns that nothing is made of."""
        self.records += 1
        self.noted.update(content.noted)
        used = {*content.columns, *content.used, "id", PIECE}
        filled = [k for k, v in record.items() if k not in used and v not in (None, "", [], {})]
        for name in (*content.unused, *map(str, filled)):
            known = name in self.unused or len(self.unused) < _COLUMNS_NAMED
            self.unused[name if known else "others"] += 1


class Encoded(NamedTuple):
    """A record's tokens. prompt: how many leading ones are no targets; None for a text. said: as
    of `Content`."""

    name: str
    ids: list[int]
    prompt: int | None = None
    labels: list[int] | None = None
    said: str | None = None


class Encoder:
    """Encodes records with one tokenizer and one set of columns."""

    def __init__(self, tokenizer: Any, config: DataConfig):
        self.tokenizer, self._config = tokenizer, config

    def encode(self, chunk: Sequence[tuple[int, Record]], counts: Counts) -> list[Encoded]:
        """Return the tokens of records that come with their number in the data; empty ones are
        counted and left out. A record with nothing to train on in it is a DataError."""
        read = [self._read(number, record) for number, record in chunk]
        every = [text for _, _, texts in read for text in texts]
        tokens, encoded = self._tokens_of(every), []
        for (_, record), (name, content, texts) in zip(chunk, read, strict=True):
            counts.add(record, content)
            ids, tokens = tokens[: len(texts)], tokens[len(texts) :]
            if content.ids is not None:
                encoded.append(Encoded(name, content.ids, labels=content.labels))
                continue
            skipped = content.skipped
            joined = None if skipped else self._join(name, content, texts, ids)
            if joined is None:
                empty = "empty completion" if len(texts) == 2 else "empty text"
                counts.skipped[skipped or empty] += 1
            else:
                encoded.append(joined)
        return encoded

    def _tokens_of(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of each text; the tokenizer is given TEXT_AT_ONCE characters a call."""
        tokens: list[list[int]] = []
        group: list[str] = []
        for text in (*texts, None):
            full = text is None or sum(map(len, group)) + len(text) > TEXT_AT_ONCE
            if full and group:
                found = self.tokenizer(group, verbose=False, add_special_tokens=False)["input_ids"]
                tokens, group = tokens + list(map(list, found)), []
            if text is not None and len(text) > TEXT_AT_ONCE:
                tokens.append(self._in_pieces(text))
            elif text is not None:
                group.append(text)
        return tokens

    def _in_pieces(self, text: str, before: str | None = None, follows: bool = False) -> list[int]:
        """Return the tokens of a text piece by piece; if it follows, of what follows `before`."""
        ids: list[int] = []
        for piece in _pieces(text):
            if follows and self._begins_with_space:
                ids += continuation_tokens(self.tokenizer, before, piece)
            else:
                ids += bare_tokens(self.tokenizer, piece)
            before, follows = None, True
        return ids

    def _read(self, number: int, record: Record) -> tuple[str, Content, list[str]]:
        """Return a record's name, its content and the texts of that."""
        if not isinstance(record, Mapping):
            wanted = f"{{{self._config.text_column!r}: ...}}"
            raise DataError(f"record {number} is {kind_of(record)}, not a mapping like {wanted}")
        given = record.get("id")
        name = str(number if given is None else given)
        columns = filled(record)
        form = _form_of(columns)
        if form is FORMS["text"] and self._config.text_column not in columns:
            columns, form = record, _form_of(record)  # the error names what is null
        if self._config.prompt_column is not None and "input_ids" not in columns:
            form = FORMS["prompt and completion"]
        content = form.read(name, columns, self.tokenizer, self._config)
        flags = _FLAGS[len(content.columns)]
        texts = [text_of(name, record, *of) for of in zip(content.columns, flags, strict=True)]
        return name, content, [*content.texts, *texts]

    def _join(
        self, name: str, content: Content, texts: list[str], tokens: list[list[int]]
    ) -> Encoded | None:
        """Return start token, prompt, completion or text, and end token; None if it is empty."""
        *prompt, last = tokens
        if (prompt or not content.opened) and self._begins_with_space:
            before = texts[0] if prompt and len(texts[0]) <= TEXT_AT_ONCE else None
            last = self._in_pieces(texts[-1], before, follows=True)
        # a text of spaces is a text, a completion of spaces is none
        if not last or (prompt and not texts[-1].strip()):
            return None
        front = (self._opening if content.opened else []) + (prompt[0] if prompt else [])
        end = self.tokenizer.eos_token_id
        close = [end] if content.closed and end is not None and last[-1] != end else []
        ids, given = front + last + close, len(front) if prompt else None
        return Encoded(name, ids, given, said=content.said)

    @cached_property
    def _begins_with_space(self) -> bool:
        return begins_with_space(self.tokenizer)

    @cached_property
    def _opening(self) -> list[int]:
        return opening_tokens(self.tokenizer)


def _pieces(text: str) -> Iterator[str]:
    """Yield pieces of at most TEXT_AT_ONCE characters, cut after a line end, else before a space,
    else anywhere."""
    start = 0
    while len(text) - start > TEXT_AT_ONCE:
        most = start + TEXT_AT_ONCE
        ends = text.rfind("\n", start, most) + 1, text.rfind(" ", start + 1, most), most
        end = next(end for end in ends if end > start)
        yield text[start:end]
        start = end
    yield text[start:]


def _form_of(record: Record) -> Form:
    return next(form for form in FORMS.values() if form.columns <= record.keys())


def text_of(name: str, record: Record, column: str, flag: str) -> str:
    """Return the text in a column, whole; else raise with what the record has."""
    text = record.get(column)
    if not isinstance(text, str):
        # `id` is what readers call a record by
        have = ", ".join(sorted(map(str, record.keys() - {"id", PIECE}))) or "nothing"
        what = "has no" if column not in record else f"has {kind_of(text)} as"
        raise DataError(f"record {name} {what} {column!r} (it has: {have}); set {flag}")
    check_characters(name, repr(column), text)
    return text


def check_characters(name: str, what: str, text: str) -> None:
    """Refuse half a character, which JSON allows and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = f"character {error.start} ({error.reason})"
        raise DataError(f"record {name}: {what} is broken at {place}; mend it there") from error


def plain_text(name: str, record: Record, tokenizer: Any, config: DataConfig) -> Content:
    """Read a text, or a piece of one."""
    first, last = record.get(PIECE, (True, True))
    return Content((config.text_column,), opened=first, closed=last)
