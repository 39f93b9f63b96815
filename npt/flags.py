"""Command-line flags and YAML entries, made from the settings' dataclasses: one list of names,
types and help texts.
"""

from __future__ import annotations

import argparse
import difflib
import sys
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, NoReturn

import yaml

from npt.config import GROUPS, flag_of, hints_of
from npt.console import put
from npt.errors import ConfigError, kind_of, printable
from npt.presets import presets, settings_file

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
"""A flag by each of its other names: those of transformers' and PEFT's scripts, and old ones."""

RETIRED = {
    "mixed_precision": (
        "a 4-bit base computes in fp32, or its products in bf16 (--compute_dtype bf16); --use_fp16"
        " is for unquantised ones"
    ),
    "optimizer_type": "the optimizer is AdamW, whose moments stay in fp32",
    "modulation_scale": (
        "--additive_scale scales the additive term, --mult_bound bounds the multiplicative one"
    ),
    "log_file": "a run writes metrics.jsonl and events.jsonl into --output_dir",
    "fp16": "--use_fp16 computes an unquantised base in fp16; a 4-bit base computes in fp32",
    "bf16": (
        "--compute_dtype bf16 rounds the products of a 4-bit base to bf16; all else computes in"
        " fp32"
    ),
    "behaviour": (
        "npt collect counts the prompts after which greedy texts part, npt generate --compare shows"
        " both texts, and npt evaluate --lm_eval measures long contexts"
    ),
    "context_length": "--max_length says how many tokens npt evaluate reads at once",
    "assisted": "give transformers' generate npt.student_view(model) as assistant_model",
    "draft_tokens": "give transformers' generate npt.student_view(model) as assistant_model",
    "compile": "leave it out: compiling what a converted layer computes gained nothing",
    "report_to": "write --use_wandb, --use_tensorboard or neither",
    "project": "WANDB_PROJECT names it",
    "wandb_entity": "WANDB_ENTITY names it",
    "wandb_group": "WANDB_RUN_GROUP names it",
    "wandb_tags": "WANDB_TAGS names them",
    "save_strategy": "--save_steps says how often",
    "eval_strategy": "--eval_steps says how often",
    "evaluation_strategy": "--eval_steps says how often",
    "smooth_l1_beta": "the loss smooth_l1 is squared up to 1",
    "cosine_weight": "the loss cosine is half NMSE, half 1 - cos",
    "jsd_weight": "the loss jsd is of the even mixture",
    "layer_weights": "every layer counts alike",
    "token_weighting": "every token counts alike",
    "stages": "a run has one --strategy; a second run continues with another by --adapter",
    "max_refused_share": "a run stops when more than a fifth of its micro-batches was refused",
    "spike_sigmas": "--skip_spikes refuses beyond ten robust standard deviations",
    "sample_steps": "npt generate --compare shows texts, the report multipliers at their bounds",
    "rank_budget": "--adapter_rank is the mean of the ranks that a calibrated start gives out",
    "init_std_a": "A starts with standard deviation 0.02",
    "init_std_b": "B starts with standard deviation 0.001",
    "init_std_m": "M starts at 0",
    "init_a": "A starts normal, with standard deviation 0.02",
    "padding_side": "rows are padded on the right; the side changes nothing",
    "dataset_mix": "--replay_dataset mixes in a second data set; write more of them into one file",
}
"""Flags that do not exist, and what to use instead."""


_RARE = "npt_rare"
"""The mark of a flag that few runs need."""


def canonical(name: str, known: Collection[str]) -> str:
    """Return the known flag that a name means (without leading dashes), else the name itself.

    Dashes within a name mean underscores, and a leading `no_` negates.
    """
    plain = name.replace("-", "_")
    for prefix in ("", "no_"):
        if plain.startswith(prefix):
            found = prefix + ALIASES.get(plain.removeprefix(prefix), plain.removeprefix(prefix))
            if found in known:
                return found
    return name


