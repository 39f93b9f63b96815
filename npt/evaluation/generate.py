"""Text out of a model, token by token, through transformers' own `generate`: what a user gets is
what is shown.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TextStreamer,
    TopPLogitsWarper,
)
from transformers.utils import logging as transformers_logging

from npt.base.linear import cast_once
from npt.config import SEED_MAX
from npt.data.encoding import continuation_text
from npt.errors import ConfigError, DataError, NumericalError
from npt.evaluation.greedy import end_ids

Show = Callable[[str], None]

_CONTEXT = 8
"""Tokens that what follows them is decoded behind, at least: more than one, since special ones at
their end are no text.
"""


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen.

    temperature: 0 for the most likely token, else logits are divided by it and a token is drawn.
    top_p: of the most likely tokens that together have this probability. seed: of the draws.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"--max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ConfigError(
                f"--temperature is {self.temperature}; it must be 0 (the most likely token) or a"
                " positive number"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top_p is {self.top_p}; it is a share above 0, at most 1")
        if self.top_p < 1 and not self.temperature:
            raise ConfigError(
                f"--top_p {self.top_p} means nothing without drawing; add --temperature, or drop it"
            )
        if not 0 <= self.seed <= SEED_MAX:
            raise ConfigError(f"--seed is {self.seed}; it must be from 0 to {SEED_MAX}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def arguments(self) -> dict[str, Any]:
        """For `generate`; whatever the model's own generation settings say about drawing is
        overridden.
        """
        drawn = (
            {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
            if not self.greedy
            else {"do_sample": False}
        )
        return {"max_new_tokens": self.max_new_tokens, "num_beams": 1, **drawn}

    def warpers(self) -> list[LogitsProcessor]:
        """What makes the distribution that is drawn from out of logits.

        Handed over as processors, not as settings: those a draft model is given prepared and then
        applies them once more on its own, so that it would draft at the square of the temperature.
        """
        if self.greedy:
            return []
        temperature = [TemperatureLogitsWarper(self.temperature)] if self.temperature != 1 else []
        return [*temperature, *([TopPLogitsWarper(self.top_p)] if self.top_p < 1 else [])]


@dataclass(frozen=True)
class Written:
    """ids: the new tokens. text: of them behind the prompt, special tokens left out. seconds: of
    wall-clock time. ended: by an end token, not by the limit."""

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
    """Ends a generation whose logits are not numbers, from which a token would come all
    the same.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if bool((torch.isnan(scores) | (scores == math.inf)).any()):
            raise NumericalError(
                f"the logits behind token {input_ids.shape[1]} are not finite; npt trace --adapter"
                " finds the operation"
            )
        return scores


class Streamer(TextStreamer):
    """Hands text on as soon as it is words; a token may be a part of a character only.

    Tokens are decoded behind the last ones that were handed on: by themselves they would lose the
    space that they begin with.
    """

    def __init__(self, tokenizer: Any, show: Show, prompt: Sequence[int]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._show = show
        self._go_on_behind(list(prompt))

    def put(self, value: Tensor) -> None:
        shown = [*self.token_cache, *value.flatten().tolist()]
        super().put(value)
        if not self.token_cache:  # a line has ended
            self._go_on_behind(shown)

    def _go_on_behind(self, ids: list[int]) -> None:
        """Behind as few of these as end in whole characters: one that was cut in two may spoil all
        that follow it.
        """
        size = _CONTEXT
        while "\ufffd" in (
            text := self.tokenizer.decode(ids[-size:], **self.decode_kwargs)
        ) and size < len(ids):
            size *= 2
        self.token_cache, self.print_len = ids[-size:], len(text)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._show(text)


def prompt_ids(tokenizer: Any, text: str, *, chat: bool = True) -> list[int]:
    """A prompt's tokens: what the user says, in the words of the tokenizer's chat template where it
    has one, else the text itself.

    Args:
        tokenizer: of the base model.
        text: the prompt.
        chat: False leaves a chat template aside.

    Raises:
        DataError: no token comes of it, or the template refuses it.
    """
    try:
        text.encode()
    # a terminal hands on bytes that are no text as halves of characters
    except UnicodeEncodeError as error:
        raise DataError(
            f"the prompt is broken at character {error.start} ({error.reason}); mend it there"
        ) from error
    templated = chat and getattr(tokenizer, "chat_template", None) is not None
    if templated:
        try:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # templates raise what their authors wrote into them
            raise DataError(
                f"the chat template refuses the prompt: {str(error)[:200]}; add --raw to leave the"
                " template aside"
            ) from error
    ids = tokenizer(text, add_special_tokens=not templated)["input_ids"]
    if not ids:
        raise DataError(
            "the prompt has no token; write something, or use a tokenizer with a start token"
        )
    return list(ids)


def write(
    model: Any,
    tokenizer: Any,
    prompt: Sequence[int],
    decoding: Decoding,
    *,
    show: Show | None = None,
    **arguments: Any,
) -> Written:
    """What the model writes behind one prompt.

    Memory: beside the cache, the fp32 form of a head that is stored in 16 bit, 4 V D bytes from the
    first token to the last.

    Args:
        model: with or without adapters, in the mode that it is in, or a view.
        tokenizer: of the base model.
        prompt: ids.
        decoding: how tokens are chosen. The random state outside stays as it is.
        show: told of the text as it comes.
        arguments: further ones, for `generate`.

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
    pad = getattr(tokenizer, "pad_token_id", None)
    cuda = [device] if device.type == "cuda" else []
    started = time.perf_counter()
    with _quiet(), torch.random.fork_rng(devices=cuda), cast_once(model.get_output_embeddings()):
        torch.manual_seed(decoding.seed)
        found = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            eos_token_id=ends or None,
            pad_token_id=pad if pad is not None else (ends or [0])[0],
            logits_processor=LogitsProcessorList([NoNaN(), *decoding.warpers()]),
            streamer=Streamer(tokenizer, show, prompt) if show is not None else None,
            **decoding.arguments(),
            **arguments,
        )
    new = found[0, len(prompt) :].tolist()
    seconds = time.perf_counter() - started
    return Written(
        tuple(new),
        continuation_text(tokenizer, prompt, new),
        seconds,
        bool(new) and new[-1] in ends,
    )


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two texts part: the index of the first token that only one has, or that differs; None
    where they are the same.
    """
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return None if len(one) == len(other) else min(len(one), len(other))


@contextmanager
def _quiet():
    """Transformers' advice about arguments off: the arguments are ours, not the user's."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
