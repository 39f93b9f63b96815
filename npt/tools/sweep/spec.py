"""Read a study: one YAML file becomes a list of trials, the same in every process.

    name: study                      default: the file's name
    settings: {model_name: tiny, use_quantization: true, max_steps: 40}    for every trial, by flag
    seeds: [0, 1]                    run each trial with each seed
    parts:
      map:
        note: what this part is for
        settings: {layers: all}      for every trial of this part
        arms: {plain: {}, safe: {safe_mode: true}}                         named bundles of settings
        grid: {learning_rate: [1.0e-3, 1.0e-2], adapter_rank: [4, 16]}     every combination
        random: {count: 8, seed: 0, over: {learning_rate: {low: 1.0e-4, high: 1.0, log: true}, loss:
            [nmse, direction]}}
        bisect: {setting: learning_rate, low: 1.0e-4, high: 1.0, rounds: 5}   find the largest value
            that trains

A part combines every arm with every point of the grid, every draw and every seed. Trials with equal
settings run once.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from npt.config import SEED_MAX, BaseConfig, DataConfig, NPTConfig, TrainConfig, flag_of
from npt.errors import ConfigError, kind_of
from npt.flags import canonical, checked_settings, yaml_content
from npt.stored import shown
from npt.train.resolve import SETTINGS, resolve

_OF_FOLDER = (
    "output_dir", "run_name", "resume", "save_steps", "save_total_limit", "log_steps", "eval_steps",
    "use_wandb", "use_tensorboard", "trace_steps", "smoke_test",
)  # fmt: skip
LEFT_OUT = {
    "shard_base": "a trial runs in one process",
    **dict.fromkeys(_OF_FOLDER, "a study keeps no run folders, only its table"),
    "seed": "write seeds: [0, 1] instead",
}
"""Settings of a run that a study does not accept, and why."""

_TOP = ("name", "settings", "seeds", "parts")
_PART = ("note", "settings", "seeds", "arms", "grid", "random", "bisect")
_FLAGS = [flag_of(f) for cls in SETTINGS for f in fields(cls)]
_EXTRA = {"safe_mode": bool}

NAME = 200  # longest name of a study, since it names a folder too
TRIALS = 100_000
"""Trials of a part. More are a slip in a grid, and checking them would take minutes."""


@dataclass(frozen=True)
class TrialSettings:
    """Everything except the machine that decides the result of a trial."""

    base: BaseConfig
    adapter: NPTConfig
    data: DataConfig
    training: TrainConfig

    @classmethod
    def of(cls, flags: Mapping[str, Any], seed: int) -> TrialSettings:
        """Return the settings that `npt pretrain` would use, or raise ConfigError."""
        return cls(*resolve({**flags, "seed": seed}, of_study=True).parts)

    def values(self) -> dict[str, Any]:
        """Return every setting by flag name, for JSON."""
        values: dict[str, Any] = {}
        for part in (self.base, self.adapter, self.data, self.training):
            plain = asdict(part)
            values |= {flag_of(f): plain[f.name] for f in fields(part)}
        kept = {}
        for name, value in values.items():
            if name not in LEFT_OUT:
                kept[name] = list(value) if isinstance(value, tuple) else value
        return {**kept, "seed": self.training.seed}


@dataclass(frozen=True)
class Bisection:
    """A search for the largest value of a setting that trains. It halves the bracket [`low`,
    `high`] `rounds` times on a log scale.
    """

    setting: str
    low: float
    high: float
    rounds: int


@dataclass(frozen=True)
class TrialOrigin:
    """The part, arm (or "") and point (from the grid or drawn) that a trial comes from."""

    part: str
    arm: str
    point: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        words = [self.part, self.arm] if self.arm else [self.part]
        return ", ".join([*words, *(f"{name} {value}" for name, value in self.point.items())])


@dataclass(frozen=True)
class Trial:
    """One run of a study or, with `bisect`, the few runs of a search.

    Attributes:
        key: identifies the trial; equal settings have equal keys.
        settings: checked settings with defaults filled in.
        flags: settings as written, by flag name.
        bisect: the search, if the trial is one.
        origins: every part, arm and point that gives this trial.
    """

    key: str
    settings: TrialSettings
    flags: Mapping[str, Any]
    bisect: Bisection | None = None
    origins: tuple[TrialOrigin, ...] = ()

    def __str__(self) -> str:
        return f"{self.origins[0]}, seed {self.settings.training.seed}"

    def at(self, value: float) -> TrialSettings:
        """Return the settings with this value for the setting that `bisect` searches."""
        assert self.bisect is not None
        flags = {**self.flags, self.bisect.setting: value}
        return TrialSettings.of(flags, self.settings.training.seed)


@dataclass(frozen=True)
class Design:
    """All trials of a study, in order; `varied` names the settings that differ between them."""

    name: str
    parts: tuple[str, ...]
    trials: tuple[Trial, ...]
    varied: tuple[str, ...]

    @property
    def by_key(self) -> dict[str, Trial]:
        return {trial.key: trial for trial in self.trials}


def read_design(path: str) -> Design:
    """Return the design in a file; raises like `design_of`."""
    return design_of(yaml_content(path, path), path)


def design_of(content: Any, where: str) -> Design:
    """Return the design of a study with all settings checked. `where` is its file, whose stem is
    the default name. Raise ConfigError for an unknown name, or for settings that cannot work.
    """
    top = _mapping(where, content, _TOP)
    written = _mapping(f"{where}: parts", top.get("parts"))
    if not written:
        raise ConfigError(
            f"{where} has no parts; write at least one, like parts: {{first: {{grid:"
            " {learning_rate: [1.0e-4, 1.0e-3]}}}"
        )
    name = str(top.get("name", Path(where).stem) or "")
    # it names a folder, on any system
    odd = "/" in name or "\\" in name or name in (".", "..")
    shown_well = name.strip() and name.isprintable() and len(name) <= NAME
    if odd or not shown_well:
        raise ConfigError(
            f"{where}: name {name[:NAME]!r} cannot be a folder name; use up to {NAME} letters,"
            " digits and spaces"
        )
    shared = _settings(f"{where}: settings", top.get("settings"))
    seeds = _seeds(where, top.get("seeds", [0]))
    parts: list[str] = []
    trials: dict[str, Trial] = {}
    for part, entries in written.items():
        part_name = _name(f"{where}: part {part}", part)
        entries = _mapping(f"{where}: part {part}", entries, _PART)
        parts.append(part_name)
        for trial in _trials_of(where, part_name, entries, shared, seeds):
            # equal settings run once, and count for every part that has them
            first = trials.get(trial.key, trial)
            origins = tuple(dict.fromkeys(first.origins + trial.origins))
            trials[trial.key] = replace(first, origins=origins)
    values = [trial.settings.values() for trial in trials.values()]
    varied = []
    for setting in values[0]:
        # by their text, since lists have no hash
        found = {repr(each[setting]) for each in values}
        if setting != "seed" and len(found) > 1:
            varied.append(setting)
    return Design(name, tuple(parts), tuple(trials.values()), tuple(varied))


def _trials_of(
    where: str, part: str, entries: Mapping[str, Any], shared: Mapping[str, Any], seeds: list[int]
) -> Iterator[Trial]:
    where = f"{where}: part {part}"
    settings = {**shared, **_settings(f"{where}: settings", entries.get("settings"))}
    if "seeds" in entries:
        seeds = _seeds(where, entries["seeds"])
    arms: dict[str, dict[str, Any]] = {}
    for arm, bundle in _mapping(f"{where}: arms", entries.get("arms")).items():
        at = f"{where}, arm {arm}"
        name = _name(at, arm)
        arms[name] = _settings(at, bundle)
    arms = arms or {"": {}}
    grid = {}
    for setting, values in _by_flag(f"{where}: grid", entries.get("grid")).items():
        grid[setting] = _values(f"{where}: grid", setting, values)
    draws: list[dict[str, Any]] = [{}]
    if entries.get("random"):
        draws = _draws(f"{where}: random", entries["random"])
    bisect = None
    if entries.get("bisect"):
        bisect = _bisection(f"{where}: bisect", entries["bisect"])
    # counted first: making them takes time
    count = len(arms) * math.prod(map(len, grid.values())) * len(draws) * len(seeds)
    if count > TRIALS:
        raise ConfigError(
            f"{where} has {count:,} trials, more than {TRIALS:,}: shorten its lists or draw some at"
            " random"
        )
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    for (arm, bundle), point, draw, seed in itertools.product(arms.items(), points, draws, seeds):
        origin = TrialOrigin(part, arm, {**point, **draw})
        try:
            yield _trial({**settings, **bundle, **origin.point}, seed, bisect, origin)
        except ConfigError as error:
            words = [f"{where}, arm {arm}" if arm else where]
            words += [f"{name} {value}" for name, value in origin.point.items()]
            raise ConfigError(f"{', '.join(words)}, seed {seed}: {error}") from error


def _trial(
    flags: dict[str, Any], seed: int, bisect: Bisection | None, origin: TrialOrigin
) -> Trial:
    if bisect is not None:
        TrialSettings.of({**flags, bisect.setting: bisect.high}, seed)  # both ends must work
        flags[bisect.setting] = bisect.low
    settings = TrialSettings.of(flags, seed)
    # includes defaults: if a version changes one, its trials are new
    content = [settings.values(), bisect and astuple(bisect)]
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Trial(digest[:16], settings, flags, bisect, (origin,))


def _name(where: str, written: Any) -> str:
    name = str(written)
    if ";" in name or not name.strip() or not name.isprintable():
        raise ConfigError(
            f"{where}: the table cannot hold this name; use letters, digits and spaces, without"
            " semicolons"
        )
    return name


def _mapping(where: str, value: Any, names: tuple[str, ...] = ()) -> dict[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {kind_of(value)}; write a mapping of names to values")
    for name in value:
        if names and name not in names:
            raise ConfigError(f"{where} has the unknown entry {name!r}; use {', '.join(names)}")
    return value


def _settings(where: str, value: Any) -> dict[str, Any]:
    """Return settings by flag name, checked for type and for use in a study."""
    flags = checked_settings(where, _mapping(where, value), SETTINGS, _EXTRA)
    for name in flags:
        if name in LEFT_OUT:
            raise ConfigError(f"{where}: a study does not accept {name}: {LEFT_OUT[name]}")
    return flags


def _by_flag(where: str, value: Any) -> dict[str, Any]:
    """Return the entries by full flag name; short names such as `lr` are expanded."""
    entries: dict[str, Any] = {}
    for written, entry in _mapping(where, value).items():
        name = canonical(str(written), [*_EXTRA, *_FLAGS])
        if name in entries:
            raise ConfigError(f"{where}: {name} is given twice; remove one")
        entries[name] = entry
    return entries


def _values(where: str, name: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where}: {name} is {shown(value)}; write a list of values")
    values = [_settings(where, {name: entry})[name] for entry in value]
    if len({repr(entry) for entry in values}) < len(values):
        raise ConfigError(f"{where}: {name} lists a value twice; remove one")
    return values


def _draws(where: str, value: Any) -> list[dict[str, Any]]:
    written = _mapping(where, value, ("count", "seed", "over"))
    count = written.get("count")
    seed = written.get("seed", 0)
    over = _by_flag(f"{where}: over", written.get("over"))
    if type(count) is not int or type(seed) is not int or not 1 <= count <= TRIALS or not over:
        raise ConfigError(
            f"{where} needs count (1 to {TRIALS:,}), seed (a whole number) and over (settings to"
            " draw)"
        )
    source = random.Random(seed)
    ranges = {name: _range(where, name, entry) for name, entry in over.items()}
    draws = []
    for _ in range(count):
        draws.append({name: _drawn(source, *within) for name, within in ranges.items()})
    return draws


def _range(where: str, name: str, value: Any) -> tuple[Any, ...]:
    """Return a list of values, or both ends of a range and whether to draw on a log scale."""
    if isinstance(value, list):
        return (_values(where, name, value),)
    written = _mapping(f"{where}: {name}", value, ("low", "high", "log"))
    low, high = (_settings(where, {name: written.get(end)})[name] for end in ("low", "high"))
    log = written.get("log", False)
    numbers = all(type(end) in (int, float) for end in (low, high))  # True is none
    if not numbers or not low < high or (log and low <= 0):
        raise ConfigError(
            f"{where}: {name} is {shown(value)}; write a list of values, or low and high (both"
            " above 0 with log: true)"
        )
    return low, high, log


def _drawn(source: random.Random, low: Any, high: Any = None, log: bool = False) -> Any:
    if isinstance(low, list):
        return low[source.randrange(len(low))]
    if log:
        exponent = source.uniform(math.log(low), math.log(high))
        value = math.exp(exponent)
    else:
        value = source.uniform(low, high)
    if isinstance(low, int) and isinstance(high, int):
        return round(value)
    return float(f"{value:.6g}")


def _seeds(where: str, value: Any) -> list[int]:
    seeds = value if isinstance(value, list) else []
    if not seeds or not all(type(seed) is int and 0 <= seed <= SEED_MAX for seed in seeds):
        raise ConfigError(
            f"{where}: seeds is {shown(value)}; write a list of whole numbers like [0, 1, 2]"
        )
    return list(dict.fromkeys(seeds))


def _bisection(where: str, value: Any) -> Bisection:
    written = _mapping(where, value, ("setting", "low", "high", "rounds"))
    name = canonical(str(written.get("setting", "learning_rate")), _FLAGS)
    low, high = (_settings(where, {name: written.get(end)})[name] for end in ("low", "high"))
    rounds = written.get("rounds", 4)
    numbers = isinstance(low, float) and isinstance(high, float) and 0 < low < high
    if not numbers or type(rounds) is not int or not 1 <= rounds <= 20:
        raise ConfigError(
            f"{where} is {shown(value)}; write a setting that is a number, 0 < low < high, and 1"
            " to 20 rounds"
        )
    return Bisection(name, low, high, rounds)
