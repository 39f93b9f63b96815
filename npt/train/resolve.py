"""A command becomes a run: one function for all verbs.

Flags win over --config, both over the recorded settings of a run that is resumed or looked at, and
these over defaults. The best rate, scale and objective depend on the start
(docs/results/choosing-settings.md), so their defaults are chosen together and printed.

A setting that cannot have an effect in the run is refused, or named in a note if it does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from npt.config import (
    PRODUCTS,
    STREAM,
    BaseConfig,
    DataConfig,
    NPTConfig,
    TrainConfig,
    flags_of,
    written,
)
from npt.config.field import words
from npt.errors import CheckpointError, ConfigError
from npt.flags import build, read_yaml, with_safe_mode

if TYPE_CHECKING:
    from npt.adapters.files.adapter_files import StoredAdapter
    from npt.base.recipe import Recipe

SETTINGS = (BaseConfig, NPTConfig, DataConfig, TrainConfig)
"""The classes of a run's settings."""

AUTO = "auto"

EMBEDDED = BaseConfig.model_name
BUILTIN = DataConfig.dataset_name
WEB_TEXT = "cerebras/SlimPajama-627B"

FORM_DEFAULTS: dict[str, Any] = {"targets": STREAM, "additive_scale": 1.0}
"""Defaults for the form of a closed-form start."""
NEAR_DEFAULTS: dict[str, Any] = {"learning_rate": 5e-5, "warmup_steps": 10}
"""Defaults for a student that starts close to its teacher. Higher rates make it worse."""
OF_MODULATION = ("targets", "modulation", "mult_bound", "mult_form", "regularization_lambda")
"""Settings that ask for the modulation of gate, up and down; a 0 asks for nothing."""
END_TO_END_DEFAULTS: dict[str, Any] = {"strategy": "end_to_end", "logit_kl_weight": 1.0}
CONTEXT_DEFAULTS: dict[str, Any] = {**END_TO_END_DEFAULTS, "hidden_weight": 0.0}
"""Defaults for a teacher with a context of its own (DataConfig.check_objective)."""
EMBEDDED_DEFAULTS: dict[str, dict[str, Any]] = {
    "calibrated": {"calibration_tokens": 32768, "max_steps": 150, "log_steps": 25},
    "random": {"max_steps": 600},
}
ACTIVE = 16
EMBEDDED_ACTIVE = 48
"""Default numbers of a token's code; for the embedded model and text."""
ROWS = 4
"""Default rows of A for each active number (docs/results/choosing-settings.md)."""
_RANDOM = (
    ("residual", "keep", "whose random start already equals its base"),
    ("mult_form", "half_sigmoid", "whose multipliers do not start at 1"),
)
"""Settings that rule out a closed-form start, and why."""
OTHER_WAYS = {"max_steps": ("num_epochs", "num_samples")}
"""For some defaults, the flags that replace them."""


RIVALS: dict[str, tuple[str, ...]] = {
    "adapter_rank": ("ranks",),
    "max_steps": ("num_epochs",),
    "num_epochs": ("max_steps",),
    "modulation": ("safe_mode",),
    "safe_mode": ("modulation",),
}
"""A flag makes these settings of --config, or of the run that is resumed, void."""
RIVALS_OF_CONFIG: dict[str, tuple[str, ...]] = {
    **RIVALS,
    # a rank that is given has a code of its own
    "adapter_rank": ("ranks", "active", "token_rank"),
    "ranks": ("active", "token_rank"),
    # so has an adapter its form
    "adapter": (*flags_of(NPTConfig), "calibration_tokens"),
}
"""The same for --config alone."""


@dataclass(frozen=True)
class RunSettings:
    """A run, as its command asks for it.

    Attributes:
        start: the saved adapter that training starts from, if any.
        any_base: whether that adapter may come from another base.
        started_from: the name of that adapter; when a run is resumed, as recorded.
        recipe: how the base of `start`, or of the resumed run, is stored.
        notes: lines to print.
    """

    base: BaseConfig
    adapter: NPTConfig
    data: DataConfig
    training: TrainConfig
    start: StoredAdapter | None
    any_base: bool
    started_from: str | None
    recipe: Recipe | None
    notes: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[BaseConfig, NPTConfig, DataConfig, TrainConfig]:
        return self.base, self.adapter, self.data, self.training

    def by_flag(self) -> dict[str, Any]:
        """Return all settings by flag."""
        values: dict[str, Any] = {}
        for part in self.parts:
            values |= part.by_flag()
        return values


