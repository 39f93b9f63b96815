"""Command-line flags and YAML entries, made from the settings' dataclasses: one list of names,
types and help texts.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import yaml

from npt.config import GROUPS, flag_of, kinds_of
from npt.errors import ConfigError, first_line, kind_of, printable
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
    name: instead
    for names, instead in (
        ("mixed_precision fp16 bf16", "a 4-bit base computes in fp32; see --compute_dtype"),
        ("micro_batch", "npt replay traces the refused ones, or the largest of a refused window"),
        ("optimizer_type", "the optimizer is AdamW, whose moments stay in fp32"),
        ("modulation_scale", "see --additive_scale and --mult_bound"),
        ("log_file", "a run writes metrics.jsonl and events.jsonl into --output_dir"),
        ("behaviour", "npt evaluate --divergence_prompts measures it"),
        ("lm_eval lm_eval_tasks_path lm_eval_limit", "give lm_eval npt.student_view(model)"),
        ("context_length", "--max_length says how many tokens npt evaluate reads at once"),
        ("assisted draft_tokens", "give generate npt.student_view(model) as assistant_model"),
        ("compile", "leave it out: compiling what a converted layer computes gained nothing"),
        ("report_to", "write --use_wandb, --use_tensorboard or neither"),
        ("project wandb_entity wandb_group wandb_tags", "WANDB_PROJECT and the like say it"),
        ("save_strategy eval_strategy evaluation_strategy", "see --save_steps and --eval_steps"),
        ("dataset_mix", "--replay_dataset mixes in a second data set; join more into one file"),
        ("stages", "a run has one --strategy; a second run continues with another by --adapter"),
        ("layer_weights token_weighting", "every layer and every token counts alike"),
        ("smooth_l1_beta cosine_weight jsd_weight", "register_loss adds losses of your own"),
        ("init_a init_std_a init_std_b init_std_m", "a random A has deviation 0.02, B 0.001, M 0"),
        ("rank_budget", "--adapter_rank is the mean of the ranks that a calibrated start gives"),
        ("padding_side", "rows are padded on the right; the side changes nothing"),
        ("max_refused_share", "a run stops when a fifth of its micro-batches was refused"),
        (
            "max_memory",
            "a micro-batch that does not fit is computed again in halves; npt doctor --plan",
        ),
        ("logit_temperature", "the losses on the logits have temperature 1"),
        ("rank_timeout", "a process waits 600 seconds for the others"),
        ("stop_on_divergence", "a ruined run is warned of, and its report says so"),
        ("trace_every", "--trace_steps /100 records every hundredth step"),
        ("spike_sigmas", "--skip_spikes refuses beyond ten robust standard deviations"),
        ("base_precision", "nothing is rounded; a loaded folder's model.dequantize() unpacks it"),
        (
            "sharded",
            "npt pretrain --shard_base compares the shares with the whole base as it starts",
        ),
        ("fidelity message", "the card of a pushed adapter is the one that it was saved with"),
        ("attribution", "npt.evaluate(..., unquantized=base) says what quantisation costs"),
        ("temperature top_p", "npt generate writes the most likely tokens; see npt.student_view"),
        ("undo", "npt.unconsolidate(model) takes updates back; then npt.save_adapter"),
        ("device_map", "--shard_base shares a base that is larger than one GPU among processes"),
        ("help_all", "--help shows every flag"),
        ("sample_steps", "npt generate --compare shows texts, npt report the multipliers"),
    )
    for name in names.split()
}
"""Flags that do not exist, and what to use instead."""


def canonical(name: str, known: Collection[str]) -> str:
    """Return the known flag that a name means, with dashes for underscores or a leading `no_`; else
    the name itself.
    """
    plain = name.replace("-", "_")
    for prefix in ("", "no_"):
        flag = prefix + ALIASES.get(plain.removeprefix(prefix), plain.removeprefix(prefix))
        if plain.startswith(prefix) and flag in known:
            return flag
    return name


def _hint(name: str, known: Collection[str], mark: str = "--") -> str:
    """Return what replaced an unknown flag, or a similar one, as a clause of a message, or ""."""
    plain = name.replace("-", "_")
    if plain in RETIRED:
        return f"; {RETIRED[plain]}"
    near = difflib.get_close_matches(plain, [*known, *ALIASES], n=1)
    return f"; did you mean {mark}{near[0]}?" if near else ""


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and status 2, and that knows other names of its
    flags.
    """

    def __init__(self, *arguments: Any, takes_others: bool = False, **named: Any):
        super().__init__(*arguments, **named)
        # whether flags that it does not know are returned
        self._takes_others = takes_others

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        parsed, left = super().parse_known_args(
            [*map(self._spelled, words[:end]), *words[end:]], namespace
        )
        if left and self._subparsers is None and not self._takes_others:
            flag = left[0].partition("=")[0]
            if not flag.startswith("-"):
                self.error(f"{left[0]!r} belongs to no flag")
            self.error(f"there is no flag {flag}{_hint(flag.lstrip('-'), self._flags())}")
        return parsed, left

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

    def error(self, message: str) -> NoReturn:
        line = printable(message, one_line=True)
        self.exit(2, f"{self.prog}: error: {line} (see {self.prog} --help)\n")


