"""A study's specification: one YAML file becomes a list of trials, the same in every process.

    name: study                      default: the file's name
    settings: {model_name: tiny, use_quantization: true, max_steps: 40}    of every trial, by flag
    seeds: [0, 1]                    each trial once with each
    parts:
      map:
        note: what this part is for
        settings: {layers: all}      of every trial of this part
        arms: {plain: {}, safe: {safe_mode: true}}                         named bundles of settings
        grid: {learning_rate: [1.0e-3, 1.0e-2], adapter_rank: [4, 16]}     every combination
        random: {count: 8, seed: 0, over: {learning_rate: {low: 1.0e-4, high: 1.0, log: true}, loss:
            [nmse, mse]}}
        bisect: {setting: learning_rate, low: 1.0e-4, high: 1.0, rounds: 5}   seeks the largest
            value that trains

A part's trials are all arms with all points of the grid, all draws and all seeds. Equal settings in
two places are one trial, run once.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from npt.config import SEED_MAX, flag_of
from npt.errors import ConfigError, kind_of
from npt.flags import canonical, checked_settings, yaml_content
from npt.tools.sweep.settings import CLASSES, LEFT_OUT, Settings

_TOP = ("name", "settings", "seeds", "parts")
_PART = ("note", "settings", "seeds", "arms", "grid", "random", "bisect")
_EXTRA = {"safe_mode": bool}
_FLAGS = [*_EXTRA, *(flag_of(f) for cls in CLASSES for f in fields(cls))]

NAME = 200  # letters of a study's name, which is also a folder's
TRIALS = 100_000  # trials of a study: more are a slip of the pen in a grid


@dataclass(frozen=True)
class Bisection:
    """A search for the largest value of a setting that trains: `rounds` times the bracket from
    `low` to `high` is halved by its logarithm.
    """

    setting: str
    low: float
    high: float
    rounds: int


@dataclass(frozen=True)
class Place:
    """A trial's place in the specification. point: of the part's grid, or what was drawn."""

    part: str
    arm: str
    point: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Trial:
    """One run of a study, or with `bisect` a few that seek a limit. given: its settings as written,
    by flag name. key: its name to every worker; equal settings have equal keys.
    """

    key: str
    settings: Settings
    given: Mapping[str, Any]
    bisect: Bisection | None = None
    places: tuple[Place, ...] = ()

    def at(self, value: float) -> Settings:
        """Return its settings with another value of the setting whose limit it seeks."""
        assert self.bisect is not None
        return Settings.of({**self.given, self.bisect.setting: value}, self.settings.training.seed)


@dataclass(frozen=True)
class Design:
    """All trials of a study, in the order of the specification. parts: names, with the notes.
    varied: settings that differ.
    """

    name: str
    parts: Mapping[str, str]
    trials: tuple[Trial, ...]
    varied: tuple[str, ...]

    @property
    def by_key(self) -> dict[str, Trial]:
        return {trial.key: trial for trial in self.trials}


def read_design(path: str) -> Design:
    """Return the design of a file; raise ConfigError as `design_of`."""
    return design_of(yaml_content(path, path), path)


def design_of(content: Any, where: str) -> Design:
    """Return the design of a specification's content, every trial's settings checked. where: its
    file, for messages; its stem is the default name. Raise ConfigError for an unknown name, or
    settings of a trial that cannot work; the trial is named.
    """
    top = _mapping(where, content, _TOP)
    written = _mapping(f"{where}: parts", top.get("parts"))
    if not written:
        raise ConfigError(
            f"{where} has no parts; write at least one, like parts: {{first: {{grid:"
            " {learning_rate: [1.0e-4, 1.0e-3]}}}"
        )
    name = _study_name(where, top.get("name"))
    shared = _settings(f"{where}: settings", top.get("settings"))
    seeds = _seeds(where, top.get("seeds", [0]))
    parts: dict[str, str] = {}
    trials: dict[str, Trial] = {}
    for part, content in written.items():
        at = f"{where}: part {part}"
        _check_name(at, str(part))
        own = _mapping(at, content, _PART)
        parts[str(part)] = str(own.get("note", ""))
        for trial in _trials_of(at, str(part), own, shared, seeds):
            first = trials.get(trial.key, trial)
            places = tuple(dict.fromkeys(first.places + trial.places))
            trials[trial.key] = replace(first, places=places)
    values = [trial.settings.values() for trial in trials.values()]
    varied = tuple(n for n in values[0] if len({repr(each[n]) for each in values}) > 1)
    return Design(name, parts, tuple(trials.values()), tuple(n for n in varied if n != "seed"))


def _trials_of(
    where: str, part: str, own: Mapping[str, Any], shared: Mapping[str, Any], seeds: list[int]
) -> Iterator[Trial]:
    settings = {**shared, **_settings(f"{where}: settings", own.get("settings"))}
    seeds = _seeds(where, own["seeds"]) if "seeds" in own else seeds
    arms: dict[str, dict[str, Any]] = {}
    for arm, bundle in _mapping(f"{where}: arms", own.get("arms")).items():
        arms[str(arm)] = _settings(f"{where}, arm {arm}", bundle)
        _check_name(f"{where}, arm {arm}", str(arm))
    arms = arms or {"": {}}
    grid = {
        setting: _values(f"{where}: grid", setting, values)
        for setting, values in _by_flag(f"{where}: grid", own.get("grid")).items()
    }
    draws = _draws(f"{where}: random", own["random"]) if own.get("random") is not None else [{}]
    bisect = (
        _bisection(f"{where}: bisect", own["bisect"]) if own.get("bisect") is not None else None
    )
    count = len(arms) * math.prod(map(len, grid.values())) * len(draws) * len(seeds)
    if count > TRIALS:
        raise ConfigError(
            f"{where} has {count:,} trials, more than {TRIALS:,}; draw some at random instead"
        )
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    for (arm, bundle), point, draw, seed in itertools.product(arms.items(), points, draws, seeds):
        place = Place(part, arm, {**point, **draw})
        try:
            yield _trial({**settings, **bundle, **place.point}, seed, bisect, place)
        except ConfigError as error:
            varied = ", ".join(f"{k} {v}" for k, v in {**place.point, "seed": seed}.items())
            at = f"{where}, arm {arm}" if arm else where
            raise ConfigError(f"{at}, {varied}: {error}") from error


def _trial(given: dict[str, Any], seed: int, bisect: Bisection | None, place: Place) -> Trial:
    if bisect is not None:
        Settings.of({**given, bisect.setting: bisect.high}, seed)  # both ends must work
        given[bisect.setting] = bisect.low
    settings = Settings.of(given, seed)
    # defaults too: if a version changes one, the results of the old one are of another trial
    key = _fingerprint([settings.values(), None if bisect is None else list(astuple(bisect))])
    return Trial(key, settings, given, bisect, (place,))


def _fingerprint(value: Any) -> str:
    """Return 16 hexadecimal digits that equal values share, in every process and machine."""
    text = json.dumps(value, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _study_name(where: str, value: Any) -> str:
    """Return the study's name, which is also its folder's."""
    name = Path(where).stem if value is None else str(value)
    odd = isinstance(value, list | dict) or "/" in name or "\\" in name or name in (".", "..")
    if odd or not name.strip() or not name.isprintable():
        raise ConfigError(
            f"{where}: name is {value!r}, which no folder can be called; use letters, digits and"
            " spaces"
        )
    if len(name) > NAME:
        raise ConfigError(f"{where}: name has {len(name)} letters, more than {NAME}; shorten it")
    return name


def _check_name(where: str, name: str) -> None:
    if ";" in name or not name.strip() or not name.isprintable():
        raise ConfigError(
            f"{where} is no name that a table can hold; use letters, digits and spaces, and no"
            " semicolon"
        )


def _mapping(where: str, value: Any, known: tuple[str, ...] = ()) -> dict[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {kind_of(value)}; write names with values")
    odd = [name for name in value if name not in known] if known else []
    if odd:
        raise ConfigError(f"{where} has the unknown entry {odd[0]!r}; it takes {', '.join(known)}")
    return value


def _settings(where: str, value: Any) -> dict[str, Any]:
    """Return settings by flag name, each one that a study takes and of its type."""
    given = checked_settings(where, _mapping(where, value), CLASSES, _EXTRA)
    for name in given:
        if name in LEFT_OUT:
            raise ConfigError(f"{where}: {name} is no setting of a study: {LEFT_OUT[name]}")
    return given


def _by_flag(where: str, value: Any) -> dict[str, Any]:
    """Return a mapping's entries by flag name, which may be written as `lr`; none twice."""
    found: dict[str, Any] = {}
    for written, entry in _mapping(where, value).items():
        name = canonical(str(written), _FLAGS)
        if name in found:
            raise ConfigError(f"{where}: {name} is given twice; drop one")
        found[name] = entry
    return found