class _Origin(NamedTuple):
    """What a run goes on from: another run, by its record, or a saved adapter, or nothing.

    Attributes:
        flags: the settings that it brings.
        recipe: how its base is stored.
    """

    flags: Mapping[str, Any]
    recipe: Recipe | None = None
    record: Mapping[str, Any] = {}
    start: StoredAdapter | None = None


def resolve(
    flags: Mapping[str, Any], *, shape: str | None = None, of_study: bool = False
) -> RunSettings:
    """Return the run that flags ask for.

    Args:
        flags: values by name, from a command line or a study; `init` may be `auto`, the default.
        shape: the name of a shape that stands for the base, of which no file is read.
        of_study: the flags are partly those of other runs too, so one without effect is no error.

    Raises:
        ConfigError: settings do not work together, or one of them cannot have an effect.
    """
    given = with_safe_mode(_with_config(flags))
    # the default is chosen together with others, or recorded
    if given.get("init") == AUTO:
        del given["init"]
    origin = _origin(given)
    values = {**origin.flags, **given}
    notes: list[str] = []
    # a run that goes on has chosen already
    if not origin.record:
        values, notes = with_defaults(values, shape or values.get("model_name", EMBEDDED))
    start = origin.start
    run = RunSettings(
        base=build(BaseConfig, values),
        adapter=build(NPTConfig, values) if start is None else _form_of(start, values),
        data=build(DataConfig, values),
        training=build(TrainConfig, values),
        start=start,
        any_base=given.get("any_base", False),
        started_from=given.get("adapter") or origin.record.get("settings", {}).get("adapter"),
        recipe=origin.recipe,
    )
    run.data.check_objective(run.training)
    asked = set() if of_study else {*with_safe_mode(flags)}
    notes += _without_effect(given, asked, run)
    return replace(run, notes=tuple(notes))


def _origin(given: Mapping[str, Any]) -> _Origin:
    """Return what the flags name to go on from."""
    folder = _resumed_folder(given)
    record = {} if folder is None else run_record(folder)
    if folder is not None and record:  # its adapters are in its checkpoints
        settings = without_rivals(recorded_flags(record), given)
        return _Origin(settings, _recipe_of_run(folder), record)
    if given.get("adapter") is None:
        return _Origin({})
    from npt.adapters.files.adapter_files import find_adapter

    start = find_adapter(given["adapter"])
    return _Origin(base_flags(start, given), start.recipe, start=start)


@dataclass(frozen=True)
class Look:
    """What a verb that looks at a base or at a student needs to know.

    Attributes:
        stored: the adapter; None to look at the base.
        data: by default those of the adapter's run.
        training: the settings of that run, or the defaults.
        date: the date that chat templates wrote in that run: on another day an evaluation must see
            the same tokens.
        notes: lines to print.
        unread: whether the adapter's run is known to have read other data than these.
    """

    stored: StoredAdapter | None
    base: BaseConfig
    data: DataConfig
    training: TrainConfig
    date: str | None = None
    notes: tuple[str, ...] = ()
    unread: bool = False


def resolve_look(flags: Mapping[str, Any]) -> Look:
    """Return what flags ask to look at; what they leave open, the adapter's run decides."""
    if flags.get("adapter") is None:
        return Look(None, build(BaseConfig, flags), build(DataConfig, flags), TrainConfig())
    from npt.adapters.files.adapter_files import find_adapter

    stored = find_adapter(flags["adapter"])
    record = run_record(stored.folder)
    if record.get("base_hash") != stored.record.get("base_hash"):
        record = {}  # of another run, into whose folder the adapter was copied
    data, notes = _data_to_look_at(stored, record, flags)
    # a path may have been relative to another folder: its last part must differ
    name = Path(data.dataset_name).name
    read = [source.get("dataset") for source in _sources(record)]
    return Look(
        stored=stored,
        base=build(BaseConfig, {**base_flags(stored, flags), **flags}),
        data=data,
        training=_objective_of(record, flags),
        date=record.get("date"),
        notes=notes,
        unread=all(other is not None and Path(other).name != name for other in read),
    )


