"""Stages: the strategies of a run one after the other, each for its share of the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from npt.config import TrainConfig
from npt.errors import ConfigError


@dataclass(frozen=True)
class Stage:
    """What drives the student from `start` applied steps on. config: the run's settings as they are
    for this strategy.
    """

    start: int
    config: TrainConfig


def stages_of(config: TrainConfig, total_steps: int | None) -> tuple[Stage, ...]:
    """The stages of a run.

    A stage begins where the shares before it end, to the nearest step, so that what a run does at a
    step depends on nothing but settings and length: one that is resumed goes on in the same stage.

    Args:
        config: the run's settings.
        total_steps: its optimizer steps, where they are known.

    Raises:
        ConfigError: shares of an unknown number of steps, or so few steps that a stage has none.
    """
    shares = config.stage_shares
    if len(shares) == 1:
        return (Stage(0, config.in_stage(shares[0][0])),)
    if total_steps is None:
        raise ConfigError(
            f"--stages {config.stages} shares out the steps, but the length of the stream is"
            " unknown; give --max_steps"
        )
    stages, passed = [], 0.0
    for name, share in shares:
        stages.append(Stage(round(passed * total_steps), config.in_stage(name)))
        passed += share
    for stage, end in zip(
        stages, [*(later.start for later in stages[1:]), total_steps], strict=True
    ):
        if stage.start >= end and total_steps > 0:
            raise ConfigError(
                f"--stages {config.stages} leaves {stage.config.strategy} none of {total_steps}"
                " steps; raise --max_steps or its share"
            )
    return tuple(stages)


def stage_at(stages: Sequence[Stage], steps: int) -> Stage:
    """The stage of the step behind `steps` applied ones."""
    return max((stage for stage in stages if stage.start <= steps), key=lambda stage: stage.start)
