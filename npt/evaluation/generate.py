"""The text that a model writes after a prompt, by its most likely tokens.

`npt.student_view(model).generate(...)` is transformers' own way, with its ways to draw.
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
        text: of the new tokens after the prompt, without special tokens.
        ended: whether an end token ended it, not the limit.
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
    """Return a prompt's tokens: the text as the user's turn in the tokenizer's chat template, if it
    has one and `chat` is set, else the text itself.

    Raises:
        DataError: no token comes of it, it is no text, or the template refuses it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes that are no text come as halves of characters
        raise DataError(
            f"the prompt is broken at character {error.start} ({error.reason}); mend it there"
        ) from error
    if chat and getattr(tokenizer, "chat_template", None) is not None:
        from npt.data.chat import render

        try:
            text = render(tokenizer, [{"role": "user", "content": text}], to_answer=True)
        except Exception as error:  # templates raise what their authors wrote into them
            raise DataError(
                f"the chat template refuses the prompt: {str(error)[:200]}; add --raw to leave the"
                " template aside"
            ) from error
        ids = bare_tokens(tokenizer, text)
    else:
        ids = prompt_tokens(tokenizer, text)
    if not ids:
        raise DataError(
            "the prompt has no token; write something, or use a tokenizer with a start token"
        )
    return ids


def write(model: Any, tokenizer: Any, prompt: Sequence[int], max_new_tokens: int = 64) -> Written:
    """Continue one prompt with the most likely tokens, in the mode of the model's adapters.

    Raises:
        ConfigError: prompt and new tokens exceed the model's positions, or an id lies outside the
            vocabulary.
        NumericalError: logits that are not finite.
    """
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and len(prompt) + max_new_tokens > positions:
        raise ConfigError(
            f"the prompt's {len(prompt)} tokens and --max_new_tokens {max_new_tokens} exceed the"
            f" model's {positions} positions; lower --max_new_tokens or shorten the prompt"
        )
    as_row(model, prompt)  # refuses ids outside the vocabulary
    ends = end_ids(model, tokenizer)
    started = time.perf_counter()
    with evaluating(model):
        (new,) = continue_greedily(model, [prompt], max_new_tokens, ends, ["the prompt"])
    seconds = time.perf_counter() - started
    text = continuation_text(tokenizer, prompt, new)
    return Written(tuple(new), text, seconds, bool(new) and new[-1] in ends)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the index of the first token that differs or that only one text has, None if the two
    are the same.
    """
    pairs = itertools.zip_longest(one, other)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)