def add_settings(
    parser: argparse.ArgumentParser,
    *classes: type,
    leave_out: Iterable[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Add a flag for every field of the dataclasses; one that is not given stays out of the parsed
    namespace. A boolean one takes an optional value (`--smoke_test false`) and has a negation
    (`--no_smoke_test`). Help texts show the `defaults` by name in place of the fields' own.
    """
    parser.usage = "%(prog)s [flags]"  # argparse would write a screen of them above their texts
    unset: dict[str, Any] = {"default": argparse.SUPPRESS}
    groups: dict[str, Any] = {}
    for cls in classes:
        for f in fields(cls):
            name, choices = flag_of(f), f.metadata["choices"]
            if name in leave_out:
                continue
            title = GROUPS[f.metadata["group"]]
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            kind = kinds_of(cls)[f.name][0]
            how: dict[str, Any] = {"type": _reader(kind), "metavar": kind.__name__.upper()}
            if kind is bool:
                how |= {"nargs": "?", "const": True, "metavar": "BOOL"}
                groups[title].add_argument(
                    f"--no_{name}", dest=name, action="store_false", help=unset["default"], **unset
                )
            elif kind is tuple:
                how["metavar"] = "LIST"
            elif choices:
                how |= {"choices": choices, "metavar": None}
            default = (defaults or {}).get(name, f.default)
            text = f"{f.metadata['help']} (default: {shown_default(default)})"
            groups[title].add_argument(f"--{name}", help=text, **how, **unset)


def read_yaml(
    path: str, classes: Iterable[type], extra: Mapping[str, type] | None = None
) -> dict[str, Any]:
    """Return settings from a YAML mapping of flag names, without dashes, to values: a file's, or
    that of a preset (npt/presets). Allowed are the flags of `classes`, and `extra` ones by type.
    """
    where, file = f"--config {path}", settings_file(path)
    if not file.exists():
        raise ConfigError(
            f"{where} is neither a file nor one of the presets {', '.join(presets())}"
        )
    content = yaml_content(str(file), where)
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{where} holds {kind_of(content)}; write one 'flag_name: value' a line")
    return checked_settings(where, content or {}, classes, extra)


def yaml_content(path: str, where: str) -> Any:
    """Return the content of a YAML file; ConfigError, by the name `where`, if it cannot be read."""
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), _StrictLoader)
    # PyYAML raises others for an impossible date or number, thousands of digits or nested lists
    except (yaml.YAMLError, OSError, ValueError, OverflowError, RecursionError) as error:
        mark, problem = (getattr(error, key, None) for key in ("problem_mark", "problem"))
        line = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise ConfigError(
            f"{where} cannot be read as YAML: {line}{problem or first_line(error)}"
        ) from error


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key twice, of which the last would win, and so lose a setting."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if key.value in seen and isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is given twice; drop one of the two", key.start_mark
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)


def checked_settings(
    where: str,
    content: Mapping[Any, Any],
    classes: Iterable[type],
    extra: Mapping[str, type] | None = None,
) -> dict[str, Any]:
    """Return the settings written in `content` by flag name, each known (see `read_yaml`) and of
    its type; else ConfigError, by the name `where`.
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
                f"{where}: {name} is given twice, once as {written}; drop one of the two"
            )
        settings[name] = _typed(where, name, value, kinds[name])
    return settings


def build(cls: type, given: Mapping[str, Any]) -> Any:
    """Return a settings object from values by flag name, and its defaults for the rest."""
    return cls(**{f.name: given[flag_of(f)] for f in fields(cls) if flag_of(f) in given})


def _typed(where: str, name: str, value: Any, kind: type) -> Any:
    """Return a value of YAML as its flag would give it, from the text that it would be there."""
    if value is None:
        return None
    parts = value if isinstance(value, list) and kind in (str, tuple) else [value]
    whole = kind is int and isinstance(value, float) and value.is_integer()
    if not any(isinstance(part, list | dict) for part in parts):
        try:
            return _reader(kind)(str(int(value)) if whole else ",".join(map(str, parts)))
        except (ValueError, argparse.ArgumentTypeError):
            pass
    expected = "a list" if kind is tuple else kind.__name__
    raise ConfigError(f"{where}: {name} is {value!r}, expected {expected}")


def _reader(kind: type) -> Callable[[str], Any]:
    """Return the function that reads a flag's value; a list stays text, which its setting reads."""
    return _boolean if kind is bool else str if kind is tuple else kind


def _boolean(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("true", "yes", "on", "1"):
        return True
    if lowered in ("false", "no", "off", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def shown_default(value: Any) -> str:
    """Return a default as help texts have it."""
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    return "unset" if value is None else str(value)


def with_safe_mode(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by flag name, with `safe_mode` replaced by the form that it means."""
    plain = {name: value for name, value in given.items() if name != "safe_mode"}
    if not given.get("safe_mode", False):
        return plain
    if given.get("modulation", "additive") != "additive":
        raise ConfigError(
            f"--safe_mode is the additive form, but --modulation is {given['modulation']}; drop one"
            " of the two"
        )
    return {**plain, "modulation": "additive"}
