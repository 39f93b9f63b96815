"""Tokens and text of a continuation. SentencePiece tokenizers (Llama 2, Mistral 0.1, T5) begin a
text with a space, which would be wrong in a completion.

A long text is tokenised in pieces, each of which continues the one before, because a tokenizer
needs far more memory for a text than its tokens do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

TEXT_AT_ONCE = 1 << 18
"""Characters of a text to tokenise at once. A tokenizer needs some 200 bytes for each."""

_CUT_SEARCH = 1 << 12  # characters before the end of a piece in which to look for a place to cut
_CUT = re.compile(r"(?<=\S\n)(?=[^\s/])|(?<=\S)(?= \S)")
"""After a line end or before a space, which stand alone: no token of the usual tokenizers spans
these places. Beside other white space a token may."""

_PROBE = "a"  # a text that no tokenizer drops
_MARKS = ("\n", ".", ",", "|", "0", "x", "e", "a")  # before any text, one of these is one token


def continuation_tokens(tokenizer: Any, before: str | None, text: str) -> list[int]:
    """Return the tokens of a text that follows `before` (None: any text).

    If a token of both texts together ends where `before` ends, return the tokens after it. Else use
    a mark in place of `before`.
    """

    def parts() -> Iterator[list[int]]:
        front = None if before is None else before[-TEXT_AT_ONCE:]
        for piece in _pieces(text):
            yield _continued(tokenizer, front, piece)
            front = None  # a later piece is cut where any text may precede it

    return _joined(parts())


def _continued(tokenizer: Any, before: str | None, text: str) -> list[int]:
    unknown = getattr(tokenizer, "unk_token_id", None)
    for front in _MARKS if before is None else (before, *_MARKS):
        ids, whole = _tokens(tokenizer, front, front + text)
        # an unknown token may extend into the text, since unknown neighbours are merged
        apart = not ids or unknown is None or ids[-1] != unknown
        if whole[: len(ids)] == ids and apart and (ids or front == before):
            return whole[len(ids) :]
    return _tokens(tokenizer, text)[0]


def begins_with_space(tokenizer: Any) -> bool:
    """Return whether the tokenizer begins a text differently from a continuation."""
    return continuation_tokens(tokenizer, None, _PROBE) != bare_tokens(tokenizer, _PROBE)


def opening_tokens(tokenizer: Any) -> list[int]:
    """Return the special tokens that the tokenizer puts before a text."""
    whole = _tokens(tokenizer, _PROBE, special=True)[0]
    bare = _tokens(tokenizer, _PROBE)[0]
    starts = (i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    return whole[: next(starts, 0)]


def bare_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text without special tokens, as for text from a chat template."""
    first, *others = _pieces(text)
    with_space = bool(others) and begins_with_space(tokenizer)

    def parts() -> Iterator[list[int]]:
        yield _tokens(tokenizer, first)[0]
        for piece in others:
            if with_space:
                yield _continued(tokenizer, None, piece)
            else:
                yield _tokens(tokenizer, piece)[0]

    return _joined(parts())


def prompt_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return start tokens and the tokens of a text, without an end token."""
    return [*opening_tokens(tokenizer), *bare_tokens(tokenizer, text)]


def continuation_text(tokenizer: Any, before: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of tokens that follow others, without special tokens."""

    def decoded(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    front = decoded(list(before))
    whole = decoded([*before, *ids])
    # bytes of one character may lie on both sides, and then `front` ends otherwise
    return whole[len(front) :] if whole.startswith(front) else decoded(list(ids))


def _pieces(text: str) -> Iterator[str]:
    """Yield pieces of at most TEXT_AT_ONCE characters, of which each ends where a token ends if
    there is such a place near, else anywhere."""
    start = 0
    while len(text) - start > TEXT_AT_ONCE:
        end = start + TEXT_AT_ONCE
        near = max(start + 1, end - _CUT_SEARCH)
        for place in _CUT.finditer(text, near, end):
            end = place.start()  # the last one counts
        yield text[start:end]
        start = end
    yield text[start:]


def _joined(parts: Iterable[list[int]]) -> list[int]:
    """Join the tokens of pieces. Equal ids are one object, which saves 28 bytes for each."""
    ids: list[int] = []
    known: dict[int, int] = {}
    for part in parts:
        ids += map(known.setdefault, part, part)
    return ids


def _tokens(tokenizer: Any, *texts: str, special: bool = False) -> list[list[int]]:
    ids = tokenizer(list(texts), verbose=False, add_special_tokens=special)["input_ids"]
    return list(map(list, ids))
