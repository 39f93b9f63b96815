"""The calibrated start of a run: which samples it is solved on, and where in the data training then
begins.

It is solved on the first samples of the first epoch, and training begins behind them: its first
losses would else be those of tokens that were fitted, half of what later ones are. Where too little
would be left, training begins with them all the same, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from transformers import LlamaForCausalLM

from npt.adapters.attach import at_random_start, attached_config
from npt.calibration.calibrate import calibrate
from npt.calibration.report import Calibration, print_calibration
from npt.config import TrainConfig
from npt.data.batch import Sample
from npt.data.loader import Loader, Position
from npt.data.samples import Samples, within

LEFT_OUT = 0.1
"""Share of what there is to train on that is left out, at most, because the start was solved on it.
"""


def is_solved(model: LlamaForCausalLM) -> bool:
    """Whether a run on this model solves its start: asked for, and nothing was done to the adapters
    yet.
    """
    return attached_config(model).init == "calibrated" and at_random_start(model)


def solved_on(loader: Loader, tokens: int, vocab_size: int) -> tuple[list[Sample], Position]:
    """The samples that a start is solved on, the first ones in the order of the first epoch, and
    the position behind them.

    Held-out samples are never among them, and equal settings and seeds give equal ones.

    Args:
        loader: of the run's samples, but not its own: what is read here is not what the run has
            read.
        tokens: to use, of samples within the vocabulary.
        vocab_size: V.
    """
    found: list[Sample] = []
    position, left = Position(), tokens
    for (sample,), behind in loader.groups(Position(), 1):
        if behind.epoch:
            break
        position = replace(behind, drawn=0, begun=position.begun + (behind.place != position.place))
        for usable in within([sample], vocab_size):
            found.append(usable)
            left -= len(usable.input_ids)
        if left < 2:  # what calibration stops at
            break
    return found, position


def leaves_enough(
    samples: Samples, behind: Position, steps: int | None, config: TrainConfig, window_size: int
) -> bool:
    """Whether a run can begin behind the samples that its start was solved on.

    Args:
        samples: those whose end is an epoch's.
        behind: the position behind them.
        steps: that the run would then have, None where unknown.
        config: of the run; `max_steps` can be kept, or a tenth of the samples is left out at most.
        window_size: micro-batches of a step.
    """
    if not samples.sized:  # a stream is long, if it goes on at all
        return next(samples.walk(0, behind.place), None) is not None
    assert steps is not None
    return steps == config.max_steps or behind.begun <= LEFT_OUT * (
        behind.begun + steps * window_size * config.batch_size
    )


def where_training_begins(position: Position, calibration: Calibration) -> str:
    """What to say of it.

    Args:
        position: that training begins at.
        calibration: of the start.
    """
    if position.begun:
        return f"training begins behind the {position.begun} samples that the start was solved on"
    mean = sum(calibration.nmse.values()) / len(calibration.nmse)
    return (
        "there are too few samples to leave those out that the start was solved on, so the first"
        " losses are those of tokens that were fitted; of tokens that were not the layers' NMSE is"
        f" {mean:.4g}"
    )


def calibrated_start(
    model: LlamaForCausalLM,
    tokenizer: Any,
    samples: Sequence[Sample],
    config: TrainConfig,
    *,
    batch_size: int,
    console: Console,
) -> Calibration | None:
    """Calibrate the attached adapters where their configuration asks for it and nothing has been
    done to them yet.

    Args:
        model: with adapters attached. Adapters that were loaded or calibrated before are left as
            they are.
        tokenizer: of the run.
        samples: from `solved_on`.
        config: `calibration_tokens`, `calibration_inputs`, `calibration_rounds`, `rank_budget`,
            `seed`.
        batch_size: samples at a time.
        console: for estimate, progress and table.
    """
    if not is_solved(model):
        return None
    calibration = calibrate(
        model,
        tokenizer,
        samples,
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
