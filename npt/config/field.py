"""A setting: a dataclass field that is also a command-line flag, with what its value must be."""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import Field, field, fields
from typing import Any, NamedTuple

from npt.errors import ConfigError

GROUPS = {
    "base": "The frozen base",
    "adapter": "The adapter",
    "start": "Its start",
    "data": "Data",
    "rows": "Rows of tokens",
    "objective": "Objective",
    "optimiser": "Optimiser",
    "memory": "Memory and speed",
    "guards": "Guards",
    "output": "What is written",
    "trackers": "Trackers",
}
"""Groups of flags, by the name that a setting has for its group."""


INT_MAX, FLOAT_MAX = 2**31 - 1, 3e38
"""The largest settings: products of a few such counts fit 64 bits, and such numbers fp32."""


class Bound(NamedTuple):
    """A condition on a number: a test, and the words of a refusal."""

    holds: Callable[[float], bool]
    words: str


def at_least(low: float, most: float = math.inf) -> Bound:
    """Return the bound of a finite number from `low` on, to `most`."""
    words = f"it must be a finite number of at least {low}"
    words += f", at most {most}" if most < math.inf else ""
    return Bound(lambda value: low <= value <= most and value < math.inf, words)


POSITIVE = Bound(lambda value: 0 < value < math.inf, "it must be a positive number")
SHARE = Bound(lambda value: 0 <= value <= 1, "it is a share, from 0 to 1")


class Need(NamedTuple):
    """A condition without which a setting means nothing: a test of all settings, and the words."""

    met: Callable[[Any], bool]
    words: str


def setting(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    flag: str | None = None,
    group: str = "",
    often: bool = False,
    read: Callable[[Any], Any] | None = None,
    bound: Bound | None = None,
    need: Need | None = None,
) -> Any:
    """Return a dataclass field that is also a command-line flag.

    Args:
        default, help, choices: of the field and of the flag.
        flag: its name, if it is not the field's.
        group: one of `GROUPS`.
        often: shown by `--help`, not by `--help_all` alone.
        read: turns what YAML or a caller may write into the value.
        bound: of a number, or of None.
        need: of any value but the default.
    """
    names = ("help", "choices", "flag", "group", "often", "read", "bound", "need")
    values = (help, choices, flag, group, often, read, bound, need)
    return field(default=default, metadata=dict(zip(names, values, strict=True)))


def flag_of(f: Field[Any]) -> str:
    """Return the flag's name, without dashes, of a settings field."""
    return f.metadata.get("flag") or f.name


@functools.cache
def hints_of(cls: type) -> dict[str, Any]:
    """Return the fields' types. Annotations are text that must be evaluated, and a study makes
    settings by the thousand.
    """
    return typing.get_type_hints(cls)


class Settings:
    """A group of settings. Each class among its bases may define `check` for what concerns several
    settings at once; it is called after every value has been checked by itself.
    """

    def __post_init__(self) -> None:
        cls: Any = type(self)
        checks = (_check_type, _check_choices, _check_bound, _check_size, _check_need)
        for f in fields(cls):
            if f.metadata["read"] is not None:
                object.__setattr__(self, f.name, f.metadata["read"](getattr(self, f.name)))
        for check in checks:
            for f in fields(cls):
                check(self, f, getattr(self, f.name))
        for base in reversed(cls.__mro__):
            if "check" in vars(base):
                base.check(self)


def _check_type(config: Settings, f: Field[Any], value: Any) -> None:
    cls: type = type(config)
    hint = hints_of(cls)[f.name]
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = tuple(typing.get_origin(kind) or kind for kind in allowed)
    if isinstance(value, bool):
        fits = bool in kinds
    elif isinstance(value, int):
        fits = int in kinds or float in kinds
    else:
        fits = isinstance(value, kinds)
    if not fits:
        names = " or ".join("unset" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ConfigError(f"--{flag_of(f)} is {value!r}; expected {names}")


def _check_choices(config: Settings, f: Field[Any], value: Any) -> None:
    choices = f.metadata["choices"]
    if not choices or value is None:
        return
    for item in value if isinstance(value, tuple) else (value,):
        if item not in choices:
            raise ConfigError(f"--{flag_of(f)} is {item!r}; choose from {', '.join(choices)}")


def _check_bound(config: Settings, f: Field[Any], value: Any) -> None:
    bound = f.metadata["bound"]
    if bound is not None and value is not None and not bound.holds(value):
        raise ConfigError(f"--{flag_of(f)} is {value}; {bound.words}")


def _check_size(config: Settings, f: Field[Any], value: Any) -> None:
    most = INT_MAX if isinstance(value, int) else FLOAT_MAX
    if isinstance(value, int | float) and abs(value) > most:
        raise ConfigError(f"--{flag_of(f)} is {value}; it must be at most {most}")


def _check_need(config: Settings, f: Field[Any], value: Any) -> None:
    need = f.metadata["need"]
    if need is not None and value != f.default and not need.met(config):
        shown = ",".join(value) if isinstance(value, tuple) else value
        raise ConfigError(
            f"--{flag_of(f)} {shown} means nothing without {need.words}; add it or drop the other"
        )
