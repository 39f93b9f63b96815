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
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from npt.config import INT_MAX
from npt.errors import ConfigError, kind_of
from npt.flags import checked_settings, kinds_by_flag, typed, yaml_content
from npt.stored import shown
from npt.train.resolve import SETTINGS, RunSettings, resolve

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
_KINDS = {**kinds_by_flag(SETTINGS), "safe_mode": bool}

NAME = 200  # longest name of a study, since it names a folder too
TRIALS = 100_000
"""Trials of a part. More are a slip in a grid, and checking them would take minutes."""


class Bisection(NamedTuple):
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
    point: Mapping[str, Any] = field(compare=False)

    @property
    def arm_of_part(self) -> str:
        return f"part {self.part}, arm {self.arm}" if self.arm else f"part {self.part}"

    def __str__(self) -> str:
        return ", ".join(filter(None, [self.part, self.arm, *self.settings]))

    @property
    def settings(self) -> list[str]:
        return [f"{name} {value}" for name, value in self.point.items()]


@dataclass(frozen=True)
class Trial:
    """One run of a study or, with `bisect`, the few runs of a search.

    Attributes:
        key: identifies the trial; equal settings have equal keys.
        settings: the run that `npt pretrain` would make of the flags.
        flags: settings as written, and the seed, by flag name.
        bisect: the search, if the trial is one.
        origins: every part, arm and point that gives this trial.
    """

    key: str
    settings: RunSettings
    flags: Mapping[str, Any]
    bisect: Bisection | None
    origins: tuple[TrialOrigin, ...]

    def __str__(self) -> str:
        return f"{self.origins[0]}, seed {self.settings.training.seed}"

    def at(self, value: float) -> RunSettings:
        """Return the settings with this value for the setting that `bisect` searches."""
        assert self.bisect is not None
        return resolve({**self.flags, self.bisect.setting: value}, of_study=True)


def values_of(settings: RunSettings) -> dict[str, Any]:
    """Return by flag all settings of a trial, except those that every study has alike."""
    values = settings.by_flag()
    return {name: values[name] for name in values if name == "seed" or name not in LEFT_OUT}


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
    top = _entries(where, content, _TOP)
    written = _mapping(f"{where}: parts", top.get("parts"))
    if not written:
        raise ConfigError(
            f"{where} has no parts; write at least one, like parts: {{first: {{grid:"
            " {learning_rate: [1.0e-4, 1.0e-3]}}}"
        )
    name = _study_name(where, top.get("name", Path(where).stem))
    shared = _settings(f"{where}: settings", top.get("settings"))
    seeds = _seeds(where, top.get("seeds", [0]))
    parts = []
    trials: dict[str, Trial] = {}
    for part, entries in written.items():
        at = f"{where}: part {part}"
        parts.append(_name(at, part))
        for trial in _trials_of(where, parts[-1], _entries(at, entries, _PART), shared, seeds):
            # equal settings run once, and count for every part that has them
            first = trials.get(trial.key, trial)
            origins = tuple(dict.fromkeys(first.origins + trial.origins))
            trials[trial.key] = replace(first, origins=origins)
    return Design(name, tuple(parts), tuple(trials.values()), _varied(trials.values()))


def _varied(trials: Iterable[Trial]) -> tuple[str, ...]:
    values = [values_of(trial.settings) for trial in trials]
    varied = []
    for name in values[0]:
        found = {each[name] for each in values}
        if name != "seed" and len(found) > 1:
            varied.append(name)
    return tuple(varied)


def _trials_of(
    where: str, part: str, entries: Mapping[str, Any], shared: Mapping[str, Any], seeds: list[int]
) -> Iterator[Trial]:
    at = f"{where}: part {part}"
    settings = {**shared, **_settings(f"{at}: settings", entries.get("settings"))}
    arms: dict[str, dict[str, Any]] = {}
    for arm, bundle in _mapping(f"{at}: arms", entries.get("arms")).items():
        of_arm = f"{at}, arm {arm}"
        arms[_name(of_arm, arm)] = _settings(of_arm, bundle)
    arms = arms or {"": {}}
    seeds = _seeds(at, entries.get("seeds", seeds))
    bisect = _bisection(f"{at}: bisect", entries.get("bisect"))
    points = _points(at, entries, len(arms) * len(seeds))
    for (arm, bundle), point, seed in itertools.product(arms.items(), points, seeds):
        origin = TrialOrigin(part, arm, point)
        try:
            yield _trial({**settings, **bundle, **point, "seed": seed}, bisect, origin)
        except ConfigError as error:
            place = ", ".join([origin.arm_of_part, *origin.settings, f"seed {seed}"])
            raise ConfigError(f"{where}: {place}: {error}") from error


def _points(where: str, entries: Mapping[str, Any], runs: int) -> list[dict[str, Any]]:
    """Return the settings of each point of the grid with each draw; a point has so many runs."""
    grid = _settings(f"{where}: grid", entries.get("grid"), _values)
    draws = _draws(f"{where}: random", entries.get("random"))
    # counted first: making them takes time
    count = runs * math.prod(map(len, grid.values())) * len(draws)
    if count > TRIALS:
        raise ConfigError(
            f"{where} has {count:,} trials, more than {TRIALS:,}: shorten its lists or draw some at"
            " random"
        )
    points = []
    for *values, draw in itertools.product(*grid.values(), draws):
        points.append({**dict(zip(grid, values, strict=True)), **draw})
    return points


