"""Every setting, once: frozen dataclasses, checked when they are made.

The command line, the YAML file and `run.json` are generated from these fields, so a flag is its
field's name (or the `flag` in its metadata) and its help is the field's `help`. A combination that
cannot work raises `ConfigError`, one whose part is not built yet raises `NotSupportedError`;
nothing is silently ignored.
"""

from __future__ import annotations

import functools
import math
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any

from npt.errors import ConfigError


@dataclass(frozen=True)
class Target:
    """A product of the MLP that an adapter modulates.

    module: of the MLP, whose product it is. width: of the product, `ffn` or `hidden`. stage: under
    which an observer is shown the product, modulated.
    """

    module: str
    width: str
    stage: str


TARGETS = {
    "gate": Target("gate_proj", "ffn", "gate"),
    "up": Target("up_proj", "ffn", "up"),
    "down": Target("down_proj", "hidden", "mlp"),
}
"""What can be modulated, in the order in which a layer computes it."""

MODULATIONS = ("both", "additive", "multiplicative")
RESIDUALS = ("modulate", "keep")
INITS = ("random", "calibrated")
MULT_FORMS = [
    "sigmoid",
    "half_sigmoid",
    "one_plus_tanh",
    "unbounded",
]  # grows: `register_multiplier`
INITS_A = ("normal", "kaiming")
CALIBRATION_INPUTS = ("teacher", "propagated")
QUANT_TYPES = ("nf4", "fp4")
TEACHER_PRECISIONS = ("bf16", "fp32")
COMPUTE_DTYPES = ("fp32", "bf16")
BASE_PRECISIONS = ("4bit", "16bit")
MATMUL_PRECISIONS = ("auto", "highest", "high")
ATTENTIONS = ("sdpa", "eager", "flex_attention")
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
STRATEGIES = ["local", "propagated", "end_to_end"]  # grows: `register_strategy`
LOSSES = [
    "nmse",
    "nmse_update",
    "direction",
    "mse",
    "smooth_l1",
    "cosine",
]  # grows: `register_loss`
LOGIT_LOSSES = ("kl", "reverse_kl", "jsd", "cross_entropy")
LAYER_WEIGHTS = ("uniform", "linear")
TOKEN_WEIGHTINGS = ("none", "disagreement")
SEED_MAX = 2**31 - 1
MULT_BOUND_MAX = 0.999  # nearer to 1, fp32 would round 1 - beta towards 0
PADDING_SIDES = ("right", "left")
REPLAY_RATIO = 0.2
LEAST_SHARE = 1e-6  # of a source in a mixture: a rarer one would be waited for for ever
OF_END_TO_END = (
    "logit_kl_weight",
    "logit_loss",
    "logit_temperature",
    "jsd_weight",
    "gradient_checkpointing",
)
"""Settings that the other strategies have no use for."""
SCHEDULES = ("cosine", "linear", "constant")
TRACKERS = (
    "wandb",
    "tensorboard",
    "comet_ml",
    "aim",
    "mlflow",
    "clearml",
    "dvclive",
    "swanlab",
    "trackio",
)
"""Trackers that accelerate opens, each by the name of its package."""
# beyond them fp32 has overflowing logits, or divergences that are all rounding
TEMPERATURES = (1e-3, 1e3)


GROUPS = {
    "base": "The frozen base",
    "adapter": "The adapter",
    "start": "Its start",
    "data": "Data",
    "rows": "Rows of tokens",
    "objective": "Objective",
    "optimiser": "Optimiser",
    "memory": "Memory and speed",
    "guards": "Guards",
    "output": "What is written",
    "trackers": "Trackers",
}
"""Groups of flags, by the name that a setting has for its group."""


def setting(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    flag: str | None = None,
    group: str = "",
    often: bool = False,
) -> Any:
    """A dataclass field that is also a command-line flag.

    Args:
        default, help, choices: of the field and of the flag.
        flag: its name, where that is not the field's.
        group: one of `GROUPS`.
        often: `--help` shows it, and not `--help_all` alone.
    """
    return field(
        default=default,
        metadata={"help": help, "choices": choices, "flag": flag, "group": group, "often": often},
    )


def flag_of(f: Field[Any]) -> str:
    """The flag's name, without dashes, of a settings field."""
    return f.metadata.get("flag") or f.name


