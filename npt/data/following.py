"""A text that follows another, in tokens and back: some tokenizers begin every text with a space of
their own.

So do those that come from SentencePiece (Llama 2, Mistral 0.1, T5): "answer" becomes "▁answer" as "
answer" does, which is right where a text begins and a word too many behind a prompt. Where the
whole text has a token's border at the end of what comes first, what follows has the tokens that it
has in the whole. Where it has none, the two are tokenised apart: what comes first as it is alone,
what follows as it is behind a mark that it does not join with. What adds no space, as most
byte-level tokenizers, is tokenised apart always.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_MARKS = ("\n", ".", ",", "|", "0", "x", "e", "a")
"""Texts for another to follow: of so many one at least is a token of its own in front of it."""

_PROBE = "a"


def begins_with_a_space(tokenizer: Any) -> bool:
    """Whether a text by itself begins with something that it has not where it follows another."""
    (alone,) = tokens_of(tokenizer, [_PROBE])
    return tokens_behind_a_mark(tokenizer, _PROBE) != alone


def tokens_of(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of each text by itself, without those that open and close it."""
    return (
        [
            list(ids)
            for ids in tokenizer(list(texts), verbose=False, add_special_tokens=False)["input_ids"]
        ]
        if texts
        else []
    )


def tokens_behind(
    tokenizer: Any, before: Sequence[tuple[str, Sequence[int]]], texts: Sequence[str]
) -> list[list[int]]:
    """The tokens of texts that follow others, of a tokenizer that begins every text with a space.

    Args:
        tokenizer: of the base model.
        before: of each text what it follows, and the tokens that this has alone.
        texts: as many.
    """
    wholes = tokens_of(
        tokenizer, [front + text for (front, _), text in zip(before, texts, strict=True)]
    )
    unknown = getattr(tokenizer, "unk_token_id", None)
    return [
        whole[len(ids) :] if _border(whole, ids, unknown) else tokens_behind_a_mark(tokenizer, text)
        for whole, (_, ids), text in zip(wholes, before, texts, strict=True)
    ]


def tokens_behind_a_mark(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text that follows another which it shares no token with; where no mark is one
    such, those of the text alone.
    """
    unknown = getattr(tokenizer, "unk_token_id", None)
    for mark in _MARKS:
        ids, whole = tokens_of(tokenizer, [mark, mark + text])
        if ids and _border(whole, ids, unknown):
            return whole[len(ids) :]
    return tokens_of(tokenizer, [text])[0]


def text_behind(tokenizer: Any, before: Sequence[int], ids: Sequence[int]) -> str:
    """The text of tokens that follow others, special tokens left out; by itself it would lose the
    space that it begins with.
    """
    front, whole = (
        tokenizer.decode(list(part), skip_special_tokens=True) for part in (before, [*before, *ids])
    )
    return (
        whole[len(front) :]
        if whole.startswith(front)
        else tokenizer.decode(list(ids), skip_special_tokens=True)
    )


def _border(whole: Sequence[int], ids: Sequence[int], unknown: int | None) -> bool:
    """Whether these tokens end where the text ends that they are of. An unknown one may be of more:
    neighbours are made into one.
    """
    return list(whole[: len(ids)]) == list(ids) and (
        not ids or unknown is None or ids[-1] != unknown
    )
