"""Greedy generation from one prompt.

To sample, use transformers' `generate` on a view: `npt.student_view(model).generate(...)`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from npt.adapters.converted import evaluating
from npt.adapters.token_modulation import as_row
from npt.data.continuation import bare_tokens, continuation_text, prompt_tokens
from npt.errors import ConfigError, DataError
from npt.evaluation.greedy import continue_greedily, end_ids


@dataclass(frozen=True)
class Written:
    """A continuation.

    Attributes:
        ids: the new tokens.
        text: their text after the prompt, without special tokens.
        ended: an end token ended it, not the limit.
    """

    ids: tuple[int, ...]
    text: str
    seconds: float
    ended: bool

    def as_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "tokens": len(self.ids),
            "ids": list(self.ids),
            "finish": "end" if self.ended else "length",
            "seconds": self.seconds,
            "tokens_per_second": len(self.ids) / self.seconds if self.seconds > 0 else math.nan,
        }


def prompt_ids(tokenizer: Any, text: str, *, chat: bool = True) -> list[int]:
    """Return the tokens of a prompt. With `chat` and a chat template, the text becomes the user's
    turn in that template.

    Raises:
        DataError: the prompt has no token, is not valid text, or the template refuses it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:  # invalid bytes arrive as surrogates
        raise DataError(
            f"the prompt is not valid text at character {error.start} ({error.reason}); fix it"
        ) from error
    if chat and getattr(tokenizer, "chat_template", None) is not None:
        from npt.data.chat import render

        try:
            text = render(tokenizer, [{"role": "user", "content": text}], to_answer=True)
        except Exception as error:  # a template may raise anything
            raise DataError(
                f"the chat template refuses the prompt: {str(error)[:200]}; add --raw to skip the"
                " template"
            ) from error
        # the template has written the special tokens
        ids = bare_tokens(tokenizer, text)
    else:
        ids = prompt_tokens(tokenizer, text)
    if not ids:
        raise DataError("the prompt has no token; add text or use a tokenizer with a start token")
    return ids


def write(model: Any, tokenizer: Any, prompt: Sequence[int], max_new_tokens: int = 64) -> Written:
    """Continue one prompt with the most likely tokens; the adapters' mode decides which model does.

    Raises:
        ConfigError: prompt and new tokens exceed the model's positions, or an id lies outside the
            vocabulary.
        NumericalError: logits are not finite.
    """
    positions = getattr(model.config, "max_position_embeddings", None)
    needed = len(prompt) + max_new_tokens
    exceeds = positions is not None and needed > positions
    if exceeds:
        raise ConfigError(
            f"the prompt's {len(prompt)} tokens and --max_new_tokens {max_new_tokens} exceed the"
            f" model's {positions} positions; lower --max_new_tokens or shorten the prompt"
        )
    as_row(model, prompt)  # refuses ids outside the vocabulary
    ends = end_ids(model, tokenizer)
    started = time.perf_counter()
    with evaluating(model):
        (new,) = continue_greedily(model, [prompt], [max_new_tokens], ends, ["the prompt"])
    seconds = time.perf_counter() - started
    text = continuation_text(tokenizer, prompt, new)
    has_ended = bool(new) and new[-1] in ends
    return Written(tuple(new), text, seconds, has_ended)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the index of the first token that differs or that only one text has; None if the texts
    are equal.
    """
    for place, (a, b) in enumerate(itertools.zip_longest(one, other)):
        if a != b:
            return place
    return None
