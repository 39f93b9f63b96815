"""A command becomes a run: one function for all verbs.

Flags win over --config, both over the recorded settings of a run that is resumed or looked at, and
these over defaults. The best rate, scale and objective depend on the start
(docs/results/choosing-settings.md), so their defaults are chosen together and printed.

A setting that cannot have an effect in the run is refused, or named in a note if it does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npt.config import PRODUCTS, STREAM, BaseConfig, DataConfig, NPTConfig, TrainConfig, flag_of
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

NEAR_DEFAULTS: dict[str, Any] = {
    "targets": STREAM,
    "additive_scale": 1.0,
    "learning_rate": 5e-5,
    "warmup_steps": 10,
}
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
RIVALS_OF_CONFIG = dict.fromkeys(("adapter_rank", "ranks"), ("active", "token_rank"))
"""The same for --config alone: a rank that is given has a code of its own."""


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
    given = with_safe_mode(_with_config(flags, ignored=() if shape is None else ("model_name",)))
    record = resumed_record(given)
    start = None
    recipe = None
    values = given
    if record:  # its adapters are in its checkpoints
        recipe = _recipe_of_run(given)
        values = {**without_rivals(recorded_flags(record), given), **given}
    elif given.get("adapter") is not None:
        from npt.adapters.files.adapter_files import find_adapter

        start = find_adapter(given["adapter"])
        recipe = start.recipe
        values = {**base_flags(start, given), **given}
    model_name = shape or values.get("model_name", EMBEDDED)
    notes: list[str] = []
    if not record:
        values, notes = with_defaults(values, model_name)
    elif values.get("init") == AUTO:
        values["init"] = record["settings"]["init"]
    run = RunSettings(
        base=build(BaseConfig, values),
        adapter=build(NPTConfig, values) if start is None else _form_of(start, values),
        data=build(DataConfig, values),
        training=build(TrainConfig, values),
        start=start,
        any_base=given.get("any_base", False),
        started_from=given.get("adapter") or record.get("settings", {}).get("adapter"),
        recipe=recipe,
    )
    run.data.check_objective(run.training)
    # with_safe_mode has put one for the other
    asked = {"modulation" if name == "safe_mode" else name for name in flags if not of_study}
    notes += _without_effect(given, asked, run)
    return replace(run, notes=tuple(notes))


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
    return Look(
        stored=stored,
        base=build(BaseConfig, {**base_flags(stored, flags), **flags}),
        data=data,
        training=_objective_of(record, flags),
        date=record.get("date"),
        notes=notes,
        unread=_unread(record, data),
    )


def _objective_of(record: Mapping[str, Any], flags: Mapping[str, Any]) -> TrainConfig:
    """Return the settings of an adapter's run, or the defaults of another strategy."""
    recorded = recorded_flags(record, TrainConfig)
    whole = END_TO_END_DEFAULTS["strategy"]
    strategy = flags.get("strategy") or recorded.get("strategy") or whole
    if strategy != recorded.get("strategy"):
        recorded = END_TO_END_DEFAULTS if strategy == whole else {"strategy": strategy}
    return build(TrainConfig, recorded)


def _unread(record: Mapping[str, Any], data: DataConfig) -> bool:
    """Return whether the run is known to have read other data than these."""
    # a path may have been relative to another folder: its last part must differ
    name = Path(data.dataset_name).name
    for source in record.get("sources") or [{}]:
        read = source.get("dataset")
        if read is None or Path(read).name == name:
            return False
    return True


def _data_to_look_at(
    stored: StoredAdapter, record: Mapping[str, Any], flags: Mapping[str, Any]
) -> tuple[DataConfig, tuple[str, ...]]:
    """Return the data that flags name, else those of the adapter's run, and lines about them."""
    recorded = recorded_flags(record, DataConfig)
    notes: tuple[str, ...] = ()
    first = (record.get("sources") or [{}])[0]
    if "dataset_name" in flags:
        # columns and splits are those of the run's own data
        recorded = {name: value for name, value in recorded.items() if name == "max_length"}
    elif recorded and first.get("dataset", "") is None:
        note = (
            f"{stored} was trained on records passed in Python; measuring on {BUILTIN}: pass"
            " --dataset_name for other text"
        )
        notes = (note,)
        recorded["dataset_name"] = BUILTIN
    return build(DataConfig, {**recorded, **flags}), notes


