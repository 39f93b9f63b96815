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
from itertools import compress
from typing import Any, NamedTuple

from npt.config import DataConfig
from npt.data.continuation import (
    bare_tokens,
    begins_with_space,
    continuation_tokens,
    opening_tokens,
)
from npt.data.source import PIECE, Record
from npt.errors import DataError, kind_of

PROMPT, COMPLETION, MESSAGES = "prompt", "completion", "messages"
IDS = ("input_ids", "labels", "attention_mask")

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
    """

    records: int = 0
    samples: int = 0
    tokens: int = 0
    cut_prompts: int = 0
    cut_completions: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        return {k: dict(v) if isinstance(v, Counter) else v for k, v in vars(self).items()}


def lost(counts: RecordCounts) -> str:
    """Return what was cut or left out, in words; empty if nothing was."""
    cut = {"prompts": counts.cut_prompts, "completions": counts.cut_completions}
    parts = [f"{count:,} {what} cut to --max_length" for what, count in cut.items() if count]
    parts += [f"{count:,} skipped ({why})" for why, count in sorted(counts.skipped.items())]
    return ", ".join(parts)


def no_sample(counts: RecordCounts) -> DataError:
    """Return the error of data that gave nothing but `counts`."""
    held = f"{counts.samples:,} held out" if counts.samples else ""
    reasons = ", ".join(filter(None, (held, lost(counts))))
    of = f" of {counts.records:,} records ({reasons})" if reasons else " of the data"
    return DataError(
        f"no sample to train on came{of}; check --dataset_name and the columns (--text_column,"
        " --prompt_column)"
    )


class Encoded(NamedTuple):
    """A record's tokens.

    Attributes:
        name: of the record.
        ids: of the tokens.
        prompt: how many leading ones are no targets; None for a text.
        labels: that came with given ids.
        undated: what a conversation says, whose tokens may be others tomorrow.
    """

    name: str
    ids: list[int]
    prompt: int | None = None
    labels: list[int] | None = None
    undated: str | None = None


class Content(NamedTuple):
    """The trainable part of a record.

    Attributes:
        texts: one, or a prompt and its completion; none of given ids.
        ids: tokens and labels that came as such.
        opened: add a start token.
        closed: add an end token.
        skipped: why it is left out.
        undated: what a conversation says, which does not depend on the day.
    """

    texts: tuple[str, ...] = ()
    ids: tuple[list[int], list[int] | None] | None = None
    opened: bool = True
    closed: bool = True
    skipped: str | None = None
    undated: str | None = None


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
        for name, content in read:
            counts.records += 1
            if content.ids is not None:
                ids, labels = content.ids
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

    def _read(self, number: int, record: Record) -> tuple[str, Content]:
        """Return a record's name and content."""
        config = self._config
        if not isinstance(record, Mapping):
            wanted = f"{{{config.text_column!r}: ...}}"
            raise DataError(f"record {number} is {kind_of(record)}, not a mapping like {wanted}")
        name = str(number if record.get("id") is None else record["id"])
        columns = filled(record)
        if "input_ids" in columns:
            return name, Content(ids=read_ids(name, columns))
        column = prompt_column(columns, config)
        answer = config.completion_column
        if config.prompt_column is None:
            answer = COMPLETION if column == PROMPT else None
        if column is None:
            text = text_of(name, record, config.text_column, "--text_column")
            first, last = record.get(PIECE, (True, True))
            return name, Content((text,), opened=first, closed=last)
        if isinstance(columns.get(column), list):
            from npt.data.chat import read_conversation

            return name, read_conversation(name, self.tokenizer, columns, column, answer)
        prompt = text_of(name, record, column, "--prompt_column")
        if answer is None:
            raise DataError(
                f"record {name}: {column!r} is no list of messages; name the answer's field with"
                " --completion_column"
            )
        completion = text_of(name, record, answer, "--completion_column")
        return name, Content((prompt, completion))

    def _join(self, name: str, content: Content, tokens: list[list[int]]) -> Encoded | None:
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
        return Encoded(name, front + last + close, masked, undated=content.undated)

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


def read_ids(name: str, record: Record) -> tuple[list[int], list[int] | None]:
    """Return a record's token ids, and its labels if it has any, without padding."""
    ids = _integers(name, "input_ids", record["input_ids"])
    labels, mask = (
        None if record.get(key) is None else _integers(name, key, record[key]) for key in IDS[1:]
    )
    for what, values in (("an attention_mask", mask), ("labels", labels)):
        if values is not None and len(values) != len(ids):
            raise DataError(
                f"record {name} has {len(ids)} input_ids but {what} of {len(values)}; the two"
                " belong together"
            )
    if mask is None:
        return ids, labels
    if other := set(mask) - {0, 1}:
        raise DataError(
            f"record {name} has {min(other)} in its attention_mask, expected 0 (padding) or 1 (a"
            " token); give packed documents as records of their own"
        )
    return list(compress(ids, mask)), labels and list(compress(labels, mask))


def _integers(name: str, key: str, values: Any) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else values  # an array or a tensor
    if not isinstance(values, list | tuple) or not all(map(_is_int64, values)):
        raise DataError(
            f"record {name} has {key} that are no list of 64-bit integers: {str(values)[:60]}"
        )
    return list(map(int, values))


def _is_int64(value: Any) -> bool:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return whole and abs(int(value)) < 2**63
