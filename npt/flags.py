"""Command-line flags and YAML entries, made from the fields of the settings' dataclasses."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, NoReturn

import yaml

from npt.config import GROUPS, flag_of, kinds_of
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

_ELSEWHERE = """
mixed_precision fp16 bf16: use --use_fp16 (unquantised base) or --compute_dtype (4-bit base)
optimizer_type: the optimizer is always AdamW, with fp32 moments
modulation_scale: use --additive_scale and --mult_bound
log_file: a run writes metrics.jsonl and events.jsonl to --output_dir
report_to: use --use_wandb, --use_tensorboard or neither
project wandb_entity wandb_group wandb_tags: set WANDB_PROJECT, WANDB_ENTITY etc.
save_strategy eval_strategy evaluation_strategy: use --save_steps and --eval_steps
layer_weights: layers weigh alike; use --logit_kl_weight, whose loss weighs them by their effect
token_weighting: tokens weigh alike; npt collect finds prompts with disagreement, to train on
padding_side: remove it; rows are padded on the right, which changes no result
lm_eval lm_eval_tasks_path lm_eval_limit: pass npt.student_view(model) to lm_eval
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
    plain = name.replace("-", "_")
    for prefix in ("", "no_"):
        flag = prefix + ALIASES.get(plain.removeprefix(prefix), plain.removeprefix(prefix))
        if plain.startswith(prefix) and flag in known:
            return flag
    return name


def _hint(name: str, known: Collection[str], mark: str = "--") -> str:
    """Return what replaced an unknown name, or a similar name, as the end of a message, or ""."""
    plain = name.replace("-", "_")
    if plain in _INSTEAD:
        return f": {_INSTEAD[plain]}"
    near = difflib.get_close_matches(plain, [*known, *ALIASES], n=1)
    return f": did you mean {mark}{near[0]}?" if near else ""


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that knows other names of its flags and prints an error as one line. With
    `takes_others` it returns unknown flags instead of refusing them.
    """

    def __init__(self, *arguments: Any, takes_others: bool = False, **named: Any):
        super().__init__(*arguments, **named)
        self._takes_others = takes_others

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        for word in words:
            self._check_text(word)
        end = words.index("--") if "--" in words else len(words)
        words = [*map(self._spelled, words[:end]), *words[end:]]
        if self._subparsers is not None or self._takes_others:
            return super().parse_known_args(words, namespace)
        # first: what argparse misses, as a required flag, is of no use beside it
        self._refuse_retired(words[:end])
        parsed, left = super().parse_known_args(words, namespace)
        if left:
            flag = left[0].partition("=")[0]
            if not flag.startswith("-"):
                self.error(f"{left[0]!r} does not belong to any flag")
            self._refuse(flag)
        return parsed, left

    def _refuse_retired(self, words: Iterable[str]) -> None:
        known = self._flags()
        for word in words:
            if not word.startswith("--"):
                continue
            name = word[2:].partition("=")[0]
            if name not in known and name.replace("-", "_") in _INSTEAD:
                self._refuse(f"--{name}")

    def _refuse(self, flag: str) -> NoReturn:
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
        """Return an argument, with a flag's other name replaced by its own."""
        if not argument.startswith("--"):
            return argument
        name, equals, value = argument[2:].partition("=")
        return f"--{canonical(name, self._flags())}{equals}{value}"

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
    usage = ["%(prog)s"]
    for action in parser._actions:
        if action.required and action.option_strings:
            usage.append(f"{action.option_strings[0]} {action.metavar}")
    parser.usage = " ".join([*usage, "[flags]"])
    groups: dict[str, Any] = {}
    for cls in classes:
        for f in fields(cls):
            name = flag_of(f)
            if name in leave_out:
                continue
            title = GROUPS[f.metadata["group"]]
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            kind = kinds_of(cls)[f.name][0]
            _add_setting(groups[title], f, kind, (defaults or {}).get(name, f.default))


def _add_setting(group: Any, f: Field[Any], kind: type, default: Any) -> None:
    name = flag_of(f)
    unset: Any = argparse.SUPPRESS
    how: dict[str, Any] = {"type": _reader(kind), "metavar": kind.__name__.upper()}
    if kind is bool:
        how |= {"nargs": "?", "const": True, "metavar": "BOOL"}
        group.add_argument(
            f"--no_{name}", dest=name, action="store_false", help=unset, default=unset
        )
    elif kind is tuple:
        how["metavar"] = "LIST"
    elif f.metadata["choices"]:
        how |= {"choices": f.metadata["choices"], "metavar": None}
    text = f.metadata["help"]
    need = f.metadata["need"]
    if need is not None:
        text += f"; needs {need.words}"
    if default is not None:
        text += f" (default: {shown_default(default)})"
    group.add_argument(f"--{name}", help=text, default=unset, **how)


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
    if content is not None and not isinstance(content, dict):
        raise ConfigError(
            f"{where} holds {kind_of(content)}: write one 'flag_name: value' per line"
        )
    return checked_settings(where, content or {}, classes, extra)


