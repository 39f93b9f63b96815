"""What a case came to."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


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


@dataclass(frozen=True)
class Line:
    """A judged case. unguarded: the fate of somebody else's trainer without a guard."""

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
