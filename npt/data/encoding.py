"""Records to samples: token ids and labels, cut to `max_length`.

    {"text": ...}                                            every token is a target
    {"prompt": ..., "completion": ...}                       or columns of other names
    {"instruction": ..., "input": ..., "output": ...}        Alpaca; the input follows in the prompt
    {"messages": [{"role": "user", "content": ...}, ...]}    uses the chat template
    {"conversations": [{"from": "human", "value": ...}]}     ShareGPT; perhaps with a system text
    {"input_ids": [...]}                                     optionally with labels and masks

A prompt may be a list of messages. A sample's ids are prompt, completion and end token. Labels are
-100 on the prompt; its last token predicts the completion's first. Prompt and completion are
tokenised separately, as in generation.

A text longer than `max_length` becomes several samples; a single token left over is dropped. A
prompt with its completion is always one sample. If it is too long, it loses tokens from the
prompt's start, then from the completion's end.

With `context_column` the teacher reads a context between the start tokens and the record, or as the
system message of a conversation. If both are too long together, the context loses its start. A text
becomes samples that leave room for the context, up to half of `max_length`.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import compress, takewhile
from pathlib import Path
from typing import Any

from npt.batch import IGNORE_INDEX, Sample
from npt.config import DataConfig
from npt.data.chat import columns_read, read_conversation
from npt.data.continuation import (
    TEXT_AT_ONCE,
    bare_tokens,
    begins_with_space,
    continuation_tokens,
    opening_tokens,
)
from npt.data.messages import SYSTEM, as_lists, messages_of, with_system
from npt.data.source import PIECE, Record, Skipped
from npt.errors import DataError, kind_of

PROMPT = "prompt"
COMPLETION = "completion"
MESSAGES = "messages"
CONVERSATIONS = "conversations"
INSTRUCTION = "instruction"
INPUT = "input"
OUTPUT = "output"
ANSWERS = {PROMPT: COMPLETION, INSTRUCTION: OUTPUT}
"""The column of the answer to a prompt, by the prompt's."""
MASKS = ("loss_mask", "completion_mask", "assistant_masks")
"""Columns that are 1 on tokens to train on, and 0 on others."""
IDS = ("input_ids", "labels", "attention_mask", "position_ids", *MASKS)
LENGTHS = "seq_lengths"
"""The column of the lengths of documents that were packed into one record."""

COLLECTED = (
    "prompt", "completion", "student", "position", "teacher_token", "student_token", "kl", "kl_at",
    "acceptance", "acceptance_at", "tokens", "base_hash", "adapter_hash",
)  # fmt: skip
"""Columns of a record of npt collect that describe it, beside the ids and labels to train on."""

_KNOWN_UNUSED = 100  # names of unused columns to count, since records may have any


@dataclass
class RecordCounts:
    """Counts of records and samples over all passes.

    Attributes:
        records: records read.
        samples: samples made from them.
        tokens: of the samples.
        cut_prompts: prompts that lost tokens to `max_length`.
        cut_completions: completions that lost tokens to `max_length`.
        cut_contexts: contexts that lost tokens to `max_length`, by sample.
        skipped: skipped records, or windows of a text, by reason.
        unused: records by columns that nothing is made of.
    """

    records: int = 0
    samples: int = 0
    tokens: int = 0
    cut_prompts: int = 0
    cut_completions: int = 0
    cut_contexts: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def lost(counts: RecordCounts) -> str:
    """Return what was cut or skipped, in words; empty if nothing was."""
    cut = {
        "prompts": counts.cut_prompts,
        "completions": counts.cut_completions,
        "contexts": counts.cut_contexts,
    }
    parts = [f"{count:,} {what} cut to --max_length" for what, count in cut.items() if count]
    parts += [f"{count:,} skipped ({why})" for why, count in sorted(counts.skipped.items())]
    return ", ".join(parts)


