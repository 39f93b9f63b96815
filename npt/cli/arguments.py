"""Flags that several verbs share, and loading their base and adapter."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from npt.config import INITS, INT_MAX, BaseConfig, DataConfig, check_need
from npt.console import make_console, put
from npt.errors import DataError
from npt.files import to_json
from npt.flags import add_settings
from npt.presets import presets
from npt.stored import read_bytes
from npt.train.resolve import (
    AUTO,
    EMBEDDED,
    SETTINGS,
    Look,
    RunSettings,
    resolve_look,
    with_defaults,
)
from npt.train.sources import check_sources

_OF_TRAINING = {"num_samples", "replay_dataset", "replay_ratio", "teacher_precision", "shard_base"}
"""Settings of base and data that have no effect without training."""


TEXT_BYTES = 1 << 24
"""Size limit of a text file that a flag names."""


def natural(text: str, least: int = 0) -> int:
    value = int(text)
    if not least <= value <= INT_MAX:
        raise argparse.ArgumentTypeError(f"{value} is not between {least} and {INT_MAX}")
    return value


def positive(text: str) -> int:
    return natural(text, least=1)


def limit(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def add_number(
    parser: Any, flag: str, help: str, default: Any = None, kind: Callable[[str], float] = positive
) -> None:
    """Add a flag for a number; its help ends with the default."""
    metavar = "INT" if kind in (int, natural, positive) else "FLOAT"
    shown = f" (default: {default:g})" if isinstance(default, int | float) else ""
    parser.add_argument(
        f"--{flag}", type=kind, default=default, metavar=metavar, help=f"{help}{shown}"
    )


def add_switch(parser: Any, flag: str, help: str, default: Any = False) -> None:
    """Add a flag without a value."""
    parser.add_argument(f"--{flag}", action="store_true", default=default, help=help)


def add_adapter(parser: Any, help: str = "saved adapter", **how: Any) -> None:
    """Add --adapter; `how` goes to argparse."""
    text = (
        f"{help}: an adapter folder, a run folder (its best adapter, else its last), a checkpoint,"
        " or USER/NAME on the Hub"
    )
    parser.add_argument("--adapter", metavar="PATH", help=text, **{"required": True, **how})


def add_student(
    parser: Any, *, data: bool = False, leave_out: Iterable[str] = (), **adapter: Any
) -> None:
    """Add the flags of an adapter (`adapter` goes to `add_adapter`), its base and, with `data`, a
    dataset.
    """
    add_adapter(parser, **adapter)
    text = "accept a base other than the adapter's if the shapes match, with a warning"
    add_switch(parser, "any_base", text)
    classes = (BaseConfig, DataConfig) if data else (BaseConfig,)
    add_settings(parser, *classes, leave_out={*_OF_TRAINING, *leave_out})


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the flags that stand for several settings."""
    unset = argparse.SUPPRESS
    names = ", ".join(presets())
    text = f"YAML file of settings, or a preset: {names}; other flags take precedence"
    parser.add_argument("--config", metavar="FILE.yaml", default=unset, help=text)
    text = "same as --modulation additive; --no_safe_mode overrides a file's"
    add_switch(parser, "safe_mode", text, unset)
    parser.add_argument(
        "--no_safe_mode", dest="safe_mode", action="store_false", help=unset, default=unset
    )


def add_run_settings(parser: argparse.ArgumentParser) -> None:
    """Add the settings of a run; the help shows the defaults of a run without flags."""
    defaults, _ = with_defaults({}, EMBEDDED)
    add_settings(parser, *SETTINGS, defaults={**defaults, "init": AUTO})
    init = parser._option_string_actions["--init"]
    init.choices = (AUTO, *INITS)
    init.help = f"auto: calibrated if possible, else random (the run says why); {init.help}"


def check_partners(flags: Mapping[str, Any], partners: Mapping[str, str]) -> None:
    """Refuse flags without the partner that they need."""
    for name, partner in partners.items():
        value = flags.get(name)
        if value not in (None, False):
            check_need(flags.get(partner), name, value, f"--{partner}")


