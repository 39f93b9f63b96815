"""Records to token ids.

    {"text": ...}                                            every token is a target
    {"prompt": ..., "completion": ...}                       or columns of other names
    {"messages": [{"role": "user", "content": ...}, ...]}    by the tokenizer's chat template
    {"input_ids": [...]}                                     perhaps with labels and a mask

A prompt may be a list of messages. Ids are prompt, completion and end token; labels are -100 on the
prompt, whose last token predicts the completion's first. The two are tokenised separately, as in
generation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from npt.config import DataConfig
from npt.data.continuation import (
    bare_tokens,
    begins_with_space,
    continuation_tokens,
    opening_tokens,
)
from npt.data.given_ids import IDS, read_ids
from npt.data.source import PIECE, Record
from npt.errors import DataError, kind_of

PROMPT, COMPLETION, MESSAGES = "prompt", "completion", "messages"
AFTER = "messages after the last answer left out"
_COLUMNS_NAMED = 32

TEXT_AT_ONCE = 1 << 20
"""Characters that a tokenizer is given at once, of several texts. It takes some 200 bytes each."""


@dataclass
class RecordCounts:
    """Counts of what became of the records, over every pass.

    Attributes:
        records: read.
        samples: made of them.
        tokens: of the samples.
        cut_prompts: samples whose prompt lost tokens to `max_length`.
        cut_completions: samples whose completion did.
        skipped: records, or windows of given ids, by reason.
        noted: messages by what became of them.
        unused: records by columns that nothing is made of.
    """

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

    def add(self, record: Record, used: Sequence[str]) -> None:
        """Count a record, and its columns that nothing is made of."""
        self.records += 1
        for column, value in record.items():
            if column not in (*used, "id", PIECE) and value not in (None, "", [], {}):
                name = str(column)
                named = name in self.unused or len(self.unused) < _COLUMNS_NAMED
                self.unused[name if named else "others"] += 1


class Encoded(NamedTuple):
    """A record's tokens.

    Attributes:
        name: of the record.
        ids: of the tokens.
        prompt: how many leading ones are no targets; None for a text.
        labels: that came with given ids.
        said: what a conversation says, if its tokens may be others tomorrow.
    """

    name: str
    ids: list[int]
    prompt: int | None = None
    labels: list[int] | None = None
    said: str | None = None


class _Content(NamedTuple):
    """The trainable part of a record.

    Attributes:
        used: columns that it is made of.
        texts: one, or a prompt and its completion; none of given ids.
        given: ids and labels.
        opened: add a start token.
        closed: add an end token.
        skipped: why it is left out.
        said: what a conversation says.
        after: number of its messages that are left out.
    """

    used: tuple[str, ...]
    texts: tuple[str, ...] = ()
    given: tuple[list[int], list[int] | None] | None = None
    opened: bool = True
    closed: bool = True
    skipped: str | None = None
    said: str | None = None
    after: int = 0


class Encoder:
    """Encodes records with one tokenizer and one set of columns."""

    def __init__(self, tokenizer: Any, config: DataConfig):
        self.tokenizer, self._config = tokenizer, config

    def encode(self, chunk: Sequence[tuple[int, Record]], counts: RecordCounts) -> list[Encoded]:
        """Return the tokens of records that come with their number in the data; empty ones are
        counted and left out. A record with nothing to train on in it is a DataError."""
        read = [self._read(number, record) for number, record in chunk]
        tokens = iter(self._tokens_of([text for _, content in read for text in content.texts]))
        encoded = []
        for (_, record), (name, content) in zip(chunk, read, strict=True):
            counts.add(record, content.used)
            if content.after:
                counts.noted[AFTER] += content.after
            if content.given is not None:
                ids, labels = content.given
                encoded.append(Encoded(name, ids, labels=labels))
                continue
            joined = self._join(name, content, [next(tokens) for _ in content.texts])
            if joined is None:
                empty = "empty completion" if len(content.texts) == 2 else "empty text"
                counts.skipped[content.skipped or empty] += 1
            else:
                encoded.append(joined)
        return encoded

    def _tokens_of(self, texts: list[str]) -> list[list[int]]:
        if sum(map(len, texts)) > TEXT_AT_ONCE:
            return [bare_tokens(self.tokenizer, text) for text in texts]
        if not texts:
            return []
        ids = self.tokenizer(texts, verbose=False, add_special_tokens=False)["input_ids"]
        return list(map(list, ids))

    def _read(self, number: int, record: Record) -> tuple[str, _Content]:
        """Return a record's name and content."""
        config = self._config
        if not isinstance(record, Mapping):
            wanted = f"{{{config.text_column!r}: ...}}"
            raise DataError(f"record {number} is {kind_of(record)}, not a mapping like {wanted}")
        name = str(number if record.get("id") is None else record["id"])
        columns = filled(record)
        if "input_ids" in columns:
            return name, _Content(IDS, given=read_ids(name, columns))
        column = prompt_column(columns, config)
        answer = config.completion_column
        if config.prompt_column is None:
            answer = COMPLETION if column == PROMPT else None
        if column is None:
            text = text_of(name, record, config.text_column, "--text_column")
            first, last = record.get(PIECE, (True, True))
            return name, _Content((config.text_column,), (text,), opened=first, closed=last)
        if isinstance(columns.get(column), list):
            from npt.data.chat import read_conversation

            used = (column,) if answer is None else (column, answer)
            chat = read_conversation(name, self.tokenizer, columns, column, answer)
            return name, _Content(used, opened=False, closed=False, **chat._asdict())
        prompt = text_of(name, record, column, "--prompt_column")
        if answer is None:
            raise DataError(
                f"record {name}: {column!r} is no list of messages; name the answer's field with"
                " --completion_column"
            )
        completion = text_of(name, record, answer, "--completion_column")
        return name, _Content((column, answer), (prompt, completion))

    def _join(self, name: str, content: _Content, tokens: list[list[int]]) -> Encoded | None:
        """Return start token, prompt, completion or text, and end token; None if it is empty."""
        if content.skipped is not None:
            return None
        *prompt, last = tokens
        if (prompt or not content.opened) and self._begins_with_space:
            before = content.texts[0] if prompt else None
            last = continuation_tokens(self.tokenizer, before, content.texts[-1])
        # a text of spaces is a text, a completion of spaces is none
        if not last or (prompt and not content.texts[-1].strip()):
            return None
        front = (self._opening if content.opened else []) + (prompt[0] if prompt else [])
        end = self.tokenizer.eos_token_id
        close = [end] if content.closed and end is not None and last[-1] != end else []
        masked = len(front) if prompt else None
        return Encoded(name, front + last + close, masked, said=content.said)

    @cached_property
    def _begins_with_space(self) -> bool:
        return begins_with_space(self.tokenizer)

    @cached_property
    def _opening(self) -> list[int]:
        return opening_tokens(self.tokenizer)


