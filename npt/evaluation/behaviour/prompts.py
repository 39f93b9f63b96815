"""Ten prompts of different kinds, short enough for any model."""

from __future__ import annotations

from typing import NamedTuple


class Prompt(NamedTuple):
    """A prompt and the kind of answer that it asks for."""

    kind: str
    text: str


PROMPTS = (
    Prompt("fact", "What is the capital of France, and which river flows through it?"),
    Prompt("sum", "What is 17 + 26? Show the steps."),
    Prompt("translation", "Translate into French: The book is on the table."),
    Prompt("list", "List five things to pack for a day in the mountains."),
    Prompt("code", "Write a Python function that returns the largest number of a list."),
    Prompt("story", "Write the beginning of a story about a lighthouse keeper and a whale."),
    Prompt(
        "rewriting", "Rewrite this sentence politely: Send me the report now, you are late again."
    ),
    Prompt(
        "reasoning",
        "Anna is taller than Ben, and Ben is taller than Clara. Who is the shortest, and why?",
    ),
    Prompt("letter", "Write a short letter to a landlord about a broken heater."),
    Prompt("definition", "What is photosynthesis? Explain it to a child."),
)
