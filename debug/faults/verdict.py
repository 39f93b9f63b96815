"""What a case came to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """The fate of a run.

    Attributes:
        verdict: one word for it.
        located: exactly what was planted was named, or nothing if there was nothing to name.
        false_alarms: refusals and findings of what nobody planted.
        detail: what is wrong, if anything.
    """

    verdict: str
    located: bool
    passed: bool
    false_alarms: int = 0
    detail: str = ""


def verdict_of(
    word: str, complaints: list[str], located: bool = True, false_alarms: int = 0
) -> Verdict:
    """Return `word` if there is no complaint, else `harmed`, with the complaints."""
    good = not complaints and not false_alarms
    word, detail = word if good else "harmed", "; ".join(complaints)
    return Verdict(word, located and good, good and located, false_alarms, detail)


def together(verdicts: list[Verdict]) -> Verdict:
    """Join the verdicts of a case that was judged in several modes."""
    return Verdict(
        " / ".join(dict.fromkeys(v.verdict for v in verdicts)),
        all(v.located for v in verdicts),
        all(v.passed for v in verdicts),
        sum(v.false_alarms for v in verdicts),
        "; ".join(dict.fromkeys(v.detail for v in verdicts if v.detail)),
    )