def _hint(name: str, known: Collection[str], mark: str = "--") -> str:
    """Return an addition to a message about an unknown flag: a similar flag, or what replaced it;
    or nothing.
    """
    plain = name.replace("-", "_")
    if plain in RETIRED:
        return f"; {RETIRED[plain]}"
    near = difflib.get_close_matches(plain, [*known, *ALIASES], n=1)
    return f"; did you mean {mark}{near[0]}?" if near else ""


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and status 2; that knows other names of its
    flags, and whose `--help` leaves out those that few runs need, which `--help_all` shows.
    """

    def __init__(self, *arguments: Any, takes_others: bool = False, **named: Any):
        super().__init__(*arguments, **named)
        # whether flags that it does not know are returned
        self._takes_others = takes_others

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
        """Return an argument, a flag by its own name."""
        if not argument.startswith("--"):
            return argument
        name, equals, value = argument[2:].partition("=")
        return f"--{canonical(name, self._flags())}{equals}{value}"

    def _unknown(self, argument: str) -> str:
        if not argument.startswith("-"):
            return f"{argument!r} belongs to no flag"
        flag = argument.partition("=")[0]
        return f"there is no flag {flag}{_hint(flag.lstrip('-'), self._flags())}"

    def format_help(self, *, rare_too: bool = False) -> str:
        rare = [
            action
            for action in self._actions
            if getattr(action, _RARE, False) and action.help != argparse.SUPPRESS
        ]
        if not rare or rare_too:
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

    def error(self, message: str) -> NoReturn:
        line = printable(message, one_line=True)
        self.exit(2, f"{self.prog}: error: {line} (see {self.prog} --help)\n")


class _HelpAll(argparse.Action):
    def __call__(self, parser: Any, *_: Any) -> None:
        put(parser.format_help(rare_too=True), end="")
        parser.exit()


def add_settings(
    parser: argparse.ArgumentParser, *classes: type, leave_out: Iterable[str] = ()
) -> None:
    """Add a flag for every field of the dataclasses; one that is not given stays out of the parsed
    namespace. A boolean one takes an optional value (`--smoke_test false`) and has a negation
    (`--no_smoke_test`).
    """
    groups: dict[str, Any] = {}
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
            if flag_of(f) in leave_out:
                continue
            title = GROUPS[f.metadata["group"]]
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            _add_setting(groups[title], f, plain_type(hints[f.name]))


def _add_setting(group: Any, f: Field[Any], kind: type) -> None:
    name, choices = flag_of(f), f.metadata.get("choices")
    how: dict[str, Any] = {
        "help": f"{f.metadata.get('help', '')} (default: {shown_default(f.default)})"
    }
    if kind is bool:
        how |= {"nargs": "?", "const": True, "type": _boolean, "metavar": "BOOL"}
    elif kind is tuple:
        how["metavar"] = "LIST"
    elif choices:
        how |= {"type": kind, "choices": choices}
    else:
        how |= {"type": kind, "metavar": kind.__name__.upper()}
    action = group.add_argument(f"--{name}", default=argparse.SUPPRESS, **how)
    setattr(action, _RARE, is_rare(f))
    if kind is bool:
        group.add_argument(
            f"--no_{name}",
            dest=name,
            action="store_false",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


def read_yaml(
    path: str, classes: Iterable[type], extra: Mapping[str, type] | None = None
) -> dict[str, Any]:
    """Return settings from a YAML mapping of flag names, without dashes, to values.

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
    """Return the content of a YAML file, which messages call `where`.

    Raises:
        ConfigError: unreadable, not YAML, a key twice in one mapping, or an alias.
    """
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), _StrictLoader)
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
    except (ValueError, OverflowError, RecursionError) as error:
        # out of PyYAML: an impossible date or number, thousands of digits, of nested lists
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(f"{where} holds a value that cannot be read: {reason}") from error


class _StrictLoader(yaml.SafeLoader):
    """Refuses what loses or multiplies settings: a key twice, of which the last would win, and
    aliases, of which ten lines can make a list of a billion entries.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(
                None, None, f"*{event.anchor} is an alias; write the value itself", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None,
                        None,
                        f"{key.value} is given twice; drop one of the two",
                        key.start_mark,
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def checked_settings(
    where: str,
    content: Mapping[Any, Any],
    classes: Iterable[type],
    extra: Mapping[str, type] | None = None,
) -> dict[str, Any]:
    """Return settings by flag name, each known and of its type.

    Args:
        where: they were written, for messages.
        content: as it was written.
        classes, extra: as for `read_yaml`.

    Raises:
        ConfigError: an unknown name, or a value of another type.
    """
    kinds: dict[str, type] = dict(extra or {})
    for cls in classes:
        hints = hints_of(cls)
        kinds |= {flag_of(f): plain_type(hints[f.name]) for f in fields(cls)}
    settings: dict[str, Any] = {}
    for written, value in content.items():
        name = canonical(str(written), kinds)
        if name not in kinds:
            raise ConfigError(
                f"{where}: there is no setting {written!r}{_hint(str(written), kinds, mark='')}"
            )
        if name in settings:
            raise ConfigError(
                f"{where}: {name} is given twice, once as {written}; drop one of the two"
            )
        settings[name] = _typed(where, name, value, kinds[name])
    return settings


def build(cls: type, given: Mapping[str, Any]) -> Any:
    """Return a settings object from values by flag name, and its defaults for the rest."""
    return cls(**{f.name: given[flag_of(f)] for f in fields(cls) if flag_of(f) in given})


def _typed(where: str, name: str, value: Any, kind: type) -> Any:
    if value is None:
        return None
    nested = isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(item, dict | list) for item in value)
    )
    try:
        if kind is tuple:
            return tuple(value) if isinstance(value, list) else str(value)
        if kind is bool:
            return value if isinstance(value, bool) else _boolean(str(value))
        if kind is str and not nested:  # layers: [3, 5]
            return ",".join(map(str, value)) if isinstance(value, list) else str(value)
        if kind in (int, float) and not isinstance(value, bool):
            number = kind(value)
            if isinstance(value, str | kind) or number == value:
                return number
    # a whole number that is infinite overflows
    except (ValueError, TypeError, OverflowError, argparse.ArgumentTypeError):
        pass
    expected = "a list" if kind is tuple else kind.__name__
    raise ConfigError(f"{where}: {name} is {value!r}, expected {expected}")


def plain_type(hint: Any) -> type:
    """Return int of `int | None`, tuple of `tuple[str, ...]`."""
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


def is_rare(f: Field[Any]) -> bool:
    """Return whether only `--help_all` shows a field's flag."""
    return not f.metadata["often"]


def shown_default(value: Any) -> str:
    """Return a default as help texts have it."""
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    return "unset" if value is None else str(value)


def with_safe_mode(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by flag name, with `safe_mode` replaced by the form that it means.

    Raises:
        ConfigError: another form is asked for too.
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
