"""Settings of a run: objective, optimiser, memory, guards and output."""

from dataclasses import dataclass
from functools import partial

from npt.config.field import (
    POSITIVE,
    Condition,
    SettingsGroup,
    as_text,
    at_least,
    parse_steps,
    setting,
)
from npt.errors import ConfigError

STRATEGIES = ["local", "propagated", "end_to_end"]
"""`register_strategy` adds to this list."""
LOSSES = ["nmse", "nmse_update", "direction"]
"""`register_loss` adds to this list."""
LOGIT_LOSSES = ("kl", "reverse_kl", "cross_entropy")
SCHEDULES = ("cosine", "linear", "constant")
MAX_STEPS = 10_000_000
"""A run keeps the learning rates of all its steps."""

_objective = partial(setting, group="objective")
_optimiser = partial(setting, group="optimiser")
_guards = partial(setting, group="guards")
_output = partial(setting, group="output")
_COUNT = at_least(1)
_WHOLE = Condition(lambda c: c.strategy == "end_to_end", "--strategy end_to_end")
_HIDDEN = Condition(lambda c: c.hidden_weight > 0, "--hidden_weight above 0")
_LOGITS = Condition(lambda c: c.logit_kl_weight > 0, "--logit_kl_weight above 0")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(SettingsGroup):
    """All settings of training and of the run."""

    strategy: str = _objective(
        "local",
        "local: train each layer alone, with inputs from the teacher; propagated: the same, with"
        " inputs from the student; end_to_end: train the whole student",
        choices=STRATEGIES,
    )
    loss: str = _objective(
        "nmse",
        "hidden-state loss: nmse (squared error divided by the squared norm of the state),"
        " nmse_update (divided by the squared norm of the layer's output minus its input), or"
        " direction (ignores norms)",
        choices=LOSSES,
        need=_HIDDEN,
    )
    hidden_weight: float = _objective(
        1.0, "weight of the hidden-state loss; 0 trains on the logits only", bound=at_least(0.0)
    )
    logit_kl_weight: float = _objective(
        0.0, "weight of the loss on the logits", bound=at_least(0.0), need=_WHOLE
    )
    logit_loss: str = _objective(
        "kl",
        "loss on the logits: kl is KL(teacher, student), reverse_kl is KL(student, teacher),"
        " cross_entropy compares with the data",
        choices=LOGIT_LOSSES,
        need=_LOGITS,
    )
    calibration_tokens: int = _objective(65536, "tokens for the closed-form start", bound=_COUNT)

    batch_size: int = _optimiser(4, "samples per micro-batch", bound=_COUNT)
    gradient_accumulation_steps: int = _optimiser(1, "micro-batches per step", bound=_COUNT)
    learning_rate: float = _optimiser(1e-3, "peak learning rate", bound=POSITIVE)
    weight_decay: float = _optimiser(0.0, "decoupled weight decay of AdamW", bound=at_least(0.0))
    regularization_lambda: float = _optimiser(
        0.0, "weight of a penalty on the size of the modulation", bound=at_least(0.0)
    )
    num_epochs: int = _optimiser(
        1, "passes over the data; ignored if --max_steps is given", bound=_COUNT
    )
    max_steps: int | None = _optimiser(
        None,
        "optimizer steps, over as many passes as needed; no limit if only --num_epochs is given",
        bound=at_least(1, MAX_STEPS),
    )
    warmup_steps: int = _optimiser(0, "steps of linear warm-up", bound=at_least(0, MAX_STEPS))
    scheduler_type: str = _optimiser("cosine", "learning-rate schedule", choices=SCHEDULES)
    max_grad_norm: float = _optimiser(0.5, "clip the global gradient norm to this", bound=POSITIVE)
    seed: int = _optimiser(0, "seed for initialisation and data order", bound=at_least(0))

    deterministic: bool = _guards(False, "use deterministic (slower) attention on CUDA")
    gradient_checkpointing: bool = _guards(
        False, "recompute layers in the backward pass: less memory, identical results", need=_WHOLE
    )
    max_consecutive_bad: int = _guards(
        10, "stop after this many refused micro-batches or steps in a row", bound=_COUNT
    )
    skip_spikes: bool = _guards(
        False, "also refuse a step whose loss or gradient norm is finite but unusually large"
    )
    smoke_test: bool = _guards(
        True, "before training, test one forward and backward pass with anomaly detection"
    )
    recheck: int = _guards(
        0,
        "compute one step in this many twice, and repair what a faulty machine changed (0: none)",
        bound=at_least(0),
    )
    trace_steps: str | None = _guards(
        None,
        "record statistics of every tensor at these steps, such as 1-5,8 or /100 (every hundredth)",
        read=as_text,
    )

    output_dir: str | None = _output(None, "run folder (default: a new folder in outputs/)")
    log_steps: int = _output(10, "steps between lines in metrics.jsonl", bound=_COUNT)
    eval_steps: int | None = _output(
        None, "steps between evaluations (default: only before and after training)", bound=_COUNT
    )
    eval_samples: int = _output(64, "held-out samples per evaluation", bound=_COUNT)
    save_steps: int | None = _output(None, "steps between checkpoints", bound=_COUNT)
    save_total_limit: int | None = _output(
        None, "maximum number of checkpoints to keep (default: all)", bound=_COUNT
    )
    resume: str | None = _output(
        None,
        "continue a run: auto (newest checkpoint in --output_dir), a run folder, or a checkpoint",
    )
    use_wandb: bool = _output(False, "log to Weights & Biases")
    use_tensorboard: bool = _output(False, "log to TensorBoard files in the run folder")
    run_name: str | None = _output(
        None, "run name in Weights & Biases (default: WANDB_NAME, else the folder's name)"
    )

    def check(self) -> None:
        """Refuse a run without a loss, and steps that cannot be parsed."""
        if not self.hidden_weight and not self.logit_kl_weight:
            raise ConfigError(
                "--hidden_weight and --logit_kl_weight are both 0, so there is no loss: raise one"
            )
        if self.trace_steps is not None:
            parse_steps(self.trace_steps)

    @property
    def reads_logits_alone(self) -> bool:
        """Whether the loss reads the teacher's logits and nothing else of it."""
        compared = self.logit_kl_weight > 0 and self.logit_loss != "cross_entropy"
        return self.strategy == "end_to_end" and compared and not self.hidden_weight

    @property
    def judged_by(self) -> str:
        """The held-out figure to lower: `perplexity` of a student of the data's tokens, or `kl`."""
        learns = self.logit_kl_weight > 0 and self.logit_loss == "cross_entropy"
        return "perplexity" if learns else "kl"
