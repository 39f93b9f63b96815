"""Records to token ids. The table of record forms is in npt/data/__init__.py.

Ids are prompt, completion and end token; labels are -100 on the prompt, whose last token predicts
the completion's first. The two are tokenised apart, as generation has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from npt.config import DataConfig
from npt.data.source import Record
from npt.errors import DataError, kind_of

PIECE = "npt:piece"  # key of a piece of a longer text: whether it is the first, and the last one
PROMPT, COMPLETION = "prompt", "completion"
BEHIND = "messages behind the last answer left out"
UNWRITTEN = "messages that the chat template does not write as they are"
_FLAGS = (), ("--text_column",), ("--prompt_column", "--completion_column")
_COLUMNS_NAMED = 32
_PROBE = "a"  # a text that no tokenizer drops
_MARKS = ("\n", ".", ",", "|", "0", "x", "e", "a")  # one is a token of its own before any text


@dataclass(frozen=True)
class Content:
    """What there is to train on in a record: texts (one, or a prompt and its completion), columns
    to read these from, or ids with labels or without.

    used: further columns that it is made of. unused: keys inside them that it is not made of.
    opened, closed: whether start and end token are to be added. noted: messages by what became of
    them. skipped: why it is left out."""

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


@dataclass
class Counts:
    """What became of the records that were read, counted at every pass.

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
        filled = [
            str(k) for k, v in record.items() if k not in used and v not in (None, "", [], {})
        ]
        for name in (*content.unused, *filled):
            known = name in self.unused or len(self.unused) < _COLUMNS_NAMED
            self.unused[name if known else "others"] += 1

    def lost(self) -> str:
        """Return what was cut or left out, in words; empty if nothing was."""
        cut = {"prompts": self.cut_prompts, "completions": self.cut_completions}
        parts = [f"{count:,} {what} cut to --max_length" for what, count in cut.items() if count]
        noted = {what: self.noted[what] for what in (BEHIND, UNWRITTEN)}
        parts += [f"{count:,} {what}" for what, count in noted.items() if count]
        parts += [f"{count:,} skipped ({why})" for why, count in sorted(self.skipped.items())]
        return ", ".join(parts)


def listed_columns(unused: Mapping[str, int]) -> str:
    """Return unused columns in words, each with the number of records that have it."""
    return ", ".join(f"{name!r} of {count:,} records" for name, count in sorted(unused.items()))


class Encoded(NamedTuple):
    """A record's tokens. prompt: how many leading ones are no targets; None for a text."""

    name: str
    ids: list[int]
    prompt: int | None = None
    labels: list[int] | None = None


class Encoder:
    """Encodes records with one tokenizer and one set of columns."""

    def __init__(self, tokenizer: Any, config: DataConfig):
        self.tokenizer, self._config = tokenizer, config

    def encode(self, chunk: Sequence[tuple[int, Record]], counts: Counts) -> list[Encoded]:
        """Return the tokens of records that come with their number in the data; empty ones are
        counted and left out. A record with nothing to train on in it is a DataError."""
        read, texts = [], []
        for number, record in chunk:
            if not isinstance(record, Mapping):
                wanted = f"{{{self._config.text_column!r}: ...}}"
                what = f"record {number} is {kind_of(record)}"
                raise DataError(f"{what}, not a mapping like {wanted}")
            given = record.get("id")
            name = str(number if given is None else given)
            for form in FORMS.values():
                if form.columns <= record.keys():
                    break
            if self._config.prompt_column is not None and "input_ids" not in record:
                form = FORMS["prompt and completion"]
            content = form.read(name, record, self.tokenizer, self._config)
            own = list(content.texts)
            flags = _FLAGS[len(content.columns)]
            for column, flag in zip(content.columns, flags, strict=True):
                own.append(text_of(name, record, column, flag))
            read.append((name, record, content, own))
            texts += own
        tokens = tokens_of(self.tokenizer, texts)
        end, encoded, at = self.tokenizer.eos_token_id, [], 0
        for name, record, content, own in read:
            counts.add(record, content)
            ids, at = tokens[at : at + len(own)], at + len(own)
            if content.ids is not None:
                encoded.append(Encoded(name, content.ids, labels=content.labels))
                continue
            if content.skipped is not None:
                counts.skipped[content.skipped] += 1
                continue
            prompted = len(own) == 2
            if (prompted or not content.opened) and self._begins_with_space:
                before = own[0] if prompted else None
                ids[-1] = continuation_tokens(self.tokenizer, before, own[-1])
            # a text of spaces is a text, a completion of spaces is none
            if not ids[-1] or (prompted and not own[-1].strip()):
                counts.skipped["empty completion" if prompted else "empty text"] += 1
                continue
            front = (self._opening if content.opened else []) + (ids[0] if prompted else [])
            close = [end] if content.closed and end is not None and ids[-1][-1] != end else []
            prompt = len(front) if prompted else None
            encoded.append(Encoded(name, front + ids[-1] + close, prompt))
        return encoded

    @cached_property
    def _begins_with_space(self) -> bool:
        """Whether the tokenizer begins every text with something that a continuation lacks."""
        (alone,) = tokens_of(self.tokenizer, [_PROBE])
        return continuation_tokens(self.tokenizer, None, _PROBE) != alone

    @cached_property
    def _opening(self) -> list[int]:
        """The start tokens that the tokenizer puts before a text."""
        (whole,) = self.tokenizer([_PROBE], verbose=False, add_special_tokens=True)["input_ids"]
        (bare,) = tokens_of(self.tokenizer, [_PROBE])
        starts = (i for i in range(len(whole)) if list(whole[i : i + len(bare)]) == bare)
        return list(whole[: next(starts, 0)])