def _values(where: str, name: str, value: Any) -> list[Any]:
    """Return a list of values of one setting, none twice."""
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where}: {name} is {value!r}; write a list of values")
    found = [_settings(where, {name: entry})[name] for entry in value]
    if len({repr(entry) for entry in found}) < len(found):
        raise ConfigError(f"{where}: {name} has a value twice; drop one")
    return found


def _draws(where: str, value: Any) -> list[dict[str, Any]]:
    """Return the random points; the same ones for the same seed."""
    written = _mapping(where, value, ("count", "seed", "over"))
    count, seed = written.get("count"), written.get("seed", 0)
    over = _by_flag(f"{where}: over", written.get("over"))
    if type(count) is not int or not 1 <= count <= TRIALS or type(seed) is not int or not over:
        raise ConfigError(
            f"{where} needs a count of trials, a whole seed and settings to draw from, under over"
        )
    source = random.Random(seed)
    draws = {name: _draw(where, name, entry) for name, entry in over.items()}
    return [{name: draw(source) for name, draw in draws.items()} for _ in range(count)]


def _draw(where: str, name: str, value: Any) -> Callable[[random.Random], Any]:
    """Return a function that draws a setting from a list, or from a range, perhaps by its
    logarithm.
    """
    if isinstance(value, list):
        values = _values(where, name, value)
        return lambda source: values[source.randrange(len(values))]
    written = _mapping(f"{where}: {name}", value, ("low", "high", "log"))
    low, high = _ends(where, name, written)
    log = written.get("log", False)
    numbers = all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high))
    if not numbers or not low < high or (log and low <= 0) or not isinstance(log, bool):
        raise ConfigError(
            f"{where}: {name} is {value!r}; write a list of values, or low and high, and log: true"
            " for a range above 0"
        )
    whole = isinstance(low, int) and isinstance(high, int)

    def draw(source: random.Random) -> float:
        if log:
            drawn = math.exp(source.uniform(math.log(low), math.log(high)))
        else:
            drawn = source.uniform(low, high)
        return round(drawn) if whole else float(f"{drawn:.6g}")

    return draw