class Heldout(NamedTuple):
    """The samples to measure on.

    Attributes:
        held_out: whether training leaves them out.
        data: the name of the dataset.
    """

    samples: list[Any]
    held_out: bool
    data: str

    def __str__(self) -> str:
        return f"{'held-out' if self.held_out else 'TRAINING'} tokens of {self.data}"


class Task(NamedTuple):
    """The arguments of a verb that loads a student.

    Attributes:
        flags: the flags, with the adapter in place of its path.
        look: the adapter's run, which gives the settings that no flag gives.
        console: for notes; standard error if standard output holds only results.
    """

    flags: dict[str, Any]
    look: Look
    console: Any

    @property
    def data(self) -> DataConfig:
        return self.look.data

    def load(self) -> Student:
        """Load the base, and attach the adapter if there is one."""
        adapter = self.look.stored
        recipe = None if adapter is None else adapter.recipe
        model, tokenizer = load(self.look.base, self.console, recipe=recipe)
        if adapter is None:
            return Student(model, tokenizer)
        any_base = self.flags["any_base"]
        return Student(model, tokenizer, *load_adapter(model, adapter, any_base, self.console))

    def heldout(self, model: Any, tokenizer: Any) -> Heldout:
        """Return --eval_samples samples, by default as many as the adapter's run measured on."""
        from npt.data.chat import fix_date
        from npt.data.source import open_source, own_heldout
        from npt.evaluation.heldout import evaluation_samples

        if self.look.date is not None:
            fix_date(tokenizer, self.look.date)
        count = self.flags["eval_samples"] or self.look.training.eval_samples
        heldout = own_heldout(self.data)
        records = open_source(self.data) if heldout is None else heldout
        samples, held_out = evaluation_samples(
            records, tokenizer, self.data, count, model.config.vocab_size, heldout
        )
        return Heldout(samples, held_out or self.look.unread, self.data.dataset_name)


def begin(flags: Mapping[str, Any], *, stderr: bool = False, reads_data: bool = True) -> Task:
    """Find the adapter and its run, and check the settings of base and data."""
    from npt.data.source import check_source

    look = resolve_look(flags)
    try:
        if reads_data:
            check_source(look.data)
    except DataError as error:
        if "dataset_name" in flags or look.stored is None:
            raise
        raise DataError(f"{error} (the data of the run that trained {look.stored})") from error
    console = make_console(stderr=stderr or flags["json"])
    console.say(*look.notes)
    return Task({**flags, "adapter": look.stored}, look, console)


def check_run(run: RunSettings, *, starts: bool = True) -> None:
    """Check everything that can be checked before weights are read; with `starts`, the closed-form
    start too.
    """
    from npt.adapters.fit import check_fit
    from npt.base.load import check_teacher
    from npt.base.source import read_config
    from npt.calibration.calibrate import check_form
    from npt.runs.trackers import check_trackers
    from npt.train.setup import check_trainable

    name = run.base.model_name
    own_teacher = run.base.teacher_precision is not None
    config = read_config(name)
    if own_teacher:
        check_teacher(name, config)
    check_fit(run.adapter, config, run.data.max_length)
    if starts and run.adapter.init == "calibrated":
        check_form(run.adapter)
    check_sources(run.data)
    check_trackers(run.training)
    check_trainable(run.adapter, run.data, own_teacher)


