"""From records to token ids: texts, prompts with their completions, conversations, and ids that came as ids.

Aligned teacher forcing: ids are prompt, completion and end token; labels are the ids of completion and end, -100 on the prompt, so
the last token of the prompt predicts the first of the completion.
"""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from npt.config import DataConfig
from npt.data.source import Record
from npt.errors import DataError

_INT64_MAX = 2**63 - 1
PROMPT, COMPLETION = "prompt", "completion"
"""Columns that are taken as prompt and completion where nothing else is asked for and there is no text."""


@dataclass
class Counts:
    """What became of the records that were read. skipped: records that gave no sample, by reason. cut_prompts, cut_completions:
    samples that lost tokens of either to `max_length`.
    """

    records: int = 0
    samples: int = 0
    tokens: int = 0
    cut_prompts: int = 0
    cut_completions: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "skipped": dict(self.skipped)}


@dataclass(frozen=True)
class Encoded:
    """A record's tokens. prompt: leading tokens that are no targets; None for text, all of which is."""

    name: str
    ids: list[int]
    prompt: int | None = None
    labels: list[int] | None = None


def encode(chunk: Sequence[tuple[int, Record]], tokenizer: Any, config: DataConfig, counts: Counts) -> Iterator[Encoded]:
    """Tokenise records that come with their position in the data; empty ones are counted and left out.

    Raises:
        DataError: a record with nothing to train on in it, by its id or position.
    """
    parts = [_content(number, record, config) for number, record in chunk]
    texts = [part.text for part in parts if part.text is not None]
    completions = [part.completion for part in parts if part.completion is not None]
    encoded = iter(tokenizer(texts, verbose=False)["input_ids"] if texts else ())
    continued = iter(tokenizer(completions, verbose=False, add_special_tokens=False)["input_ids"] if completions else ())
    end = tokenizer.eos_token_id
    for part in parts:
        counts.records += 1
        if part.messages is not None:
            yield from _conversation(part, tokenizer, counts)
        elif part.text is None:
            assert part.ids is not None
            yield Encoded(part.name, part.ids, labels=part.labels)
        elif part.completion is None:
            ids = list(next(encoded))
            if not part.text:
                counts.skipped["empty text"] += 1
                continue
            yield Encoded(part.name, ids if end is None or part.continues or ids[-1:] == [end] else [*ids, end])
        else:
            prompt, answer = list(next(encoded)), list(next(continued))
            if end is not None and prompt[-1:] == [end]:
                prompt.pop()  # of a tokenizer that closes what it is given: the prompt goes on
            if not answer:
                counts.skipped["empty completion"] += 1
                continue
            answer = answer if end is None or answer[-1:] == [end] else [*answer, end]
            yield Encoded(part.name, prompt + answer, prompt=len(prompt))


@dataclass(frozen=True)
class _Content:
    name: str
    text: str | None = None
    completion: str | None = None
    ids: list[int] | None = None
    labels: list[int] | None = None
    messages: tuple[list[Any], list[Any]] | None = None  # prompt and answer
    continues: bool = False


def _content(number: int, record: Any, config: DataConfig) -> _Content:
    """What a record holds: token ids, prompt and completion, or text."""
    if not isinstance(record, Mapping):
        raise DataError(f"record {number} is a {type(record).__name__}, not a mapping like {{{config.text_column!r}: ...}}")
    name = str(record.get("id", number))
    if "input_ids" in record:
        return _given_ids(name, record)
    asked = config.prompt_column is not None
    if asked or (config.text_column not in record and PROMPT in record and COMPLETION in record):
        return _prompted(name, record, config.prompt_column or PROMPT, config.completion_column or (None if asked else COMPLETION))
    text = _string(name, record, config.text_column, "--text_column")
    return _Content(name, text=text, continues=bool(record.get("continues", False)))