def _ends(where: str, name: str, written: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the low and the high end of a range of a setting, each of its type."""
    low, high = (_settings(where, {name: written.get(end)})[name] for end in ("low", "high"))
    return low, high


def _seeds(where: str, value: Any) -> list[int]:
    seeds = value if isinstance(value, list) else []
    if not seeds or not all(type(seed) is int and 0 <= seed <= SEED_MAX for seed in seeds):
        raise ConfigError(
            f"{where}: seeds is {value!r}; write a list of whole numbers like [0, 1, 2]"
        )
    return list(dict.fromkeys(seeds))


def _bisection(where: str, value: Any) -> Bisection:
    written = _mapping(where, value, ("setting", "low", "high", "rounds"))
    name = written.get("setting", "learning_rate")
    if not isinstance(name, str):
        raise ConfigError(f"{where}: setting is {name!r}; write the name of one setting")
    name = canonical(name, _FLAGS)
    low, high = _ends(where, name, written)
    rounds = written.get("rounds", 4)
    numbers = isinstance(low, float) and isinstance(high, float) and 0 < low < high
    if not numbers or type(rounds) is not int or not 1 <= rounds <= 20:
        raise ConfigError(
            f"{where} is {value!r}; write a setting that is a number, low and high above 0, and 1"
            " to 20 rounds"
        )
    return Bisection(name, low, high, rounds)
