"""What a case came to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """verdict: one word for what became of the run. located: exactly what was planted was named, or
    nothing where nothing had to be. false_alarms: refusals and findings of what nobody planted.
    detail: what is wrong, empty where nothing is."""

    verdict: str
    located: bool
    passed: bool
    false_alarms: int = 0
    detail: str = ""


Check = Callable[[bool], Verdict]
"""Judges a case in a reading mode of the transaction: True reads flags one window late."""


def verdict_of(
    word: str, complaints: list[str], located: bool = True, false_alarms: int = 0
) -> Verdict:
    """`word` where there is no complaint, else `harmed`, with the complaints."""
    good = not complaints and not false_alarms
    return Verdict(
        word if good else "harmed",
        located and good,
        good and located,
        false_alarms,
        "; ".join(complaints),
    )


def together(verdicts: list[Verdict]) -> Verdict:
    """One verdict for a case that was judged in several modes."""
    words = list(dict.fromkeys(v.verdict for v in verdicts))
    return Verdict(
        " / ".join(words),
        all(v.located for v in verdicts),
        all(v.passed for v in verdicts),
        sum(v.false_alarms for v in verdicts),
        "; ".join(dict.fromkeys(v.detail for v in verdicts if v.detail)),
    )