def tokens_of(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return the tokens of each text by itself, without start and end token."""
    if not texts:
        return []
    return list(map(list, tokenizer(texts, verbose=False, add_special_tokens=False)["input_ids"]))


def continuation_tokens(tokenizer: Any, before: str | None, text: str) -> list[int]:
    """Return the tokens of a text that follows `before` (None: another text).

    Tokenizers of SentencePiece (Llama 2, Mistral 0.1, T5) begin every text with a space, which is
    a word too many in a completion. If the two together have a border of tokens where `before`
    ends, the text has the tokens that it has there; else those after a mark that it does not join.
    """
    unknown = getattr(tokenizer, "unk_token_id", None)
    for front in _MARKS if before is None else (before, *_MARKS):
        ids, whole = tokens_of(tokenizer, [front, front + text])
        # an unknown token may reach into the text: neighbours are merged
        apart = not ids or unknown is None or ids[-1] != unknown
        if whole[: len(ids)] == ids and apart and (ids or front == before):
            return whole[len(ids) :]
    return tokens_of(tokenizer, [text])[0]


def continuation_text(tokenizer: Any, before: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of tokens that follow others, special tokens left out; decoded alone it would
    lose the space that it begins with."""
    parts = (list(before), [*before, *ids], list(ids))
    front, whole, alone = (tokenizer.decode(part, skip_special_tokens=True) for part in parts)
    return str(whole[len(front) :] if whole.startswith(front) else alone)


def text_of(name: str, record: Record, column: str, flag: str) -> str:
    """Return the text in a column, whole; else say what is there."""
    text = record.get(column)
    if not isinstance(text, str):
        have = ", ".join(sorted(map(str, record))) or "nothing"
        what = "has no" if column not in record else f"has {kind_of(text)} as"
        raise DataError(f"record {name} {what} {column!r} (it has: {have}); set {flag}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise half_character(name, repr(column), error) from error
    return text


def half_character(name: str, what: str, error: UnicodeEncodeError) -> DataError:
    """Return what to raise of half a character, which JSON allows and no tokenizer takes."""
    place = f"character {error.start} ({error.reason})"
    return DataError(f"record {name}: {what} is broken at {place}; mend it there")


def plain_text(name: str, record: Record, tokenizer: Any, config: DataConfig) -> Content:
    """Read a text, or a piece of one."""
    first, last = record.get(PIECE, (True, True))
    return Content((config.text_column,), opened=first, closed=last)


def prompt_texts(name: str, record: Record, tokenizer: Any, config: DataConfig) -> Content:
    """Read a prompt and its completion, from the columns asked for or the usual ones."""
    column, answer = config.prompt_column, config.completion_column
    if column is None:
        if config.text_column in record:
            return plain_text(name, record, tokenizer, config)
        column, answer = PROMPT, COMPLETION
    if isinstance(record.get(column), list):
        return FORMS["messages"].read(name, record, tokenizer, config)
    if answer is None:
        text_of(name, record, column, "--prompt_column")
        raise DataError(
            f"record {name}: {column!r} is no list of messages; name the answer's field with"
            " --completion_column"
        )
    return Content((column, answer))
