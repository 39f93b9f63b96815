"""Names, units and formats of the fidelity figures.

Files, tables of studies and `--json` hold shares as fractions; terminals and pages write them in
per cent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NO_ERROR = 1e-6
"""A smaller difference or error is rounding, such as the teacher's against itself."""


@dataclass(frozen=True)
class Figure:
    """The name and format of a fidelity figure.

    Attributes:
        name: full name, with the unit unless it follows the number.
        short: name for a narrow column.
        digits: digits after the decimal point.
        percent: the figure is a share, written in per cent.
        ideal: value of the teacher against itself; None if it depends on the text.
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
        tail = ""
        if math.isfinite(error) and error >= NO_ERROR:
            digits = error_digits(scale * error, self.digits)
            tail = f" ± {scale * error:.{digits}f}"
        else:
            digits = self._digits_to_tell(value)
        return f"{scale * value:z.{digits}f}{tail}{unit}".replace("-", "−")

    def _digits_to_tell(self, value: float) -> int:
        """Return the digits with which a value without an error does not read as the teacher's."""
        if self.ideal is None or abs(value - self.ideal) < NO_ERROR:
            return self.digits
        scale = 100.0 if self.percent else 1.0
        digits = self.digits
        while f"{scale * value:.{digits}f}" == f"{scale * self.ideal:.{digits}f}":
            digits += 1
        return digits


def error_digits(error: float, usual: int) -> int:
    """Return how many digits after the point to write of a value and its error: the usual number,
    but more if the error would read as 0, and fewer if it would have over two significant digits.
    """
    two_significant = 1 - int(f"{error:.1e}".partition("e")[2])
    needed = next(n for n in range(usual, 400) if round(error, n))
    return max(0, min(needed, two_significant))


FIGURES: dict[str, Figure] = {
    "kl": Figure("KL(teacher, model), nats", "KL, nats", 4, ideal=0.0),
    "top1": Figure("top-1 agreement", "top-1", 1, percent=True, ideal=1.0),
    "acceptance": Figure("speculative acceptance", "acceptance", 1, percent=True, ideal=1.0),
    "perplexity": Figure("perplexity", "perplexity", 3),
    "perplexity_ratio": Figure("perplexity over the teacher's", "ratio", 4, ideal=1.0),
}
"""Figures by their key in files."""


COMPARISON_NAMES = {
    "unquantized_to_4bit": "unquantised to 4-bit",
    "4bit_to_npt": "4-bit to NPT",
    "unquantized_to_npt": "unquantised to NPT",
}
"""Names of the comparisons by their key in `fidelity.json`."""
