"""`npt doctor`."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import fields
from typing import Any

from npt.cli.arguments import add_number, add_switch, print_json
from npt.cli.defaults import EMBEDDED, SETTINGS, add_config, with_config, with_data
from npt.cli.planning import make_plan
from npt.config import BaseConfig, DataConfig, NPTConfig, TrainConfig, flag_of
from npt.console import make_console
from npt.errors import ConfigError, DataError
from npt.flags import add_settings, build, with_safe_mode


def doctor(given: dict[str, Any]) -> int:
    """Look at what a run would be made of, before it: --data for counts, ids and samples of a data
    set, --plan for memory."""
    if given["data"] is None and not given["plan"]:
        raise ConfigError(
            "npt doctor looks at what it is asked to: --data [NAME] (counts, ids and three samples"
            " of the data) or --plan (the memory that a run will take)"
        )
    _check_flags(given)
    given = with_config(given, ignored=() if given["shape"] is None else ("model_name",))
    given = with_safe_mode(given)
    from npt.tools.data_doctor.report import print_report

    console = make_console(stderr=given["json"])
    reports = {} if given["data"] is None else _examine(given, console)
    if not given["json"]:
        for report in reports.values():
            print_report(report, console)
    plan = make_plan(given, console) if given["plan"] else None
    if given["json"]:
        figures = {name: report.as_dict() for name, report in reports.items()}
        print_json(figures | ({} if plan is None else {"plan": plan}))
    sound = all(report.trainable for report in reports.values())
    return 0 if sound and (plan is None or plan["fits"]) else 2


def _check_flags(given: dict[str, Any]) -> None:
    """Refuse flags that would be ignored without --plan."""
    settings = {flag_of(f) for cls in (BaseConfig, NPTConfig, TrainConfig) for f in fields(cls)}
    unused = sorted((settings - {"model_name"}) & given.keys())
    unused += [name for name in ("shape", "device", "measure", "safe_mode") if given.get(name)]
    if unused and not given["plan"]:
        raise ConfigError(f"--{unused[0]} means nothing without --plan; add it or drop the other")


def _examine(given: dict[str, Any], console: Any) -> dict[str, Any]:
    """Return reports on the data and, if any are, on those that are replayed."""
    if given["data"] is not True:
        if given.get("dataset_name", given["data"]) != given["data"]:
            raise ConfigError(
                f"--data is {given['data']}, --dataset_name {given['dataset_name']}; they mean the"
                " same, give one of them"
            )
        given = {**given, "dataset_name": given["data"]}
    given = with_data(given, EMBEDDED).given
    base, data = build(BaseConfig, given), build(DataConfig, given)
    from npt.adapters.fit import check_length
    from npt.base.load import load_tokenizer, read_config
    from npt.data.source import open_source
    from npt.tools.data_doctor.report import examine
    from npt.train.sources import FIRST, REPLAY, check_sources, fitting_columns, sources_of

    check_sources(data)
    model_config, tokenizer = read_config(base.model_name), load_tokenizer(base.model_name)
    check_length(data.max_length, model_config)
    reports = {}
    with console.status("reading the data"):
        for part in sources_of(data):
            config = part.config
            if part.label != FIRST:
                with contextlib.suppress(DataError):  # the report says where
                    config = fitting_columns(config, open_source(config))
            most, vocabulary = given["max_records"], model_config.vocab_size
            report = examine(config, tokenizer, vocabulary, max_records=most)
            reports["replay" if part.label == REPLAY else part.label] = report
    return reports


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit status: 0 nothing prevents training, 2 something does, or wrong arguments."
    )
    parser.add_argument(
        "--data",
        nargs="?",
        const=True,
        metavar="NAME",
        help="look at the data; NAME as in --dataset_name, which it replaces",
    )
    add_number(parser, "max_records", "look at the first records only (default: all)")
    add_switch(
        parser,
        "plan",
        "predict the memory of a run with these flags, by formula; no weights are read",
    )
    parser.add_argument(
        "--shape",
        metavar="SHAPE",
        help="plan for a named shape, or for D,F,L,heads,kv_heads,V, in place of --model_name",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="that is planned for, and need not be here, or measured on (default: the GPU, if any)",
    )
    add_switch(
        parser,
        "measure",
        "run windows of 1, 2, 4, ... samples up to --batch_size: their peak and their time",
    )
    add_config(parser)
    add_settings(parser, *SETTINGS, leave_out=("num_samples",))
