"""Settings of a run: optimiser, memory, guards and what it writes; `TrainConfig` has them all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from npt.config.field import INT_MAX, POSITIVE, Bound, Settings, at_least, setting
from npt.config.objective import Objective
from npt.config.texts import joined_or_number, parse_bytes, parse_steps
from npt.errors import ConfigError

SCHEDULES = ("cosine", "linear", "constant")
SEED_MAX = INT_MAX
MAX_STEPS = 10_000_000
"""The rates of all steps of a run are kept."""
_LONGEST_WAIT = 1e9  # seconds, which the clocks of all libraries hold
_start = partial(setting, group="start")
_optimiser = partial(setting, group="optimiser")
_memory = partial(setting, group="memory")
_guards = partial(setting, group="guards")
_output = partial(setting, group="output")
_trackers = partial(setting, group="trackers")


@dataclass(frozen=True, kw_only=True)
class Calibration(Settings):
    """The calibrated start."""

    calibration_tokens: int = _start(
        65536,
        "of init calibrated: tokens of the training data that the start is fitted to",
        bound=at_least(1),
    )


@dataclass(frozen=True, kw_only=True)
class Optimiser(Settings):
    """Windows, steps and their rates."""

    batch_size: int = _optimiser(4, "samples of a micro-batch", often=True, bound=at_least(1))
    gradient_accumulation_steps: int = _optimiser(
        1,
        "micro-batches K of a window, that is of one optimizer step",
        often=True,
        bound=at_least(1),
    )
    learning_rate: float = _optimiser(1e-3, "peak learning rate", often=True, bound=POSITIVE)
    weight_decay: float = _optimiser(0.0, "AdamW's decoupled weight decay", bound=at_least(0.0))
    regularization_lambda: float = _optimiser(
        0.0, "weight of the L2 of the modulation", bound=at_least(0.0)
    )
    num_epochs: int = _optimiser(
        1,
        "passes over the data, unless max_steps says how long the run is",
        often=True,
        bound=at_least(1),
    )
    max_steps: int | None = _optimiser(
        None,
        "optimizer steps of the run, whatever num_epochs is: the data begin again as often as that"
        " takes",
        often=True,
        bound=at_least(1, MAX_STEPS),
    )
    warmup_steps: int = _optimiser(0, "steps of linear warm-up", bound=at_least(0, MAX_STEPS))
    scheduler_type: str = _optimiser("cosine", "learning rate after warm-up", choices=SCHEDULES)
    max_grad_norm: float = _optimiser(0.5, "clip the global gradient norm to this", bound=POSITIVE)
    seed: int = _optimiser(0, "seed of initialisation and data order", bound=at_least(0))


@dataclass(frozen=True, kw_only=True)
class Memory(Settings):
    """Memory, speed and how long processes wait for one another."""

    gradient_checkpointing: bool = _memory(
        False,
        "end_to_end only: keep each layer's input alone and compute the layer again in backward;"
        " less memory, the same bits",
    )
    max_memory: str | None = _memory(
        None,
        "peak of tensor memory to stay below, as 10GiB: so many samples are computed at once as are"
        " predicted to fit",
        read=joined_or_number,
    )

    rank_timeout: float = _memory(
        600.0,
        "seconds that one of several processes waits for the others before it gives up",
        bound=Bound(
            lambda value: 0 < value <= _LONGEST_WAIT,
            f"it must be a positive number, at most {_LONGEST_WAIT:g}",
        ),
    )

    def check(self) -> None:
        """Refuse what is no size."""
        _ = self.max_memory_bytes

    @property
    def max_memory_bytes(self) -> int | None:
        """`max_memory` in bytes."""
        return None if self.max_memory is None else parse_bytes(self.max_memory)


@dataclass(frozen=True, kw_only=True)
class Guards(Settings):
    """Refusals, the end of a run after too many, and the recording of tensors."""

    max_consecutive_bad: int = _guards(
        10, "stop after this many refusals in a row", bound=at_least(1)
    )
    skip_spikes: bool = _guards(
        False,
        "refuse finite steps whose loss or gradient norm lies ten robust standard"
        " deviations above the accepted ones",
    )
    stop_on_divergence: bool = _guards(
        False,
        "end a run that is finite and ruined: its loss far above the start, multipliers at their"
        " bounds, or a student worse than its floor; without it they are warnings",
    )
    smoke_test: bool = _guards(
        True, "one batch forward and backward under anomaly detection before the loop"
    )
    trace_steps: str | None = _guards(
        None,
        "steps whose tensors are recorded: a list 1,2,3, a range 1-5, or a mix 1-5,8",
        read=joined_or_number,
    )
    trace_every: int | None = _guards(
        None, "record the tensors of every so many steps", bound=at_least(1)
    )

    def check(self) -> None:
        """Refuse steps that are none."""
        if self.trace_steps is not None:
            parse_steps(self.trace_steps)


@dataclass(frozen=True, kw_only=True)
class Output(Settings):
    """The run folder: what is written, and how often."""

    output_dir: str | None = _output(
        None, "run folder; default a new one below outputs/", often=True
    )
    log_steps: int = _output(10, "steps between metrics lines", often=True, bound=at_least(1))
    eval_steps: int | None = _output(
        None, "steps between evaluations on held-out text", often=True, bound=at_least(1)
    )
    eval_samples: int = _output(64, "held-out samples of an evaluation", bound=at_least(1))
    save_steps: int | None = _output(
        None, "steps between adapter checkpoints", often=True, bound=at_least(1)
    )
    save_total_limit: int | None = _output(
        None, "keep at most this many checkpoints", bound=at_least(1)
    )
    resume: str | None = _output(
        None,
        "auto (the newest good checkpoint below output_dir), a run folder, or one checkpoint",
        often=True,
    )


@dataclass(frozen=True, kw_only=True)
class Tracking(Settings):
    """Trackers, and the name of the run in them."""

    use_wandb: bool = _trackers(False, "log to Weights & Biases", often=True)
    use_tensorboard: bool = _trackers(False, "log to TensorBoard, below the run folder")
    run_name: str | None = _trackers(
        None, "name of the run in Weights & Biases (WANDB_NAME, else its folder's)"
    )


# Of several bases a dataclass takes the fields of the last one first.
@dataclass(frozen=True, kw_only=True)
class TrainConfig(Tracking, Output, Guards, Memory, Optimiser, Calibration, Objective):
    """All settings of the training of adapters, and of the run that does it."""

    def check(self) -> None:
        """Refuse to keep less of a graph that is one layer's."""
        if self.gradient_checkpointing and self.strategy != "end_to_end":
            raise ConfigError(
                f"--gradient_checkpointing with --strategy {self.strategy}, which keeps one layer's"
                " graph at a time, saves nothing; use --strategy end_to_end or drop it"
            )
