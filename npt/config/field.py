"""A setting: a dataclass field that is also a command-line flag, with checks of its value."""

from __future__ import annotations

import functools
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


class Bound(NamedTuple):
    """A condition on a number: a test, and the words of the error."""

    holds: Callable[[float], bool]
    words: str


def at_least(low: float, most: float = math.inf) -> Bound:
    """Return the bound of a number from `low` to `most`."""
    words = f"it must be at least {low}"
    if most < math.inf:
        words += f" and at most {most}"
    return Bound(lambda value: low <= value <= most, words)


POSITIVE = Bound(lambda value: value > 0, "it must be above 0")


class Need(NamedTuple):
    """A condition without which a setting has no effect: a test of all settings, and a name."""

    met: Callable[[Any], bool]
    words: str


_METADATA = dict.fromkeys(("choices", "flag", "read", "bound", "need"))


def setting(default: Any, help: str, *, group: str = "", **more: Any) -> Any:
    """Return a dataclass field that is also a command-line flag, in one of the `GROUPS`.

    `more` may hold `choices` of the value or of a tuple's items; `flag`, a name other than the
    field's; `read`, a function that converts what YAML or a caller may write; `bound`, the `Bound`
    of a number; and `need`, the `Need` of any value but the default.
    """
    assert more.keys() <= _METADATA.keys()
    return field(default=default, metadata={**_METADATA, "help": help, "group": group, **more})


def flag_of(f: Field[Any]) -> str:
    """Return the name of a field's flag, without dashes."""
    return f.metadata["flag"] or f.name


@functools.cache
def kinds_of(cls: type) -> dict[str, tuple[type, ...]]:
    """Return the types of each field, its flag's first. Cached: annotations must be evaluated."""
    kinds = {}
    for name, hint in typing.get_type_hints(cls).items():
        parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        kinds[name] = tuple(typing.get_origin(part) or part for part in parts)
    return kinds


class SettingsGroup:
    """Settings that are checked when they are made: first each one, then all together."""

    def __post_init__(self) -> None:
        cls: Any = type(self)
        for f in fields(cls):
            value = getattr(self, f.name)
            read = f.metadata["read"]
            if read is not None:
                value = read(value)
                object.__setattr__(self, f.name, value)  # frozen
            fault = _fault(f, value, kinds_of(cls)[f.name])
            if fault is not None:
                raise ConfigError(f"--{flag_of(f)} is {fault}")
        # only now: a need may look at any of them
        for f in fields(cls):
            value = getattr(self, f.name)
            need = f.metadata["need"]
            if need is None or value == f.default or need.met(self):
                continue
            shown = "" if value is True else f" {as_text(value)}"
            raise ConfigError(
                f"--{flag_of(f)}{shown} has no effect without {need.words}: add {need.words}"
                f" or remove --{flag_of(f)}"
            )
        self.check()

    def check(self) -> None:
        """Refuse combinations that cannot work."""


def _fault(f: Field[Any], value: Any, kinds: tuple[type, ...]) -> str | None:
    """Return what is wrong with a value, and what would be right; None if it is valid."""
    choices = f.metadata["choices"]
    bound = f.metadata["bound"]
    # a bool is an int, but no number here
    if isinstance(value, bool):
        fits = bool in kinds
    else:
        fits = isinstance(value, kinds) or (isinstance(value, int) and float in kinds)
    if not fits:
        names = " or ".join("unset" if kind is type(None) else kind.__name__ for kind in kinds)
        return f"{value!r}; expected {names}"
    if value is None:
        return None
    items = value if isinstance(value, tuple) else (value,)
    for item in items:
        if choices and item not in choices:
            return f"{item!r}; choose from {', '.join(choices)}"
    if bound is not None and not bound.holds(value):
        return f"{value}; {bound.words}"
    most = INT_MAX if isinstance(value, int) else FLOAT_MAX
    if isinstance(value, int | float) and abs(value) > most:
        return f"{value}; it must be at most {most}"
    return None


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
