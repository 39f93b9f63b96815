"""Text out of a model through transformers' own `generate`, as users get it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.utils import logging as transformers_logging

from npt.base.linear import cast_once
from npt.config import SEED_MAX
from npt.data.batch import PAD_ID
from npt.data.chat import has_template, render
from npt.data.continuation import bare_tokens, continuation_text, prompt_tokens
from npt.errors import ConfigError, DataError, NumericalError
from npt.evaluation.greedy import end_ids

LEAST_TEMPERATURE = 1e-6
"""Logits divided by far less are not finite in fp32."""


@dataclass(frozen=True)
class Decoding:
    """The choice of tokens.

    Attributes:
        temperature: 0 for the most likely token, else logits are divided by it and one is drawn.
        top_p: of the most likely tokens that together have this probability.
        seed: of the draws.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        finite = LEAST_TEMPERATURE <= self.temperature < math.inf
        least = f"it must be 0 (the most likely token) or a finite number, {LEAST_TEMPERATURE:g} up"
        for name, fits, bound in (
            ("max_new_tokens", self.max_new_tokens >= 1, "it must be at least 1"),
            ("temperature", self.temperature == 0 or finite, least),
            ("top_p", 0 < self.top_p <= 1, "it is a share above 0, at most 1"),
            ("seed", 0 <= self.seed <= SEED_MAX, f"it must be from 0 to {SEED_MAX}"),
        ):
            if not fits:
                raise ConfigError(f"--{name} is {getattr(self, name)}; {bound}")
        if self.top_p < 1 and not self.temperature:
            raise ConfigError(
                f"--top_p {self.top_p} has no effect without --temperature: add --temperature or"
                " remove --top_p"
            )

    def described(self) -> str:
        """Return the choice of tokens in words."""
        if not self.temperature:
            return f"{self.max_new_tokens:,} at most, the most likely ones"
        return (
            f"{self.max_new_tokens:,} at most, drawn at temperature {self.temperature:g} from"
            f" {self.top_p:g} of the probability, seed {self.seed}"
        )

    def arguments(self) -> dict[str, Any]:
        """Return arguments for `generate` that override the model's own settings for drawing."""
        drawn: dict[str, Any] = {"do_sample": self.temperature > 0}
        if self.temperature:
            drawn |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
        return {"max_new_tokens": self.max_new_tokens, "num_beams": 1, **drawn}


@dataclass(frozen=True)
class Written:
    """A continuation.

    Attributes:
        ids: the new tokens.
        text: theirs after the prompt, without special tokens.
        seconds: of wall-clock time.
        ended: by an end token, not by the limit.
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


class NoNaN(LogitsProcessor):
    """Ends a generation whose logits are not numbers, of which a token would come all the same."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if bool((torch.isnan(scores) | (scores == math.inf)).any()):
            raise NumericalError(
                f"the logits after token {input_ids.shape[1]} are not finite; npt trace --adapter"
                " finds the operation"
            )
        return scores


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
    if chat and has_template(tokenizer):
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


def write(model: Any, tokenizer: Any, prompt: Sequence[int], decoding: Decoding) -> Written:
    """Continue one prompt with a model, in the mode that it is in, or a view. The random state
    stays as it is.

    Memory: the cache, and the fp32 form of a head that is stored in 16 bit, 4 V D bytes.

    Raises:
        ConfigError: prompt and new tokens exceed the model's positions.
        DataError: an id outside the vocabulary.
        NumericalError: logits that are not finite.
    """
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and len(prompt) + decoding.max_new_tokens > positions:
        raise ConfigError(
            f"the prompt's {len(prompt)} tokens and --max_new_tokens {decoding.max_new_tokens}"
            f" exceed the model's {positions} positions; lower --max_new_tokens or shorten the"
            " prompt"
        )
    outside = [i for i in prompt if not 0 <= i < model.config.vocab_size]
    if outside:
        raise DataError(
            f"the prompt has the token id {outside[0]}, the model's vocabulary is [0,"
            f" {model.config.vocab_size}); wrong tokenizer?"
        )
    device = next(model.parameters()).device
    ids = torch.tensor([list(prompt)], device=device)
    ends = sorted(end_ids(model, tokenizer))
    cuda = [device] if device.type == "cuda" else []
    started = time.perf_counter()
    with _quiet(), torch.random.fork_rng(devices=cuda), cast_once(model.get_output_embeddings()):
        torch.manual_seed(decoding.seed)
        whole = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            eos_token_id=ends or None,
            pad_token_id=PAD_ID,  # one row has none; the tokenizer's may be one without a row
            logits_processor=LogitsProcessorList([NoNaN()]),
            **decoding.arguments(),
        )
    new = whole[0, len(prompt) :].tolist()
    seconds = time.perf_counter() - started
    text = continuation_text(tokenizer, prompt, new)
    return Written(tuple(new), text, seconds, bool(new) and new[-1] in ends)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the index of the first token that differs or that only one text has, None if the two
    are the same.
    """
    pairs = itertools.zip_longest(one, other)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def shared_text(
    tokenizer: Any, prompt: Sequence[int], ids: Sequence[int], position: int | None
) -> tuple[str, str]:
    """Return a text up to a token (None: all of it), and the rest. The second part is cut from the
    whole, since tokens may share a character.
    """
    whole = continuation_text(tokenizer, prompt, ids)
    common = continuation_text(tokenizer, prompt, ids[:position]).rstrip("\ufffd")
    return (common, whole[len(common) :]) if whole.startswith(common) else ("", whole)


@contextmanager
def _quiet():
    """Silence transformers' advice on arguments: they are ours, not the user's."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
