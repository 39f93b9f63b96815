"""Prompts from any data: texts, prompts with or without completions, conversations, and samples
with a loss mask. They are tokenised and ordered as in training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from npt.batch import IGNORE_INDEX, Sample
from npt.config import DataConfig
from npt.data.chat import has_template
from npt.data.encoding import (
    COMPLETION,
    OUTPUT,
    PROMPT,
    Encoder,
    answer_column,
    filled,
    prompt_column,
)
from npt.data.messages import messages_of
from npt.data.samples import Samples
from npt.data.source import Record, Repeatable, is_sequence
from npt.errors import DataError

_ANY_ANSWER = "x"
_UNCUT = 2**31 - 1  # the greatest --max_length


def read_prompts(
    records: Iterable[Record], tokenizer: Any, config: DataConfig, *, length: int, seed: int
) -> Iterator[Sample]:
    """Yield prompts of at most `length` tokens, in an order that depends on the seed. Raise
    DataError for a record without a prompt.

    A longer prompt keeps its end, and a text is cut into pieces, each a prompt. In a record with
    ids and labels, the prompt is the leading tokens without a label; in a conversation, everything
    before the last answer. End tokens are removed.
    """
    prompt = partial(prompt_record, tokenizer=tokenizer, config=config, length=length)
    prompts: Iterable[Record] = Repeatable(lambda: itertools.starmap(prompt, enumerate(records)))
    if is_sequence(records):
        prompts = _Sequence(records, prompt)
    as_samples = DataConfig(max_length=length)
    return Samples(prompts, tokenizer, as_samples, seed=seed, hold_out=False).epoch(0)


def prompt_record(
    number: int, record: Any, tokenizer: Any, config: DataConfig, length: int
) -> dict[str, Any]:
    """Return the prompt of a record as {"id", "input_ids"}."""
    column = None
    if isinstance(record, Mapping):
        record = filled(record)
        column = _column_of(record, config)
    if column is not None:
        # fill in a completion, since the encoder needs one
        as_json = answer_column(column, config) is None
        record = _with_any_answer(number, record, column, as_json)
        config = replace(config, prompt_column=column, completion_column=COMPLETION)
    whole = replace(config, max_length=_UNCUT)
    sample = next(iter(Encoder(tokenizer, whole).samples(number, record)), None)
    if sample is None:
        return {"id": str(number), "input_ids": []}
    ids = list(sample.input_ids)
    labels = sample.labels or ()
    # where the first label is; without one nothing is masked
    masked = next((at for at, label in enumerate(labels) if label != IGNORE_INDEX), 0)
    if masked or column is not None:
        ids = ids[:masked][-length:]
    elif ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    return {"id": sample.id.removesuffix("@0"), "input_ids": ids}


def _column_of(record: Mapping[str, Any], config: DataConfig) -> str | None:
    if "input_ids" in record:
        return None
    return prompt_column({COMPLETION: _ANY_ANSWER, OUTPUT: _ANY_ANSWER, **record}, config)


def _with_any_answer(
    number: int, record: Mapping[str, Any], column: str, as_json: bool
) -> dict[str, Any]:
    name = str(number if record.get("id") is None else record["id"])
    if column not in record:
        raise DataError(
            f"record {name} has no column {column!r} (columns:"
            f" {', '.join(sorted(map(str, record)))}); set --prompt_column"
        )
    prompt = record[column]
    messages = messages_of(name, prompt, as_json=as_json)
    if messages is not None:
        prompt = messages
        last = messages[-1] if messages else None
        if isinstance(last, Mapping) and last.get("role") == "assistant":
            prompt = messages[:-1]
    return {**record, "id": name, column: prompt, COMPLETION: _ANY_ANSWER}


def written_prompts(texts: Iterable[str], tokenizer: Any) -> list[Record]:
    """Return texts as records; for a model with a chat template each is the user's message."""
    chat = has_template(tokenizer)
    records: list[Record] = []
    for number, text in enumerate(texts, start=1):
        prompt = [{"role": "user", "content": text}] if chat else text
        records.append({"id": f"prompt {number}", PROMPT: prompt})
    return records


class _Sequence(Sequence[Record]):
    """The prompts of a sequence of records, made on access."""

    def __init__(self, records: Any, prompt: Callable[[int, Any], dict[str, Any]]):
        self._records = records
        self._prompt = prompt

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        return self._prompt(index, self._records[index])
