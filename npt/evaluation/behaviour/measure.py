"""The behaviour of a converted model next to its teacher, as `behaviour.json` keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel

from npt.adapters.converted import attached_config
from npt.data.batch import Sample
from npt.data.chat import has_template
from npt.data.source import Record
from npt.errors import ConfigError
from npt.evaluation.behaviour.agreement import Agreement, measure_agreement
from npt.evaluation.behaviour.answers import Answers, compare_answers
from npt.evaluation.behaviour.documents import beginnings
from npt.evaluation.behaviour.needles import DEPTHS, Needles, find_needles, make_needles
from npt.evaluation.behaviour.positions import Positions, measure_positions, rows_of
from npt.evaluation.behaviour.prompts import PROMPTS
from npt.evaluation.generate import prompt_ids
from npt.evaluation.greedy import end_ids, parting_prompts
from npt.evaluation.metrics import evaluating
from npt.random_state import kept_random_state

CONTEXT_LENGTH = 2048
ANSWER_TOKENS = 64
AGREEMENT_TOKENS = 128
AGREEMENT_PROMPTS = 16
ROWS = 6
"""Rows of the figures by position."""


@dataclass(frozen=True)
class Behaviour:
    """Teacher (the base, adapters disabled) and student side by side.

    text: name of the documents of `positions` and `needles`. A part that could not be measured is
    None, and `notes` says why; they also say what is other than usual.
    """

    text: str
    answers: Answers | None
    agreement: Agreement | None
    positions: Positions | None
    needles: Needles | None
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `behaviour.json`."""
        return asdict(self)


@kept_random_state()
def measure_behaviour(
    model: PreTrainedModel,
    tokenizer: Any,
    samples: Sequence[Sample],
    documents: tuple[str, Iterable[Record]],
    *,
    context_length: int = CONTEXT_LENGTH,
    batch_size: int = AGREEMENT_PROMPTS,
    between: Callable[[], None] | None = None,
) -> Behaviour:
    """Compare student and teacher as a person would. With a model of 135 M parameters in NF4 it
    takes some 330 seconds of one CPU core, and 1.5 GB besides the model, most of it the logits that
    greedy texts are compared on.

    Memory does not grow with the number of rows, prompts or needles: a KV cache of `batch_size`
    short texts, the states of a row of `context_length`, and logits of a chunk of tokens.

    Args:
        model: with adapters attached; not changed.
        tokenizer: of the base model.
        samples: held out; their beginnings are the prompts of the greedy agreement.
        documents: the name of a text and its held-out documents (`heldout_documents`).
        context_length: of the figures by position and of the needles; at most the model's
            positions are used.
        batch_size: prompts at a time; does not change the figures beyond rounding.
        between: called now and then; what it raises ends the measurement.

    Raises:
        ConfigError: a context of fewer than two tokens.
        DataError: token ids outside the vocabulary.
        NumericalError: logits that are not finite.
        ModelError: no adapters are attached.
    """
    attached_config(model)
    if context_length < 2:
        raise ConfigError(f"--context_length is {context_length}; it must be at least 2")
    work = _Work(model, tokenizer, context_length, between or _nothing)
    name, records = documents
    with evaluating(model):
        answers = work.answers()
        agreement = work.agreement(samples, batch_size)
        tokens = 2 * ROWS * work.context
        texts = beginnings(records, tokenizer, work.context, tokens, model.config.vocab_size)
        positions, needles = work.positions(texts), work.needles(texts)
    return Behaviour(name, answers, agreement, positions, needles, tuple(work.notes))


def _nothing() -> None:
    pass


class _Work:
    """The parts of one measurement. limit: the model's positions, None if unknown."""

    def __init__(
        self, model: Any, tokenizer: Any, context_length: int, between: Callable[[], None]
    ):
        self._model, self._tokenizer, self._between = model, tokenizer, between
        self._limit: int | None = getattr(model.config, "max_position_embeddings", None)
        self.notes: list[str] = []
        self.context = min(context_length, self._limit or context_length)
        if self.context < context_length:
            self._note(
                f"the model has {self.context:,} positions, so contexts end there and not at"
                f" {context_length:,}"
            )

    def _note(self, said: str) -> None:
        self.notes.append(said)

    def answers(self) -> Answers | None:
        if not has_template(self._tokenizer):
            self._note(
                "the tokenizer has no chat template: the prompts are continued as plain text"
            )
        longest = max(len(prompt_ids(self._tokenizer, prompt.text)) for prompt in PROMPTS)
        room = ANSWER_TOKENS if self._limit is None else self._limit - longest
        if room < 1:
            self._note(f"no answers: the prompts fill the model's {self._limit} positions")
            return None
        self._between()
        tokens = min(ANSWER_TOKENS, room)
        return compare_answers(self._model, self._tokenizer, PROMPTS, tokens)

    def agreement(self, samples: Sequence[Sample], batch_size: int) -> Agreement | None:
        limit = self._limit or 2 * AGREEMENT_TOKENS
        tokens = min(AGREEMENT_TOKENS, limit // 2)
        if not samples or tokens < 1:
            self._note("no greedy agreement: there is no held-out text, or no room to continue it")
            return None
        if tokens < AGREEMENT_TOKENS:
            self._note(f"greedy texts end after {tokens} tokens, half of the model's positions")
        return measure_agreement(
            self._model,
            parting_prompts(samples, AGREEMENT_PROMPTS, tokens, self._limit),
            end_ids(self._model, self._tokenizer),
            max_new_tokens=tokens,
            batch_size=batch_size,
            between=self._between,
        )

    def positions(self, texts: Sequence[Sample]) -> Positions | None:
        rows, whole = rows_of(texts, self.context, ROWS)
        if not rows:
            self._note("no figures by position: there are no held-out documents")
            return None
        octaves = measure_positions(self._model, rows, self._between)
        return Positions(self.context, len(rows), whole, octaves)

    def needles(self, texts: Sequence[Sample]) -> Needles | None:
        prose = [token for text in texts for token in text.input_ids]
        needles = make_needles(self._tokenizer, prose, self.context) if prose else []
        if not needles:
            self._note("no needles: there are no held-out documents, or no room for the nearest")
            return None
        farthest = needles[-1].depth
        if farthest < DEPTHS[-1]:
            self._note(
                f"needles lie at most {farthest:,} tokens of prose back: {self.context:,} positions"
                " have no room for more"
            )
        return find_needles(self._model, needles, self._between)
