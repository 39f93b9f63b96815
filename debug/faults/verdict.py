"""The outcome of a case."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """The outcome of a run.

    Attributes:
        verdict: in one word.
        located: exactly the planted fault was named, or nothing if none was to be named.
        passed: the outcome is the expected one.
        false_alarms: refusals and findings without a planted fault.
        detail: what is wrong.
    """

    verdict: str
    located: bool
    passed: bool
    false_alarms: int = 0
    detail: str = ""


@dataclass(frozen=True)
class Line:
    """A judged case. unguarded: the outcome of another trainer without the guard."""

    case: Any
    verdict: Verdict
    seconds: float
    unguarded: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        names = ("id", "name", "group", "truth")
        of_case = {key: getattr(self.case, key) for key in names if hasattr(self.case, key)}
        fate = {} if self.unguarded is None else {"unguarded": self.unguarded}
        return {**of_case, **asdict(self.verdict), **fate, "seconds": round(self.seconds, 2)}


def verdict_of(
    word: str, complaints: list[str], located: bool = True, false_alarms: int = 0
) -> Verdict:
    """Return the verdict `word`, or `harmed` with the complaints if there are any."""
    good = not complaints and not false_alarms
    word, detail = word if good else "harmed", "; ".join(complaints)
    return Verdict(word, located and good, good and located, false_alarms, detail)


def together(verdicts: list[Verdict]) -> Verdict:
    """Join the verdicts of a case that ran in several modes."""
    return Verdict(
        " / ".join(dict.fromkeys(v.verdict for v in verdicts)),
        all(v.located for v in verdicts),
        all(v.passed for v in verdicts),
        sum(v.false_alarms for v in verdicts),
        "; ".join(dict.fromkeys(v.detail for v in verdicts if v.detail)),
    )
