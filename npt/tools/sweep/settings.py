"""The settings of one trial: of the base, the adapters, the data and the training, checked as those
of a run are, and of the probes that are made in addition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from npt.config import BaseConfig, DataConfig, NPTConfig, TrainConfig
from npt.config.field import POSITIVE, Bound, Need, at_least, flag_of, setting
from npt.config.field import Settings as SettingsGroup
from npt.errors import ConfigError
from npt.flags import build, with_safe_mode

_FAULT = Need(lambda config: config.fault_step is not None, "--fault_step")


@dataclass(frozen=True, kw_only=True)
class ProbeConfig(SettingsGroup):
    """Faults that are planted in a study's run, and when it counts as diverged."""

    compute_dtype: str | None = setting(
        None,
        "number format that the whole base computes in, against the policy",
        choices=("fp32", "bf16", "fp16"),
    )
    fault_step: int | None = setting(
        None, "step whose first batch has activations of another size", bound=at_least(2)
    )
    fault_scale: float = setting(
        1e4, "how many times as large they are", bound=POSITIVE, need=_FAULT
    )
    fault_place: str = setting(
        "attention",
        "which: every attention output, or the embedding's",
        choices=("attention", "embedding"),
        need=_FAULT,
    )
    divergence_factor: float = setting(
        10.0,
        "a run has diverged when its loss is this many times its first one",
        bound=Bound(lambda value: 1 < value < math.inf, "it must be a number above 1"),
    )


CLASSES = (BaseConfig, NPTConfig, DataConfig, TrainConfig, ProbeConfig)

LEFT_OUT = {
    name: why
    for names, why in (
        ("device_map shard_base", "a study's base lies on one device of one process"),
        (
            "replay_dataset replay_ratio streaming",
            "a study's runs read the beginning of one data set",
        ),
        (
            "num_epochs resume save_steps save_total_limit",
            "a study's runs are as long as max_steps and save nothing",
        ),
        (
            "output_dir run_name log_steps eval_steps smoke_test trace_steps trace_every"
            " use_tensorboard",
            "a study's runs write no folder of their own",
        ),
        ("max_memory", "a study's runs compute a batch at once"),
        ("rank_timeout", "a study's run is one process"),
        ("use_wandb", "the record of a study's runs is its table"),
        ("share_embeddings", "it does nothing"),
        ("ranks", "a study's runs have one rank for all layers"),
        ("seed", "write seeds: [0, 1] instead"),
    )
    for name in names.split()
}
"""Settings of a run that a study does not take, and why."""


@dataclass(frozen=True)
class Settings:
    """Everything that decides the result of a trial, but for the machine."""

    base: BaseConfig
    adapter: NPTConfig
    data: DataConfig
    training: TrainConfig
    probe: ProbeConfig

    @classmethod
    def of(cls, given: Mapping[str, Any], seed: int) -> Settings:
        """Return the settings of values by flag name, `safe_mode` among them; raise ConfigError for
        a value or a combination that cannot work in a study.
        """
        given = with_safe_mode({**given, "seed": seed})
        # a study's compute_dtype is the probe's, of the whole base, not of packed products alone
        of_base = {name: value for name, value in given.items() if name != "compute_dtype"}
        settings = cls(*(build(kind, of_base if kind is BaseConfig else given) for kind in CLASSES))
        settings._check()
        return settings

    def _check(self) -> None:
        steps, base, probe = self.training.max_steps, self.base, self.probe
        fault, dtype = probe.fault_step, probe.compute_dtype
        if steps is None:
            raise ConfigError("--max_steps is unset; say how long a study's runs are")
        if fault is not None and fault >= steps:
            raise ConfigError(
                f"--fault_step is {fault} of {steps} steps; some must be left after it"
            )
        if fault is not None and base.teacher_precision is not None:
            raise ConfigError(
                "--fault_step does not go with --teacher_precision, whose teacher it would not"
                " reach; drop one of the two"
            )
        if dtype is not None and base.use_fp16:
            raise ConfigError(f"--use_fp16 with --compute_dtype {dtype}; drop one of the two")
        if dtype in ("bf16", "fp16") and base.teacher_precision is not None:
            raise ConfigError(
                f"--teacher_precision does not go with --compute_dtype {dtype}; drop one of the two"
            )

    def values(self) -> dict[str, Any]:
        """Return every setting by flag name, as JSON takes it."""
        found: dict[str, Any] = {}
        for part in (self.base, self.adapter, self.data, self.training, self.probe):
            plain = asdict(part)
            for f in fields(part):
                value, name = plain[f.name], flag_of(f)
                if name not in LEFT_OUT or name == "seed":
                    found[name] = list(value) if isinstance(value, tuple) else value
        return found
