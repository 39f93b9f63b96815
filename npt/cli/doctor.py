"""`npt doctor`."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from npt.cli.arguments import natural, positive
from npt.config import SEED_MAX, BaseConfig, DataConfig, flag_of
from npt.console import make_console
from npt.errors import ConfigError
from npt.flags import add_settings, build


def doctor(given: dict[str, Any]) -> int:
    """Look at what a run would be made of, before it: --data for counts, ids and samples of a data set."""
    if given["data"] is None:
        raise ConfigError("npt doctor looks at what it is asked to: --data [NAME] (counts, ids and three samples of the data)")
    from npt.data.table import print_report
    from npt.files import to_json

    console = make_console(stderr=given["json"])
    reports = _examine(given, console)
    if given["json"]:
        print(to_json({part: report.as_dict() for part, report in reports.items()}, indent=2))
    else:
        for report in reports.values():
            print_report(report, console)
    return 0 if all(report.trainable for report in reports.values()) else 2


def _examine(given: dict[str, Any], console: Any) -> dict[str, Any]:
    """Reports on the data and, where there are any, on what is replayed."""
    if given["data"] is not True:
        if given.get("dataset_name", given["data"]) != given["data"]:
            raise ConfigError(f"--data is {given['data']}, --dataset_name {given['dataset_name']}; they mean the same, give one of them")
        given = {**given, "dataset_name": given["data"]}
    base, data = build(BaseConfig, given), build(DataConfig, given)
    if given["seed"] > SEED_MAX:
        raise ConfigError(f"--seed is {given['seed']}; it must be at most {SEED_MAX}")
    from npt.adapters.attach import check_length
    from npt.data.report import examine
    from npt.data.source import check_source, replay_source
    from npt.quant.load import load_tokenizer, read_config

    check_source(data)
    model_config, tokenizer = read_config(base.model_name), load_tokenizer(base.model_name)
    check_length(data.max_length, model_config)
    parts = {"data": data} | ({"replay": replay_source(data)} if data.replay_dataset is not None else {})
    how = {"batch_size": given["batch_size"], "seed": given["seed"], "max_records": given["max_records"]}
    with console.status("reading the data"):
        return {part: examine(config, tokenizer, model_config.vocab_size, **how) for part, config in parts.items()}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit status: 0 nothing stands in the way of training, 2 something does, or wrong arguments."
    parser.add_argument(
        "--data", nargs="?", const=True, metavar="NAME", help="look at the data; NAME as in --dataset_name, which it may stand for"
    )
    parser.add_argument("--batch_size", type=positive, default=4, metavar="INT", help="samples of a batch, for the padding (default: 4)")
    parser.add_argument("--max_records", type=positive, metavar="INT", help="look at the first records only (default: all)")
    parser.add_argument("--seed", type=natural, default=0, metavar="INT", help="which samples are shown (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    base_flags = {flag_of(f) for f in fields(BaseConfig)}
    add_settings(parser, BaseConfig, DataConfig, leave_out=("num_samples", *base_flags - {"model_name"}))