def _given_ids(name: str, record: Record) -> _Content:
    ids = _integers(name, "input_ids", record["input_ids"])
    labels = None if record.get("labels") is None else _integers(name, "labels", record["labels"])
    mask = None if record.get("attention_mask") is None else _integers(name, "attention_mask", record["attention_mask"])
    for field_name, values in (("attention_mask", mask), ("labels", labels)):
        if values is not None and len(values) != len(ids):
            what = "an attention_mask" if field_name == "attention_mask" else field_name
            raise DataError(f"record {name} has {len(ids)} input_ids but {what} of {len(values)}; the two belong together")
    if mask is not None:  # padding that came with the data stays out
        keep = [i for i, real in enumerate(mask) if real]
        ids, labels = [ids[i] for i in keep], None if labels is None else [labels[i] for i in keep]
    return _Content(name, ids=ids, labels=labels)


def _prompted(name: str, record: Record, prompt_column: str, completion_column: str | None) -> _Content:
    prompt = record.get(prompt_column)
    if isinstance(prompt, list):
        answer = record.get(completion_column) if completion_column is not None else None
        if completion_column is None:
            prompt, answer = prompt[:-1], prompt[-1:]
        elif isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        for column, messages in ((prompt_column, prompt), (completion_column or prompt_column, answer)):
            whole = isinstance(messages, list) and all(isinstance(m, Mapping) and "role" in m and "content" in m for m in messages)
            if not whole:
                raise DataError(f'record {name}: {column!r} is no list of messages like {{"role": "user", "content": ...}}')
        assert isinstance(answer, list)
        return _Content(name, messages=(prompt, answer))
    if completion_column is None:
        raise DataError(f"record {name}: {prompt_column!r} is no list of messages; name the answer's field with --completion_column")
    return _Content(
        name,
        text=_string(name, record, prompt_column, "--prompt_column"),
        completion=_string(name, record, completion_column, "--completion_column"),
    )


def _conversation(part: _Content, tokenizer: Any, counts: Counts) -> Iterator[Encoded]:
    """A conversation through the tokenizer's chat template; its last message is the completion."""
    assert part.messages is not None
    prompt, answer = part.messages
    if getattr(tokenizer, "chat_template", None) is None:
        raise DataError(f"record {part.name} is a conversation, but the tokenizer has no chat template; use prompt and completion texts")
    if not answer or not str(answer[-1]["content"]).strip():
        counts.skipped["empty completion"] += 1
        return

    def template(messages: list[Any], opening: bool) -> list[int]:
        made = tokenizer.apply_chat_template(messages, add_generation_prompt=opening, tokenize=True, return_dict=True)
        return list(made["input_ids"])

    try:
        start, whole = template(prompt, True), template([*prompt, *answer], False)
    except Exception as error:  # templates raise what their authors wrote into them
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"record {part.name}: the chat template refuses it: {reason[:200]}") from error
    if whole[: len(start)] != start:
        raise DataError(
            f"record {part.name}: the chat template writes the prompt differently with an answer behind it, so the answer's tokens cannot "
            "be told; use prompt and completion texts"
        )
    yield Encoded(part.name, whole, prompt=len(start))


def _string(name: str, record: Record, column: str, flag: str) -> str:
    text = record.get(column)
    if not isinstance(text, str):
        have = ", ".join(sorted(map(str, record))) or "nothing"
        what = "has no" if column not in record else f"has a {type(text).__name__} as"
        raise DataError(f"record {name} {what} {column!r} (it has: {have}); set {flag}")
    return text


def _integers(name: str, field_name: str, values: Any) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else values  # an array or a tensor
    whole = isinstance(values, list | tuple) and all(isinstance(i, numbers.Integral) and not isinstance(i, bool) for i in values)
    if not whole or any(abs(i) > _INT64_MAX for i in values):
        raise DataError(f"record {name} has {field_name} that are no list of 64-bit integers: {str(values)[:60]}")
    return [int(i) for i in values]
