"""`npt <verb>`: the command line. Every verb is a function of parsed settings that returns an exit status."""

from __future__ import annotations

import argparse
import math
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from npt.config import STRATEGIES, BaseConfig, DataConfig, NPTConfig, TrainConfig
from npt.console import make_console, silent_console
from npt.errors import ConfigError, NPTError
from npt.flags import OneLineParser, add_settings, build, read_yaml
from npt.version import __version__

REFUSED_SHARE_WORTH_SAYING = 0.01

_TRAINING = (BaseConfig, NPTConfig, DataConfig, TrainConfig)


def main(argv: Sequence[str] | None = None, prog: str = "npt") -> int:
    """Parse, run, and turn an error meant for the user into one line and its exit status.

    Args:
        argv: arguments behind the program's name; default the process's.
        prog: name shown in messages.

    Returns:
        The exit status: 0 done, 2 wrong arguments or data, 3 stopped after too many refusals, 4 smoke test failed, 5 adapter,
        checkpoint or bundle unusable, 6 another process of the run was lost (of one that failed its status), 128+n after signal n.
    """
    parser = _parser(prog)
    args = parser.parse_args(argv)
    given = vars(args)
    debug, verb = given.pop("debug"), given.pop("verb")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return verb(given)
    except NPTError as error:
        if debug:
            raise
        print(f"{_speaker(prog)}: error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print(f"{_speaker(prog)}: interrupted", file=sys.stderr)
        return 130
    except RuntimeError as error:
        if debug or type(error).__name__ != "OutOfMemoryError":  # by name: torch need not be loaded to say that a flag is wrong
            raise
        reason = str(error).split(". ")[0]
        print(f"{_speaker(prog)}: error: out of memory: {reason}; lower --batch_size or --max_length", file=sys.stderr)
        return 2


def pretrain(given: dict[str, Any]) -> int:
    """Distil adapters from a base: load, convert, train, evaluate."""
    if "config" in given:
        given = {**read_yaml(given["config"], _TRAINING, {"safe_mode": bool}), **given}
    if given.pop("safe_mode", False):
        if given.get("modulation", "additive") != "additive":
            raise ConfigError(f"--safe_mode is the additive form, but --modulation is {given['modulation']}; drop one of the two")
        given = {**given, "modulation": "additive"}
    base, adapter, data, training = (build(cls, given) for cls in _TRAINING)
    from npt.distill.ranks import join_ranks

    ranks = join_ranks(training.rank_timeout)
    try:
        with ranks.member():
            return _pretrain(ranks, base, adapter, data, training)
    finally:
        ranks.close()


def _pretrain(ranks: Any, base: BaseConfig, adapter: NPTConfig, data: DataConfig, training: TrainConfig) -> int:
    """One process of a run, whose ranks it is one of."""
    import npt
    from npt.adapters.attach import check_fit
    from npt.data.source import check_source
    from npt.distill.resume import find_resumed
    from npt.distill.run_folder import check_free
    from npt.distill.signals import StopOnSignal
    from npt.distill.trainer import check_trainable
    from npt.fidelity.table import print_fidelity
    from npt.quant.load import read_config

    def check_folder() -> None:
        if training.resume is not None:
            find_resumed(training.resume, training.output_dir)
        elif training.output_dir is not None:
            check_free(Path(training.output_dir))

    console = make_console() if ranks.main else silent_console()
    ranks.first(check_folder)  # before the minutes that loading a large base takes
    check_fit(adapter, read_config(base.model_name), data.max_length)
    check_source(data)
    check_trainable(adapter, data)
    with StopOnSignal(at_once=True):  # while the base is loaded and the data are prepared
        model, tokenizer = _load(base, console, ranks.device)
        if base.share_embeddings:
            console.print("--share_embeddings: teacher and student share the whole base in any case, embeddings included")
        report = npt.attach(model, adapter, seed=training.seed)
        console.print(str(report), soft_wrap=True)
        trainer = npt.Trainer(model, tokenizer, None, training, data_config=data, settings=asdict(base), console=console, ranks=ranks)
        result = trainer.train()
    if result.fidelity is not None:
        console.print()
        print_fidelity(result.fidelity, console, "held-out" if result.heldout else "TRAINING")
    console.print(
        f"{result.steps} steps, {result.tokens:,} tokens in {result.seconds:.0f} s, {result.refused} refusals; "
        f"everything is in {result.folder}",
        soft_wrap=True,
    )
    if result.refused_share > REFUSED_SHARE_WORTH_SAYING:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(result.refused_by_kind.items()))
        console.print(
            f"warning: {result.refused_share:.1%} of {result.micro_batches} micro-batches were refused ({kinds}); see events.jsonl before "
            "trusting this run",
            soft_wrap=True,
        )
    return result.exit_status


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
    model, tokenizer = _load(base, console)
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


