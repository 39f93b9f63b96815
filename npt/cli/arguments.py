"""Flags that several verbs share, and loading a base and its adapter as they say."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from npt.config import INT_MAX, BaseConfig, DataConfig, NPTConfig, TrainConfig
from npt.console import make_console, put
from npt.files import to_json
from npt.flags import add_settings, build

_OF_TRAINING = {"num_samples", "replay_dataset", "replay_ratio", "teacher_precision", "shard_base"}
"""Settings of base and data that mean nothing to a verb that does not train."""


def natural(text: str, least: int = 0) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not least <= value <= INT_MAX:
        raise argparse.ArgumentTypeError(f"{value} is not from {least} to {INT_MAX}")
    return value


def positive(text: str) -> int:
    return natural(text, least=1)


def limit(text: str) -> float:
    value = float(text)  # whose error argparse words
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def add_number(
    parser: Any, flag: str, help: str, default: Any = None, kind: Callable[[str], float] = positive
) -> None:
    """Add a flag of one number; a default that is a number is added to its help."""
    metavar = "INT" if kind in (int, natural, positive) else "FLOAT"
    shown = f" (default: {default:g})" if isinstance(default, int | float) else ""
    parser.add_argument(
        f"--{flag}", type=kind, default=default, metavar=metavar, help=f"{help}{shown}"
    )


def add_switch(parser: Any, flag: str, help: str, default: Any = False) -> None:
    """Add a flag without a value."""
    parser.add_argument(f"--{flag}", action="store_true", default=default, help=help)


def add_adapter(
    parser: argparse.ArgumentParser, *, required: bool = True, help: str = "a saved adapter"
) -> None:
    """Add --adapter."""
    parser.add_argument(
        "--adapter",
        required=required,
        metavar="PATH",
        help=(
            f"{help}: its folder, a run's folder (the best, else the last), a checkpoint, or"
            " USER/NAME on the hub; it knows its base"
        ),
    )


def add_student(
    parser: argparse.ArgumentParser,
    *,
    data: bool = False,
    leave_out: Iterable[str] = (),
    **adapter: Any,
) -> None:
    """Add the flags by which a verb loads an adapter on its base, and with `data` a data set.

    Args:
        adapter: passed to `add_adapter`.
    """
    add_adapter(parser, **adapter)
    add_switch(
        parser,
        "any_base",
        "use an adapter of another base too, if its shapes fit; a warning and what is written say"
        " in what the two differ",
    )
    classes = (BaseConfig, DataConfig) if data else (BaseConfig,)
    add_settings(parser, *classes, leave_out={*_OF_TRAINING, *leave_out})


def with_base(given: Mapping[str, Any]) -> tuple[dict[str, Any], BaseConfig]:
    """Return the flags, with the adapter that they name as it was found, and the base. What flags
    do not say about the base is taken from the adapter.
    """
    if given.get("adapter") is None:
        return dict(given), build(BaseConfig, given)
    from npt.adapters.files.adapter_files import find_adapter

    adapter = find_adapter(given["adapter"])
    recipe, recorded = adapter.recipe, dict[str, Any]()
    name = adapter.record.get("base_model_name_or_path")
    if isinstance(name, str) and name != "unknown":
        recorded["model_name"] = name
    if recipe is not None:
        packed = recipe.flags["use_quantization"]
        if given.get("use_quantization", packed) == packed:
            recorded |= recipe.flags
    return {**given, "adapter": adapter}, build(BaseConfig, {**recorded, **given})


class Task(NamedTuple):
    """The arguments of a verb that loads a student.

    Attributes:
        given: the flags, with the adapter that was found.
        console: for notes; standard output under --json is JSON alone.
    """

    given: dict[str, Any]
    base: BaseConfig
    data: DataConfig
    console: Any


def begin(given: Mapping[str, Any]) -> Task:
    """Find the adapter of the flags, and check the settings of base and data."""
    flags, base = with_base(given)
    data = build(DataConfig, flags)
    from npt.data.source import check_source

    check_source(data)
    return Task(flags, base, data, make_console(stderr=flags["json"]))


def check_run(
    base: BaseConfig, adapter: NPTConfig, data: DataConfig, training: TrainConfig,
    *, starts: bool = True,
) -> None:  # fmt: skip
    """Refuse what can be refused before weights are read.

    Args:
        starts: the adapter is new, and may be calibrated.
    """
    from npt.adapters.fit import check_fit
    from npt.base.load import check_teacher, read_config
    from npt.calibration.calibrate import check_calibration
    from npt.runs.trackers import check_trackers
    from npt.train.run_setup import check_replay, check_trainable
    from npt.train.sources import check_sources

    config = read_config(base.model_name)
    if base.teacher_precision is not None:
        check_teacher(base.model_name, config)
    check_fit(adapter, config, data.max_length)
    if starts:
        check_calibration(adapter)
    check_sources(data)
    check_trackers(training)
    check_trainable(adapter, data, base.teacher_precision is not None)
    check_replay(data)


def load(
    base: BaseConfig, console: Any, device: Any = None, pack_on: Any = None, *, adapter: Any = None
) -> tuple[Any, Any]:
    """Load the base of these settings and print a line about it.

    Args:
        device, pack_on: as for `npt.load_base`.
        adapter: that was found, on whose base the user may have decided what no flag does.
    """
    import npt
    from npt.base.gguf.configuration import describe_origin
    from npt.base.precision import policy_dtype, quantization_of, set_matmul_precision
    from npt.base.recipe import STORED

    where: dict[str, Any] = (
        {"device": device} if base.device_map is None else {"device_map": base.device_map}
    )
    recipe = None if adapter is None else adapter.recipe
    form = base.quantization, base.use_fp16
    if recipe is not None and (recipe.quantization, recipe.use_fp16) == form:
        where |= recipe.storage
    model, tokenizer = npt.load_base(
        base.model_name,
        quantization=base.quantization,
        use_fp16=base.use_fp16,
        compute_dtype=base.compute_dtype,
        attn_implementation=base.attn_implementation,
        pack_on=pack_on,
        **where,
    )
    packed, computing = quantization_of(model), policy_dtype(model)
    dtype = next(name for name, stored in STORED.items() if stored == computing)
    set_matmul_precision(base.matmul_precision, model)
    devices = ", ".join(dict.fromkeys(str(parameter.device) for parameter in model.parameters()))
    console.say(
        f"base {base.model_name}: {'unquantised' if packed is None else packed.upper()}, computes"
        f" in {dtype} on {devices}"
    )
    if (origin := describe_origin(model.config)) is not None:
        console.say(origin)
    return model, tokenizer


def load_teacher(base: BaseConfig, console: Any, device: Any) -> Any:
    """Load the teacher of --teacher_precision and print a line about it; None without one."""
    import npt

    precision = base.teacher_precision
    if precision is None:
        return None
    teacher = npt.load_teacher(
        base.model_name, precision, device=device, attn_implementation=base.attn_implementation
    )
    console.say(f"teacher {base.model_name}: unquantised, stored in {precision}, computes in fp32")
    return teacher


class Student(NamedTuple):
    """A base with its adapter attached.

    Attributes:
        identity: of the base.
        other: `other_base`, what the adapter's own base differs in; else nothing.
    """

    model: Any
    tokenizer: Any
    identity: Any
    other: dict[str, str]


def load_adapter(model: Any, given: Mapping[str, Any], console: Any) -> tuple[Any, dict[str, str]]:
    """Attach the adapter of the flags, which was found; warn if its base is another one. Return
    `identity` and `other` of a `Student`.
    """
    import npt
    from npt.adapters.files.adapter_files import base_mismatch

    base, stored = npt.base_identity(model), given["adapter"]
    if stored.folder != Path(stored.name):
        console.say(f"adapter {stored.folder}")
    other = base_mismatch(stored, base) if given["any_base"] else None
    npt.load_adapter(model, stored, base=base, check_base=not given["any_base"])
    if other is None:
        return base, {}
    console.say(f"warning: --any_base: {stored} was trained on another base: {other}")
    return base, {"other_base": other}


def load_student(base: BaseConfig, given: Mapping[str, Any], console: Any) -> Student:
    """Load the base and attach the adapter of the flags."""
    model, tokenizer = load(base, console, adapter=given["adapter"])
    return Student(model, tokenizer, *load_adapter(model, given, console))


def print_json(value: Any) -> None:
    """Print standard JSON on stdout."""
    put(to_json(value, indent=2))


def tell(given: Mapping[str, Any], figures: Any, *lines: str) -> None:
    """Print a verb's result: the figures under --json, else the lines."""
    if given["json"]:
        print_json(figures)
    else:
        make_console().say(*lines)


def print_table(console: Any, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table below an empty line: the first column holds names, the others numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    numbers = (Column(heading, justify="right", no_wrap=True) for heading in headings[1:])
    table = Table(headings[0], *numbers, box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(table)
