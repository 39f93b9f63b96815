"""Samples of a student in training for trackers: texts next to the teacher's, and multipliers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npt.data.batch import IGNORE_INDEX, Sample, batches
from npt.evaluation.generate import Decoding, write
from npt.evaluation.modulation import Modulation, measure_modulation
from npt.evaluation.view import mode_view
from npt.train.run_setup import RunSetup

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 24, 32

Row = tuple[str, str, str]
"""A prompt, the student's continuation of it, and the teacher's."""


class TrackerSamples:
    """Texts and multipliers of a student; nothing is changed, the random state included.

    Args:
        setup: of the run; a signal ends the sampling.
        samples: evaluation samples; the first few begin the texts.
    """

    def __init__(self, setup: RunSetup, samples: Sequence[Sample]):
        self._setup, self._samples = setup, samples
        longest = getattr(setup.model.config, "max_position_embeddings", None)
        self._positions = longest or PROMPT_TOKENS + NEW_TOKENS
        self._taught: list[str] | None = None  # the teacher's texts stay as they are

    def texts(self) -> list[Row]:
        """Write the most likely tokens after a few prompts.

        Raises:
            NumericalError: logits that are not finite.
        """
        prompts = [prompt for sample in self._samples if (prompt := self._prompt(sample))][:PROMPTS]
        model, teacher = self._setup.model, self._setup.teacher
        if self._taught is None:
            teacher = mode_view(model, "teacher") if teacher is None else teacher
            self._taught = [self._written(teacher, prompt) for prompt in prompts]
        student = mode_view(model, "student")
        return [
            (
                self._setup.tokenizer.decode(list(prompt), skip_special_tokens=True),
                self._written(student, prompt),
                taught,
            )
            for prompt, taught in zip(prompts, self._taught, strict=True)
        ]

    def modulation(self, samples: int) -> Modulation:
        """Measure the modulation on the first so many samples."""
        setup = self._setup
        few = batches(self._samples[:samples], setup.splitter.samples)
        return measure_modulation(setup.model, few, between=setup.stop.check)

    def _written(self, model: Any, prompt: Sequence[int]) -> str:
        self._setup.stop.check()
        new = min(NEW_TOKENS, self._positions - len(prompt))
        return write(model, self._setup.tokenizer, prompt, Decoding(max_new_tokens=new)).text

    def _prompt(self, sample: Sample) -> tuple[int, ...]:
        """Return the beginning of a sample's first document, before the tokens to be learnt."""
        ids = sample.input_ids[: sample.lengths[0] if sample.lengths else None]
        scored = sample.labels is not None and next(
            (i for i, label in enumerate(sample.labels) if label != IGNORE_INDEX), len(ids)
        )
        return ids[: min(PROMPT_TOKENS, scored or len(ids) // 2, self._positions - 1)]
