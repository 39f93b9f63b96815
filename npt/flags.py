"""Command-line flags and YAML entries, made from the fields of the settings' dataclasses."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import Field
from pathlib import Path
from types import NoneType
from typing import Any

import yaml

from npt.config import GROUPS, flag_of, flags_of, kinds_of
from npt.config.field import as_text
from npt.errors import ConfigError, first_line, kind_of
from npt.parser import canonical, hint
from npt.presets import presets, settings_file
from npt.stored import read_bytes, shown

YAML_BYTES = 1 << 20
"""Size limit of YAML files. PyYAML takes seconds for a megabyte."""

_TAGS = "tag:yaml.org,2002:"
_NOT_AS_WRITTEN = re.compile(r"[-+]?(0[0-9_bx]|[0-9].*:|[0-9_]{20})")


def add_settings(
    parser: argparse.ArgumentParser,
    *classes: type,
    leave_out: Iterable[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Add a flag for every field of the dataclasses. Flags that are not given are not in the parsed
    namespace. A boolean flag takes an optional value (`--smoke_test false`) and has a negation
    (`--no_smoke_test`). Help texts show the `defaults`, by flag name, in place of the fields' own.
    """
    # argparse would list every flag here
    required = [f"{a.option_strings[0]} {a.metavar}" for a in parser._actions if a.required]
    parser.usage = " ".join(["%(prog)s", *required, "[flags]"])
    # argparse shows no group without flags
    groups = {name: parser.add_argument_group(title) for name, title in GROUPS.items()}
    shown = defaults or {}
    for name, f in flags_of(*classes).items():
        if name not in leave_out:
            _add_setting(groups[f.metadata["group"]], f, shown.get(name, f.default))


def _add_setting(group: Any, f: Field[Any], default: Any) -> None:
    name = flag_of(f)
    kind = kinds_of(f)[0]
    unset: Any = argparse.SUPPRESS
    how: dict[str, Any] = {"metavar": "LIST" if kind is tuple else kind.__name__.upper()}
    if kind is bool:
        how |= {"nargs": "?", "const": True}
        group.add_argument(
            f"--no_{name}", dest=name, action="store_false", help=unset, default=unset
        )
    elif kind is str and f.metadata["choices"]:
        how = {"choices": f.metadata["choices"]}
    text = f.metadata["help"]
    need = f.metadata["need"].words
    if need:
        text += f"; needs {need}"
    if default is not None:
        text += f" (default: {shown_default(default)})"
    group.add_argument(f"--{name}", type=_READERS.get(kind, kind), help=text, default=unset, **how)


def read_yaml(
    path: str, classes: Iterable[type], extra: Mapping[str, type] | None = None
) -> dict[str, Any]:
    """Return the settings in a YAML file or preset (npt/presets), a mapping of flag names, without
    dashes, to values. Allowed are the flags of `classes`, and the `extra` ones with their types.
    """
    where = f"--config {path}"
    file = settings_file(path)
    if not file.exists():
        raise ConfigError(
            f"{where} is neither a file nor a preset: name a file or one of {', '.join(presets())}"
        )
    content = yaml_content(str(file), where)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{where} holds {kind_of(content)}: write one 'flag_name: value' per line"
        )
    return checked_settings(where, content, {**kinds_by_flag(classes), **(extra or {})})


def yaml_content(path: str, where: str) -> Any:
    """Return the content of a YAML file; ConfigError, by the name `where`, if it is not YAML, or
    has an alias, a tag or a key that is not text.
    """
    try:
        # PyYAML decodes the bytes: PowerShell writes UTF-16
        return yaml.load(read_bytes(Path(path), YAML_BYTES), _StrictLoader)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from error
    # PyYAML raises errors of Python's for huge numbers and deep nesting
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid YAML: {_problem(error)}") from error


def _problem(error: Exception) -> str:
    problem: str = getattr(error, "problem", None) or first_line(error)
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, yaml.reader.ReaderError):
        problem += "; save it as UTF-8"
    if mark is not None:
        problem = f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
    return problem


