"""Texts of a student in training next to its teacher's, for the trackers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npt.data.batch import IGNORE_INDEX, Sample
from npt.evaluation.generate import Decoding, write
from npt.evaluation.view import mode_view
from npt.train.run_setup import RunSetup

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 24, 32


def sample_texts(setup: RunSetup, samples: Sequence[Sample]) -> list[tuple[str, str, str]]:
    """Return prompts, each with the student's and the teacher's most likely continuation.

    A prompt is the beginning of a sample's first document, before the tokens to be learnt.

    Raises:
        NumericalError: logits that are not finite.
        StoppedError: a signal arrived.
    """
    tokenizer, model = setup.tokenizer, setup.model
    positions = getattr(model.config, "max_position_embeddings", None) or 2 * NEW_TOKENS
    teacher = mode_view(model, "teacher") if setup.teacher is None else setup.teacher

    def written(model: Any, prompt: Sequence[int]) -> str:
        setup.stop.check()
        decoding = Decoding(max_new_tokens=min(NEW_TOKENS, positions - len(prompt)))
        return write(model, tokenizer, prompt, decoding).text

    rows: list[tuple[str, str, str]] = []
    for sample in samples:
        ids = sample.input_ids[: sample.lengths[0] if sample.lengths else None]
        labels = sample.labels if sample.labels is not None else ()
        scored = next((i for i, label in enumerate(labels) if label != IGNORE_INDEX), 0)
        prompt = ids[: min(PROMPT_TOKENS, scored or len(ids) // 2, positions - 1)]
        if prompt and len(rows) < PROMPTS:
            text = tokenizer.decode(list(prompt), skip_special_tokens=True)
            student = written(mode_view(model, "student"), prompt)
            rows.append((text, student, written(teacher, prompt)))
    return rows