def _with_config(flags: Mapping[str, Any], ignored: Collection[str]) -> dict[str, Any]:
    """Return the flags and the settings of --config, except `ignored` ones."""
    flags = dict(flags)
    path = flags.pop("config", None)
    if path is None:
        return flags
    extra = {"safe_mode": bool, "any_base": bool, "adapter": str}
    settings = without_rivals(read_yaml(path, SETTINGS, extra), flags)
    settings = without_rivals(settings, flags, RIVALS_OF_CONFIG)
    if "adapter" in flags:  # it has a form of its own
        form = [flag_of(f) for f in fields(NPTConfig)]
        ignored = {*ignored, *form, "calibration_tokens"}
    kept = {name: value for name, value in settings.items() if name not in ignored}
    return kept | flags


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
    to: the checkpoint's own, else `run.json`; {} if there is neither.

    Raises:
        CheckpointError: the record is damaged.
    """
    from npt.runs.checkpoint import RECORD
    from npt.runs.run_folder import RUN
    from npt.stored import read_json

    places = [place / RUN for place in (folder, *folder.resolve().parents[:3])]
    for path in (folder / RECORD, *places):
        if path.exists():
            return read_json(path, CheckpointError)
    return {}


def resumed_record(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of the run that --resume names; {} if it has no checkpoint, and so begins
    anew. Whether the run can be resumed is checked later.
    """
    folder = _resumed_folder(flags)
    if folder is None:
        return {}
    from npt.adapters.files.run_layout import CHECKPOINTS, checkpoints
    from npt.runs.checkpoint import RECORD

    if not (folder / RECORD).exists() and not checkpoints(folder / CHECKPOINTS):
        return {}
    record = run_record(folder)
    return record if isinstance(record.get("settings"), dict) else {}


def _resumed_folder(flags: Mapping[str, Any]) -> Path | None:
    resume = flags.get("resume")
    if resume is None:
        return None
    if resume != AUTO:
        return Path(resume).expanduser()
    return None if flags.get("output_dir") is None else Path(flags["output_dir"])


def recorded_flags(record: Mapping[str, Any], *classes: type) -> dict[str, Any]:
    """Return the settings of a run's record by flag name, of all classes or of these. The folder of
    the run is not among them.
    """
    settings = record.get("settings")
    if not isinstance(settings, dict):
        return {}
    names = {f.name: flag_of(f) for cls in classes or SETTINGS for f in fields(cls)}
    for of_folder in ("resume", "output_dir"):
        names.pop(of_folder, None)
    return {names[name]: value for name, value in settings.items() if name in names}


