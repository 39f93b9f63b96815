"""A setting: a dataclass field that is also a command-line flag, with what its value must be."""

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
    "base": "The frozen base",
    "adapter": "The adapter",
    "data": "Data",
    "objective": "Objective",
    "optimiser": "Optimiser",
    "guards": "Memory and guards",
    "output": "What is written",
}
"""Groups of flags, by the name that a setting has for its group."""

INT_MAX, FLOAT_MAX = 2**31 - 1, 3e38
"""The largest settings: products of a few such counts fit 64 bits, and such numbers fp32."""


class Bound(NamedTuple):
    """A condition on a number: a test, and the words of a refusal."""

    holds: Callable[[float], bool]
    words: str


def at_least(low: float, most: float = math.inf) -> Bound:
    """Return the bound of a number from `low` on, to `most`."""
    words = f"it must be at least {low}" + (f" and at most {most}" if most < math.inf else "")
    return Bound(lambda value: low <= value <= most, words)


POSITIVE = Bound(lambda value: value > 0, "it must be above 0")


class Need(NamedTuple):
    """A condition without which a setting means nothing: a test of all settings, and the words."""

    met: Callable[[Any], bool]
    words: str


_METADATA = dict.fromkeys(("choices", "flag", "read", "bound", "need"))


def setting(default: Any, help: str, *, group: str = "", **more: Any) -> Any:
    """Return a dataclass field that is also a command-line flag, in one of the `GROUPS`.

    Of `more`, `choices` are those of the value, or of a tuple's items; `flag` is its name, if it is
    not the field's; `read` turns what YAML or a caller may write into the value; `bound` is that of
    a number, and `need` that of any value but the default.
    """
    assert more.keys() <= _METADATA.keys()
    return field(default=default, metadata={**_METADATA, "help": help, "group": group, **more})


def flag_of(f: Field[Any]) -> str:
    """Return the flag's name, without dashes, of a settings field."""
    return f.metadata["flag"] or f.name


@functools.cache
def kinds_of(cls: type) -> dict[str, tuple[type, ...]]:
    """Return the types that each field may have, that of its flag first: (int, NoneType) of
    `int | None`. Cached, since annotations are text that must be evaluated.
    """
    kinds = {}
    for name, hint in typing.get_type_hints(cls).items():
        parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        kinds[name] = tuple(typing.get_origin(part) or part for part in parts)
    return kinds


class SettingsGroup:
    """Settings that are checked when they are made, each by itself, then together by `check`."""

    def __post_init__(self) -> None:
        cls: Any = type(self)
        for f in fields(cls):
            if f.metadata["read"] is not None:
                object.__setattr__(self, f.name, f.metadata["read"](getattr(self, f.name)))
            fault = _fault(f, getattr(self, f.name), kinds_of(cls)[f.name])
            if fault is not None:
                raise ConfigError(f"--{flag_of(f)} is {fault}")
        for f in fields(cls):
            value, need = getattr(self, f.name), f.metadata["need"]
            if need is not None and value != f.default and not need.met(self):
                shown = ",".join(value) if isinstance(value, tuple) else value
                raise ConfigError(
                    f"--{flag_of(f)} {shown} means nothing without {need.words}; add it or drop"
                    " the other"
                )
        self.check()

    def check(self) -> None:
        """Refuse settings that do not go together."""


def _fault(f: Field[Any], value: Any, kinds: tuple[type, ...]) -> str | None:
    """Return a value that a setting cannot have and what it can have, or None."""
    choices, bound = f.metadata["choices"], f.metadata["bound"]
    if isinstance(value, bool):
        fits = bool in kinds
    else:
        fits = isinstance(value, kinds) or (isinstance(value, int) and float in kinds)
    if not fits:
        names = " or ".join("unset" if kind is type(None) else kind.__name__ for kind in kinds)
        return f"{value!r}; expected {names}"
    if value is None:
        return None
    for item in value if isinstance(value, tuple) else (value,):
        if choices and item not in choices:
            return f"{item!r}; choose from {', '.join(choices)}"
    if bound is not None and not bound.holds(value):
        return f"{value}; {bound.words}"
    most = INT_MAX if isinstance(value, int) else FLOAT_MAX
    if isinstance(value, int | float) and abs(value) > most:
        return f"{value}; it must be at most {most}"
    return None


def parse_steps(text: str, flag: str = "--trace_steps") -> tuple[range, ...]:
    """Return steps, counted from 1, as ranges: `1,2,3`, `1-5` (both ends included), `/100` (every
    hundredth) or a mix of these; ConfigError, by `flag`, if it is not of that form.
    """
    steps = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,18})\s*(?:-\s*(\d{1,18})\s*)?|\s*/\s*(\d{1,18})\s*", part)
        first, last, every = (int(n) if n else 0 for n in match.groups()) if match else (0, 0, 0)
        last = last or first
        if every:
            steps.append(range(every, 10**18, every))
        elif 1 <= first <= last:
            steps.append(range(first, last + 1))
        else:
            raise ConfigError(
                f"{flag} is {text!r}; write steps from 1 on as a list 1,2,3, a range 1-5, /100 for"
                " every hundredth, or a mix 1-5,8"
            )
    return tuple(steps)


def as_text(value: Any) -> Any:
    """Return the items of a list as `a,b`, and a whole number, which is what YAML makes of a lone
    3, as its text; anything else as it is.
    """
    if isinstance(value, list | tuple | range):
        return ",".join(map(str, value))
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def words(value: Any) -> Any:
    """Return the words of `a,b`, or of a list of such, as a tuple; anything else as it is."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return value
    return tuple(word.strip() for part in parts for word in part.split(",") if word.strip())
