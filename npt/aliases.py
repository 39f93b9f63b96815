"""Other names of flags: those of transformers' and PEFT's scripts, which fingers type, and those
that this toolkit once had.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

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
"""A flag by each of its other names."""

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
    "save_strategy": "--save_steps says how often",
    "eval_strategy": "--eval_steps says how often",
    "evaluation_strategy": "--eval_steps says how often",
}
"""Of flags that there are not, what there is."""


def canonical(name: str, known: Collection[str]) -> str:
    """The known flag that a name means, without dashes in front; the name itself where it means
    none.

    Args:
        name: as it was written; dashes within it stand for underscores, and `no_` in front negates.
        known: names of flags.
    """
    plain = name.replace("-", "_")
    for prefix in ("", "no_"):
        if plain.startswith(prefix):
            found = prefix + ALIASES.get(plain.removeprefix(prefix), plain.removeprefix(prefix))
            if found in known:
                return found
    return name


def hint(name: str, known: Collection[str], mark: str = "--") -> str:
    """What to add to a message about an unknown flag: `; did you mean --rank?`, or what there is in
    its place; or nothing.

    Args:
        name: as it was written, without dashes in front.
        known: names of flags.
        mark: in front of a name.
    """
    plain = name.replace("-", "_")
    if plain in RETIRED:
        return f"; {RETIRED[plain]}"
    near = difflib.get_close_matches(plain, [*known, *ALIASES], n=1)
    return f"; did you mean {mark}{near[0]}?" if near else ""