def _objective_of(record: Mapping[str, Any], flags: Mapping[str, Any]) -> TrainConfig:
    """Return the settings of an adapter's run, or the defaults of another strategy."""
    recorded = {**END_TO_END_DEFAULTS, **recorded_flags(record, TrainConfig)}
    strategy = flags.get("strategy") or recorded["strategy"]
    if strategy == recorded["strategy"]:
        return build(TrainConfig, recorded)
    whole = strategy == END_TO_END_DEFAULTS["strategy"]
    return build(TrainConfig, END_TO_END_DEFAULTS if whole else {"strategy": strategy})


def _sources(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    return record.get("sources") or [{}]


def _data_to_look_at(
    stored: StoredAdapter, record: Mapping[str, Any], flags: Mapping[str, Any]
) -> tuple[DataConfig, tuple[str, ...]]:
    """Return the data that flags name, else those of the adapter's run, and lines about them."""
    recorded = recorded_flags(record, DataConfig)
    if "dataset_name" in flags:
        # columns and splits are those of the run's own data
        recorded = {name: value for name, value in recorded.items() if name == "max_length"}
        return build(DataConfig, {**recorded, **flags}), ()
    notes = []
    if recorded and _sources(record)[0].get("dataset", "") is None:
        recorded["dataset_name"] = BUILTIN
        notes.append(
            f"{stored} was trained on records passed in Python; measuring on {BUILTIN}: pass"
            " --dataset_name for other text"
        )
    return build(DataConfig, {**recorded, **flags}), tuple(notes)


def _with_config(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags, and the settings of --config that none of them makes void."""
    flags = dict(flags)
    path = flags.pop("config", None)
    if path is None:
        return flags
    extra = {"safe_mode": bool, "any_base": bool, "adapter": str}
    return without_rivals(read_yaml(path, SETTINGS, extra), flags, RIVALS_OF_CONFIG) | flags


def without_rivals(
    settings: Mapping[str, Any],
    flags: Mapping[str, Any],
    rivals: Mapping[str, tuple[str, ...]] = RIVALS,
) -> dict[str, Any]:
    """Return the settings that no flag makes void (see RIVALS)."""
    void = {rival for name in flags for rival in rivals.get(name, ())}
    return {name: value for name, value in settings.items() if name not in void}


def run_record(folder: Path) -> dict[str, Any]:
    """Return the record of the run that a run folder, a checkpoint or an adapter's folder belongs
    to: the checkpoint's own, else `run.json`; {} if there is neither, or no settings in it.

    Raises:
        CheckpointError: the record is damaged.
    """
    from npt.runs.checkpoint import RECORD
    from npt.runs.run_folder import RUN
    from npt.stored import read_json

    places = [place / RUN for place in (folder, *folder.resolve().parents[:3])]
    path = next(filter(Path.exists, (folder / RECORD, *places)), None)
    record = {} if path is None else read_json(path, CheckpointError)
    return record if isinstance(record.get("settings"), dict) else {}


def _resumed_folder(flags: Mapping[str, Any]) -> Path | None:
    """Return the folder that --resume names; None if it has no checkpoint, and the run so begins
    anew. Whether the run can be resumed is checked later.
    """
    resume = flags.get("resume")
    named = flags.get("output_dir") if resume == AUTO else resume
    if named is None:
        return None
    from npt.adapters.files.run_layout import CHECKPOINTS, checkpoints
    from npt.runs.checkpoint import RECORD

    # an output folder is used as it is written
    folder = Path(named) if resume == AUTO else Path(named).expanduser()
    begun = (folder / RECORD).exists() or checkpoints(folder / CHECKPOINTS)
    return folder if begun else None


def recorded_flags(record: Mapping[str, Any], *classes: type) -> dict[str, Any]:
    """Return the settings of a run's record by flag name, of all classes or of these. The folder of
    the run is not among them.
    """
    settings = record.get("settings", {})
    found = {}
    for flag, f in flags_of(*(classes or SETTINGS)).items():
        if f.name in settings and flag not in ("resume", "output_dir"):
            found[flag] = settings[f.name]
    return found


def base_flags(stored: StoredAdapter, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of the base that a saved adapter was trained on, as far as it records them
    and the flags ask for no other precision.
    """
    recorded = {} if stored.recipe is None else stored.recipe.flags
    packed = recorded.get("use_quantization")
    if flags.get("use_quantization", packed) != packed:
        recorded = {}
    name = stored.record.get("base_model_name_or_path")
    if isinstance(name, str) and name != "unknown":
        recorded["model_name"] = name
    return recorded


def _recipe_of_run(folder: Path) -> Recipe | None:
    """Return how the base of the run to resume is stored, by any of its adapters."""
    from npt.adapters.files.adapter_files import find_adapter
    from npt.errors import AdapterFileError

    try:
        return find_adapter(folder).recipe
    except AdapterFileError:  # a checkpoint's own fault is reported when it is read
        return None


def _form_of(start: StoredAdapter, values: Mapping[str, Any]) -> NPTConfig:
    """Return the form to train a saved adapter in: its own, or with multipliers added.

    Raises:
        ConfigError: a flag asks for another form.
    """
    form = start.config
    recorded = form.by_flag()
    asked: NPTConfig = build(NPTConfig, {**recorded, **values})
    grown = replace(form, modulation="both")
    if asked == grown and form.modulation == "additive":
        return grown
    for flag, wanted in asked.by_flag().items():
        if wanted != recorded[flag]:
            raise ConfigError(
                f"--{flag} is {wanted}, but --adapter {start} has {recorded[flag]}: remove one of"
                " them"
            )
    return form


def with_defaults(flags: Mapping[str, Any], model_name: str) -> tuple[dict[str, Any], list[str]]:
    """Return the flags with the defaults of a new run, and lines about them."""
    flags = dict(flags)
    notes: list[str] = []
    if "dataset_name" not in flags and model_name != EMBEDDED:
        flags = {"dataset_name": WEB_TEXT, "streaming": True, **flags}
        notes.append(
            f"no --dataset_name: streaming text from {WEB_TEXT}; to train on your own text, pass a"
            " file or folder"
        )
    whole = CONTEXT_DEFAULTS["strategy"]
    if flags.get("context_column") is not None and flags.get("strategy", whole) == whole:
        objective = _missing(CONTEXT_DEFAULTS, flags)
        flags |= objective
        if objective:
            notes.append(f"--context_column: logits alone are compared: {_as_flags(objective)}")
    asked = flags.pop("init", AUTO)
    if flags.get("adapter") is not None:
        chosen = _near(flags)
    else:
        chosen, note = _start(flags, asked, model_name)
        notes += note
    chosen |= _missing({"save_steps": 500}, flags)
    return {**flags, **chosen}, notes


def _start(
    flags: Mapping[str, Any], asked: str, model_name: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the start, `asked` or chosen, with the defaults that go with it, and a line about it
    if it was chosen.
    """
    against = _why_random(flags)
    init = asked
    if asked == AUTO:
        init = "random" if against else "calibrated"
    embedded = model_name == EMBEDDED and flags.get("dataset_name", BUILTIN) == BUILTIN
    defaults: dict[str, Any] = {}
    if init == "calibrated":
        defaults = {**_form(flags), **_near(flags)}
        # else the start will be refused
        if not against:
            defaults |= _code(flags, EMBEDDED_ACTIVE if embedded else ACTIVE)
    if embedded:
        defaults |= _missing(EMBEDDED_DEFAULTS[init], flags)
    note = f"--init auto: random start, because of {against}"
    if not against:
        note = (
            f"--init auto: closed-form start (--init calibrated), with {_as_flags(defaults)}; use"
            " --init random for a random start"
        )
    return {"init": init, **defaults}, [note] if asked == AUTO else []


def _form(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return defaults for the form of a closed-form start."""
    form = dict(FORM_DEFAULTS)
    if any(flags.get(name) for name in OF_MODULATION):
        form["targets"] = ",".join(NPTConfig.targets)
    return _missing(form, flags)


def _near(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return defaults for a student that starts close to its teacher."""
    steps = int(flags.get("max_steps") or 100)
    warmup = min(NEAR_DEFAULTS["warmup_steps"], steps // 10)
    near = _missing({**NEAR_DEFAULTS, "warmup_steps": warmup}, flags)
    # the objective is one choice: who makes a part of it makes it all
    if flags.keys().isdisjoint({"loss", *END_TO_END_DEFAULTS}):
        near |= END_TO_END_DEFAULTS
    return near


def _code(flags: Mapping[str, Any], usual: int) -> dict[str, Any]:
    """Return the missing sizes of the code and of the token part. All numbers of a rank that is
    given are kept, unless --active says how many.
    """
    if "ranks" in flags:
        return {}
    if "adapter_rank" in flags:
        return _missing({"token_rank": flags["adapter_rank"]}, flags)
    active = flags.get("active", usual)
    rank = ROWS * (active or usual)
    return _missing({"adapter_rank": rank, "active": active, "token_rank": rank}, flags)


def _as_flags(settings: Mapping[str, Any]) -> str:
    return " ".join(f"--{name} {value}" for name, value in settings.items())


def _missing(defaults: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    missing = {}
    for name, value in defaults.items():
        ways = (name, *OTHER_WAYS.get(name, ()))
        if flags.keys().isdisjoint(ways):
            missing[name] = value
    return missing


def _why_random(flags: Mapping[str, Any]) -> str:
    """Return the flag that rules out a closed-form start, with the reason, or ""."""
    for name, value, why in _RANDOM:
        if flags.get(name) == value:
            return f"--{name} {value}, {why}"
    targets = words(flags.get("targets", STREAM))
    return "" if STREAM in targets else f"--targets {','.join(targets)}, without stream"


def _products(run: RunSettings) -> bool:
    return not PRODUCTS.keys().isdisjoint(run.adapter.targets)


_ALONE = "stream is the only target: add gate, up or down to --targets, or remove it"
_EFFECTS: dict[str, tuple[Callable[[RunSettings], Any], str]] = {
    "modulation": (_products, _ALONE),
    "regularization_lambda": (_products, _ALONE),
    "mult_bound": (lambda r: r.adapter.multiplied, "nothing is multiplied: add --modulation both"),
    "mult_form": (lambda r: r.adapter.multiplied, _ALONE),
    "additive_scale": (lambda r: r.adapter.shifted, "nothing is added: add --modulation both"),
    "calibration_tokens": (
        lambda r: not r.started_from and r.adapter.init == "calibrated",
        "there is no closed-form start: remove it, or use --init calibrated without --adapter",
    ),
    "init": (lambda r: not r.started_from, "--adapter is the start: remove one of them"),
    "any_base": (lambda r: r.started_from, "add --adapter or remove it"),
    "use_fp16": (lambda r: not r.base.use_quantization, "a 4-bit base computes in fp32"),
    "share_embeddings": (lambda r: False, "teacher and student share the whole base"),
    "num_epochs": (lambda r: r.training.max_steps is None, "--max_steps sets the length"),
    "adapter_rank": (lambda r: r.adapter.ranks is None, "--ranks sets the ranks"),
    "run_name": (lambda r: r.training.use_wandb, "it names a run in W&B: add --use_wandb"),
}
"""Settings by flag: when they have an effect, and what to do if not. One that was not asked for, or
that is 0, asks for nothing.
"""
_HARMLESS = {"use_fp16", "share_embeddings", "num_epochs", "adapter_rank", "run_name"}
"""Settings among them that may stand in a command that is used for many runs."""


def _without_effect(
    given: Mapping[str, Any], asked: Collection[str], run: RunSettings
) -> list[str]:
    """Return lines about given settings that have no effect. One that does harm unsaid is refused
    if a flag asked for it; a file of settings may serve many runs.
    """
    lines = []
    for name, (has_effect, why) in _EFFECTS.items():
        value = given.get(name)
        if not value or has_effect(run):
            continue
        line = f"{written(name, value)} has no effect: {why}"
        if name in asked and name not in _HARMLESS:
            raise ConfigError(line)
        lines.append(line)
    return lines
