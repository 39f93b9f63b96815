"""Conversations through a tokenizer's chat template.

Templates may write today's date (Llama 3.2, SmolLM3 and Granite do), so that the tokens of the same
record are others tomorrow. Here a tokenizer's date is fixed: when it writes first, or to that of a
run or a file that is continued.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

from npt.data.time_limit import time_limit

RENDER_SECONDS = 30
"""Longer than any template takes, which are programs that come with a model's files."""

_DATE = "_npt_date"
_CLOCK = "strftime_now"  # transformers' function for templates, which take plain data otherwise

_DIRECTIVES = [
    *(f"%{letter}" for letter in "aAbBcdDeFGgHIjmMpRSTuUVwWxXyYzZ"),
    *(f"%-{letter}" for letter in "deHIjmMSy"),
]

# It takes the function's place. What ends in braces keeps a newline that the template begins with.
_MACRO = (
    "{%- macro strftime_now(format) -%}{%- set written = namespace(text=format) -%}"
    "{%- for directive, value in npt_date.items() -%}"
    "{%- set written.text = written.text | replace(directive, value) -%}{%- endfor -%}"
    "{{- written.text -}}{%- endmacro -%}{{- '' }}"
)


def has_template(tokenizer: Any) -> bool:
    """Return whether the tokenizer has a chat template."""
    return getattr(tokenizer, "chat_template", None) is not None


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, to_answer: bool) -> str:
    """Return the messages as the template writes them; `to_answer` opens the assistant's turn.

    Templates raise whatever their authors wrote into them, and TimeLimitError after
    `RENDER_SECONDS`.
    """
    dated: dict[str, Any] = {}
    if _CLOCK in str(tokenizer.chat_template):
        written = _MACRO + tokenizer.get_chat_template()
        dated = {"chat_template": written, "npt_date": _by_directive(date_of(tokenizer))}
    with time_limit(RENDER_SECONDS):
        return str(
            tokenizer.apply_chat_template(
                messages, add_generation_prompt=to_answer, tokenize=False, **dated
            )
        )


@cache
def _by_directive(date: str) -> dict[str, str]:
    """Return what each directive of strftime writes at a date; every record asks for all of it."""
    at = datetime.fromisoformat(date)
    return {directive: at.strftime(directive) for directive in _DIRECTIVES}


def date_of(tokenizer: Any) -> str:
    """Return the date and time that the tokenizer's template writes, as ISO 8601."""
    if getattr(tokenizer, _DATE, None) is None:
        fix_date(tokenizer, datetime.now().isoformat(timespec="seconds"))
    return str(getattr(tokenizer, _DATE))


def fix_date(tokenizer: Any, date: str) -> None:
    """Let the tokenizer's template write this date from now on."""
    setattr(tokenizer, _DATE, date)
