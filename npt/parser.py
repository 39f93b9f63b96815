"""The parser of command lines. It knows other tools' names of flags, and imports only what
`npt --help` needs.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Collection
from typing import Any, NoReturn

from npt.errors import printable

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


def hint(name: str, known: Collection[str], mark: str = "--") -> str:
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
        self.error(f"there is no flag {flag}{hint(flag.lstrip('-'), self._flags())}")

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
