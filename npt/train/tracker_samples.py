"""Samples of a student in training for trackers: texts next to the teacher's, and multipliers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedModel

from npt.data.batch import IGNORE_INDEX, Sample, batches
from npt.evaluation.generate import Decoding, write
from npt.evaluation.modulation import Modulation, measure_modulation
from npt.evaluation.view import mode_view

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 24, 32

Row = tuple[str, str, str]
"""A prompt, the student's continuation of it, and the teacher's."""


class TrackerSamples:
    """Texts and multipliers of a student; everything stays as it was, the random state included.

    Args:
        model: the student, whose base is the teacher.
        tokenizer: of the base.
        samples: evaluation samples; the first few begin the texts.
        teacher: a teacher of its own.
        batch_size: samples at once.
        pad_id: of padding.
        between: called before every text and batch; an error that it raises ends the sampling.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        samples: Sequence[Sample],
        *,
        teacher: PreTrainedModel | None,
        batch_size: int,
        pad_id: int,
        between: Callable[[], None],
    ):
        self._model, self._tokenizer, self._teacher = model, tokenizer, teacher
        self._samples, self._batch_size, self._pad_id = samples, batch_size, pad_id
        self._between = between
        longest = getattr(model.config, "max_position_embeddings", None)
        self._positions = longest or PROMPT_TOKENS + NEW_TOKENS
        self._taught: list[str] | None = None  # the teacher's texts stay as they are

    def texts(self) -> list[Row]:
        """Write the most likely tokens after a few prompts.

        Raises:
            NumericalError: logits that are not finite.
        """
        prompts = [prompt for sample in self._samples if (prompt := self._prompt(sample))][:PROMPTS]
        if self._taught is None:
            teacher = self._teacher
            if teacher is None:
                teacher = mode_view(self._model, "teacher")
            self._taught = [self._written(teacher, prompt) for prompt in prompts]
        student = mode_view(self._model, "student")
        return [
            (
                self._tokenizer.decode(list(prompt), skip_special_tokens=True),
                self._written(student, prompt),
                taught,
            )
            for prompt, taught in zip(prompts, self._taught, strict=True)
        ]

    def modulation(self, samples: int) -> Modulation:
        """Measure the modulation on the first so many samples."""
        few = batches(self._samples[:samples], self._batch_size, self._pad_id)
        return measure_modulation(self._model, few, between=self._between)

    def _written(self, model: Any, prompt: Sequence[int]) -> str:
        self._between()
        new = min(NEW_TOKENS, self._positions - len(prompt))
        return write(model, self._tokenizer, prompt, Decoding(max_new_tokens=new)).text

    def _prompt(self, sample: Sample) -> tuple[int, ...]:
        """Return the beginning of a sample's first document, before the tokens to be learnt."""
        ids = sample.input_ids[: sample.lengths[0] if sample.lengths else None]
        scored = sample.labels is not None and next(
            (i for i, label in enumerate(sample.labels) if label != IGNORE_INDEX), len(ids)
        )
        return ids[: min(PROMPT_TOKENS, scored or len(ids) // 2, self._positions - 1)]
