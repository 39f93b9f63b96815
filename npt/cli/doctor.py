"""`npt doctor`."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping
from typing import Any

from npt.cli.arguments import (
    add_config,
    add_number,
    add_switch,
    check_partners,
    load,
    load_teacher,
    print_json,
    print_table,
)
from npt.config import BaseConfig, DataConfig, flags_of
from npt.console import make_console
from npt.errors import ConfigError, DataError
from npt.flags import add_settings
from npt.train.resolve import SETTINGS, RunSettings, resolve
from npt.train.sources import FIRST, REPLAY, check_sources, fitting_columns, sources_of

_OWN_FLAGS = {"data", "max_records", "plan", "processes", "shape", "device", "measure", "json"}
"""Flags that are not of a run."""


EMBEDDED_BY_DEFAULT = "of the embedded model; choose yours with --model_name"
"""The name of the tokenizer if no base is given."""


def doctor(flags: dict[str, Any]) -> int:
    """Check a dataset or predict memory before a run.

    Exit status 2 means that the data have faults or the run does not fit in memory.
    """
    if flags["data"] is None and not flags["plan"]:
        raise ConfigError("add --data [NAME] to check a dataset, or --plan to predict memory")
    # a dataset is checked without a run: settings of one would have no effect
    own = {"safe_mode", "shape", "device", "measure", "processes"}
    needing = own | flags_of(*SETTINGS).keys() - flags_of(DataConfig).keys() - {"model_name"}
    check_partners(flags, dict.fromkeys(sorted(needing), "plan"))
    check_partners(flags, {"processes": "shard_base"})
    shape = flags["shape"]
    if shape is not None and "model_name" in flags:
        name = flags["model_name"]
        raise ConfigError(f"--shape {shape} replaces --model_name {name}: remove one")
    run = _run(flags)
    console = make_console(stderr=flags["json"])
    figures = {}
    sound = True
    if flags["data"] is not None:
        reports = _examine(run, flags, console)
        from npt.doctor.data import print_report

        for name, report in reports.items():
            if not flags["json"]:
                print_report(report, console)
            figures[name] = report.as_dict()
            sound &= not report.problems
    if flags["plan"]:
        figures["plan"] = _plan(run, flags, console)
        sound &= figures["plan"]["fits"]
    if flags["json"]:
        print_json(figures)
    return 0 if sound else 2


def _run(flags: Mapping[str, Any]) -> RunSettings:
    """Return the run that `npt pretrain` would make of the same flags; --data names its data."""
    name = flags["data"]
    shape = flags["shape"]
    asked = {n: value for n, value in flags.items() if n not in _OWN_FLAGS}
    if name is not None:
        given = DataConfig.dataset_name if name is True else name
        dataset = asked.setdefault("dataset_name", given)
        if name not in (True, dataset):
            raise ConfigError(f"--data {name} and --dataset_name {dataset} differ: remove one")
    if shape is not None:
        asked["model_name"] = BaseConfig.model_name  # instead of that of --config
    return resolve(asked, shape=shape)


def _examine(run: RunSettings, flags: Mapping[str, Any], console: Any) -> dict[str, Any]:
    # before torch is loaded, which takes a second
    check_sources(run.data)
    from npt.adapters.fit import check_length
    from npt.base.source import EMBEDDED, load_tokenizer, read_config
    from npt.data.source import open_source
    from npt.doctor.data import examine

    model_name = run.base.model_name
    model_config = read_config(model_name, whole=False)
    tokenizer = load_tokenizer(model_name)
    check_length(run.data.max_length, model_config)
    by_default = model_name == EMBEDDED and "model_name" not in flags
    reports = {}
    with console.status("reading data"):
        for part in sources_of(run.data):
            config = part.config
            # another dataset than the first may have other columns
            if part.label != FIRST:
                with contextlib.suppress(DataError):  # the report will name the fault
                    config = fitting_columns(config, open_source(config))
            name = "replay" if part.label == REPLAY else part.label
            reports[name] = examine(
                config,
                tokenizer,
                model_config.vocab_size,
                max_records=flags["max_records"],
                tokenizer_name=EMBEDDED_BY_DEFAULT if by_default else model_name,
            )
    return reports


def _plan(run: RunSettings, flags: Mapping[str, Any], console: Any) -> dict[str, Any]:
    """Predict a run's memory, with --measure run windows too, print the plan and return it."""
    from npt.doctor.plan import PHASES, available, shown

    name, workload = _workload(run, flags)
    training = workload.training
    shape = workload.shape
    device = workload.device
    ranks = list(workload.ranks.values())
    memory = workload.plan()
    limit = available(device)  # None if it is not here
    # samples of all processes between two optimizer steps
    window = training.batch_size * training.gradient_accumulation_steps * workload.processes
    plan = {
        "name": name,
        "device": str(device),
        "tokens_per_step": window * workload.length,
        "ranks": ranks,
        "memory": memory.as_dict(),
        "limit_bytes": limit,
        "fits": limit is None or memory.peak <= limit,
    }
    # before the first line below: loading the base prints others
    if flags["measure"]:
        plan["measured"] = _measured(run, flags, console, workload, limit)
    if flags["json"]:
        return plan
    shared = f", shared by {workload.processes} processes" if workload.processes > 1 else ""
    stored = "unquantised" if workload.quantization is None else workload.quantization.upper()
    console.say(
        f"{name}: L {shape.layers}, D {shape.hidden}, F {shape.ffn}, V {shape.vocab:,}, {stored},"
        f" on {device}{shared}",
        f"rank {max(ranks)} on {len(ranks)} layers, {','.join(run.adapter.targets)},"
        f" {training.strategy};"
        f" {training.gradient_accumulation_steps} x {training.batch_size} samples of"
        f" {workload.length:,} tokens per step",
    )
    rows = []
    for term in memory.terms:
        cells = [shown(term.bytes) if phase in term.phases else "" for phase in PHASES]
        rows.append([term.name, *cells])
    rows.append(["total", *(shown(memory.of(phase)) for phase in PHASES)])
    print_table(console, ["memory", *PHASES], rows)
    verdict = f"peak {shown(memory.peak)} in the {memory.phase}"
    if limit is not None:
        fits = "fits" if plan["fits"] else "does not fit"
        verdict += f"; it {fits} in the {shown(limit)} free on {device}"
    console.say(verdict)
    rows = []
    for measured in plan.get("measured", []):
        cells = ["does not fit", ""]
        if measured["peak"] is not None:
            tokens = measured["samples"] * training.gradient_accumulation_steps * workload.length
            cells = [shown(measured["peak"]), f"{tokens / measured['seconds']:,.0f}"]
        rows.append([str(measured["samples"]), shown(measured["predicted"]), *cells])
    if rows:
        print_table(console, ["samples per micro-batch", "predicted", "measured", "tokens/s"], rows)
    return plan


