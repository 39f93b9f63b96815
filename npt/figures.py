"""Names, units and formats of the fidelity figures, and what training changed in words.

Files, tables of studies and `--json` hold shares as fractions; terminals and pages write them in
per cent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
        scale = 100.0 if self.percent else 1.0
        digits = self.digits_to_tell(value)
        tail = ""
        if math.isfinite(error) and error >= NO_ERROR:
            digits = error_digits(scale * error, self.digits)
            tail = f" ± {scale * error:.{digits}f}"
        if self.percent:
            tail += "%"
        return f"{scale * value:z.{digits}f}{tail}".replace("-", "−")

    def digits_to_tell(self, value: float) -> int:
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
    first = -int(f"{error:.0e}".partition("e")[2])
    return max(0, min(max(usual, first), first + 1))


FIGURES: dict[str, Figure] = {
    "kl": Figure("KL(teacher, model), nats", "KL, nats", 4, ideal=0.0),
    "top1": Figure("top-1 agreement", "top-1", 1, percent=True, ideal=1.0),
    "acceptance": Figure("speculative acceptance", "acceptance", 1, percent=True, ideal=1.0),
    "perplexity": Figure("perplexity", "perplexity", 3),
    "perplexity_ratio": Figure("perplexity over the teacher's", "ratio", 4, ideal=1.0),
}
"""Figures by their key in files."""


@dataclass(frozen=True)
class Change:
    """How training changed a figure, measured before and after on the same tokens.

    Attributes:
        figure: `kl` or `perplexity`.
        change: after minus before. Its error pairs the samples, so it is smaller than those of the
            two figures, which mostly tell how the samples differ.
    """

    figure: str
    before: float
    before_se: float
    after: float
    after_se: float
    change: float
    change_se: float


def nan_for_null(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with NaN in place of null."""
    return {key: math.nan if value is None else value for key, value in values.items()}


def unpaired(name: str, before: Mapping[str, float], after: Mapping[str, float]) -> Change:
    """Return how a figure changed, with the error of two independent measurements."""
    first = before[name]
    first_se = before[f"{name}_se"]
    last = after[name]
    last_se = after[f"{name}_se"]
    error = math.hypot(first_se, last_se)
    return Change(name, first, first_se, last, last_se, last - first, error)


NOISE = 2.0
"""Standard errors that chance alone exceeds in one case of twenty."""

Verdict = Literal["lower", "noise", "higher", "not finite"]


def verdict(change: float, error: float) -> Verdict:
    """Return what a change is: without a known error, lower or higher beyond rounding."""
    if not math.isfinite(change):
        return "not finite"
    if abs(change) < NO_ERROR or abs(change) <= NOISE * error:
        return "noise"
    return "lower" if change < 0 else "higher"


def change_line(change: Change, text: str) -> str:
    """Return what training changed, in a sentence; `text` describes the text measured on."""
    name = f"the perplexity of {text}"
    unit = ""
    if change.figure == "kl":
        name = f"the KL to the teacher on {text}"
        unit = " nats"
    figure = FIGURES[change.figure]
    kind = verdict(change.change, change.change_se)
    if kind == "not finite":
        return f"After training, {name} is not finite."

    def digits(value: float, error: float) -> int:
        known = NO_ERROR / 100 < error < math.inf
        return error_digits(error, figure.digits) if known else figure.digits_to_tell(value)

    # before and after get at least the digits of the change
    shown = digits(change.change, change.change_se)
    before = f"{change.before:.{max(shown, digits(change.before, change.before_se))}f}"
    after = f"{change.after:.{max(shown, digits(change.after, change.after_se))}f}"
    moved = f"{change.change:+z.{shown}f}".replace("-", "−")
    if math.isfinite(change.change_se):
        moved += f" ± {change.change_se:.{shown}f}"
    moved = f"from {before} to {after}{unit} ({moved})"
    if kind == "noise":
        return f"Training did not change {name} beyond noise: {moved}."
    did = "lowered" if kind == "lower" else "raised"
    share = "" if change.before <= 0 else _share(change.after / change.before)
    return f"Training {did} {name}{share}, {moved}."


def _share(ratio: float) -> str:
    """Return by how much, or how often, a figure grew or fell."""
    if ratio >= 100:
        return f" {ratio:,.0f}-fold"
    if ratio >= 2:
        return f" {ratio:.3g}-fold"
    percent = 100 * abs(ratio - 1)
    # 100% would read as a fall to 0
    return f" by {percent:.2g}%" if percent < 99 else f" by {min(percent, 99.99):.4g}%"


COMPARISON_NAMES = {
    "unquantized_to_4bit": "unquantised to 4-bit",
    "4bit_to_npt": "4-bit to NPT",
    "unquantized_to_npt": "unquantised to NPT",
}
"""Names of the comparisons by their key in `fidelity.json`."""
