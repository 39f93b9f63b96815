"""From records to token ids: texts, prompts with their completions, conversations, and ids that
came as ids.

Aligned teacher forcing: ids are prompt, completion and end token; labels are the ids of completion
and end, -100 on the prompt, so the last token of the prompt predicts the first of the completion.
The two are tokenised apart: no token reaches across the border, and a prompt has the ids that it
has where something is generated behind it. A completion has those of a text that follows another
(npt/data/following.py).
"""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from npt.config import DataConfig
from npt.data.following import begins_with_a_space, tokens_behind, tokens_behind_a_mark, tokens_of
from npt.data.forms import (
    INPUT,
    INSTRUCTION,
    NO_ANSWER,
    OUTPUT,
    SYSTEM,
    alpaca_message,
    alpaca_prompt,
    conversation_column,
    is_alpaca,
    is_turn,
    messages_of,
)
from npt.data.local import PIECE
from npt.data.source import Record
from npt.errors import DataError, first_line, kind_of

_INT64_MAX = 2**63 - 1
_PROBE = "a"  # a text that no tokenizer drops

PROMPT, COMPLETION = "prompt", "completion"
"""Columns that are taken as prompt and completion where nothing else is asked for and there is no
text.
"""

_NAMED = 32  # columns that are counted by their names

EARLIER, BEHIND, UNWRITTEN = (
    "earlier answers taken as context",
    "messages behind the last answer left out",
    "messages that the chat template does not write as they are",
)
"""What is noted of conversations."""