def filled(record: Record) -> Record:
    """Return a record's columns that are not null, as merged tables have those of other forms; all
    of them if it has a name at most besides.
    """
    columns = {column: value for column, value in record.items() if value is not None}
    return columns if columns.keys() - {"id", PIECE} else record


def prompt_column(record: Record, config: DataConfig) -> str | None:
    """Return the column of a record's prompt or conversation; None of a text."""
    if config.prompt_column is not None or config.text_column in record:
        return config.prompt_column
    if PROMPT in record and COMPLETION in record:
        return PROMPT
    return MESSAGES if isinstance(record.get(MESSAGES), list) else None


def text_of(name: str, record: Record, column: str, flags: str) -> str:
    """Return the text in a column, whole; else raise with what the record has."""
    text = record.get(column)
    if not isinstance(text, str):
        # `id` is what readers call a record by
        have = ", ".join(sorted(map(str, record.keys() - {"id", PIECE}))) or "nothing"
        what = "has no" if column not in record else f"has {kind_of(text)} as"
        raise DataError(f"record {name} {what} {column!r} (it has: {have}); set {flags}")
    check_characters(name, repr(column), text)
    return text


def check_characters(name: str, what: str, text: str) -> None:
    """Refuse half a character, which JSON allows and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"character {error.start} ({error.reason})"
        raise DataError(f"record {name}: {what} is broken at {where}; mend it there") from error