def _trial(flags: dict[str, Any], bisect: Bisection | None, origin: TrialOrigin) -> Trial:
    if bisect is not None:
        resolve({**flags, bisect.setting: bisect.high}, of_study=True)  # both ends must work
        flags[bisect.setting] = bisect.low
    settings = resolve(flags, of_study=True)
    # includes defaults: if a version changes one, its trials are new
    content = [values_of(settings), bisect]
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Trial(key, settings, flags, bisect, (origin,))


def _study_name(where: str, written: Any) -> str:
    name = str(written or "")
    # it names a folder, on any system
    fits = re.fullmatch(rf"[^/\\]{{1,{NAME}}}", name) and name.strip(" .")
    if not fits or not name.isprintable():
        raise ConfigError(
            f"{where}: name {name[:NAME]!r} cannot be a folder name; use up to {NAME} letters,"
            " digits and spaces"
        )
    return name


def _name(where: str, written: Any) -> str:
    name = str(written)
    if ";" in name or not name.strip() or not name.isprintable():
        raise ConfigError(
            f"{where}: the table cannot hold this name; use letters, digits and spaces, without"
            " semicolons"
        )
    return name


def _mapping(where: str, value: Any) -> dict[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {kind_of(value)}; write a mapping of names to values")
    return value


def _entries(where: str, value: Any, names: Sequence[str]) -> dict[Any, Any]:
    """Return a mapping of no other than these names."""
    entries = _mapping(where, value)
    for name in entries:
        if name not in names:
            raise ConfigError(f"{where} has the unknown entry {name!r}; use {', '.join(names)}")
    return entries


def _settings(where: str, value: Any, read: Callable[..., Any] = typed) -> dict[str, Any]:
    """Return what `read` makes of each setting, by flag name, checked for use in a study."""
    flags = checked_settings(where, _mapping(where, value), _KINDS, read)
    for name in flags:
        if name in LEFT_OUT:
            raise ConfigError(f"{where}: a study does not accept {name}: {LEFT_OUT[name]}")
    return flags


def _values(where: str, name: str, value: Any, kind: type) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where}: {name} is {shown(value)}; write a list of values")
    values = [typed(where, name, entry, kind) for entry in value]
    if len(set(values)) < len(values):
        raise ConfigError(f"{where}: {name} lists a value twice; remove one")
    return values


def _ends(where: str, name: str, value: Mapping[str, Any], kind: type) -> list[Any]:
    return [typed(where, name, value.get(end), kind) for end in ("low", "high")]


def _is_whole(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    return type(value) is int and least <= value <= most


def _draws(where: str, value: Any) -> list[dict[str, Any]]:
    if not value:
        return [{}]
    written = _entries(where, value, ("count", "seed", "over"))
    count: Any = written.get("count")
    seed = written.get("seed", 0)
    over = _settings(where, _mapping(f"{where}: over", written.get("over")), _range)
    if not (_is_whole(count, 1, TRIALS) and _is_whole(seed) and over):
        raise ConfigError(
            f"{where} needs count (1 to {TRIALS:,}), seed (a whole number) and over (settings to"
            " draw)"
        )
    source = random.Random(seed)
    draws = []
    for _ in range(count):
        draws.append({name: draw(source) for name, draw in over.items()})
    return draws


def _range(where: str, name: str, value: Any, kind: type) -> Callable[[random.Random], Any]:
    """Return how to draw a value: from a list, or between two ends."""
    if isinstance(value, list):
        values = _values(where, name, value, kind)
        return lambda source: source.choice(values)
    written = _entries(f"{where}: {name}", value, ("low", "high", "log"))
    low, high = _ends(where, name, written, kind)
    log = written.get("log", False)
    numbers = kind in (int, float) and None not in (low, high)
    if not (numbers and low < high and (low > 0 or not log)):
        raise ConfigError(
            f"{where}: {name} is {shown(value)}; write a list of values, or low and high (both"
            " above 0 with log: true)"
        )
    return lambda source: _drawn(source, low, high, log)


def _drawn(source: random.Random, low: Any, high: Any, log: bool) -> Any:
    if log:
        exponent = source.uniform(math.log(low), math.log(high))
        value = math.exp(exponent)
    else:
        value = source.uniform(low, high)
    return round(value) if isinstance(low, int) else float(f"{value:.6g}")


def _seeds(where: str, value: Any) -> list[int]:
    seeds = value if isinstance(value, list) else []
    if not seeds or not all(_is_whole(seed, 0, INT_MAX) for seed in seeds):
        raise ConfigError(
            f"{where}: seeds is {shown(value)}; write a list of whole numbers like [0, 1, 2]"
        )
    return list(dict.fromkeys(seeds))


def _bisection(where: str, value: Any) -> Bisection | None:
    if not value:
        return None
    written = _entries(where, value, Bisection._fields)
    setting = str(written.get("setting", "learning_rate"))
    rounds = written.get("rounds", 4)
    ((name, (low, high)),) = _settings(where, {setting: written}, _ends).items()
    numbers = isinstance(low, float) and isinstance(high, float)
    if not (numbers and 0 < low < high and _is_whole(rounds, 1, 20)):
        raise ConfigError(
            f"{where} is {shown(value)}; write a setting that is a number, 0 < low < high, and 1"
            " to 20 rounds"
        )
    return Bisection(name, low, high, rounds)