def _measured(
    run: RunSettings, flags: Mapping[str, Any], console: Any, workload: Any, limit: int | None
) -> list[dict[str, Any]]:
    from npt.doctor.measure import measured_windows

    if workload.processes > 1:
        raise ConfigError("--measure runs windows in one process: remove --measure or --shard_base")
    if flags["shape"] is not None:
        raise ConfigError("--measure needs a model, not a shape: replace --shape by --model_name")
    if workload.device.type == "cuda" and limit is None:
        raise ConfigError("--device cuda --measure needs a GPU, but none is here: use --device cpu")
    base = run.base
    model, _ = load(base, console, workload.device)
    teacher = load_teacher(base, console, workload.device)
    with console.status("measuring windows"):
        return list(measured_windows(workload, model, teacher, limit))


def _workload(run: RunSettings, flags: Mapping[str, Any]) -> tuple[str, Any]:
    import torch

    from npt.adapters.fit import check_fit
    from npt.base.source import read_config
    from npt.doctor.plan import Workload
    from npt.doctor.shape import llama_config, shape_named
    from npt.train.setup import check_trainable

    base = run.base
    length = run.data.max_length
    name = flags["shape"] or base.model_name
    if flags["shape"] is None:
        config = read_config(base.model_name)
    else:
        config = llama_config(shape_named(name), length)
        config.dtype = torch.bfloat16
    check_fit(run.adapter, config, length)
    check_trainable(run.adapter, None, base.teacher_precision is not None)
    device = None if flags["device"] is None else torch.device(flags["device"])
    processes = flags["processes"]
    return name, Workload.of(base, config, run.adapter, run.training, length, device, processes)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "check a dataset: NAME, or else --dataset_name"
    add("--data", nargs="?", const=True, metavar="NAME", help=text)
    add_number(parser, "max_records", "check only this many records (default: all)")
    add_switch(parser, "plan", "predict the peak memory of a run, without reading weights")
    text = "with --plan --shard_base: number of processes, one per GPU"
    add_number(parser, "processes", text)
    add("--shape", metavar="NAME", help="plan for a shape such as llama-3.1-8b, not a model")
    text = "device to plan for or measure on (default: the GPU, if there is one)"
    add("--device", choices=("cpu", "cuda"), help=text)
    text = "with --plan: also run windows of 1, 2, 4, ... samples, up to --batch_size"
    add_switch(parser, "measure", text)
    add_config(parser)
    add_settings(parser, *SETTINGS, leave_out=("num_samples",))
