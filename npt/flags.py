"""Command-line flags and YAML entries, made from the fields of the settings' dataclasses."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import Field
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn

import yaml

from npt.config import GROUPS, flag_of, flags_of, kinds_of
from npt.config.field import as_text
from npt.errors import ConfigError, first_line, kind_of, printable
from npt.presets import presets, settings_file
from npt.stored import read_bytes, shown

YAML_BYTES = 1 << 20
"""Size limit of YAML files. PyYAML takes seconds for a megabyte."""

_TAGS = "tag:yaml.org,2002:"
_NOT_AS_WRITTEN = re.compile(r"[-+]?(0[0-9_bx]|[0-9].*:|[0-9_]{20})")

ALIASES = {
    "model_name_or_path": "model_name",
    "base_model": "model_name",
    "dataset": "dataset_name",
    "max_seq_length": "max_length",
    "load_in_4bit": "use_quantization",
    "bnb_4bit_quant_type": "quant_type",
    "lr": "learning_rate",
    "per_device_train_batch_size": "batch_size",
    "num_train_epochs": "num_epochs",
    "lr_scheduler_type": "scheduler_type",
    "logging_steps": "log_steps",
    "resume_from_checkpoint": "resume",
    "output": "output_dir",
}
"""Other names of flags, from scripts of transformers and PEFT."""
_OWN_NAMES = {**ALIASES, **{f"no_{other}": f"no_{name}" for other, name in ALIASES.items()}}

_ELSEWHERE = """
mixed_precision fp16 bf16: use --use_fp16 (unquantised base) or --compute_dtype (4-bit base)
optimizer_type: the optimizer is always AdamW, with fp32 moments
modulation_scale: use --additive_scale and --mult_bound
log_file: a run writes metrics.jsonl and events.jsonl to --output_dir
report_to: use --use_wandb, --use_tensorboard or neither
project wandb_entity wandb_group wandb_tags: set WANDB_PROJECT, WANDB_ENTITY etc.
save_strategy eval_strategy evaluation_strategy: use --save_steps and --eval_steps
padding_side: remove it; rows are padded on the right, which changes no result
lm_eval: pass npt.student_view(model) to lm_eval
temperature top_p: npt generate writes the most likely tokens; sample with npt.student_view
max_memory: use npt doctor --plan; a micro-batch that does not fit is computed in halves
device_map: use --shard_base to share a base larger than one GPU among processes
"""
REPLACED: dict[str, str] = {}
"""Flags of the original scripts and of transformers' that do not exist, and what to use instead."""

for _line in _ELSEWHERE.strip().splitlines():
    _names, _, _remedy = _line.partition(": ")
    REPLACED |= dict.fromkeys(_names.split(), _remedy)

_OF_OTHER_VERBS = {
    "seed": "remove it; this verb draws no random numbers",
    "device": "set NPT_DEVICE=cpu or NPT_DEVICE=cuda",
}
"""Flags of some verbs, and what to use with the others."""
_INSTEAD = REPLACED | _OF_OTHER_VERBS


def canonical(name: str, known: Collection[str]) -> str:
    """Return the known flag that a name stands for, with dashes for underscores or a leading `no_`;
    else the name itself.
    """
    plain = _plain(name)
    flag = _OWN_NAMES.get(plain, plain)
    return flag if flag in known else name


def _plain(name: str) -> str:
    return name.replace("-", "_")


def _hint(name: str, known: Collection[str], mark: str = "--") -> str:
    """Return what replaced an unknown name, or a similar name, as the end of a message, or ""."""
    plain = _plain(name)
    if plain in _INSTEAD:
        return f": {_INSTEAD[plain]}"
    near = difflib.get_close_matches(plain, [*known, *ALIASES], n=1)
    return f": did you mean {mark}{near[0]}?" if near else ""


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that knows other names of its flags and prints an error as one line. With
    `takes_others` it leaves unknown flags to its caller or to the parsers of its verbs.
    """

    def __init__(self, *arguments: Any, takes_others: bool = False, **named: Any):
        super().__init__(*arguments, **named)
        self._takes_others = takes_others
        self._replaced = {} if takes_others else _INSTEAD

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        for word in words:
            self._check_text(word)
        end = [*words, "--"].index("--")
        words[:end] = map(self._spelled, words[:end])
        parsed, left = super().parse_known_args(words, namespace)
        if left and not self._takes_others:
            self._refuse(left[0])
        return parsed, left

    def _refuse(self, word: str) -> NoReturn:
        flag = word.partition("=")[0]
        if not flag.startswith("-"):
            self.error(f"{word!r} does not belong to any flag")
        self.error(f"there is no flag {flag}{_hint(flag.lstrip('-'), self._flags())}")

    def _check_text(self, word: str) -> None:
        """Refuse an argument that is not text: libraries cannot open such a path, or split it into
        tokens, and a run would find that out at its end.
        """
        try:
            word.encode()
        except UnicodeEncodeError:
            encoding = sys.getfilesystemencoding()
            remedy = "rename the file, or type the text as UTF-8"
            if encoding != "utf-8":
                remedy = "set PYTHONUTF8=1"
            self.error(f"the argument {word!r} is not {encoding.upper()} text: {remedy}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            hint = f"choose from {', '.join(action.choices)}"
            near = difflib.get_close_matches(value, action.choices, n=1)
            if near:
                hint = f"did you mean {near[0]}?"
            self.error(f"there is no verb {value}: {hint}")
        super()._check_value(action, value)

    def _flags(self) -> list[str]:
        return [name[2:] for name in self._option_string_actions if name.startswith("--")]

    def _spelled(self, argument: str) -> str:
        """Return an argument, with a flag's other name replaced by its own. Refuse a flag that was
        replaced before argparse misses another, as a required one.
        """
        if not argument.startswith("--"):
            return argument
        known = self._flags()
        written, equals, value = argument[2:].partition("=")
        name = canonical(written, known)
        if name not in known and _plain(name) in self._replaced:
            self._refuse(f"--{name}")
        return f"--{name}{equals}{value}"

    def error(self, message: str) -> NoReturn:
        line = printable(message, one_line=True)
        self.exit(2, f"{self.prog}: error: {line} (see {self.prog} --help)\n")


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
                f"{where}: there is no setting {written!r}{_hint(str(written), kinds, mark='')}"
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