def yaml_content(path: str, where: str) -> Any:
    """Return the content of a YAML file; ConfigError, by the name `where`, if it is not YAML, or
    has an alias, a tag or a key that is not text.
    """
    try:
        # PyYAML decodes the bytes: PowerShell writes UTF-16
        return yaml.load(read_bytes(Path(path), YAML_BYTES), _StrictLoader)
    # PyYAML raises errors of Python's for huge numbers and deep nesting
    except (yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        problem = getattr(error, "problem", None) or getattr(error, "strerror", None)
        problem = problem or first_line(error)
        if isinstance(error, yaml.reader.ReaderError):
            problem += "; save it as UTF-8"
        mark = getattr(error, "problem_mark", None)
        if mark is not None:
            problem = f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
        fault = "cannot be read" if isinstance(error, OSError) else "is not valid YAML"
        raise ConfigError(f"{where} {fault}: {problem}") from error


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


def checked_settings(
    where: str,
    content: Mapping[Any, Any],
    classes: Iterable[type],
    extra: Mapping[str, type] | None = None,
) -> dict[str, Any]:
    """Return the settings in `content` by flag name, converted to their types (see `read_yaml`).
    ConfigError, by the name `where`, for an unknown name or a value of another type.
    """
    kinds: dict[str, type] = dict(extra or {})
    for cls in classes:
        kinds |= {flag_of(f): kinds_of(cls)[f.name][0] for f in fields(cls)}
    settings: dict[str, Any] = {}
    for written, value in content.items():
        name = canonical(str(written), kinds)
        if name not in kinds:
            raise ConfigError(
                f"{where}: there is no setting {written!r}{_hint(str(written), kinds, mark='')}"
            )
        if name in settings:
            raise ConfigError(
                f"{where}: {name} is given twice, once as {written}: remove one of them"
            )
        settings[name] = _typed(where, name, value, kinds[name])
    return settings


def build(cls: type, given: Mapping[str, Any]) -> Any:
    """Return a settings object from values by flag name, with defaults for the rest."""
    return cls(**{f.name: given[flag_of(f)] for f in fields(cls) if flag_of(f) in given})


def _typed(where: str, name: str, value: Any, kind: type) -> Any:
    """Return a YAML value as its flag would parse it from text."""
    if value is None:
        return None
    parts = value if isinstance(value, list) and kind in (str, tuple) else [value]
    # a bare `no` is not text in YAML
    odd = (list, dict) if kind is bool else (list, dict, bool)
    if not any(isinstance(part, odd) for part in parts):
        text = ",".join(map(str, parts))
        # 1e5 is a float in YAML
        if kind is int and isinstance(value, float) and value.is_integer():
            text = str(int(value))
        try:
            text.encode()  # an escape of YAML's can write half a character
            return _reader(kind)(text)
        except (ValueError, argparse.ArgumentTypeError):
            pass
    expected = "a list" if kind is tuple else kind.__name__
    if kind is str and isinstance(value, bool):
        expected += ": leave the line out, or put text in quotes"
    raise ConfigError(f"{where}: {name} is {shown(value)}; expected {expected}")


def _reader(kind: type) -> Callable[[str], Any]:
    """Return the function that parses a flag's value. A list stays text; its setting parses it."""
    if kind is bool:
        return _boolean
    return str if kind is tuple else kind


def _boolean(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("true", "yes", "on", "1"):
        return True
    if lowered in ("false", "no", "off", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def shown_default(value: Any) -> str:
    """Return a default as help texts show it."""
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    return "unset" if value is None else str(value)


def with_safe_mode(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by flag name, with `safe_mode` replaced by `modulation: additive`."""
    plain = {name: value for name, value in given.items() if name != "safe_mode"}
    if not given.get("safe_mode", False):
        return plain
    if given.get("modulation", "additive") != "additive":
        raise ConfigError(
            f"--safe_mode means --modulation additive, but --modulation is {given['modulation']}:"
            " remove one of them"
        )
    return {**plain, "modulation": "additive"}