def trace(given: dict[str, Any]) -> int:
    """Look for the operation that first makes a bad number, in the model's own pass or in an adapter's training step."""
    base, data = build(BaseConfig, given), build(DataConfig, given)
    training = TrainConfig(strategy=given["strategy"])
    import itertools
    from functools import partial

    import npt
    from npt.adapters.io import read_adapter_config
    from npt.data.batch import batches, pad_id_of
    from npt.data.samples import Samples
    from npt.data.source import check_source, open_source
    from npt.distill.loop import fill_gradients
    from npt.distill.strategies import STRATEGIES as strategies
    from npt.files import to_json

    console = make_console(stderr=given["json"])
    if given["adapter"] is not None:
        read_adapter_config(Path(given["adapter"]))  # before the base is loaded
    check_source(data)
    model, tokenizer = _load(base, console)
    if given["adapter"] is not None:
        npt.load_adapter(model, given["adapter"])
    samples = Samples(open_source(data), tokenizer, data, seed=0, hold_out=False).epoch(0)
    verdict, seen = None, 0
    for batch in itertools.islice(batches(samples, given["batch_size"], pad_id_of(tokenizer)), given["batches"]):
        run = None if given["adapter"] is None else partial(fill_gradients, strategies[training.strategy], model, batch, training)
        verdict, seen = npt.trace(model, batch, run=run, limit=given["limit"]), seen + 1
        if verdict is not None:
            break
    what = "the model's own pass" if given["adapter"] is None else f"a training step ({training.strategy})"
    if given["json"]:
        print(to_json({"fault": None if verdict is None else verdict.as_dict(), "batches": seen, "traced": what}, indent=2))
    elif verdict is None:
        console.print(f"no fault in {seen} batches of {what}")
    else:
        console.print(f"batch {seen - 1} of {what}:\n{verdict}", markup=False, highlight=False, soft_wrap=True)
    return 0 if verdict is None else 1


def replay(given: dict[str, Any]) -> int:
    """Take the last window of a run that gave up again: does the fault recur, where does it arise, is it the data or the state?"""
    from npt.distill.replay import replay as replay_bundle
    from npt.files import to_json

    result = replay_bundle(given["bundle"], model_name=given["model_name"], device=given["device"], micro_batch=given["micro_batch"])
    if given["json"]:
        print(to_json(result.as_dict(), indent=2))
    else:
        make_console().print(str(result), soft_wrap=True)
    return 0


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = OneLineParser(prog=prog, description="Distil Neuro-Plastic adapters into quantised language models.")
    parser.add_argument("--version", action="version", version=f"npt {__version__}")
    verbs = parser.add_subparsers(required=True, metavar="VERB", parser_class=OneLineParser)

    def verb(function: Any) -> argparse.ArgumentParser:
        sub = verbs.add_parser(function.__name__, help=function.__doc__, description=function.__doc__, allow_abbrev=False)
        sub.set_defaults(verb=function)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return sub

    training = verb(pretrain)
    training.add_argument(
        "--config", metavar="FILE.yaml", default=argparse.SUPPRESS, help="settings by flag name; flags given beside it win"
    )
    training.add_argument(
        "--safe_mode", action="store_true", default=argparse.SUPPRESS, help="additive modulation only: short for --modulation additive"
    )
    add_settings(training, *_TRAINING)
    measuring = verb(evaluate)
    measuring.add_argument("--adapter", required=True, metavar="FOLDER", help="folder that a run saved an adapter to")
    measuring.add_argument("--eval_samples", type=_positive, default=64, metavar="INT", help="samples to evaluate on (default: 64)")
    measuring.add_argument("--batch_size", type=_positive, default=8, metavar="INT", help="samples at a time (default: 8)")
    measuring.add_argument("--json", action="store_true", help="print the figures as JSON instead of tables")
    add_settings(measuring, BaseConfig, DataConfig, leave_out=("num_samples",))
    tracing = verb(trace)
    tracing.epilog = "Exit status: 0 no fault, 1 a fault was found, 2 wrong arguments or data, 5 adapter unusable."
    tracing.add_argument(
        "--adapter", metavar="FOLDER", help="a saved adapter, whose training step is traced (default: the base's own pass)"
    )
    tracing.add_argument("--strategy", choices=STRATEGIES, default="local", help="of the training step (default: local)")
    tracing.add_argument("--batches", type=_positive, default=1, metavar="INT", help="batches to look at until a fault (default: 1)")
    tracing.add_argument("--batch_size", type=_positive, default=4, metavar="INT", help="samples at a time (default: 4)")
    tracing.add_argument(
        "--limit", type=_limit, default=math.inf, metavar="FLOAT", help="numbers beyond this size are faults (default: inf)"
    )
    tracing.add_argument("--json", action="store_true", help="print the verdict as JSON")
    add_settings(tracing, BaseConfig, DataConfig, leave_out=("num_samples",))
    replaying = verb(replay)
    replaying.add_argument("bundle", metavar="BUNDLE", help="folder RUN/postmortem/step-XXXXXXXX")
    replaying.add_argument("--model_name", help="the run's base, where it is not to be found under the recorded name")
    replaying.add_argument("--device", help="default: the kind that the run was on, where there is one")
    replaying.add_argument("--micro_batch", type=int, metavar="INT", help="trace this micro-batch of the window, refused or not")
    replaying.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _limit(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _load(base: BaseConfig, console: Any, device: Any = None) -> tuple[Any, Any]:
    import torch

    import npt
    from npt.quant.precision import quantization_of

    torch.set_float32_matmul_precision(base.matmul_precision)
    model, tokenizer = npt.load_base(base.model_name, quantization=base.quantization, use_fp16=base.use_fp16, device=device)
    packed = quantization_of(model)
    dtype = "fp16" if base.use_fp16 and packed is None else "fp32"
    console.print(
        f"base {base.model_name}: {'unquantised' if packed is None else packed.upper()}, computes in {dtype} on {model.device}",
    )
    return model, tokenizer


def _show_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"warning: {message}", file=sys.stderr)


def _speaker(prog: str) -> str:
    """Who says it, where several processes share a terminal."""
    return f"{prog}: rank {os.environ.get('RANK')}" if os.environ.get("WORLD_SIZE", "1") != "1" else prog


if __name__ == "__main__":
    sys.exit(main())
