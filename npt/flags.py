"""Command-line flags and YAML entries, made from the settings' dataclasses: one list of names,
types and help texts.
"""

from __future__ import annotations

import argparse
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, NoReturn

import yaml

from npt.aliases import canonical, hint
from npt.config import GROUPS, flag_of, hints_of
from npt.errors import ConfigError, kind_of
from npt.presets import presets, settings_file


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and status 2; that knows other names of its
    flags (npt/aliases.py), and whose `--help` leaves out what few runs need, which `--help_all`
    shows."""

    def __init__(self, *arguments: Any, takes_others: bool = False, **named: Any):
        super().__init__(*arguments, **named)
        # whether flags that it does not know are somebody else's, and handed out
        self._takes_others = takes_others
        self._show_all = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        until = given.index("--") if "--" in given else len(given)
        found, left = super().parse_known_args(
            [*map(self._spelled, given[:until]), *given[until:]], namespace
        )
        if left and self._subparsers is None and not self._takes_others:
            self.error(self._unknown(left[0]))
        return found, left

    def _flags(self) -> list[str]:
        return [
            name.removeprefix("--") for name in self._option_string_actions if name.startswith("--")
        ]

    def _spelled(self, argument: str) -> str:
        """An argument, a flag by its own name."""
        if not argument.startswith("--") or argument == "--":
            return argument
        name, equals, value = argument[2:].partition("=")
        return f"--{canonical(name, self._flags())}{equals}{value}"

    def _unknown(self, argument: str) -> str:
        if not argument.startswith("-"):
            return f"{argument!r} belongs to no flag"
        name = argument.lstrip("-").partition("=")[0]
        return f"there is no flag {argument.partition('=')[0]}{hint(name, self._flags())}"

    def format_help(self) -> str:
        rare = [
            action
            for action in self._actions
            if getattr(action, _RARE, False) and action.help != argparse.SUPPRESS
        ]
        if not rare or self._show_all:
            return super().format_help()
        helps, epilog = [action.help for action in rare], self.epilog
        try:
            for action in rare:
                action.help = argparse.SUPPRESS
            self.epilog = f"{len(rare)} more flags: {self.prog} --help_all. {epilog or ''}".strip()
            return super().format_help().rstrip() + "\n"
        finally:
            self.epilog = epilog
            for action, text in zip(rare, helps, strict=True):
                action.help = text

    def show_all(self) -> NoReturn:
        """Print help on every flag, and end."""
        self._show_all = True
        self.print_help()
        self.exit()

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


_RARE = "npt_rare"
"""What marks a flag that few runs need."""


class _HelpAll(argparse.Action):
    def __call__(self, parser: Any, *_: Any) -> None:
        parser.show_all()


class _Words(argparse.Action):
    """Words behind a flag, with spaces or commas between them, as one list."""

    def __call__(self, parser: Any, namespace: Any, values: Any, *_: Any) -> None:
        setattr(namespace, self.dest, ",".join(values))


def add_settings(
    parser: argparse.ArgumentParser, *classes: type, leave_out: Iterable[str] = ()
) -> None:
    """Add a flag for every field of the dataclasses; one that is not given stays out of the parsed
    namespace.

    A boolean setting takes an optional value (`--smoke_test false`) and has a negation
    (`--no_smoke_test`).
    """
    groups: dict[str, Any] = {}
    if "--help_all" not in parser._option_string_actions:
        parser.add_argument(
            "--help_all",
            nargs=0,
            action=_HelpAll,
            default=argparse.SUPPRESS,
            help="show every flag and exit",
        )
    for cls in classes:
        hints = hints_of(cls)
        for f in fields(cls):
            name = flag_of(f)
            if name in leave_out:
                continue
            title = GROUPS[f.metadata["group"]]
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            group = groups[title]
            before = len(parser._actions)
            kind = _plain_type(hints[f.name])
            help = f"{f.metadata.get('help', '')} (default: {_shown(f)})"
            if kind is bool:
                group.add_argument(
                    f"--{name}",
                    nargs="?",
                    const=True,
                    type=_boolean,
                    default=argparse.SUPPRESS,
                    metavar="BOOL",
                    help=help,
                )
                group.add_argument(
                    f"--no_{name}",
                    dest=name,
                    action="store_false",
                    default=argparse.SUPPRESS,
                    help=argparse.SUPPRESS,
                )
            # transformers' scripts take `--report_to wandb tensorboard`
            elif kind is tuple and f.metadata["group"] == "trackers":
                group.add_argument(
                    f"--{name}",
                    nargs="+",
                    action=_Words,
                    default=argparse.SUPPRESS,
                    metavar="LIST",
                    help=help,
                )
            elif kind is tuple:
                group.add_argument(
                    f"--{name}", default=argparse.SUPPRESS, metavar="LIST", help=help
                )
            else:
                choices = f.metadata.get("choices")
                group.add_argument(
                    f"--{name}",
                    type=kind,
                    choices=choices,
                    default=argparse.SUPPRESS,
                    metavar=None if choices else kind.__name__.upper(),
                    help=help,
                )
            for action in parser._actions[before:]:
                setattr(action, _RARE, not f.metadata["often"])


def read_yaml(
    path: str, classes: Iterable[type], extra: Mapping[str, type] | None = None
) -> dict[str, Any]:
    """Settings from a YAML mapping of flag names, without dashes, to values.

    Args:
        path: the file, or the name of a preset (npt/presets).
        classes: whose flags are allowed.
        extra: further flags and their types.

    Raises:
        ConfigError: unreadable, not YAML, not a mapping, an unknown name, or a value of another
            type.
    """
    where = f"--config {path}"
    file = settings_file(path)
    if not file.exists():
        raise ConfigError(
            f"{where} is neither a file nor one of the presets {', '.join(presets())}"
        )
    content = yaml_content(str(file), where)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{where} holds {kind_of(content)}; write one 'flag_name: value' a line")
    return checked_settings(where, content, classes, extra)


def yaml_content(path: str, where: str) -> Any:
    """What a YAML file holds.

    Args:
        path: the file.
        where: what messages call it.

    Raises:
        ConfigError: unreadable, or not YAML.
    """
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{where} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise ConfigError(
            f"{where} is not valid YAML: {place}{getattr(error, 'problem', error)}"
        ) from error


def checked_settings(
    where: str,
    content: Mapping[Any, Any],
    classes: Iterable[type],
    extra: Mapping[str, type] | None = None,
) -> dict[str, Any]:
    """Settings by flag name, each known and of its type.

    Args:
        where: they were written, for messages.
        content: as it was written.
        classes: whose flags are allowed.
        extra: further flags and their types.

    Raises:
        ConfigError: an unknown name, or a value of another type.
    """
    kinds: dict[str, type] = dict(extra or {})
    for cls in classes:
        hints = hints_of(cls)
        kinds |= {flag_of(f): _plain_type(hints[f.name]) for f in fields(cls)}
    settings: dict[str, Any] = {}
    for written, value in content.items():
        name = canonical(str(written), kinds)
        if name not in kinds:
            raise ConfigError(
                f"{where}: there is no setting {written!r}{hint(str(written), kinds, mark='')}"
            )
        if name in settings:
            raise ConfigError(
                f"{where}: {name} stands there twice, once as {written}; drop one of the two"
            )
        settings[name] = _typed(where, name, value, kinds[name])
    return settings


def build(cls: type, given: Mapping[str, Any]) -> Any:
    """A settings object from what was given, by flag name, and its defaults for the rest."""
    return cls(**{f.name: given[flag_of(f)] for f in fields(cls) if flag_of(f) in given})


def _typed(where: str, name: str, value: Any, kind: type) -> Any:
    if value is None or (
        kind is not str
        and isinstance(value, kind)
        and not (kind is int and isinstance(value, bool))
    ):
        return value
    try:
        if kind is tuple:
            return tuple(value) if isinstance(value, list) else str(value)
        if kind is bool:
            return _boolean(str(value))
        if kind in (int, float) and not isinstance(value, bool):
            return kind(value) if isinstance(value, str) or kind(value) == value else _fail()
        if (
            kind is str
            and isinstance(value, list)
            and not any(isinstance(item, dict | list) for item in value)
        ):
            return ",".join(map(str, value))  # layers: [3, 5]
        if kind is str and not isinstance(value, dict | list):
            return str(value)
    # a whole number that is infinite overflows
    except (ValueError, TypeError, OverflowError, argparse.ArgumentTypeError):
        pass
    raise ConfigError(
        f"{where}: {name} is {value!r}, expected {'a list' if kind is tuple else kind.__name__}"
    )


def _fail() -> NoReturn:
    raise ValueError


def _plain_type(hint: Any) -> type:
    """int of `int | None`, tuple of `tuple[str, ...]`."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    return typing.get_origin(hint) or hint


def _boolean(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("true", "yes", "on", "1"):
        return True
    if lowered in ("false", "no", "off", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def _shown(f: Field[Any]) -> str:
    default = f.default if f.default is not MISSING else None
    if isinstance(default, tuple):
        return ",".join(default)
    if isinstance(default, bool):
        return str(default).lower()
    return "unset" if default is None else str(default)


def with_safe_mode(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values by flag name, with `safe_mode` written out as the form that it stands for.

    Raises:
        ConfigError: another form is asked for beside it.
    """
    plain = {name: value for name, value in given.items() if name != "safe_mode"}
    if not given.get("safe_mode", False):
        return plain
    if given.get("modulation", "additive") != "additive":
        raise ConfigError(
            f"--safe_mode is the additive form, but --modulation is {given['modulation']}; drop one"
            " of the two"
        )
    return {**plain, "modulation": "additive"}