@dataclass
class Counts:
    """What became of the records that were read, every pass over them counted anew.

    skipped: records, or windows of given token ids, that gave no sample, by reason. cut_prompts,
    cut_completions: samples that lost tokens of either to `max_length`. noted: of conversations,
    how many messages became what. unused: records in which there is something in a column that
    nothing is made of, by column.
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
        return {
            name: dict(value) if isinstance(value, Counter) else value
            for name, value in vars(self).items()
        }

    def see(self, part: _Content, record: Record) -> None:
        """Count a record, and what of it is not used."""
        self.records += 1
        self.noted.update(part.noted)
        columns = [
            str(name)
            for name, value in record.items()
            if name not in (*part.used, "id", PIECE) and value not in (None, "", [], {})
        ]
        for name in (*columns, *part.unused):
            self.unused[name if name in self.unused or len(self.unused) < _NAMED else "others"] += 1

    def lost(self) -> str:
        """What was cut or left out, in words; empty where nothing was."""
        cut = {"prompts": self.cut_prompts, "completions": self.cut_completions}
        parts = [f"{number:,} {what} cut to --max_length" for what, number in cut.items() if number]
        parts += [
            f"{self.noted[what]:,} {what}" for what in (BEHIND, UNWRITTEN) if self.noted[what]
        ]
        return ", ".join(
            parts
            + [f"{number:,} skipped ({reason})" for reason, number in sorted(self.skipped.items())]
        )


def listed_columns(unused: Mapping[str, int]) -> str:
    """Columns that nothing is made of, each with the records that have something in it."""
    return ", ".join(f"{name!r} of {count:,} records" for name, count in sorted(unused.items()))


@dataclass(frozen=True)
class Encoded:
    """A record's tokens. prompt: leading tokens that are no targets; None for text, all of which
    is.
    """

    name: str
    ids: list[int]
    prompt: int | None = None
    labels: list[int] | None = None


def encode(
    chunk: Sequence[tuple[int, Record]], tokenizer: Any, config: DataConfig, counts: Counts
) -> Iterator[Encoded]:
    """Tokenise records that come with their position in the data; empty ones are counted and left
    out.

    Raises:
        DataError: a record with nothing to train on in it, by its id or position.
    """
    parts = [_content(number, record, tokenizer, config) for number, record in chunk]
    tokens = _tokens(parts, tokenizer)
    opening = _opening(tokenizer) if any(part.texts for part in parts) else []
    end = tokenizer.eos_token_id
    for part, own, (_, record) in zip(parts, tokens, chunk, strict=True):
        counts.see(part, record)
        if part.ids is not None:
            yield Encoded(part.name, part.ids, labels=part.labels)
            continue
        if part.skipped is not None:
            counts.skipped[part.skipped] += 1
            continue
        *prompt, target = own
        # a text of spaces is one, a completion of them is none
        if not target or (prompt and not part.texts[-1].strip()):
            counts.skipped["empty completion" if prompt else "empty text"] += 1
            continue
        start = opening if part.opened else []
        close = [end] if part.closed and end is not None and target[-1] != end else []
        if prompt:
            yield Encoded(
                part.name, start + prompt[0] + target + close, prompt=len(start) + len(prompt[0])
            )
        else:
            yield Encoded(part.name, start + target + close)


def _tokens(parts: Sequence[_Content], tokenizer: Any) -> list[list[list[int]]]:
    """Of each part the tokens of its texts, opened and closed by nothing; of what follows a prompt
    or a piece those it has there.
    """
    own = iter(tokens_of(tokenizer, [text for part in parts for text in part.texts]))
    found = [[next(own) for _ in part.texts] for part in parts]
    follows = any(len(part.texts) == 2 or (part.texts and not part.opened) for part in parts)
    if not follows or not begins_with_a_space(tokenizer):
        return found
    pairs = [(part.texts, ids) for part, ids in zip(parts, found, strict=True) if len(ids) == 2]
    behind = tokens_behind(
        tokenizer, [(texts[0], ids[0]) for texts, ids in pairs], [texts[1] for texts, _ in pairs]
    )
    for (_, ids), completion in zip(pairs, behind, strict=True):
        ids[1] = completion
    for part, ids in zip(parts, found, strict=True):
        if len(ids) == 1 and not part.opened:
            ids[0] = tokens_behind_a_mark(tokenizer, part.texts[0])
    return found


def _opening(tokenizer: Any) -> list[int]:
    """The start tokens that the tokenizer puts in front of a text."""
    (whole,), (bare,) = (
        tokenizer([_PROBE], verbose=False, add_special_tokens=special)["input_ids"]
        for special in (True, False)
    )
    starts = (i for i in range(len(whole)) if list(whole[i : i + len(bare)]) == list(bare))
    return list(whole[: next(starts, 0)])


@dataclass(frozen=True)
class _Content:
    """What a record holds: texts (one, or a prompt and its completion), or ids with labels or
    without.

    opened, closed: whether a start and an end token are to be put around the texts. used: columns
    that it is made of. unused: keys inside them that it is not made of. noted: how many messages
    became what. skipped: why it is left out.
    """

    name: str
    texts: tuple[str, ...] = ()
    ids: list[int] | None = None
    labels: list[int] | None = None
    opened: bool = True
    closed: bool = True
    used: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    noted: Mapping[str, int] = field(default_factory=dict)
    skipped: str | None = None


def _content(number: int, record: Any, tokenizer: Any, config: DataConfig) -> _Content:
    if not isinstance(record, Mapping):
        raise DataError(
            f"record {number} is {kind_of(record)}, not a mapping like {{{config.text_column!r}:"
            " ...}"
        )
    given = record.get("id")
    name = str(number if given is None else given)
    if "input_ids" in record:
        return _given_ids(name, record)
    if config.prompt_column is not None:
        return _prompted(name, record, tokenizer, config.prompt_column, config.completion_column)
    if is_alpaca(record, config):
        return _instruction(name, record, tokenizer)
    if config.text_column not in record and PROMPT in record and COMPLETION in record:
        return _prompted(name, record, tokenizer, PROMPT, COMPLETION)
    conversation = conversation_column(record, config)
    if conversation is not None:
        return _prompted(name, record, tokenizer, conversation, None)
    first, last = record.get(PIECE, (True, True))
    text = _string(name, record, config.text_column, "--text_column")
    return _Content(name, (text,), opened=first, closed=last, used=(config.text_column,))


def _given_ids(name: str, record: Record) -> _Content:
    ids = _integers(name, "input_ids", record["input_ids"])
    labels = None if record.get("labels") is None else _integers(name, "labels", record["labels"])
    mask = (
        None
        if record.get("attention_mask") is None
        else _integers(name, "attention_mask", record["attention_mask"])
    )
    for what, values in (("an attention_mask", mask), ("labels", labels)):
        if values is not None and len(values) != len(ids):
            raise DataError(
                f"record {name} has {len(ids)} input_ids but {what} of {len(values)}; the two"
                " belong together"
            )
    if mask is not None:  # padding that came with the data stays out
        keep = [i for i, real in enumerate(mask) if real]
        ids, labels = [ids[i] for i in keep], None if labels is None else [labels[i] for i in keep]
    return _Content(name, ids=ids, labels=labels, used=("input_ids", "labels", "attention_mask"))


def _instruction(name: str, record: Record, tokenizer: Any) -> _Content:
    """A record of Alpaca: a conversation where the tokenizer has a chat template, else Alpaca's own
    prompt.
    """
    instruction, answer = (
        _string(name, record, column, "--prompt_column") for column in (INSTRUCTION, OUTPUT)
    )
    further = "" if record.get(INPUT) is None else _string(name, record, INPUT, "--prompt_column")
    used = (INSTRUCTION, INPUT, OUTPUT)
    if getattr(tokenizer, "chat_template", None) is None:
        return _Content(name, (alpaca_prompt(instruction, further), answer), used=used)
    message = {"role": "assistant", "content": answer}
    return replace(
        _conversation(name, tokenizer, [alpaca_message(instruction, further)], [message]), used=used
    )


def _prompted(
    name: str, record: Record, tokenizer: Any, prompt_column: str, completion_column: str | None
) -> _Content:
    if isinstance(record.get(prompt_column), list):
        return _told(name, record, tokenizer, prompt_column, completion_column)
    prompt = _string(name, record, prompt_column, "--prompt_column")
    if completion_column is None:
        raise DataError(
            f"record {name}: {prompt_column!r} is no list of messages; name the answer's field with"
            " --completion_column"
        )
    answer = _string(name, record, completion_column, "--completion_column")
    return _Content(name, (prompt, answer), used=(prompt_column, completion_column))


def _told(
    name: str, record: Record, tokenizer: Any, prompt_column: str, completion_column: str | None
) -> _Content:
    """A conversation, with what is noted of it."""
    prompt, answer, behind = _messages(name, record, prompt_column, completion_column)
    noted = {EARLIER: sum(message["role"] not in NO_ANSWER for message in prompt), BEHIND: behind}
    columns = [prompt_column, *([] if completion_column is None else [completion_column])]
    turns = [
        (column, turn)
        for column in columns
        if isinstance(record.get(column), list)
        for turn in record[column]
        if is_turn(turn)
    ]
    inside = {
        f"{column}.{key}"
        for column, turn in turns
        for key, value in turn.items()
        if key not in ("from", "value") and value is not None
    }
    content = _conversation(name, tokenizer, prompt, answer)
    used = (
        (*columns, SYSTEM)
        if turns and prompt and prompt[0]["content"] == record.get(SYSTEM)
        else tuple(columns)
    )
    noted = {what: count for what, count in {**content.noted, **noted}.items() if count}
    return replace(content, used=used, unused=tuple(sorted(inside)), noted=noted)


def _messages(
    name: str, record: Record, prompt_column: str, completion_column: str | None
) -> tuple[list[Any], list[Any], int]:
    """The messages of a conversation's prompt, those of its answer, of one list the last answer,
    and how many stand behind that.
    """
    prompt, behind = messages_of(name, record, prompt_column), 0
    answer: Any
    if completion_column is None:
        answers = [
            i
            for i, m in enumerate(prompt)
            if isinstance(m, Mapping) and m.get("role", "user") not in NO_ANSWER
        ]
        last = answers[-1] if answers else len(prompt) - 1
        prompt, answer, behind = prompt[:last], prompt[last : last + 1], len(prompt) - last - 1
    elif isinstance(record.get(completion_column), list):
        answer = messages_of(
            name, {completion_column: record[completion_column]}, completion_column
        )
    else:
        answer = record.get(completion_column)
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    for column, messages in ((prompt_column, prompt), (completion_column or prompt_column, answer)):
        whole = isinstance(messages, list) and all(
            isinstance(m, Mapping) and "role" in m and "content" in m for m in messages
        )
        if not whole:
            raise DataError(
                f'record {name}: {column!r} is no list of messages like {{"role": "user",'
                ' "content": ...}'
            )
    assert isinstance(answer, list)
    return prompt, answer, max(0, behind)


def _conversation(name: str, tokenizer: Any, prompt: list[Any], answer: list[Any]) -> _Content:
    """A conversation as the tokenizer's chat template writes it, start and end tokens included."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise DataError(
            f"record {name} is a conversation, but the tokenizer has no chat template; use prompt"
            " and completion texts"
        )
    if (
        not answer
        or answer[-1]["role"] in NO_ANSWER
        or not str(answer[-1]["content"] or "").strip()
    ):
        return _Content(name, skipped="empty completion")
    if not prompt:  # which no template writes
        return _Content(name, skipped="answer to nothing")
    try:
        start = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        whole = tokenizer.apply_chat_template(
            [*prompt, *answer], add_generation_prompt=False, tokenize=False
        )
    except Exception as error:  # templates raise what their authors wrote into them
        raise DataError(
            f"record {name}: the chat template refuses it: {first_line(error)[:200]}; mend the"
            " record"
        ) from error
    if not whole.startswith(start):
        raise DataError(
            f"record {name}: the chat template writes the prompt differently with an answer behind"
            " it, so the answer's tokens cannot be told; use prompt and completion texts"
        )
    texts = (
        message["content"].strip()
        for message in (*prompt, *answer)
        if isinstance(message["content"], str)
    )
    noted = {UNWRITTEN: sum(text not in whole for text in texts)}
    return _Content(
        name,
        (_whole(name, "prompt", start), _whole(name, "answer", whole[len(start) :])),
        opened=False,
        closed=False,
        noted=noted,
    )


def _string(name: str, record: Record, column: str, flag: str) -> str:
    text = record.get(column)
    if not isinstance(text, str):
        have = ", ".join(sorted(map(str, record))) or "nothing"
        what = "has no" if column not in record else f"has {kind_of(text)} as"
        raise DataError(f"record {name} {what} {column!r} (it has: {have}); set {flag}")
    return _whole(name, repr(column), text)


def _whole(name: str, what: str, text: str) -> str:
    """The text, which JSON allows to hold half a character, that no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"record {name}: {what} is broken at character {error.start} ({error.reason}); mend it"
            " there"
        ) from error
    return text


def _integers(name: str, field_name: str, values: Any) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else values  # an array or a tensor
    whole = isinstance(values, list | tuple) and all(
        isinstance(i, numbers.Integral) and not isinstance(i, bool) for i in values
    )
    if not whole or any(abs(i) > _INT64_MAX for i in values):
        raise DataError(
            f"record {name} has {field_name} that are no list of 64-bit integers:"
            f" {str(values)[:60]}"
        )
    return [int(i) for i in values]
