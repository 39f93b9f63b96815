"""Tokens and text of a continuation. SentencePiece tokenizers (Llama 2, Mistral 0.1, T5) begin a
text with a space, which would be wrong in a completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_PROBE = "a"  # a text that no tokenizer drops
_MARKS = ("\n", ".", ",", "|", "0", "x", "e", "a")  # before any text, one of these is one token


def continuation_tokens(tokenizer: Any, before: str | None, text: str) -> list[int]:
    """Return the tokens of a text that follows `before` (None: any text).

    If a token of both texts together ends where `before` ends, return the tokens after it. Else use
    a mark in place of `before`.
    """
    unknown = getattr(tokenizer, "unk_token_id", None)
    for front in _MARKS if before is None else (before, *_MARKS):
        ids, whole = _tokens(tokenizer, front, front + text)
        # an unknown token may extend into the text, since unknown neighbours are merged
        apart = not ids or unknown is None or ids[-1] != unknown
        if whole[: len(ids)] == ids and apart and (ids or front == before):
            return whole[len(ids) :]
    return bare_tokens(tokenizer, text)


def begins_with_space(tokenizer: Any) -> bool:
    """Return whether the tokenizer begins a text differently from a continuation."""
    return continuation_tokens(tokenizer, None, _PROBE) != bare_tokens(tokenizer, _PROBE)


def opening_tokens(tokenizer: Any) -> list[int]:
    """Return the special tokens that the tokenizer puts before a text."""
    (whole,), (bare,) = _tokens(tokenizer, _PROBE, special=True), _tokens(tokenizer, _PROBE)
    starts = (i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    return whole[: next(starts, 0)]


def bare_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text without special tokens, as for text from a chat template."""
    return _tokens(tokenizer, text)[0]


def prompt_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return start tokens and the tokens of a text, without an end token."""
    return [*opening_tokens(tokenizer), *bare_tokens(tokenizer, text)]


def continuation_text(tokenizer: Any, before: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of tokens that follow others, without special tokens."""
    parts = (list(before), [*before, *ids], list(ids))
    front, whole, alone = (tokenizer.decode(part, skip_special_tokens=True) for part in parts)
    return str(whole[len(front) :] if whole.startswith(front) else alone)


def _tokens(tokenizer: Any, *texts: str, special: bool = False) -> list[list[int]]:
    ids = tokenizer(list(texts), verbose=False, add_special_tokens=special)["input_ids"]
    return list(map(list, ids))
