"""Weights & Biases and TensorBoard, through accelerate's trackers. They are shown the figures and can change nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from npt.config import TrainConfig
from npt.errors import ConfigError
from npt.extras import require


def check_trackers(config: TrainConfig) -> list[str]:
    """Return the names of the trackers that the configuration asks for.

    Raises:
        ConfigError: one of them is not installed. Accelerate would leave it out and track nothing.
    """
    chosen = [name for name, wanted in (("wandb", config.use_wandb), ("tensorboard", config.use_tensorboard)) if wanted]
    for name in chosen:
        require(name, f"--use_{name}")
    return chosen


class Trackers:
    """`log` sends finite numbers to every tracker that the configuration asks for; without any it does nothing.

    Args:
        config: which ones, and the run's name.
        folder: the run's.
        resolved: settings to show beside the figures.
        wandb_run: what Weights & Biases is to know the run by; one that it knows is gone on with.
        wandb_group: runs that Weights & Biases shows together.
        resume_at: the step that the run in this folder goes on from. TensorBoard forgets what it has of later ones; Weights & Biases
            keeps the figures that it had first, which differ from those to come only where settings were changed.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        resolved: dict[str, Any],
        *,
        wandb_run: str | None = None,
        resume_at: int | None = None,
        wandb_group: str | None = None,
    ):
        chosen = check_trackers(config)
        self._accelerator = None
        if not chosen:
            return
        from accelerate import Accelerator

        self._accelerator = Accelerator(log_with=chosen, project_dir=str(folder))
        options: dict[str, dict[str, Any]] = {}
        if config.use_wandb:
            options["wandb"] = {"name": config.run_name or folder.name, "dir": str(folder), "id": wandb_run, "resume": "allow"}
            options["wandb"] |= {} if wandb_group is None else {"group": wandb_group}
        if config.use_tensorboard and resume_at is not None:
            options["tensorboard"] = {"purge_step": resume_at + 1}
        plain = {k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in resolved.items()}
        try:
            self._accelerator.init_trackers("npt", config=plain, init_kwargs=options)
        except Exception as error:  # each tracker has classes of its own
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            remedy = "log in first (wandb login), set WANDB_MODE=offline, or leave the tracker out"
            raise ConfigError(f"{' or '.join(chosen)} cannot be started: {reason[:200]}; {remedy}") from error

    def log(self, values: dict[str, Any], step: int) -> None:
        """Numbers at `step`; None and non-finite values are left out, which every tracker can draw."""
        if self._accelerator is not None:
            numbers = {k: v for k, v in values.items() if isinstance(v, int | float) and math.isfinite(v)}
            self._accelerator.log(numbers, step=step)

    def close(self) -> None:
        if self._accelerator is not None:
            for tracker in self._accelerator.trackers:  # accelerate's own ending takes the run's process group along
                tracker.finish()
