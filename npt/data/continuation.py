"""Tokens and text of what follows other text.

Tokenizers of SentencePiece (Llama 2, Mistral 0.1, T5) begin every text with a space, which is a
word too many in a completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_PROBE = "a"  # a text that no tokenizer drops
_MARKS = ("\n", ".", ",", "|", "0", "x", "e", "a")  # one is a token of its own before any text


def continuation_tokens(tokenizer: Any, before: str | None, text: str) -> list[int]:
    """Return the tokens of a text that follows `before` (None: another text).

    If the two together have a border of tokens at the end of `before`, these are the tokens after
    it; else those after a mark that the text does not join.
    """
    unknown = getattr(tokenizer, "unk_token_id", None)
    for front in _MARKS if before is None else (before, *_MARKS):
        ids, whole = _tokens(tokenizer, front, front + text)
        # an unknown token may reach into the text: neighbours are merged
        apart = not ids or unknown is None or ids[-1] != unknown
        if whole[: len(ids)] == ids and apart and (ids or front == before):
            return whole[len(ids) :]
    return bare_tokens(tokenizer, text)


def begins_with_space(tokenizer: Any) -> bool:
    """Return whether the tokenizer begins a text with something that a continuation lacks."""
    return continuation_tokens(tokenizer, None, _PROBE) != bare_tokens(tokenizer, _PROBE)


def opening_tokens(tokenizer: Any) -> list[int]:
    """Return the start tokens that the tokenizer puts before a text."""
    (whole,), (bare,) = _tokens(tokenizer, _PROBE, special=True), _tokens(tokenizer, _PROBE)
    starts = (i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    return whole[: next(starts, 0)]


def bare_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text alone, or of one that a chat template wrote."""
    return _tokens(tokenizer, text)[0]


def prompt_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return start tokens and a text's own, without the end token that some tokenizers add."""
    return [*opening_tokens(tokenizer), *bare_tokens(tokenizer, text)]


def continuation_text(tokenizer: Any, before: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of tokens that follow others, without special tokens; decoded alone it could
    lose its first space."""
    parts = (list(before), [*before, *ids], list(ids))
    front, whole, alone = (tokenizer.decode(part, skip_special_tokens=True) for part in parts)
    return str(whole[len(front) :] if whole.startswith(front) else alone)


def _tokens(tokenizer: Any, *texts: str, special: bool = False) -> list[list[int]]:
    ids = tokenizer(list(texts), verbose=False, add_special_tokens=special)["input_ids"]
    return list(map(list, ids))
