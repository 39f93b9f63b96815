"""The calibrated start of a run: which data it is solved on, and when it is left out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from transformers import LlamaForCausalLM

from npt.adapters.attach import at_random_start, attached_config
from npt.calibration.calibrate import calibrate
from npt.calibration.report import Calibration, print_calibration
from npt.config import DataConfig, TrainConfig
from npt.data.samples import Samples
from npt.data.source import Record


def calibrated_start(
    model: LlamaForCausalLM,
    tokenizer: Any,
    data: Iterable[Record],
    config: TrainConfig,
    data_config: DataConfig,
    *,
    hold_out: bool,
    batch_size: int,
    console: Console,
) -> Calibration | None:
    """Calibrate the attached adapters where their configuration asks for it and nothing has been done to them yet.

    The tokens are the first of the run's own samples in the order of its first epoch: held-out samples are never among them, and
    equal settings and seeds give equal adapters.

    Args:
        model: with adapters attached. Adapters that were loaded or calibrated before are left as they are.
        tokenizer, data, data_config: of the run.
        config: `calibration_tokens`, `calibration_inputs`, `calibration_rounds`, `rank_budget`, `seed`.
        hold_out: whether the run leaves out one sample in twenty of its data.
        batch_size: samples at a time.
        console: for estimate, progress and table.
    """
    if attached_config(model).init != "calibrated" or not at_random_start(model):
        return None
    samples = Samples(data, tokenizer, data_config, seed=config.seed, hold_out=hold_out)
    calibration = calibrate(
        model,
        tokenizer,
        samples.epoch(0),
        config.calibration_tokens,
        inputs=config.calibration_inputs,
        rounds=config.calibration_rounds,
        rank_budget=config.rank_budget,
        batch_size=batch_size,
        seed=config.seed,
        console=console,
    )
    print_calibration(calibration, console)
    return calibration