def unused_columns(counts: RecordCounts) -> str:
    """Return the columns that nothing is made of, in words; empty if there is none."""
    return ", ".join(
        f"{column!r} in {count:,} record{'' if count == 1 else 's'}"
        for column, count in sorted(counts.unused.items())
    )


def no_sample(counts: RecordCounts) -> DataError:
    """Return the error for data without a sample, from its `counts`."""
    held = f"{counts.samples:,} held out" if counts.samples else ""
    reasons = ", ".join(filter(None, (held, lost(counts))))
    source = f"{counts.records:,} records: {reasons}" if reasons else "the data"
    return DataError(
        f"no sample to train on in {source}; check --dataset_name and the columns"
        " (--text_column, --prompt_column)"
    )


class Encoder:
    """Turns records into samples, with one tokenizer and one set of columns, and counts both."""

    def __init__(self, tokenizer: Any, config: DataConfig, counts: RecordCounts | None = None):
        self.tokenizer = tokenizer
        self._config = config
        self.counts = RecordCounts() if counts is None else counts

    def samples(self, number: int, record: Record) -> list[Sample]:
        """Return a record's samples, none if it is empty; raise DataError if it lacks a column."""
        samples: list[Sample] = []
        try:
            samples = self._read(number, record)
        except Skipped as reason:
            self.counts.skipped[str(reason)] += 1
        self.counts.records += 1
        self.counts.samples += len(samples)
        self.counts.tokens += sum(len(sample.input_ids) for sample in samples)
        return samples

    def _read(self, number: int, record: Record) -> list[Sample]:
        config = self._config
        if not isinstance(record, Mapping):
            wanted = f"{{{config.text_column!r}: ...}}"
            raise DataError(f"record {number} is {kind_of(record)}, not a mapping like {wanted}")
        name = str(number if record.get("id") is None else record["id"])
        columns = filled(record)
        context = self._context(name, record)
        if "input_ids" in columns:
            # the texts are those of the tokens
            texts = (config.text_column, PROMPT, COMPLETION, MESSAGES, CONVERSATIONS)
            self._note_unused(record, *IDS, LENGTHS, *texts, *COLLECTED)
            return self._windows(name, *read_ids(name, columns))
        column = prompt_column(columns, config)
        if column is None:
            check_no_null(name, record, columns)
            text = text_of(name, record, config.text_column, "--text_column")
            self._note_unused(record, config.text_column)
            return self._windows(name, self._document(record, text), context=context)
        answer = answer_column(column, config)
        # a conversation may be stored as JSON; a prompt that looks like JSON is a text
        messages = messages_of(name, columns.get(column), as_json=answer is None)
        if messages is None:
            return [self._answered(name, record, column, answer, context)]
        used = [column, answer]
        if column == CONVERSATIONS:
            used.append(SYSTEM)
            messages = with_system(messages, columns.get(SYSTEM))
        conversation = {**columns, column: messages}
        sample = self._conversation(name, conversation, column, answer, context)
        self._note_unused(record, *used, *columns_read(self.tokenizer, columns))
        return [sample]

    def _answered(
        self, name: str, record: Record, column: str, answer: str | None, context: str
    ) -> Sample:
        """Return the sample of a prompt and its completion, both texts."""
        prompt = text_of(name, record, column, "--prompt_column")
        if answer is None:
            remedy = "set --completion_column to the answer's column"
            if column in (MESSAGES, CONVERSATIONS):
                remedy = "correct it"
            raise DataError(f"record {name}: {column!r} is not a list of messages; {remedy}")
        completion = text_of(name, record, answer, "--completion_column")
        used = [column, answer]
        if column == INSTRUCTION and record.get(INPUT) is not None:
            further = text_of(name, record, INPUT, "--prompt_column")
            used.append(INPUT)
            if further.strip():
                prompt = f"{prompt}\n\n{further}"
        self._note_unused(record, *used)
        front = [*self._opening, *self._tokens(prompt)]
        answered = self._ended(self._completion(prompt, completion))
        sample = self._fitted(name, front, answered)
        own = len(sample.input_ids) - len(self._opening)
        return self._after(sample, self._opening, self._context_tokens(context), own)

    def _document(self, record: Record, text: str) -> list[int]:
        """Return the tokens of a text, or of a piece of one: a document has one start and end."""
        opened, closed = record.get(PIECE, (True, True))
        ids = self._tokens(text) if opened else self._following(None, text)
        if not ids:
            raise Skipped("empty text")
        if opened:
            ids = [*self._opening, *ids]
        return self._ended(ids) if closed else ids

    def _context(self, name: str, record: Record) -> str:
        """Return the context that the teacher reads; a blank one is none."""
        column = self._config.context_column
        if column is None:
            return ""
        if record.get("input_ids") is not None:
            raise DataError(
                f"record {name} has input_ids, which --context_column does not support; use texts"
                " or messages"
            )
        context = text_of(name, record, column, "--context_column")
        return context if context.strip() else ""

    def _context_tokens(self, context: str) -> list[int]:
        return self._tokens(context) if context else []

    def _conversation(
        self, name: str, record: Record, column: str, answer: str | None, context: str
    ) -> Sample:
        """Return the sample of a conversation, with its context as the teacher's system message."""
        read = partial(read_conversation, name, self.tokenizer)
        prompt, completion, undated = read(record, column, answer)
        check_characters(name, "conversation", prompt + completion)
        front = self._tokens(prompt)
        # the template writes the end token
        answered = self._completion(prompt, completion)
        if not context:
            return self._fitted(name, front, answered, undated)
        messages = with_system(record[column], context)
        if messages is record[column]:
            raise DataError(
                f"record {name} has a system message, and a context to put in its place; remove one"
                " of them"
            )
        told, told_completion, undated = read({**record, column: messages}, column, answer)
        if told == prompt or told_completion != completion:
            raise DataError(
                f"record {name}: the chat template does not write a system message before the same"
                " answer, so it cannot hold the context; use prompt and completion texts"
            )
        sample = self._fitted(name, front, answered, undated)
        told_front = self._tokens(told)
        # templates write the system message first, so the prompts end alike
        pairs = zip(reversed(front), reversed(told_front), strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        shared = min(common + len(answered), len(sample.input_ids))
        return self._after(sample, [], told_front[: len(told_front) - common], shared)

    def _after(self, sample: Sample, front: list[int], context: list[int], shared: int) -> Sample:
        """Return a sample of which the teacher reads `front`, the end of `context` that fits, and
        the last `shared` tokens.
        """
        if not context:
            return sample
        room = self._config.max_length - len(front) - shared
        if min(room, shared) < 1:
            raise Skipped("no room for the context")
        self.counts.cut_contexts += len(context) > room
        before = (*front, *context[-room:])
        # the student's first token is not predicted, so the teacher's is no target either
        labels = (IGNORE_INDEX, *sample.targets[1:])
        taught = Sample(
            f"{sample.id} after its context",
            (*before, *sample.input_ids[-shared:]),
            (*[IGNORE_INDEX] * len(before), *labels[-shared:]),
        )
        return replace(sample, taught=taught)

    def _note_unused(self, record: Record, *used: str | None) -> None:
        """Count the columns that are neither used nor empty."""
        unused = self.counts.unused
        known = {*used, "id", PIECE, self._config.context_column}
        for column, value in record.items():
            empty = isinstance(value, str | list | tuple | dict | None) and not value
            if column in known or empty:
                continue
            if column in unused or len(unused) < _KNOWN_UNUSED:
                unused[str(column)] += 1

    def _completion(self, prompt: str, completion: str) -> list[int]:
        ids = self._following(prompt, completion)
        if not ids or not completion.strip():  # blank completions are empty, blank texts are not
            raise Skipped("empty completion")
        return ids

    def _following(self, before: str | None, text: str) -> list[int]:
        """Return the tokens of a text that follows `before` (None: any text)."""
        if self._begins_with_space:
            return continuation_tokens(self.tokenizer, before, text)
        return self._tokens(text)

    def _tokens(self, text: str) -> list[int]:
        if len(text) > TEXT_AT_ONCE:
            return bare_tokens(self.tokenizer, text)
        tokens = self.tokenizer([text], verbose=False, add_special_tokens=False)
        return list(tokens["input_ids"][0])

    def _ended(self, ids: list[int]) -> list[int]:
        end = self.tokenizer.eos_token_id
        return ids if end is None or ids[-1] == end else [*ids, end]

    @cached_property
    def _begins_with_space(self) -> bool:
        return begins_with_space(self.tokenizer)

    @cached_property
    def _opening(self) -> list[int]:
        return opening_tokens(self.tokenizer)

    def _windows(
        self, name: str, ids: list[int], labels: Sequence[int] = (), context: str = ""
    ) -> list[Sample]:
        """Cut the ids of a text into windows that do not overlap. Each follows the context."""
        samples: list[Sample] = []
        length = self._config.max_length
        front: list[int] = []
        before = self._context_tokens(context)
        if context:
            front = self._opening
            length = max(length - len(front) - len(before), length // 2)
        # a single token left over predicts nothing
        for start in range(0, max(1, len(ids) - 1), length):
            window = tuple(ids[start : start + length])
            targets = tuple(labels[start : start + length])
            if len(window) < 2:
                self.counts.skipped["fewer than two tokens"] += 1
            elif set(targets[1:]) == {IGNORE_INDEX}:
                self.counts.skipped["no target"] += 1
            else:
                sample = Sample(f"{name}@{start}", window, targets or None)
                # the first window has the start tokens, which the teacher reads before the context
                own = len(window) if start else len(window) - len(front)
                samples.append(self._after(sample, front, before, own))
        return samples

    def _fitted(
        self, name: str, prompt: list[int], completion: list[int], undated: str | None = None
    ) -> Sample:
        """Keep the completion, if it fits after one token of prompt, and then the prompt's end."""
        length = self._config.max_length
        # nothing predicts a row's first token
        most = length - min(len(prompt), 1)
        answer = completion[:most]
        start = max(0, len(prompt) + len(answer) - length)
        self.counts.cut_completions += len(completion) > most
        self.counts.cut_prompts += start > 0
        kept = prompt[start:]
        ids = (*kept, *answer)
        if len(ids) < 2:
            raise Skipped("no target")
        labels = (*[IGNORE_INDEX] * len(kept), *answer)
        return Sample(f"{name}@{start}", ids, labels, undated=undated)


def filled(record: Record) -> Record:
    """Return a record without the nulls of merged tables, unless only its id would be left."""
    columns = {column: value for column, value in record.items() if value is not None}
    others = columns.keys() - {"id", PIECE}
    return columns if others else record


def prompt_column(record: Record, config: DataConfig) -> str | None:
    """Return the column of a record's prompt or conversation; None for a text."""
    if config.prompt_column is not None or config.text_column in record:
        return config.prompt_column
    # a conversation holds its own answer
    forms = [*ANSWERS.items(), (MESSAGES, MESSAGES), (CONVERSATIONS, CONVERSATIONS)]
    return next((prompt for prompt, answer in forms if {prompt, answer} <= record.keys()), None)


def answer_column(column: str, config: DataConfig) -> str | None:
    """Return the column of the answer to a prompt's column; None if a conversation holds it."""
    if config.prompt_column is not None:
        return config.completion_column
    return ANSWERS.get(column)


def check_no_null(name: str, record: Record, columns: Record) -> None:
    """Raise DataError if a record has a prompt without its completion, or the reverse, because one
    of them is null. (`columns` are the record's without nulls.)"""
    for pair in ANSWERS.items():
        for column, other in (pair, pair[::-1]):
            if column in columns and other in record and other not in columns:
                text_of(name, record, other, "--prompt_column")


def text_of(name: str, record: Record, column: str, flags: str) -> str:
    """Return the text in a column, or raise DataError with the columns that the record has."""
    text = record.get(column)
    if text is None and column in record:
        raise DataError(
            f"record {name}{_line(name)} has null as {column!r}; fill it in, or remove the record"
        )
    if not isinstance(text, str):
        own = record.keys() - {"id", PIECE}  # readers add `id`
        have = ", ".join(sorted(map(str, own))) or "nothing"
        what = "has no column" if column not in record else f"has {kind_of(text)} as"
        raise DataError(f"record {name} {what} {column!r} (columns: {have}); set {flags}")
    check_characters(name, repr(column), text)
    return text


def _line(name: str) -> str:
    """Return the line of a record, in brackets, if its reader named it by file and line."""
    file, _, number = name.rpartition(":")
    others = {".jsonl", ".ndjson", ".csv", ".tsv"}.isdisjoint(Path(file.lower()).suffixes)
    return "" if others or not number.isdigit() else f" (line {number})"


def check_characters(name: str, what: str, text: str) -> None:
    """Raise DataError for a lone surrogate, which JSON allows but no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"character {error.start} ({error.reason})"
        raise DataError(f"record {name}: {what} is damaged at {where}; correct it") from error


def read_ids(name: str, record: Record) -> tuple[list[int], list[int]]:
    """Return a record's token ids and their labels, without padding. Where one of MASKS is 0, there
    is no label. If the labels are empty, every token is its own target."""
    columns = {key: _integers(name, key, record[key]) for key in IDS if key in record}
    length = len(columns["input_ids"])
    for key, values in columns.items():
        if len(values) != length:
            raise DataError(
                f"record {name} has {length} input_ids, but {key} has length {len(values)}; they"
                " must be equally long"
            )
    for key, expected in _MEANINGS.items():
        other = set(columns.get(key, ())) - {0, 1}
        if other:
            raise DataError(f"record {name} has {min(other)} in its {key}, expected {expected}")
    # windows are cut from tokens alone; batches are padded anew
    mask = columns.pop("attention_mask", [1] * length)
    columns = {key: list(compress(values, mask)) for key, values in columns.items()}
    ids = columns["input_ids"]
    labels = columns.get("labels", [])
    for key in columns.keys() & MASKS:
        # without labels every token is its own target
        pairs = zip(labels or ids, columns[key], strict=True)
        labels = [label if trained else IGNORE_INDEX for label, trained in pairs]
    positions = list(range(len(ids)))
    if columns.get("position_ids", positions) != positions:
        raise DataError(
            f"record {name} has position_ids other than 0 to {len(ids) - 1}; make each packed"
            " document a record of its own"
        )
    lengths = _integers(name, LENGTHS, record.get(LENGTHS, [len(ids)]))
    if len(lengths) > 1 or sum(lengths) != len(ids):
        raise DataError(
            f"record {name} has {LENGTHS} {str(lengths)[:60]} for {len(ids)} tokens; make each"
            " packed document a record of its own"
        )
    return ids, labels


_MEANINGS = {
    "attention_mask": "0 (padding) or 1 (a token); make each packed document a record of its own",
    **dict.fromkeys(MASKS, "0 (no target) or 1 (train on the token)"),
}
"""What a mask may hold."""


def _integers(name: str, key: str, values: Any) -> list[int]:
    values = as_lists(values)
    # Python counts True as 1, but only a mask may
    refused = set() if key in _MEANINGS else {bool}
    try:
        if not isinstance(values, list | tuple) or refused & set(map(type, values)):
            raise TypeError
        return array("q", values).tolist()
    except (TypeError, OverflowError) as error:
        raise DataError(
            f"record {name} has {key} that are not a list of 64-bit integers: {str(values)[:60]}"
        ) from error