class _StrictLoader(yaml.SafeLoader):
    """Refuse what loses or multiplies settings, and read a scalar as its flag would."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases, since ten lines of them make a list of a billion entries, and tags."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _fault(event, f"*{event.anchor} is an alias: write out the value")
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise _fault(event, f"{tag.replace(_TAGS, '!!')} is a tag: write the value without it")
        return super().compose_node(parent, index)

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        """Leave as text dates, numbers that YAML 1.1 would read otherwise (`3:5` as 185, `010` as
        8), and numbers too long for Python.
        """
        tag = super().resolve(kind, value, implicit)
        plain = kind is yaml.ScalarNode and implicit[0]
        if plain and (tag == f"{_TAGS}timestamp" or _NOT_AS_WRITTEN.match(value)):
            return self.DEFAULT_SCALAR_TAG
        return tag

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Refuse duplicate keys, of which YAML would keep the last, and read all keys as text."""
        mapping = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _fault(key, "a key is a list or a mapping: write a name")
            if key.value in mapping:
                raise _fault(key, f"{key.value} is given twice: remove one of them")
            mapping[key.value] = self.construct_object(value, deep=deep)
        return mapping


def _fault(at: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


def typed(where: str, name: str, value: Any, kind: type) -> Any:
    """Return a YAML value as its flag would parse it from text."""
    if value is None:
        return None
    with suppress(ValueError, argparse.ArgumentTypeError):
        return _READERS.get(kind, kind)(_as_typed(value, kind))
    expected = "a list" if kind is tuple else kind.__name__
    if kind is str and isinstance(value, bool):
        expected += ": leave the line out, or put text in quotes"
    raise ConfigError(f"{where}: {name} is {shown(value)}; expected {expected}")


def _as_typed(value: Any, kind: type) -> str:
    """Return a YAML value as text on a command line; ValueError if its flag takes no such value."""
    parts = value if isinstance(value, list) and kind in (str, tuple) else [value]
    # a bare `no` is not text in YAML; of a list's null the setting says what it may be
    if not all(type(part) in (str, int, float, NoneType, kind) for part in parts):
        raise ValueError
    text = ",".join(map(str, parts))
    # an escape of YAML's can write half a character
    text.encode()
    # 1e5 is a float in YAML
    return text.removesuffix(".0") if kind is int and type(value) is float else text


def checked_settings(
    where: str,
    content: Mapping[Any, Any],
    kinds: Mapping[str, type],
    read: Callable[..., Any] = typed,
) -> dict[str, Any]:
    """Return the entries of `content` by flag name, each read by `read`.

    Args:
        where: the file, and the place in it, for messages.
        kinds: the types of the known flags.

    Raises:
        ConfigError: a name is unknown or given twice, or a value is of another type.
    """
    settings: dict[str, Any] = {}
    for written, value in content.items():
        name = canonical(str(written), kinds)
        if name not in kinds:
            raise ConfigError(
                f"{where}: there is no setting {written!r}{hint(str(written), kinds, mark='')}"
            )
        if name in settings:
            first = next(other for other in content if canonical(str(other), kinds) == name)
            raise ConfigError(
                f"{where}: {first} is given twice, once as {written}: remove one of them"
            )
        settings[name] = read(where, name, value, kinds[name])
    return settings


def kinds_by_flag(classes: Iterable[type]) -> dict[str, type]:
    """Return the types of settings by flag."""
    return {name: kinds_of(f)[0] for name, f in flags_of(*classes).items()}


def build(cls: type, given: Mapping[str, Any]) -> Any:
    """Return a settings object from values by flag name, with defaults for the rest."""
    return cls(**{f.name: given[name] for name, f in flags_of(cls).items() if name in given})


_BOOLEANS = {**yaml.SafeLoader.bool_values, "1": True, "0": False}


def _boolean(text: str) -> bool:
    value = _BOOLEANS.get(text.lower())
    if value is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return value


_READERS: dict[type, Any] = {bool: _boolean, tuple: str}
"""How to parse a flag's value, where not by its type. A list stays text; its setting parses it."""


def shown_default(value: Any) -> str:
    """Return a default as help texts show it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "unset" if value is None else str(as_text(value))


def with_safe_mode(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by flag name, with `safe_mode` replaced by `modulation: additive`."""
    plain = dict(given)
    if not plain.pop("safe_mode", False):
        return plain
    modulation = plain.setdefault("modulation", "additive")
    if modulation != "additive":
        raise ConfigError(
            f"--safe_mode means --modulation additive, but --modulation is {modulation}: remove one"
            " of them"
        )
    return plain
