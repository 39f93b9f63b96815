"""Are the earlier causes of NaN gone, on this model and with these settings? Every check, its
figures, and the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from faults import check_maths, check_training
from faults.bench import Base
from faults.check import Check
from npt.adapters.attach import detach
from npt.adapters.fit import check_fit
from npt.base.load import load_base, read_config
from npt.base.precision import quantization_of
from npt.base.quantization_error import set_matmul_precision
from npt.config import BaseConfig, NPTConfig, TrainConfig
from npt.train.run_setup import check_trainable

CHECKS: tuple[Callable[[Base], Check], ...] = (
    check_maths.bounded,
    check_maths.neutral,
    check_maths.start,
    check_maths.scaled_additive,
    check_maths.normalised,
    check_maths.clipped,
    check_maths.in_fp32,
    check_maths.shared,
    check_training.repeatable,
    check_training.keyed,
    check_training.padding_unseen,
    check_training.padding_uncounted,
    check_training.logged,
    check_training.empty_refused,
    check_training.refused,
    check_training.averaged,
    check_training.safe_mode,
    check_training.watched,
    check_training.smoke_tested,
)


def open_base(base: BaseConfig, adapter: NPTConfig, config: TrainConfig) -> Base:
    """Load the user's base as training would, with the settings to train it with.

    Raises:
        ConfigError: settings that cannot be trained, or that do not fit the model.
        ModelError: no such model, or not a Llama.
    """
    check_trainable(adapter, None)
    check_fit(adapter, read_config(base.model_name))
    model, _ = load_base(
        base.model_name,
        quantization=base.quantization,
        use_fp16=base.use_fp16,
        compute_dtype=base.compute_dtype,
        attn_implementation=base.attn_implementation,
    )
    set_matmul_precision(base.matmul_precision, model)
    return Base(model, adapter, config)


def verify(
    base: Base,
    checks: Sequence[Callable[[Base], Check]] = CHECKS,
    watch: Callable[[Check], None] | None = None,
) -> list[Check]:
    """Run the checks; base tensors and random state are as before afterwards."""
    config = base.config
    # What checks plant must not end a run, and nothing of it is anybody else's to see.
    quiet = replace(
        config,
        eval_steps=None,
        save_steps=None,
        skip_spikes=False,
        max_consecutive_bad=100,
        max_refused_share=1.0,
    )
    untracked = replace(quiet, use_wandb=False, use_tensorboard=False, sample_steps=None)
    chosen = replace(base, config=untracked)
    found = []
    device = next(base.model.parameters()).device
    in_training = [module for module in base.model.modules() if module.training]
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            detach(base.model)
            base.model.eval()
            for check in checks:
                found.append(check(chosen))
                if watch is not None:
                    watch(found[-1])
    finally:
        for module in in_training:
            module.training = True
    return found


def describe(base: Base) -> str:
    """Return a line about the base and the settings of the checks."""
    model, adapter = base.model, base.adapter
    packed = quantization_of(model)
    return (
        f"{model.config._name_or_path}: {'unquantised' if packed is None else packed.upper()} on"
        f" {model.device}; layers {adapter.layers}, rank {adapter.rank}, {adapter.modulation},"
        f" {','.join(adapter.targets)}; strategy {base.config.strategy}"
    )


def summary(checks: Sequence[Check]) -> dict[str, Any]:
    return {
        "checks": [asdict(check) for check in checks],
        "passed": sum(check.passed for check in checks),
        "total": len(checks),
    }


def print_checks(console: Console, checks: Sequence[Check], title: str) -> None:
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("check", overflow="fold", max_width=32)
    table.add_column("figures", overflow="fold")
    table.add_column("passed", no_wrap=True)
    for check in checks:
        table.add_row(
            check.name,
            check.detail,
            Text("yes", style="green") if check.passed else Text("NO", style="red"),
        )
    console.print(table)
    failed = [check for check in checks if not check.passed]
    for check in failed:
        console.print(
            f"failed: {check.name}. Earlier: {check.earlier}. Now: {check.detail}", soft_wrap=True
        )
    console.print(f"passed {len(checks) - len(failed)} of {len(checks)}")
