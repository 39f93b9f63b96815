"""Stages: the strategies of a run one after the other, each for its share of the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from npt.config import TrainConfig
from npt.errors import ConfigError


@dataclass(frozen=True)
class Stage:
    """A strategy from `start` applied steps on. config: the run's settings for this strategy."""

    start: int
    config: TrainConfig


def stages_of(config: TrainConfig, total_steps: int | None) -> tuple[Stage, ...]:
    """Return the stages of a run.

    A stage begins where the shares before it end, to the nearest step, so that the stage of a step
    depends on nothing but settings and length: a resumed run continues in the same stage.

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
    ends = [*(later.start for later in stages[1:]), total_steps]
    for stage, end in zip(stages, ends, strict=True):
        if stage.start >= end and total_steps > 0:
            raise ConfigError(
                f"--stages {config.stages} leaves {stage.config.strategy} none of {total_steps}"
                " steps; raise --max_steps or its share"
            )
    return tuple(stages)


def stage_at(stages: Sequence[Stage], steps: int) -> Stage:
    """Return the stage of the step after `steps` applied ones."""
    return max((stage for stage in stages if stage.start <= steps), key=lambda stage: stage.start)