def load(
    base: BaseConfig,
    console: Any,
    device: Any = None,
    *,
    recipe: Any = None,
    layers_later: bool = False,
) -> tuple[Any, Any]:
    """Load the base with `npt.load_base`, stored as the recipe says, and print a line."""
    import npt
    from npt.base.gguf.configuration import describe_origin
    from npt.base.precision import policy_dtype, quantization_of, set_matmul_precision
    from npt.base.recipe import STORED

    # other flags than the recipe's ask for a base that is packed anew
    storage = {}
    form = (base.quantization, base.use_fp16)
    if recipe is not None and (recipe.quantization, recipe.use_fp16) == form:
        storage = recipe.storage
    model, tokenizer = npt.load_base(
        **base.loading, device=device, layers_later=layers_later, **storage
    )
    # as found on the model, which may differ from what the flags ask for
    packed = quantization_of(model)
    computing = policy_dtype(model)
    dtype = next(name for name, stored in STORED.items() if stored == computing)
    set_matmul_precision(base.matmul_precision, model)
    devices = dict.fromkeys(str(p.device) for p in model.parameters() if not p.is_meta)
    console.say(
        f"base {base.model_name}: {'unquantised' if packed is None else packed.upper()}, computes"
        f" in {dtype} on {', '.join(devices)}"
    )
    if (origin := describe_origin(model.config)) is not None:
        console.say(origin)
    return model, tokenizer


def load_teacher(base: BaseConfig, console: Any, device: Any) -> Any:
    """Load the teacher of --teacher_precision and print a line; return None without the flag."""
    import npt

    name = base.model_name
    precision = base.teacher_precision
    if precision is None:
        return None
    console.say(f"teacher {name}: unquantised, stored in {precision}, computes in fp32")
    attention = base.attn_implementation
    return npt.load_teacher(name, precision, device=device, attn_implementation=attention)


class Student(NamedTuple):
    """A base with its adapter attached.

    Attributes:
        identity: the identity of the base; None without an adapter.
        other: under `other_base`, how the adapter's own base differs; empty if it does not.
    """

    model: Any
    tokenizer: Any
    identity: Any = None
    other: dict[str, str] = {}  # noqa: RUF012


def load_adapter(
    model: Any, stored: Any, any_base: bool, console: Any, shard: Callable[[], Any] | None = None
) -> tuple[Any, dict[str, str]]:
    """Attach a saved adapter, warn if its base is another one, and return `identity` and `other` of
    a `Student`. `shard` reads layers that are still in their files; the identity needs them.
    """
    import npt
    from npt.adapters.files.adapter_files import read_adapter

    if stored.folder != Path(stored.name):
        console.say(f"adapter {stored.folder}")
    attach: Callable[..., Any] = npt.load_adapter
    if shard is not None:
        npt.load_adapter(model, stored, check_base=False)
        shard()
        attach = read_adapter  # what is attached is only checked
    base = npt.base_identity(model)
    other = base.mismatch(stored.record) if any_base else None
    attach(model, stored, base=base, check_base=not any_base)
    if other is None:
        return base, {}
    console.say(f"warning: --any_base: {stored} was trained on another base: {other}")
    return base, {"other_base": other}


def read_text(name: str, flag: str) -> str:
    """Return the text of a file; raise DataError if it is unreadable, not UTF-8, or empty."""
    try:
        text = read_bytes(Path(name), TEXT_BYTES).decode().removeprefix("\ufeff")
    except OSError as error:
        raise DataError(
            f"{flag} {name} cannot be read: {error.strerror}; name a text file"
        ) from error
    except ValueError as error:  # a null character in the path, or bytes that are not UTF-8
        raise DataError(f"{flag} {name} is not UTF-8 text: save it as UTF-8") from error
    if not text.strip():
        raise DataError(f"{flag} {name} is empty: write a text into it")
    return text.replace("\r\n", "\n")


def print_json(value: Any) -> None:
    """Print JSON on standard output."""
    put(to_json(value, indent=2))


def tell(flags: Mapping[str, Any], figures: Any, *lines: str) -> None:
    """Print a verb's result: the figures with --json, else the lines."""
    if flags["json"]:
        print_json(figures)
    else:
        make_console().say(*lines)


def print_table(console: Any, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print an empty line and a table of a column of names and columns of numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    numbers = (Column(heading, justify="right", no_wrap=True) for heading in headings[1:])
    table = Table(headings[0], *numbers, box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(table)
