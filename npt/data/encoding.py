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

import numbers
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from npt.config import DataConfig
from npt.data.chat import AFTER, prompt_and_answer, why_skipped, written
from npt.data.content import PIECE, filled
from npt.data.continuation import (
    bare_tokens,
    begins_with_space,
    continuation_tokens,
    opening_tokens,
)
from npt.data.source import Record
from npt.errors import DataError, kind_of

PROMPT, COMPLETION, MESSAGES = "prompt", "completion", "messages"
_IDS = ("input_ids", "labels", "attention_mask")
_COLUMNS_NAMED = 32
_INT64_MAX = 2**63 - 1

TEXT_AT_ONCE = 1 << 20
"""Characters that a tokenizer is given at once, of several texts. It takes some 200 bytes each."""


@dataclass
class Counts:
    """Counts of what became of the records, over every pass.

    Attributes:
        cut_prompts, cut_completions: samples that lost tokens to `max_length`.
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
        prompt: how many leading ones are no targets; None for a text.
        said: what a conversation says, if its tokens may be others tomorrow.
    """

    name: str
    ids: list[int]
    prompt: int | None = None
    labels: list[int] | None = None
    said: str | None = None


class _Content(NamedTuple):
    """The trainable part of a record: texts (one, or a prompt and its completion), or ids.

    Attributes:
        used: columns that it is made of.
        opened, closed: add a start token, an end token.
        skipped: why it is left out.
    """

    used: tuple[str, ...]
    texts: tuple[str, ...] = ()
    ids: list[int] | None = None
    labels: list[int] | None = None
    opened: bool = True
    closed: bool = True
    skipped: str | None = None
    said: str | None = None
    after: int = 0


class Encoder:
    """Encodes records with one tokenizer and one set of columns."""

    def __init__(self, tokenizer: Any, config: DataConfig):
        self.tokenizer, self._config = tokenizer, config

    def encode(self, chunk: Sequence[tuple[int, Record]], counts: Counts) -> list[Encoded]:
        """Return the tokens of records that come with their number in the data; empty ones are
        counted and left out. A record with nothing to train on in it is a DataError."""
        read = [self._read(number, record) for number, record in chunk]
        tokens = iter(self._tokens_of([text for _, content in read for text in content.texts]))
        encoded = []
        for (_, record), (name, content) in zip(chunk, read, strict=True):
            counts.add(record, content.used)
            if content.after:
                counts.noted[AFTER] += content.after
            if content.ids is not None:
                encoded.append(Encoded(name, content.ids, labels=content.labels))
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
            return name, _given_ids(name, columns)
        column = prompt_column(columns, config)
        answer = config.completion_column
        if config.prompt_column is None:
            answer = COMPLETION if column == PROMPT else None
        if column is None:
            text = text_of(name, record, config.text_column, "--text_column")
            first, last = record.get(PIECE, (True, True))
            return name, _Content((config.text_column,), (text,), opened=first, closed=last)
        if isinstance(columns.get(column), list):
            return name, self._conversation(name, columns, column, answer)
        prompt = text_of(name, record, column, "--prompt_column")
        if answer is None:
            raise DataError(
                f"record {name}: {column!r} is no list of messages; name the answer's field with"
                " --completion_column"
            )
        completion = text_of(name, record, answer, "--completion_column")
        return name, _Content((column, answer), (prompt, completion))

    def _conversation(
        self, name: str, record: Record, column: str, answer_column: str | None
    ) -> _Content:
        prompt, answer, after = prompt_and_answer(name, record, column, answer_column)
        used = (column,) if answer_column is None else (column, answer_column)
        skipped = why_skipped(prompt, answer)
        if skipped is not None:
            return _Content(used, skipped=skipped, after=after)
        *texts, said = written(name, self.tokenizer, prompt, answer)
        for what, text in zip(("prompt", "answer"), texts, strict=True):
            _check_characters(name, what, text)
        return _Content(used, tuple(texts), opened=False, closed=False, said=said, after=after)

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
    _check_characters(name, repr(column), text)
    return text


def _check_characters(name: str, what: str, text: str) -> None:
    """Refuse half a character, which JSON allows and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"character {error.start} ({error.reason})"
        raise DataError(f"record {name}: {what} is broken at {where}; mend it there") from error


def _given_ids(name: str, record: Record) -> _Content:
    """Read token ids, with labels or without; padding that came with them stays out."""
    filled_in = ("input_ids", *(key for key in _IDS[1:] if record.get(key) is not None))
    lists = {key: _integers(name, key, record[key]) for key in filled_in}
    ids = lists["input_ids"]
    labels, mask = lists.get("labels"), lists.get("attention_mask")
    for what, values in (("an attention_mask", mask), ("labels", labels)):
        if values is not None and len(values) != len(ids):
            raise DataError(
                f"record {name} has {len(ids)} input_ids but {what} of {len(values)}; the two"
                " belong together"
            )
    other = next((value for value in mask or () if value not in (0, 1)), None)
    if other is not None:
        raise DataError(
            f"record {name} has {other} in its attention_mask, expected 0 (padding) or 1 (a token);"
            " give packed documents as records of their own"
        )
    if mask is not None:
        keep = [i for i, real in enumerate(mask) if real]
        ids, labels = [ids[i] for i in keep], None if labels is None else [labels[i] for i in keep]
    return _Content(_IDS, ids=ids, labels=labels)


def _integers(name: str, key: str, values: Any) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else values  # an array or a tensor
    whole = isinstance(values, list | tuple) and all(
        isinstance(i, numbers.Integral) and not isinstance(i, bool) for i in values
    )
    if not whole or any(abs(i) > _INT64_MAX for i in values):
        raise DataError(
            f"record {name} has {key} that are no list of 64-bit integers: {str(values)[:60]}"
        )
    return [int(i) for i in values]
