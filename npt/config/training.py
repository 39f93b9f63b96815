"""Settings of a run: what the student learns, optimiser, memory, guards and what is written."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from npt.config.field import (
    INT_MAX,
    POSITIVE,
    Need,
    SettingsGroup,
    as_text,
    at_least,
    parse_steps,
    setting,
)
from npt.errors import ConfigError

STRATEGIES = ["local", "propagated", "end_to_end"]
"""`register_strategy` adds to them."""
LOSSES = ["nmse", "nmse_update", "direction"]
"""`register_loss` adds to them."""
LOGIT_LOSSES = ("kl", "reverse_kl", "cross_entropy")
SCHEDULES = ("cosine", "linear", "constant")
SEED_MAX = INT_MAX
MAX_STEPS = 10_000_000
"""The rates of all steps of a run are kept."""

_objective = partial(setting, group="objective")
_optimiser = partial(setting, group="optimiser")
_guards = partial(setting, group="guards")
_output = partial(setting, group="output")
_COUNT = at_least(1)
_WHOLE = Need(lambda c: c.strategy == "end_to_end", "--strategy end_to_end")
_HIDDEN = Need(lambda c: c.hidden_weight > 0, "a --hidden_weight above 0")
_LOGITS = Need(lambda c: c.logit_kl_weight > 0, "a --logit_kl_weight above 0")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(SettingsGroup):
    """All settings of the training of adapters, and of the run that does it."""

    strategy: str = _objective("local", "how the student is driven", choices=STRATEGIES)
    loss: str = _objective(
        "nmse", "hidden-state loss per valid token", choices=LOSSES, need=_HIDDEN
    )
    hidden_weight: float = _objective(
        1.0, "weight of the loss on hidden states; 0: logits alone", bound=at_least(0.0)
    )
    logit_kl_weight: float = _objective(
        0.0, "weight of the loss on the logits of end_to_end", bound=at_least(0.0), need=_WHOLE
    )
    logit_loss: str = _objective(
        "kl", "loss on the logits, per position", choices=LOGIT_LOSSES, need=_LOGITS
    )
    calibration_tokens: int = _objective(
        65536, "training tokens that init calibrated fits the start to", bound=_COUNT
    )

    batch_size: int = _optimiser(4, "samples of a micro-batch", bound=_COUNT)
    gradient_accumulation_steps: int = _optimiser(
        1, "micro-batches K of a window, that is of one optimizer step", bound=_COUNT
    )
    learning_rate: float = _optimiser(1e-3, "peak learning rate", bound=POSITIVE)
    weight_decay: float = _optimiser(0.0, "AdamW's decoupled weight decay", bound=at_least(0.0))
    regularization_lambda: float = _optimiser(
        0.0, "weight of the L2 of the modulation", bound=at_least(0.0)
    )
    num_epochs: int = _optimiser(1, "passes over the data, without max_steps", bound=_COUNT)
    max_steps: int | None = _optimiser(
        None,
        "optimizer steps of the run, over as many epochs as they take",
        bound=at_least(1, MAX_STEPS),
    )
    warmup_steps: int = _optimiser(0, "steps of linear warm-up", bound=at_least(0, MAX_STEPS))
    scheduler_type: str = _optimiser("cosine", "learning rate after warm-up", choices=SCHEDULES)
    max_grad_norm: float = _optimiser(0.5, "clip the global gradient norm to this", bound=POSITIVE)
    seed: int = _optimiser(0, "seed of initialisation and data order", bound=at_least(0))

    deterministic: bool = _guards(
        False, "a backward of attention that repeats its bits on CUDA, a slower one"
    )
    gradient_checkpointing: bool = _guards(
        False, "compute layers again in backward; less memory, the same bits", need=_WHOLE
    )
    max_consecutive_bad: int = _guards(10, "stop after this many refusals in a row", bound=_COUNT)
    skip_spikes: bool = _guards(
        False, "refuse finite steps whose loss or gradient norm lies far above the accepted ones"
    )
    smoke_test: bool = _guards(
        True, "one batch forward and backward under anomaly detection before the loop"
    )
    trace_steps: str | None = _guards(
        None, "steps whose tensors are recorded, as 1-5,8; /100: every hundredth", read=as_text
    )

    output_dir: str | None = _output(None, "run folder; default a new one below outputs/")
    log_steps: int = _output(10, "steps between metrics lines", bound=_COUNT)
    eval_steps: int | None = _output(
        None, "steps between evaluations on held-out text", bound=_COUNT
    )
    eval_samples: int = _output(64, "held-out samples of an evaluation", bound=_COUNT)
    save_steps: int | None = _output(None, "steps between adapter checkpoints", bound=_COUNT)
    save_total_limit: int | None = _output(None, "keep at most this many checkpoints", bound=_COUNT)
    resume: str | None = _output(
        None, "auto (the newest below output_dir), a run folder, or one checkpoint"
    )
    use_wandb: bool = _output(False, "log to Weights & Biases")
    use_tensorboard: bool = _output(False, "log to TensorBoard, below the run folder")
    run_name: str | None = _output(
        None, "name of the run in Weights & Biases (WANDB_NAME, else its folder's)"
    )

    def check(self) -> None:
        """Refuse a run with nothing to train on, and steps that are none."""
        if not self.hidden_weight and not self.logit_kl_weight:
            raise ConfigError(
                "--hidden_weight and --logit_kl_weight are both 0, which leaves nothing to train"
                " on; raise one of the two"
            )
        if self.trace_steps is not None:
            parse_steps(self.trace_steps)

    @property
    def judged_by(self) -> str:
        """The held-out figure that is lower for a better student: `perplexity` of one that learns
        the data's own tokens, which its teacher may not know, else the `kl` to the teacher."""
        learns = self.logit_kl_weight > 0 and self.logit_loss == "cross_entropy"
        return "perplexity" if learns else "kl"
