"""Prompts out of any data: texts, prompts with or without completions, conversations, and samples
that have a loss mask.

They are tokenised as training tokenises what stands in front of a completion, and come in
training's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from npt.config import DataConfig
from npt.data.batch import IGNORE_INDEX, Sample
from npt.data.encoding import Counts, Encoder
from npt.data.record_forms import (
    COMPLETION,
    INSTRUCTION,
    OUTPUT,
    PROMPT,
    conversation_column,
    is_alpaca,
    messages_of,
)
from npt.data.samples import Samples
from npt.data.source import Record
from npt.errors import DataError

_AS_PROMPT = DataConfig(prompt_column=PROMPT, completion_column=COMPLETION)
_ANY_ANSWER = "x"


def read_prompts(
    records: Iterable[Record], tokenizer: Any, config: DataConfig, *, length: int, seed: int
) -> Iterator[Sample]:
    """Prompts of at most `length` tokens, in an order that the seed fixes.

    A prompt that is longer keeps its end; a text is cut to pieces, each a prompt. Of a record with
    ids and labels the leading tokens without a label are the prompt, of a conversation everything
    before its last answer. End tokens are left out.

    Args:
        records: as for training; those with a prompt need no completion.
        tokenizer: of the base model.
        config: the columns.
        length: tokens, 2 at least.
        seed: of the order.

    Raises:
        DataError: a record with nothing of this in it, or no prompt of two tokens or more.
    """
    prompts: Iterable[Record]
    if hasattr(records, "__len__") and hasattr(records, "__getitem__"):
        prompts = _Sequence(records, tokenizer, config, length)
    else:
        prompts = _Stream(records, tokenizer, config, length)
    return Samples(
        prompts, tokenizer, DataConfig(max_length=length), seed=seed, hold_out=False
    ).epoch(0)


def prompt_record(
    number: int, record: Any, tokenizer: Any, config: DataConfig, length: int
) -> dict[str, Any]:
    """A record's prompt as a record of its own: {"id", "input_ids"}."""
    whole = isinstance(record, Mapping) and "input_ids" not in record
    if whole and config.prompt_column is None and _is_instruction(record, config):
        record = {**record, OUTPUT: _ANY_ANSWER}
    elif (
        whole
        and config.prompt_column is None
        and (column := conversation_column(record, config)) is not None
    ):
        record, config = _with_any_answer(number, record, column), _AS_PROMPT
    elif whole and (
        config.prompt_column is not None or (config.text_column not in record and PROMPT in record)
    ):
        record = _with_any_answer(number, record, config.prompt_column or PROMPT)
        config = _AS_PROMPT
    for encoded in Encoder(tokenizer, config).encode([(number, record)], Counts()):
        ids, prompt = encoded.ids, encoded.prompt
        if encoded.labels is not None:
            prompt = (
                next((i for i, label in enumerate(encoded.labels) if label != IGNORE_INDEX), 0)
                or None
            )
        if prompt is not None:
            ids = ids[:prompt][-length:]
        elif ids[-1:] == [tokenizer.eos_token_id]:
            ids = ids[:-1]
        return {"id": encoded.name, "input_ids": ids}
    return {"id": str(number), "input_ids": []}


def _is_instruction(record: Mapping[str, Any], config: DataConfig) -> bool:
    """Alpaca's, which here needs no output where there is no text either."""
    return is_alpaca(record, config) or (
        INSTRUCTION in record and PROMPT not in record and config.text_column not in record
    )


def _with_any_answer(number: int, record: Mapping[str, Any], column: str) -> dict[str, Any]:
    given = record.get("id")
    name = str(number if given is None else given)
    if column not in record:
        raise DataError(
            f"record {name} has no {column!r} (it has: {', '.join(sorted(map(str, record)))}); set"
            " --prompt_column"
        )
    prompt = (
        messages_of(name, record, column) if isinstance(record[column], list) else record[column]
    )
    if (
        isinstance(prompt, list)
        and prompt
        and isinstance(prompt[-1], Mapping)
        and prompt[-1].get("role") == "assistant"
    ):
        prompt = prompt[:-1]
    return {"id": name, PROMPT: prompt, COMPLETION: _ANY_ANSWER}


class _Sequence(Sequence[Record]):
    """The prompts of a sequence of records, made when they are asked for."""

    def __init__(self, records: Any, *how: Any):
        self._records, self._how = records, how

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        return prompt_record(index, self._records[index], *self._how)


class _Stream:
    """The prompts of a stream of records."""

    def __init__(self, records: Iterable[Record], *how: Any):
        self._records, self._how = records, how

    def __iter__(self) -> Iterator[Record]:
        return (
            prompt_record(number, record, *self._how) for number, record in enumerate(self._records)
        )