def parse_steps(text: str, flag: str = "--trace_steps") -> tuple[range, ...]:
    """Steps, counted from 1, as ranges: `1,2,3`, `1-5` (both ends included) or a mix `1-5,8`.

    Args:
        text: what was written.
        flag: what the message calls it.

    Raises:
        ConfigError: not of that form.
    """
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,18})\s*(?:-\s*(\d{1,18})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise ConfigError(
                f"{flag} is {text!r}; write steps from 1 on as a list 1,2,3, a range 1-5 or a mix"
                " 1-5,8"
            )
        found.append(range(first, last + 1))
    return tuple(found)


_UNITS = {"": 1, "b": 1} | {
    f"{letter}{tail}": base**power
    for power, letter in enumerate("kmgt", 1)
    for tail, base in (("b", 1000), ("ib", 1024))
}


def parse_bytes(text: str, flag: str = "--max_memory") -> int:
    """Bytes of `10GiB` (1024 each), `10GB` (1000 each), likewise K, M and T, or of a plain number
    of bytes.

    Args:
        text: what was written.
        flag: what the message calls it.

    Raises:
        ConfigError: not of that form, or less than a byte.
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([a-z]{0,3})\s*", text, re.IGNORECASE)
    unit = None if match is None else _UNITS.get(match[2].lower())
    found = 0 if match is None or unit is None else int(float(match[1]) * unit)
    if found < 1:
        raise ConfigError(
            f"{flag} is {text!r}; write a size like 10GiB, 800MB or a number of bytes"
        )
    return found


@functools.cache
def hints_of(cls: type) -> dict[str, Any]:
    """The fields' types: annotations are text that has to be evaluated, and a study makes settings
    by the thousand.
    """
    return typing.get_type_hints(cls)


def _check_fields(config: Any) -> None:
    """Every value has its field's type and is one of its choices."""
    cls: type = type(config)
    hints = hints_of(cls)
    for f in fields(config):
        _check_type(flag_of(f), getattr(config, f.name), hints[f.name])
    for f in fields(config):
        choices = f.metadata.get("choices")
        value = getattr(config, f.name)
        if choices and value is not None:
            for item in value if isinstance(value, tuple) else (value,):
                if item not in choices:
                    raise ConfigError(
                        f"--{flag_of(f)} is {item!r}; choose from {', '.join(choices)}"
                    )


def _check_type(flag: str, value: Any, hint: Any) -> None:
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = tuple(typing.get_origin(kind) or kind for kind in allowed)
    if isinstance(value, bool):
        fits = bool in kinds
    elif isinstance(value, int):
        fits = int in kinds or float in kinds
    else:
        fits = isinstance(value, kinds)
    if not fits:
        names = " or ".join("unset" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ConfigError(f"--{flag} is {value!r}; expected {names}")


def check_attention(name: str) -> None:
    """Refuse an attention implementation that a base cannot be trained with.

    Raises:
        ConfigError: unknown, or a flash kernel.
    """
    if name in ATTENTIONS:
        return
    if "flash" in name:
        raise ConfigError(
            f"--attn_implementation is {name!r}, but flash kernels take no fp32, in which a base"
            " computes, and no mask that keeps packed documents apart; choose from"
            f" {', '.join(ATTENTIONS)} (under --use_fp16 sdpa reaches torch's own flash kernel)"
        )
    raise ConfigError(f"--attn_implementation is {name!r}; choose from {', '.join(ATTENTIONS)}")


def _words(given: Any) -> Any:
    """The words of `a,b`, or of a list of such; anything else as it is."""
    parts = [given] if isinstance(given, str) else given
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return given
    return (
        tuple(
            dict.fromkeys(
                word.strip() for part in parts for word in part.split(",") if word.strip()
            )
        )
        or None
    )


def _whole_numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--{flag} is {text!r}; write whole numbers like 8,16,32") from None


def _check_at_least(config: Any, bounds: dict[str, float]) -> None:
    names = {f.name: flag_of(f) for f in fields(config)}
    for name, low in bounds.items():
        value = getattr(config, name)
        if value is not None and not (value >= low and math.isfinite(value)):
            raise ConfigError(
                f"--{names[name]} is {value}; it must be a finite number of at least {low}"
            )


@dataclass(frozen=True, kw_only=True)
class NPTConfig:
    """What an adapter is: its size, place and form (DESIGN: the modulation of a layer's MLP by its
    attention).
    """

    rank: int = setting(
        16, "rank R of the low-rank code z = A a", flag="adapter_rank", group="adapter", often=True
    )
    layers: str = setting(
        "upper_half",
        "layers to convert: upper_half, all, a range 8-15 or a list 3,5,7",
        group="adapter",
        often=True,
    )
    targets: tuple[str, ...] = setting(
        tuple(TARGETS),
        "MLP products to modulate, comma-separated",
        choices=tuple(TARGETS),
        group="adapter",
    )
    modulation: str = setting(
        "both",
        "multiplicative term, additive term, or both",
        choices=MODULATIONS,
        group="adapter",
        often=True,
    )
    residual: str = setting(
        "modulate",
        "modulate: attention leaves the residual stream; keep: it stays",
        choices=RESIDUALS,
        group="adapter",
    )
    init: str = setting(
        "random",
        "random: small normal start; calibrated: closed form",
        choices=INITS,
        group="start",
        often=True,
    )
    additive_scale: float = setting(0.1, "alpha: scale of the additive term", group="adapter")
    mult_bound: float = setting(
        0.5, "beta: the multiplicative term stays within (1-beta, 1+beta)", group="adapter"
    )
    init_std_a: float = setting(0.02, "standard deviation of A at the start", group="start")
    init_std_b: float = setting(
        0.001, "standard deviation of B at the start (0 where residual is keep)", group="start"
    )
    ranks: tuple[int, ...] | None = setting(
        None,
        "rank of each converted layer in order of depth, as 8,16,32, instead of one for all",
        group="adapter",
    )
    mult_form: str = setting(
        "sigmoid",
        "form of the multiplicative term; the others are there to be compared with",
        choices=MULT_FORMS,
        group="adapter",
    )
    init_a: str = setting(
        "normal",
        "start of A: normal, with init_std_a, or kaiming, uniform within 1/sqrt(D)",
        choices=INITS_A,
        group="start",
    )
    init_std_m: float = setting(
        0.0,
        "standard deviation of M at the start (0: every multiplier is exactly 1)",
        group="start",
    )

    def __post_init__(self) -> None:
        if isinstance(self.ranks, str):
            object.__setattr__(self, "ranks", _whole_numbers("ranks", self.ranks))
        elif isinstance(self.ranks, list):
            object.__setattr__(self, "ranks", tuple(self.ranks))
        if isinstance(self.targets, str):
            object.__setattr__(
                self, "targets", tuple(t.strip() for t in self.targets.split(",") if t.strip())
            )
        elif isinstance(self.targets, list):
            object.__setattr__(self, "targets", tuple(self.targets))
        if isinstance(self.layers, int) and not isinstance(self.layers, bool):
            # YAML reads a lone `layers: 3` as a number
            object.__setattr__(self, "layers", str(self.layers))
        elif isinstance(self.layers, list | tuple | range):
            object.__setattr__(self, "layers", ",".join(str(i) for i in self.layers))
        _check_fields(self)
        if not self.targets or len(set(self.targets)) != len(self.targets):
            raise ConfigError(
                f"--targets is {self.targets}; name each of {', '.join(TARGETS)} at most once, and"
                " one at least"
            )
        if self.rank < 1:
            raise ConfigError(f"--adapter_rank is {self.rank}; it must be at least 1")
        if self.ranks is not None and not (
            self.ranks and all(type(rank) is int and rank >= 1 for rank in self.ranks)
        ):
            raise ConfigError(
                f"--ranks is {self.ranks}; give each converted layer a whole number of at least 1,"
                " as 8,16,32"
            )
        if not 0 < self.mult_bound <= MULT_BOUND_MAX:
            raise ConfigError(
                f"--mult_bound is {self.mult_bound}; it must lie above 0 and be at most"
                f" {MULT_BOUND_MAX}, so that m never reaches 0"
            )
        if not (self.additive_scale > 0 and math.isfinite(self.additive_scale)):
            raise ConfigError(
                f"--additive_scale is {self.additive_scale}; it must be a positive number"
            )
        _check_at_least(self, {"init_std_a": 0.0, "init_std_b": 0.0, "init_std_m": 0.0})
        self._check_forms()

    def _check_forms(self) -> None:
        """Settings of a term that is not there, and a start that is solved for the sigmoid form
        alone.
        """
        for name, default, used, needed in (
            ("mult_form", "sigmoid", self.multiplicative, "--modulation both or multiplicative"),
            ("init_std_m", 0.0, self.multiplicative, "--modulation both or multiplicative"),
            ("mult_bound", 0.5, self.mult_form == "sigmoid", "--mult_form sigmoid"),
            ("init_std_a", 0.02, self.init_a == "normal", "--init_a normal"),
        ):
            if getattr(self, name) != default and not used:
                raise ConfigError(
                    f"--{name} {getattr(self, name)} means nothing without {needed}; add it or drop"
                    " the other"
                )
        if self.init == "calibrated" and self.mult_form != "sigmoid":
            raise ConfigError(
                f"--init calibrated solves the sigmoid form, but --mult_form is {self.mult_form};"
                " drop one of the two"
            )
        if self.residual == "keep" and (self.init_std_m or self.mult_form == "half_sigmoid"):
            raise ConfigError(
                "--residual keep starts equal to its base, but these multipliers do not start at 1;"
                " drop --residual keep"
            )

    def ranks_of(self, count: int) -> tuple[int, ...]:
        """The rank of each of `count` converted layers, in order of depth.

        Raises:
            ConfigError: `ranks` are of another number of layers.
        """
        if self.ranks is None:
            return (self.rank,) * count
        if len(self.ranks) != count:
            raise ConfigError(
                f"--ranks has {len(self.ranks)} ranks ({','.join(map(str, self.ranks))}), but"
                f" {count} layers are converted"
            )
        return self.ranks

    @property
    def multiplicative(self) -> bool:
        return self.modulation in ("both", "multiplicative")

    @property
    def additive(self) -> bool:
        return self.modulation in ("both", "additive")


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """Which frozen model, and how it is stored and computed."""

    model_name: str = setting(
        "tiny", "'tiny' (embedded), a folder, or a hub id", group="base", often=True
    )
    use_quantization: bool = setting(
        False,
        "load the base in 4 bit; everything then computes in fp32, unless compute_dtype says"
        " otherwise",
        group="base",
        often=True,
    )
    quant_type: str = setting("nf4", "4-bit code", choices=QUANT_TYPES, group="base")
    use_fp16: bool = setting(
        False,
        "compute the unquantised base in fp16; ignored, with a warning, under quantisation",
        group="base",
    )
    compute_dtype: str = setting(
        "fp32",
        "products of 4-bit weights: fp32, or bf16 (all else stays in fp32)",
        choices=COMPUTE_DTYPES,
        group="base",
    )
    matmul_precision: str = setting(
        "auto",
        "fp32 products: highest (fp32), high (TF32 on CUDA) or auto, high where its error is"
        " measured to be small",
        choices=MATMUL_PRECISIONS,
        group="base",
    )
    attn_implementation: str = setting(
        "sdpa",
        "attention: sdpa (memory-efficient kernel on CUDA), eager (keeps every score), or"
        " flex_attention (needs a compiler)",
        group="base",
    )
    teacher_precision: str | None = setting(
        None,
        "learn from the unquantised model, stored so, instead of the 4-bit base; costs its memory",
        choices=TEACHER_PRECISIONS,
        group="base",
    )
    device_map: str | None = setting(
        None,
        "spread the base over all GPUs of this one process, layer by layer",
        choices=DEVICE_MAPS,
        group="base",
    )
    shard_base: bool = setting(
        False,
        "share the base among all processes, layer by layer (FSDP2); each keeps it on the host"
        " until then",
        group="base",
    )
    share_embeddings: bool = setting(
        False,
        "accepted for old commands: teacher and student share the whole base in any case",
        group="base",
    )

    def __post_init__(self) -> None:
        _check_fields(self)
        check_attention(self.attn_implementation)
        if self.shard_base and self.device_map is not None:
            raise ConfigError(
                f"--shard_base is for several processes, --device_map {self.device_map} for one;"
                " drop one of the two"
            )
        if self.quant_type != "nf4" and not self.use_quantization:
            raise ConfigError(
                f"--quant_type {self.quant_type} means nothing without --use_quantization; add it"
                " or drop the other"
            )
        if self.compute_dtype != "fp32" and not self.use_quantization:
            raise ConfigError(
                f"--compute_dtype {self.compute_dtype} is for products of 4-bit weights; add"
                " --use_quantization or drop the other"
            )
        if self.teacher_precision is not None and not self.use_quantization:
            raise ConfigError(
                f"--teacher_precision is {self.teacher_precision}, but the base is not quantised"
                " and is its own best teacher; add --use_quantization or drop the other"
            )

    @property
    def quantization(self) -> str | None:
        return self.quant_type if self.use_quantization else None


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text, and how it is cut into samples."""

    dataset_name: str = setting(
        "builtin",
        "'builtin', a file, folder or glob (.txt .jsonl .json .csv .parquet), or a hub dataset's"
        " name",
        group="data",
        often=True,
    )
    dataset_mix: str | None = setting(
        None,
        "data sets with their weights in place of one: a.jsonl:0.7,slimpajama:0.3; the first one's"
        " end is an epoch's",
        group="data",
    )
    dataset_config: str | None = setting(None, "configuration of a hub dataset", group="data")
    dataset_split: str = setting("train", "split to train on", group="data")
    text_column: str = setting("text", "field that holds the text", group="data", often=True)
    prompt_column: str | None = setting(
        None, "field that holds the prompt, a text or a list of messages", group="data", often=True
    )
    completion_column: str | None = setting(
        None,
        "field that holds the completion; of a list of messages it is the last one",
        group="data",
        often=True,
    )
    streaming: bool = setting(False, "read as it comes, keeping nothing", group="data", often=True)
    num_samples: int | None = setting(
        None,
        "use at most this many samples of max_length tokens, counted before packing",
        group="rows",
    )
    max_length: int = setting(256, "tokens of a sample", group="rows", often=True)
    packing: bool = setting(
        False,
        "put short documents side by side into rows of max_length, attention kept inside each",
        group="rows",
    )
    padding_side: str = setting(
        "right", "where rows are filled up", choices=PADDING_SIDES, group="rows"
    )
    replay_dataset: str | None = setting(
        None, "second data set, mixed in against forgetting", group="data"
    )
    replay_ratio: float | None = setting(
        None,
        f"share of samples from the replay data set ({REPLAY_RATIO} where one is given)",
        group="data",
    )

    def __post_init__(self) -> None:
        _check_fields(self)
        _check_at_least(self, {"max_length": 2, "num_samples": 1})
        if self.completion_column is not None and self.prompt_column is None:
            raise ConfigError(
                f"--completion_column is {self.completion_column!r} without --prompt_column; name"
                " both"
            )
        if self.prompt_column is not None and self.prompt_column == self.completion_column:
            raise ConfigError(
                f"--prompt_column and --completion_column are both {self.prompt_column!r}; they are"
                " two fields"
            )
        if self.replay_ratio is not None and not 0 < self.replay_ratio < 1:
            raise ConfigError(
                f"--replay_ratio is {self.replay_ratio}; it is a share, between 0 and 1"
            )
        if self.dataset_mix is not None:
            self._check_mix()

    def _check_mix(self) -> None:
        other = {
            "dataset_name": (
                self.dataset_name,
                DataConfig.dataset_name,
                "name the source in the mixture",
            ),
            "dataset_config": (
                self.dataset_config,
                None,
                "write it behind the source's name, as owner/name:config:0.5",
            ),
            "replay_dataset": (self.replay_dataset, None, "name it in the mixture with its weight"),
        }
        for name, (value, default, remedy) in other.items():
            if value != default:
                raise ConfigError(
                    f"--dataset_mix does not go with --{name} {value}; {remedy}, or drop one of"
                    " the two"
                )
        _ = self.mix  # refuses what is no mixture

    @property
    def mix(self) -> tuple[tuple[str, float], ...]:
        """The sources of `dataset_mix` with their shares, which sum to 1; empty where there is no
        mixture. A name may hold colons.
        """
        if self.dataset_mix is None:
            return ()
        form = "write sources with weights, like a.jsonl:0.7,b.jsonl:0.3"
        weights: dict[str, float] = {}
        for part in (part.strip() for part in self.dataset_mix.split(",")):
            name, _, written = part.rpartition(":")
            if not name:
                raise ConfigError(f"--dataset_mix names {part!r} without a weight; {form}")
            try:
                weight = float(written)
            except ValueError:
                raise ConfigError(
                    f"--dataset_mix gives {name!r} the weight {written!r}, which is no number;"
                    f" {form}"
                ) from None
            if not (weight > 0 and math.isfinite(weight)):
                raise ConfigError(
                    f"--dataset_mix gives {name!r} the weight {written}; weights are finite numbers"
                    " above 0"
                )
            if name in weights:
                raise ConfigError(f"--dataset_mix names {name!r} twice; add its weights up")
            weights[name] = weight
        if len(weights) == 1:
            raise ConfigError(
                f"--dataset_mix names one source, {next(iter(weights))!r}; use --dataset_name, or"
                " add another"
            )
        scale = 1.0 if math.isfinite(sum(weights.values())) else max(weights.values())
        total = math.fsum(weight / scale for weight in weights.values())
        shares = {name: weight / scale / total for name, weight in weights.items()}
        rare = next((name for name, share in shares.items() if share < LEAST_SHARE), None)
        if rare is not None:
            raise ConfigError(
                f"--dataset_mix gives {rare!r} a share of {shares[rare]:.3g}; {LEAST_SHARE:g} is"
                " the least, leave it out"
            )
        return tuple(shares.items())

    @property
    def replay_share(self) -> float:
        """Share of the samples that are replayed, where there is something to replay."""
        return REPLAY_RATIO if self.replay_ratio is None else self.replay_ratio


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How the adapters are trained, and what the run writes."""

    strategy: str = setting(
        "local", "how the student is driven", choices=STRATEGIES, group="objective", often=True
    )
    stages: str | None = setting(
        None,
        "strategies one after the other with their shares of the steps: local:0.7,end_to_end:0.3",
        group="objective",
    )
    loss: str = setting(
        "nmse", "hidden-state loss per valid token", choices=LOSSES, group="objective"
    )
    smooth_l1_beta: float = setting(
        1.0,
        "of the loss smooth_l1: errors up to this count squared, larger ones linearly",
        group="objective",
    )
    cosine_weight: float = setting(
        0.5, "of the loss cosine: share of 1 - cos, the rest being NMSE", group="objective"
    )
    layer_weights: str = setting(
        "uniform",
        "weight of each converted layer's loss: uniform, linear (grows with depth), or a list"
        " 1,2,4",
        group="objective",
    )
    token_weighting: str = setting(
        "none",
        "disagreement: tokens on which the student is further off weigh more, 1 on average, 1/2 at"
        " least",
        choices=TOKEN_WEIGHTINGS,
        group="objective",
    )
    hidden_weight: float = setting(
        1.0,
        "weight of the loss on hidden states; 0, with a logit_kl_weight, trains on the logits"
        " alone",
        group="objective",
    )
    logit_kl_weight: float = setting(
        0.0,
        "end_to_end only: weight of the loss on the logits, by default KL(teacher, student) in"
        " nats",
        group="objective",
        often=True,
    )
    logit_loss: str = setting(
        "kl",
        "loss on the logits, where logit_kl_weight is above 0",
        choices=LOGIT_LOSSES,
        group="objective",
    )
    logit_temperature: float = setting(
        1.0,
        "temperature T of kl, reverse_kl and jsd, which are multiplied by T^2",
        group="objective",
    )
    jsd_weight: float = setting(
        0.5, "of the logit loss jsd: the teacher's share of the mixture", group="objective"
    )
    gradient_checkpointing: bool = setting(
        False,
        "end_to_end only: keep each layer's input alone and compute the layer again in backward;"
        " less memory, the same bits",
        group="memory",
    )
    batch_size: int = setting(4, "samples of a micro-batch", group="optimiser", often=True)
    gradient_accumulation_steps: int = setting(
        1,
        "micro-batches K of a window, that is of one optimizer step",
        group="optimiser",
        often=True,
    )
    max_memory: str | None = setting(
        None,
        "peak of tensor memory to stay below, as 10GiB: so many samples are computed at once as are"
        " predicted to fit",
        group="memory",
    )
    calibration_tokens: int = setting(
        65536,
        "of init calibrated: tokens of the training data that the adapters are solved on",
        group="start",
    )
    calibration_inputs: str = setting(
        "teacher",
        "of init calibrated: layer inputs, the teacher's or the calibrated student's own",
        choices=CALIBRATION_INPUTS,
        group="start",
    )
    calibration_rounds: int = setting(
        3,
        "of init calibrated: Gauss-Newton rounds per layer behind the linear solution, up to twice"
        " as many while they gain much",
        group="start",
    )
    rank_budget: int | None = setting(
        None,
        "of init calibrated: ranks of all layers together, spent where they are worth most",
        group="start",
    )
    learning_rate: float = setting(1e-3, "peak learning rate", group="optimiser", often=True)
    weight_decay: float = setting(0.0, "AdamW's decoupled weight decay", group="optimiser")
    regularization_lambda: float = setting(
        0.0, "weight of the L2 of the modulation", group="optimiser"
    )
    num_epochs: int = setting(
        1,
        "passes over the data, when max_steps does not end the run first",
        group="optimiser",
        often=True,
    )
    max_steps: int | None = setting(None, "optimizer steps, at most", group="optimiser", often=True)
    warmup_steps: int = setting(0, "steps of linear warm-up", group="optimiser")
    scheduler_type: str = setting(
        "cosine", "learning rate after warm-up", choices=SCHEDULES, group="optimiser"
    )
    max_grad_norm: float = setting(0.5, "clip the global gradient norm to this", group="optimiser")
    max_consecutive_bad: int = setting(10, "stop after this many refusals in a row", group="guards")
    max_refused_share: float = setting(
        0.2, "stop when more than this share of the micro-batches was refused", group="guards"
    )
    skip_spikes: bool = setting(
        False,
        "refuse finite steps whose loss or gradient norm lies far above the accepted ones",
        group="guards",
    )
    spike_sigmas: float = setting(
        10.0, "how far: median + this many robust standard deviations", group="guards"
    )
    seed: int = setting(0, "seed of initialisation and data order", group="optimiser")
    output_dir: str | None = setting(
        None, "run folder; default a new one below outputs/", group="output", often=True
    )
    log_steps: int = setting(10, "steps between metrics lines", group="output", often=True)
    eval_steps: int | None = setting(
        None, "steps between evaluations on held-out text", group="output", often=True
    )
    eval_samples: int = setting(64, "held-out samples of an evaluation", group="output")
    save_steps: int | None = setting(
        None, "steps between adapter checkpoints", group="output", often=True
    )
    save_total_limit: int | None = setting(
        None, "keep at most this many checkpoints", group="output"
    )
    resume: str | None = setting(
        None,
        "auto (the newest good checkpoint below output_dir), a run folder, or one checkpoint",
        group="output",
        often=True,
    )
    use_wandb: bool = setting(False, "log to Weights & Biases", group="trackers", often=True)
    use_tensorboard: bool = setting(
        False, "log to TensorBoard, below the run folder", group="trackers"
    )
    report_to: tuple[str, ...] | None = setting(
        None,
        f"trackers to log to, one or several of {', '.join(TRACKERS)}; all: those that are"
        " installed; none: none, whatever else says so",
        choices=(*TRACKERS, "all", "none"),
        group="trackers",
    )
    run_name: str | None = setting(
        None, "name of the run in the trackers (WANDB_NAME, else its folder's)", group="trackers"
    )
    project: str | None = setting(
        None,
        "project of the run in the trackers (WANDB_PROJECT and the like, else npt)",
        group="trackers",
    )
    wandb_entity: str | None = setting(
        None, "user or team of the run in Weights & Biases (WANDB_ENTITY)", group="trackers"
    )
    wandb_group: str | None = setting(
        None, "group of the run in Weights & Biases (WANDB_RUN_GROUP)", group="trackers"
    )
    wandb_tags: tuple[str, ...] | None = setting(
        None, "tags of the run in Weights & Biases (WANDB_TAGS)", group="trackers"
    )
    sample_steps: int | None = setting(
        None,
        "steps between texts of student and teacher and histograms of the multipliers in the"
        " trackers",
        group="trackers",
    )
    smoke_test: bool = setting(
        True,
        "one batch forward and backward under anomaly detection before the loop",
        group="guards",
    )
    trace_steps: str | None = setting(
        None,
        "steps whose tensors are recorded: a list 1,2,3, a range 1-5, or a mix 1-5,8",
        group="guards",
    )
    compile: bool = setting(
        False,
        "compile the elementwise work of each converted layer; needs a compiler, takes a while at"
        " the start",
        group="memory",
    )
    rank_timeout: float = setting(
        600.0,
        "seconds that one of several processes waits for the others before it gives up",
        group="memory",
    )
    trace_every: int | None = setting(
        None, "record the tensors of every so many steps", group="guards"
    )

    def __post_init__(self) -> None:
        if isinstance(self.trace_steps, int) and not isinstance(self.trace_steps, bool):
            object.__setattr__(self, "trace_steps", str(self.trace_steps))
        elif isinstance(self.trace_steps, list | tuple):
            object.__setattr__(
                self, "trace_steps", ",".join(str(step) for step in self.trace_steps)
            )
        for name in ("report_to", "wandb_tags"):
            object.__setattr__(self, name, _words(getattr(self, name)))
        if isinstance(self.layer_weights, list | tuple):
            object.__setattr__(
                self, "layer_weights", ",".join(str(weight) for weight in self.layer_weights)
            )
        if isinstance(self.max_memory, int) and not isinstance(self.max_memory, bool):
            object.__setattr__(self, "max_memory", str(self.max_memory))
        _check_fields(self)
        _check_at_least(
            self,
            {
                "hidden_weight": 0.0,
                "logit_kl_weight": 0.0,
                "calibration_tokens": 1,
                "calibration_rounds": 0,
                "rank_budget": 1,
                "batch_size": 1,
                "gradient_accumulation_steps": 1,
                "weight_decay": 0.0,
                "regularization_lambda": 0.0,
                "num_epochs": 1,
                "max_steps": 1,
                "warmup_steps": 0,
                "max_consecutive_bad": 1,
                "seed": 0,
                "log_steps": 1,
                "eval_steps": 1,
                "eval_samples": 1,
                "save_steps": 1,
                "save_total_limit": 1,
                "trace_every": 1,
                "sample_steps": 1,
            },
        )
        self._check_trackers()
        if not 0 <= self.max_refused_share <= 1:
            raise ConfigError(
                f"--max_refused_share is {self.max_refused_share}; it is a share, from 0 to 1"
            )
        for name in (
            "learning_rate",
            "max_grad_norm",
            "spike_sigmas",
            "smooth_l1_beta",
            "rank_timeout",
        ):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"--{name} is {value}; it must be a positive number")
        if self.seed > SEED_MAX:
            raise ConfigError(f"--seed is {self.seed}; it must be at most {SEED_MAX}")
        if self.stages is not None and self.strategy != "local":
            raise ConfigError(
                f"--strategy is {self.strategy} and --stages is {self.stages}; the stages name the"
                " strategies, drop --strategy"
            )
        driven = [name for name, _ in self.stage_shares]
        if self.logit_kl_weight and "end_to_end" not in driven:
            raise ConfigError(
                f"--logit_kl_weight is {self.logit_kl_weight} with --strategy {','.join(driven)},"
                " which computes no logits; use --strategy end_to_end"
            )
        if self.gradient_checkpointing and "end_to_end" not in driven:
            raise ConfigError(
                f"--gradient_checkpointing with --strategy {','.join(driven)}, which keeps one"
                " layer's graph at a time, saves nothing; use --strategy end_to_end or drop it"
            )
        self._check_hidden_weight(driven)
        self._check_losses()
        _ = self.max_memory_bytes  # refuses what is no size
        if self.trace_steps is not None:
            parse_steps(self.trace_steps)

    def _check_trackers(self) -> None:
        """Settings of a tracker that is not asked for; beside `--report_to none` they wait for the
        next run.
        """
        asked = self.report_to or ()
        if "none" in asked:
            if len(asked) > 1:
                raise ConfigError(f"--report_to is {','.join(asked)}; write none, or the trackers")
            return
        of_wandb = self.use_wandb or "wandb" in asked or "all" in asked
        for name, used, needed in (
            ("wandb_entity", of_wandb, "--report_to wandb"),
            ("wandb_group", of_wandb, "--report_to wandb"),
            ("wandb_tags", of_wandb, "--report_to wandb"),
            (
                "sample_steps",
                bool(asked) or self.use_wandb or self.use_tensorboard,
                "a tracker (--report_to)",
            ),
        ):
            value = getattr(self, name)
            if value is not None and not used:
                shown = ",".join(value) if isinstance(value, tuple) else value
                raise ConfigError(
                    f"--{name} {shown} means nothing without {needed}; add it or drop the other"
                )

    def _check_hidden_weight(self, driven: Sequence[str]) -> None:
        """Without a loss on hidden states the one on the logits has to be there, in every stage."""
        if self.hidden_weight:
            return
        other = next((name for name in driven if name != "end_to_end"), None)
        if other is not None:
            raise ConfigError(
                f"--hidden_weight is 0, but --strategy {other} trains on hidden states alone; raise"
                " it, or use --strategy end_to_end with a --logit_kl_weight"
            )
        if not self.logit_kl_weight:
            raise ConfigError(
                "--hidden_weight and --logit_kl_weight are both 0, which leaves nothing to train"
                " on; raise one of the two"
            )

    def _check_losses(self) -> None:
        if not 0 <= self.cosine_weight <= 1:
            raise ConfigError(
                f"--cosine_weight is {self.cosine_weight}; it is a share, from 0 to 1"
            )
        if not 0 < self.jsd_weight < 1:
            raise ConfigError(
                f"--jsd_weight is {self.jsd_weight}; it is a share between 0 and 1, both left out"
            )
        low, high = TEMPERATURES
        if not low <= self.logit_temperature <= high:
            raise ConfigError(
                f"--logit_temperature is {self.logit_temperature}; it must lie between {low} and"
                f" {high}"
            )
        divergence = self.logit_kl_weight > 0 and self.logit_loss != "cross_entropy"
        for name, default, used, needed in (
            ("loss", "nmse", self.hidden_weight > 0, "a --hidden_weight above 0"),
            ("layer_weights", "uniform", self.hidden_weight > 0, "a --hidden_weight above 0"),
            ("smooth_l1_beta", 1.0, self.loss == "smooth_l1", "--loss smooth_l1"),
            ("cosine_weight", 0.5, self.loss == "cosine", "--loss cosine"),
            ("logit_loss", "kl", self.logit_kl_weight > 0, "a --logit_kl_weight above 0"),
            (
                "logit_temperature",
                1.0,
                divergence,
                "a --logit_kl_weight above 0 and kl, reverse_kl or jsd as --logit_loss",
            ),
            ("jsd_weight", 0.5, divergence and self.logit_loss == "jsd", "--logit_loss jsd"),
        ):
            if getattr(self, name) != default and not used:
                raise ConfigError(
                    f"--{name} {getattr(self, name)} means nothing without {needed}; add it or drop"
                    " the other"
                )
        if not all(weight > 0 and math.isfinite(weight) for weight in self.layer_weight_list or ()):
            raise ConfigError(
                f"--layer_weights is {self.layer_weights}; weights are finite numbers above 0"
            )

    @property
    def stage_shares(self) -> tuple[tuple[str, float], ...]:
        """Strategies in their order, each with its share of the steps; one of all of them where
        there are no stages.
        """
        if self.stages is None:
            return ((self.strategy, 1.0),)
        found = []
        for part in self.stages.split(","):
            name, _, share = part.partition(":")
            try:
                found.append((name.strip(), float(share)))
            except ValueError:
                raise ConfigError(
                    f"--stages is {self.stages!r}; write strategies with shares, like"
                    " local:0.7,end_to_end:0.3"
                ) from None
        for name, part_of_all in found:
            if name not in STRATEGIES:
                raise ConfigError(f"--stages names {name!r}; choose from {', '.join(STRATEGIES)}")
            if not 0 < part_of_all <= 1:
                raise ConfigError(
                    f"--stages gives {name} a share of {part_of_all}; shares lie above 0 and sum"
                    " to 1"
                )
        total = sum(part_of_all for _, part_of_all in found)
        if abs(total - 1) > 1e-6:
            raise ConfigError(
                f"--stages has shares that sum to {total:g}; they are shares of the steps and sum"
                " to 1"
            )
        return tuple(found)

    def in_stage(self, strategy: str) -> TrainConfig:
        """These settings where this strategy drives the student: without what only the
        others take.
        """
        if self.stages is None:
            return self
        return replace(
            self,
            strategy=strategy,
            stages=None,
            **({} if strategy == "end_to_end" else unset_of_end_to_end()),
        )

    @property
    def max_memory_bytes(self) -> int | None:
        """`max_memory` in bytes."""
        return None if self.max_memory is None else parse_bytes(self.max_memory)

    @property
    def layer_weight_list(self) -> tuple[float, ...] | None:
        """The weights where `layer_weights` is a list of them, one for each converted layer; None
        where it is a word.
        """
        if self.layer_weights in LAYER_WEIGHTS:
            return None
        try:
            return tuple(float(weight) for weight in self.layer_weights.split(","))
        except ValueError:
            words = ", ".join(LAYER_WEIGHTS)
            raise ConfigError(
                f"--layer_weights is {self.layer_weights!r}; choose from {words}, or give numbers"
                " like 1,2,4"
            ) from None


def unset_of_end_to_end() -> dict[str, Any]:
    """The settings of `end_to_end` alone as they are where nobody sets them."""
    return {name: getattr(TrainConfig, name) for name in OF_END_TO_END}