def base_flags(stored: StoredAdapter, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of the base that a saved adapter was trained on, as far as it records them
    and the flags ask for no other precision.
    """
    recorded: dict[str, Any] = {}
    name = stored.record.get("base_model_name_or_path")
    if isinstance(name, str) and name != "unknown":
        recorded["model_name"] = name
    if stored.recipe is not None:
        packed = stored.recipe.flags["use_quantization"]
        if flags.get("use_quantization", packed) == packed:
            recorded |= stored.recipe.flags
    return recorded


def _recipe_of_run(flags: Mapping[str, Any]) -> Recipe | None:
    """Return how the base of the run to resume is stored, by any of its adapters."""
    from npt.adapters.files.adapter_files import find_adapter
    from npt.errors import AdapterFileError

    folder = _resumed_folder(flags)
    assert folder is not None
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
    recorded = {flag_of(f): getattr(form, f.name) for f in fields(form)}
    asked: NPTConfig = build(NPTConfig, {**recorded, **values})
    grown = replace(form, modulation="both")
    if asked == grown and form.modulation == "additive":
        return grown
    for f in fields(form):
        was = getattr(form, f.name)
        wanted = getattr(asked, f.name)
        if wanted != was:
            raise ConfigError(
                f"--{flag_of(f)} is {wanted}, but --adapter {start} has {was}: remove one of them"
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
        init = "calibrated" if against is None else "random"
    embedded = model_name == EMBEDDED and flags.get("dataset_name", BUILTIN) == BUILTIN
    defaults: dict[str, Any] = {}
    if init == "calibrated":
        defaults |= _near(flags)
        if against is None:
            defaults |= _code(flags, EMBEDDED_ACTIVE if embedded else ACTIVE)
    if embedded:
        defaults |= _missing(EMBEDDED_DEFAULTS[init], flags)
    chosen = {"init": init, **defaults}
    if asked != AUTO:
        return chosen, []
    if against is not None:
        return chosen, [f"--init auto: random start, because of {against}"]
    note = (
        f"--init auto: closed-form start (--init calibrated), with {_as_flags(defaults)}; use"
        " --init random for a random start"
    )
    return chosen, [note]


def _near(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return defaults for a student that starts close to its teacher."""
    form = dict(NEAR_DEFAULTS)
    if flags.get("adapter") is not None:
        del form["additive_scale"], form["targets"]
    elif any(flags.get(name) for name in OF_MODULATION):
        form["targets"] = ",".join(NPTConfig.targets)
    steps = int(flags.get("max_steps") or 100)
    form["warmup_steps"] = min(form["warmup_steps"], steps // 10)
    near = _missing(form, flags)
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
    chosen = {}
    if "adapter_rank" in flags:
        rank = flags["adapter_rank"]
    else:
        active = flags.get("active", usual)
        rank = ROWS * (active or usual)
        chosen = {"adapter_rank": rank, "active": active}
    return _missing({**chosen, "token_rank": rank}, flags)


def _as_flags(settings: Mapping[str, Any]) -> str:
    return " ".join(f"--{name} {value}" for name, value in settings.items())


def _missing(defaults: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    missing = {}
    for name, value in defaults.items():
        ways = (name, *OTHER_WAYS.get(name, ()))
        if flags.keys().isdisjoint(ways):
            missing[name] = value
    return missing


def _why_random(flags: Mapping[str, Any]) -> str | None:
    """Return the flag that rules out a closed-form start, with the reason, or None."""
    if flags.get("residual") == "keep":
        return "--residual keep, whose random start already equals its base"
    if flags.get("mult_form") == "half_sigmoid":
        return "--mult_form half_sigmoid, whose multipliers do not start at 1"
    targets = words(flags.get("targets", STREAM))
    if STREAM not in targets:
        return f"--targets {','.join(targets)}, without stream"
    return None


def _products(run: RunSettings) -> bool:
    return not PRODUCTS.keys().isdisjoint(run.adapter.targets)


_ALONE = "stream is the only target: add gate, up or down to --targets, or remove it"
_REFUSED: dict[str, tuple[Callable[[RunSettings], Any], str]] = {
    "modulation": (_products, _ALONE),
    "regularization_lambda": (_products, _ALONE),
    "mult_bound": (lambda r: r.adapter.multiplied, "nothing is multiplied: add --modulation both"),
    "mult_form": (lambda r: r.adapter.multiplied, _ALONE),
    "additive_scale": (lambda r: r.adapter.shifted, "nothing is added: add --modulation both"),
    "calibration_tokens": (
        lambda r: r.started_from is None and r.adapter.init == "calibrated",
        "there is no closed-form start: remove it, or use --init calibrated without --adapter",
    ),
    "init": (lambda r: r.started_from is None, "--adapter is the start: remove one of them"),
    "any_base": (lambda r: r.started_from is not None, "add --adapter or remove it"),
}
"""Settings by flag: when they have an effect, and what to do if not. One that was not asked for, or
that is 0, asks for nothing.
"""
_HARMLESS: dict[str, tuple[Callable[[RunSettings], Any], str]] = {
    "use_fp16": (lambda r: not r.base.use_quantization, "a 4-bit base computes in fp32"),
    "share_embeddings": (lambda r: False, "teacher and student share the whole base"),
    "num_epochs": (lambda r: r.training.max_steps is None, "--max_steps sets the length"),
    "adapter_rank": (lambda r: r.adapter.ranks is None, "--ranks sets the ranks"),
    "run_name": (lambda r: r.training.use_wandb, "it names a run in W&B: add --use_wandb"),
}
"""The same for settings that may stand in a command that is used for many runs."""


def _without_effect(
    given: Mapping[str, Any], asked: Collection[str], run: RunSettings
) -> list[str]:
    """Return lines about given settings that have no effect. One that does harm unsaid is refused
    if a flag asked for it; a file of settings may serve many runs.
    """
    lines = []
    for table in (_REFUSED, _HARMLESS):
        for name, (has_effect, why) in table.items():
            value = given.get(name)
            if not value or value == AUTO or has_effect(run):
                continue
            shown = "" if value is True else f" {value}"
            line = f"--{name}{shown} has no effect: {why}"
            if table is _REFUSED and name in asked:
                raise ConfigError(line)
            lines.append(line)
    return lines
