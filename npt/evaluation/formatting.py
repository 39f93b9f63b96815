"""The figures of fidelity for a reader: their names, units, and their writing with an error.

Files, tables of studies and `--json` hold plain numbers, in which a share is a fraction and 1 is
all of it. Terminals and pages write the same share in per cent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NO_ERROR = 1e-6
"""A difference or an error below this is rounding, as that of the teacher against itself."""

MORE_DIGITS = 4
"""Digits at most that are added if a figure would read as the teacher's own."""


@dataclass(frozen=True)
class Figure:
    """A figure of fidelity, and its form.

    Attributes:
        name: in words, with the unit unless that follows the number.
        short: for a table's narrow column.
        digits: after the point.
        percent: whether it is a share.
        ideal: the teacher's against itself; None if that depends on the text.
    """

    name: str
    short: str
    digits: int
    percent: bool = False
    ideal: float | None = None

    def write(self, value: float, error: float = math.nan) -> str:
        if not math.isfinite(value):
            return "not finite"
        scale, unit = (100.0, "%") if self.percent else (1.0, "")
        digits, most, tail = self.digits, self.digits + MORE_DIGITS, ""
        if self.ideal is not None and abs(value - self.ideal) >= NO_ERROR:
            ideal = scale * self.ideal
            while digits < most and f"{scale * value:.{digits}f}" == f"{ideal:.{digits}f}":
                digits += 1
        if math.isfinite(error) and error >= NO_ERROR:
            enough = (n for n in range(digits, most) if float(f"{scale * error:.{n}f}"))
            digits = next(enough, digits)
            tail = f" ± {scale * error:.{digits}f}"
        return f"{scale * value:.{digits}f}{tail}{unit}".replace("-", "−")


FIGURES: dict[str, Figure] = {
    "kl": Figure("KL(teacher, model), nats", "KL, nats", 4, ideal=0.0),
    "top1": Figure("top-1 agreement", "top-1", 1, percent=True, ideal=1.0),
    "acceptance": Figure("speculative acceptance", "acceptance", 1, percent=True, ideal=1.0),
    "perplexity": Figure("perplexity", "perplexity", 3),
    "perplexity_ratio": Figure("perplexity over the teacher's", "ratio", 4, ideal=1.0),
}
"""By the key that files have them under."""


COMPARISON_NAMES = {
    "unquantized_to_4bit": "unquantised to 4-bit",
    "4bit_to_npt": "4-bit to NPT",
    "unquantized_to_npt": "unquantised to NPT",
}
"""What is compared, by the key that `fidelity.json` has it under."""
