"""`npt doctor`."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import fields, replace
from typing import Any

from npt.cli.arguments import natural, positive
from npt.cli.defaults import EMBEDDED, over, with_data
from npt.cli.planning import make_plan, print_page
from npt.cli.products import measure_products, print_products
from npt.config import SEED_MAX, BaseConfig, DataConfig, NPTConfig, TrainConfig, flag_of
from npt.console import make_console
from npt.errors import ConfigError
from npt.flags import add_settings, build, read_yaml, with_safe_mode

_OF_DATA = {"model_name", "batch_size", "seed"}
"""Settings of training, beside those of the data, that a look at the data heeds."""

_OF_PLAN = {
    flag_of(f) for cls in (BaseConfig, NPTConfig, TrainConfig) for f in fields(cls)
} - _OF_DATA

_OF_PRODUCTS = {flag_of(f) for f in fields(BaseConfig)} - {
    "matmul_precision",
    "teacher_precision",
    "share_embeddings",
}
"""Settings that a measurement of products heeds."""


def doctor(given: dict[str, Any]) -> int:
    """Look at what a run would be made of, before it: --data for counts, ids and samples of a data
    set, --plan for memory and time, --products for the error and the speed of its products on this
    device."""
    if given["data"] is None and not given["plan"] and not given["products"]:
        raise ConfigError(
            "npt doctor looks at what it is asked to: --data [NAME] (counts, ids and three samples"
            " of the data), --plan (the memory and the time that a run will take) or --products"
            " (error and speed of its products on this device)"
        )
    _check_flags(given)
    given = {"batch_size": 4, "seed": 0, **_with_config(given)}
    from npt.files import to_json
    from npt.tools.data_doctor.table import print_report

    given = with_safe_mode(given)
    console = make_console(stderr=given["json"])
    reports = {} if given["data"] is None else _examine(given, console)
    if not given["json"]:
        for report in reports.values():
            print_report(report, console)
    page = make_plan(given, console) if given["plan"] else None
    products = measure_products(given, console) if given["products"] else None
    if given["json"]:
        found = {part: report.as_dict() for part, report in reports.items()}
        further = {"plan": page, "products": products}
        print(
            to_json(
                found | {part: one.as_dict() for part, one in further.items() if one is not None},
                indent=2,
            )
        )
    else:
        if page is not None:
            print_page(page, console)
        if products is not None:
            print_products(products, console)
    sound = all(report.trainable for report in reports.values()) and (page is None or page.fits)
    return 0 if sound else 2


def _with_config(given: dict[str, Any]) -> dict[str, Any]:
    """The flags over those of a file; a shape that is named beside it stands in the place of its
    base.
    """
    if "config" not in given:
        return given
    written = read_yaml(
        given["config"],
        (BaseConfig, NPTConfig, DataConfig, TrainConfig),
        {"safe_mode": bool, "any_base": bool, "adapter": str},
    )
    if given["shape"] is not None:
        written.pop("model_name", None)
    return over(written, given)


def _check_flags(given: dict[str, Any]) -> None:
    """Refuse flags that would be ignored, and seeds out of range."""
    if given.get("seed", 0) > SEED_MAX:
        raise ConfigError(f"--seed is {given['seed']}; it must be at most {SEED_MAX}")
    if given["plan"]:
        return
    heeded = {"device", *_OF_PRODUCTS} if given["products"] else set()
    switches = (
        name for name in ("shape", "device", "measure", "no_trial", "safe_mode") if given.get(name)
    )
    only = [name for name in (*sorted(_OF_PLAN & set(given)), *switches) if name not in heeded]
    if only:
        raise ConfigError(f"--{only[0]} means nothing without --plan; add it or drop the other")


def _examine(given: dict[str, Any], console: Any) -> dict[str, Any]:
    """Reports on the data and, where there are any, on what is replayed."""
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
    from npt.errors import DataError
    from npt.tools.data_doctor.report import examine
    from npt.train.sources import FIRST, REPLAY, check_sources, fitting_columns, sources_of

    check_sources(data)
    model_config, tokenizer = read_config(base.model_name), load_tokenizer(base.model_name)
    check_length(data.max_length, model_config)
    parts = sources_of(data)
    how = {
        "batch_size": given["batch_size"],
        "seed": given["seed"],
        "max_records": given["max_records"],
    }
    with console.status("reading the data"):
        found = {}
        for part in parts:
            config = part.config
            if part.label != FIRST:
                with contextlib.suppress(DataError):  # the report says where
                    config = fitting_columns(config, open_source(config))
            report = examine(config, tokenizer, model_config.vocab_size, **how)
            if data.dataset_mix is not None:
                report = replace(report, name=f"{part.label} ({part.share:.1%} of the samples)")
            found["replay" if part.label == REPLAY else part.label] = report
        return found


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit status: 0 nothing stands in the way of training, 2 something does, or wrong"
        " arguments."
    )
    parser.add_argument(
        "--data",
        nargs="?",
        const=True,
        metavar="NAME",
        help="look at the data; NAME as in --dataset_name, which it may stand for",
    )
    parser.add_argument(
        "--max_records",
        type=positive,
        metavar="INT",
        help="look at the first records only (default: all)",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="predict the memory and the time of a run with these flags; no weights are read",
    )
    parser.add_argument(
        "--products",
        action="store_true",
        help="load the base and measure error and speed of its products at each --matmul_precision",
    )
    parser.add_argument(
        "--shape",
        metavar="SHAPE",
        help="plan for a named shape, or for D,F,L,heads,kv_heads,V, in place of --model_name",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="that is planned for or measured on (default: the GPU, if there is one)",
    )
    parser.add_argument(
        "--measure", action="store_true", help="run a few steps for real as well, and compare"
    )
    parser.add_argument(
        "--no_trial", action="store_true", help="leave the time out, for which one layer is run"
    )
    quiet = argparse.SUPPRESS
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        default=quiet,
        help="settings as npt pretrain takes them, a file or a preset",
    )
    parser.add_argument(
        "--batch_size",
        type=positive,
        default=quiet,
        metavar="INT",
        help="samples of a micro-batch (default: 4)",
    )
    parser.add_argument(
        "--seed",
        type=natural,
        default=quiet,
        metavar="INT",
        help="which samples are shown (default: 0)",
    )
    parser.add_argument(
        "--safe_mode",
        action="store_true",
        default=argparse.SUPPRESS,
        help="short for --modulation additive",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_settings(
        parser,
        BaseConfig,
        NPTConfig,
        DataConfig,
        TrainConfig,
        leave_out=("num_samples", "batch_size", "seed"),
    )
