"""`npt evaluate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from npt.cli.arguments import load, positive
from npt.config import BaseConfig, DataConfig
from npt.console import make_console
from npt.flags import add_settings, build


def evaluate(given: dict[str, Any]) -> int:
    """Measure a saved adapter against its teacher and its floor."""
    base, data = build(BaseConfig, given), build(DataConfig, given)
    import npt
    from npt.adapters.io import read_adapter_config
    from npt.data.samples import evaluation_samples
    from npt.data.source import check_source, open_source, own_heldout
    from npt.fidelity.table import print_fidelity
    from npt.files import to_json

    console = make_console(stderr=given["json"])
    read_adapter_config(Path(given["adapter"]))  # before the base is loaded
    check_source(data)
    model, tokenizer = load(base, console)
    npt.load_adapter(model, given["adapter"])
    own = own_heldout(data)
    records = own if own is not None else open_source(data)
    samples, heldout = evaluation_samples(records, tokenizer, data, given["eval_samples"], model.config.vocab_size, own)
    fidelity = npt.evaluate(model, tokenizer, samples, batch_size=given["batch_size"])
    if given["json"]:
        print(to_json({**fidelity.as_dict(), "heldout": heldout}, indent=2))
    else:
        print_fidelity(fidelity, console, "held-out" if heldout else "TRAINING")
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapter", required=True, metavar="FOLDER", help="folder that a run saved an adapter to")
    parser.add_argument("--eval_samples", type=positive, default=64, metavar="INT", help="samples to evaluate on (default: 64)")
    parser.add_argument("--batch_size", type=positive, default=8, metavar="INT", help="samples at a time (default: 8)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of tables")
    add_settings(parser, BaseConfig, DataConfig, leave_out=("num_samples", "shard_base"))
