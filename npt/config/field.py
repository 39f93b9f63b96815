"""A setting: a dataclass field that is also a command-line flag, with checks of its value."""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Callable
from dataclasses import Field, field, fields
from typing import Any, NamedTuple

from npt.errors import ConfigError

GROUPS = {
    "base": "Base model",
    "adapter": "Adapter",
    "data": "Data",
    "objective": "Objective",
    "optimiser": "Optimisation",
    "guards": "Memory and guards",
    "output": "Output",
}
"""Headings of the groups of settings."""

INT_MAX = 2**31 - 1
FLOAT_MAX = 3e38
"""The largest values: products of a few such counts fit into 64 bits, such numbers into fp32."""


class Condition(NamedTuple):
    """A condition on a value or on all settings: a test, and its words in an error."""

    holds: Callable[[Any], Any]
    words: str


def at_least(low: float, most: float = math.inf) -> Condition:
    """Return the bound of a number from `low` to `most`."""
    words = f"it must be at least {low}"
    if most < math.inf:
        words += f" and at most {most}"
    return Condition(lambda value: low <= value <= most, words)


POSITIVE = Condition(lambda value: value > 0, "it must be above 0")
ALWAYS = Condition(lambda _: True, "")
_SIZES = (
    Condition(
        lambda v: not isinstance(v, int) or abs(v) <= INT_MAX, f"it must be at most {INT_MAX}"
    ),
    Condition(
        lambda v: not isinstance(v, float) or abs(v) <= FLOAT_MAX,
        f"it must be a number of at most {FLOAT_MAX}",  # NaN is none
    ),
)

_METADATA: dict[str, Any] = {
    "choices": None,
    "flag": None,
    "read": lambda value: value,
    "bound": ALWAYS,
    "need": ALWAYS,
}


def setting(default: Any, help: str, *, group: str = "", **more: Any) -> Any:
    """Return a dataclass field that is also a command-line flag, in one of the `GROUPS`.

    `more` may hold `choices` of the value or of a tuple's items; `flag`, a name other than the
    field's; `read`, a function that converts what YAML or a caller may write; `bound`, a condition
    on the value, unless it is None; and `need`, one on all settings without which any value but the
    default has no effect.
    """
    assert more.keys() <= _METADATA.keys()
    return field(default=default, metadata={**_METADATA, "help": help, "group": group, **more})


def flag_of(f: Field[Any]) -> str:
    """Return the name of a field's flag, without dashes."""
    return f.metadata["flag"] or f.name


def flags_of(*classes: Any) -> dict[str, Field[Any]]:
    """Return the fields of settings, or of their classes, by flag."""
    return {flag_of(f): f for cls in classes for f in fields(cls)}


def kinds_of(f: Field[Any]) -> tuple[type, ...]:
    """Return the types of a field, its flag's first."""
    hint: Any = f.type
    parts = hint.__args__ if isinstance(hint, types.UnionType) else (hint,)
    return tuple(typing.get_origin(part) or part for part in parts)


def written(flag: str, value: Any) -> str:
    """Return a flag with its value, as on a command line."""
    return f"--{flag}" if value is True else f"--{flag} {as_text(value)}"


def check_need(met: Any, flag: str, value: Any, words: str) -> None:
    """Raise ConfigError for a flag that has no effect because what it needs is not `met`."""
    if not met:
        raise ConfigError(
            f"{written(flag, value)} has no effect without {words}: add {words} or remove --{flag}"
        )


class SettingsGroup:
    """Settings that are checked when they are made: first each one, then all together.

    Their annotations must be types: a module of theirs imports no `annotations` of `__future__`.
    """

    def __post_init__(self) -> None:
        for f in flags_of(self).values():
            value = f.metadata["read"](getattr(self, f.name))
            object.__setattr__(self, f.name, value)  # frozen
            fault = _fault(f, value)
            if fault:
                raise ConfigError(f"--{flag_of(f)} is {fault}")
        # only now: a need may look at any of them
        for flag, f in flags_of(self).items():
            value = getattr(self, f.name)
            need = f.metadata["need"]
            check_need(value == f.default or need.holds(self), flag, value, need.words)
        self.check()

    def check(self) -> None:
        """Refuse combinations that cannot work."""

    def by_flag(self) -> dict[str, Any]:
        """Return the values by flag."""
        return {flag: getattr(self, f.name) for flag, f in flags_of(self).items()}


def _fault(f: Field[Any], value: Any) -> str:
    """Return what is wrong with a value, and what would be right; "" if it is valid."""
    kinds = kinds_of(f)
    choices = f.metadata["choices"]
    if not _is_one_of(kinds, value):
        names = ["unset" if kind is types.NoneType else kind.__name__ for kind in kinds]
        return f"{value!r}; expected {' or '.join(names)}"
    if value is None:
        return ""
    for item in value if isinstance(value, tuple) else (value,):
        if choices and item not in choices:
            return f"{item!r}; choose from {', '.join(choices)}"
    for bound in (f.metadata["bound"], *_SIZES):
        if not bound.holds(value):
            return f"{value}; {bound.words}"
    return ""


def _is_one_of(kinds: tuple[type, ...], value: Any) -> bool:
    # a bool is an int, but no number here
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (isinstance(value, int) and float in kinds)


def parse_steps(text: str, flag: str = "--trace_steps") -> tuple[range, ...]:
    """Return steps from 1 on, written `1,2,3`, `1-5` (both ends included), `/100` (every hundredth)
    or a mix of these, as ranges. ConfigError for anything else.
    """
    steps = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,18})\s*(?:-\s*(\d{1,18})\s*)?|\s*/\s*(\d{1,18})\s*", part)
        numbers = match.groups(default="0") if match else ("0", "0", "0")
        first, last, every = map(int, numbers)
        last = last or first
        if every:
            steps.append(range(every, 10**18, every))
        elif 1 <= first <= last:
            steps.append(range(first, last + 1))
        else:
            raise ConfigError(
                f"{flag} is {text!r}; write steps as a list 1,2,3, a range 1-5, /100 for every"
                " hundredth, or a mix 1-5,8"
            )
    return tuple(steps)


def as_text(value: Any) -> Any:
    """Return a list as `a,b`, an int (YAML's reading of a lone 3) as text, or else the value."""
    if isinstance(value, list | tuple | range):
        return ",".join(map(str, value))
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def words(value: Any) -> Any:
    """Return the words in `a,b`, or in a list of such texts, as a tuple; else the value itself."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return value
    return tuple(word.strip() for part in parts for word in part.split(",") if word.strip())
