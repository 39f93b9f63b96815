"""`npt <verb>`: the command line. Every verb is a function of parsed settings that returns an exit status."""

from __future__ import annotations

import argparse
import math
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from npt.config import SEED_MAX, STRATEGIES, BaseConfig, DataConfig, NPTConfig, TrainConfig, flag_of
from npt.console import make_console, silent_console
from npt.errors import ConfigError, DataError, NPTError, StoppedError
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
    except (NPTError, StoppedError) as error:
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
    from npt.distill.resume import changed_settings, find_resumed
    from npt.distill.run_folder import check_free
    from npt.distill.signals import StopOnSignal
    from npt.distill.trainer import check_replay, check_trainable
    from npt.fidelity.table import print_fidelity
    from npt.quant.load import read_config

    def check_folder() -> None:
        if training.resume is not None:
            resumed = find_resumed(training.resume, training.output_dir)
            if resumed.checkpoint is not None:
                now = {name: value for part in (base, adapter, data, training) for name, value in asdict(part).items()}
                changed_settings(resumed.checkpoint.record["settings"], now)
        elif training.output_dir is not None:
            check_free(Path(training.output_dir))

    console = make_console() if ranks.main else silent_console()
    ranks.first(check_folder)  # before the minutes that loading a large base takes
    check_fit(adapter, read_config(base.model_name), data.max_length)
    check_source(data)
    check_trainable(adapter, data)
    check_replay(data)
    with StopOnSignal(at_once=True) as stop:  # while the base is loaded and the data are prepared
        model, tokenizer = _load(base, console, ranks.device)
        if base.share_embeddings:
            console.print("--share_embeddings: teacher and student share the whole base in any case, embeddings included")
        report = npt.attach(model, adapter, seed=training.seed)
        console.print(str(report), soft_wrap=True)
        trainer = npt.Trainer(model, tokenizer, None, training, data_config=data, settings=asdict(base), console=console, ranks=ranks)
        stop.check()  # what is raised inside a destructor goes no further
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
    if given["strategy"] is not None and given["adapter"] is None:
        raise ConfigError(f"--strategy {given['strategy']} is of an adapter's training step; give its --adapter, or drop --strategy")
    base, data = build(BaseConfig, given), build(DataConfig, given)
    training = TrainConfig(strategy=given["strategy"] or TrainConfig.strategy)
    import itertools
    from functools import partial

    import npt
    from npt.adapters.io import read_adapter_config
    from npt.data.batch import batches, pad_id_of
    from npt.data.samples import Samples, no_sample
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
    samples = Samples(open_source(data), tokenizer, data, seed=0, hold_out=False)
    made = batches(samples.epoch(0), given["batch_size"], pad_id_of(tokenizer), data.padding_side)
    verdict, seen = None, 0
    for batch in itertools.islice(made, given["batches"]):
        run = None if given["adapter"] is None else partial(fill_gradients, strategies[training.strategy], model, batch, training)
        verdict, seen = npt.trace(model, batch, run=run, limit=given["limit"]), seen + 1
        if verdict is not None:
            break
    if not seen:
        raise no_sample(samples.counts)
    what = "the model's own pass" if given["adapter"] is None else f"a training step ({training.strategy})"
    if given["json"]:
        print(to_json({"fault": None if verdict is None else verdict.as_dict(), "batches": seen, "traced": what}, indent=2))
    elif verdict is None:
        console.print(f"no fault in {seen} {'batch' if seen == 1 else 'batches'} of {what}")
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


def collect(given: dict[str, Any]) -> int:
    """Write the prompts at which a student's greedy token leaves its teacher's, as data to train on."""
    base, data = build(BaseConfig, given), build(DataConfig, given)
    if given["seed"] > SEED_MAX:
        raise ConfigError(f"--seed is {given['seed']}; it must be at most {SEED_MAX}")
    import npt
    from npt.adapters.attach import check_length
    from npt.adapters.io import read_adapter_config
    from npt.data.source import BUILTIN, check_source, open_source
    from npt.distill.collect import collect as run
    from npt.distill.collect import prompt_length
    from npt.distill.journal import read_state
    from npt.files import to_json
    from npt.quant.load import read_config

    console = make_console(stderr=given["json"])
    read_adapter_config(Path(given["adapter"]))  # this and what follows before the base is loaded
    read_state(Path(given["output"]))
    prompt_length(data, given["max_new_tokens"])
    check_source(data)
    check_length(data.max_length, read_config(base.model_name))
    if data.dataset_name == BUILTIN and data.dataset_split != "train":
        raise DataError(f"--dataset_split {data.dataset_split} of the built-in text is what runs are evaluated on; collect from 'train'")
    model, tokenizer = _load(base, console)
    base_hash = npt.base_hash(model)
    npt.load_adapter(model, given["adapter"], base_hash=base_hash)
    how = {name: given[name] for name in ("max_new_tokens", "num_prompts", "batch_size", "seed")}
    with console.status("collecting") as status:

        def report(progress: Any) -> None:
            status.update(f"{progress.prompts:,} prompts, {progress.disagreements:,} disagreements")

        result = run(model, tokenizer, open_source(data), given["output"], data_config=data, base_hash=base_hash, report=report, **how)
    figures = result.as_dict()
    if given["json"]:
        print(to_json(figures, indent=2))
    else:
        before = f", {result.resumed:,} of them earlier" if result.resumed else ""
        if result.removed:
            console.print(f"removed {result.removed:,} bytes of a batch that an earlier call had not finished")
        console.print(
            f"{figures['prompts']:,} prompts{before}: the student leaves its teacher in {figures['disagreements']:,}; over "
            f"{figures['tokens']:,} tokens top-1 {figures['top1']:.1%}, KL {figures['kl']:.4f} nats, acceptance "
            f"{figures['acceptance']:.1%}; written to {figures['output']}",
            soft_wrap=True,
        )
    return result.exit_status


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
    tracing.add_argument("--strategy", choices=STRATEGIES, help="of the adapter's training step (default: local)")
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
    _add_doctor(verb(doctor))
    _add_collect(verb(collect))
    return parser


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit status: 0 nothing stands in the way of training, 2 something does, or wrong arguments."
    parser.add_argument(
        "--data", nargs="?", const=True, metavar="NAME", help="look at the data; NAME as in --dataset_name, which it may stand for"
    )
    parser.add_argument("--batch_size", type=_positive, default=4, metavar="INT", help="samples of a batch, for the padding (default: 4)")
    parser.add_argument("--max_records", type=_positive, metavar="INT", help="look at the first records only (default: all)")
    parser.add_argument("--seed", type=_natural, default=0, metavar="INT", help="which samples are shown (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    base_flags = {flag_of(f) for f in fields(BaseConfig)}
    add_settings(parser, BaseConfig, DataConfig, leave_out=("num_samples", *base_flags - {"model_name"}))


def _add_collect(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "The same command again goes on where an earlier one ended. Exit status: 0 done, 2 wrong arguments, data or output, 5 adapter "
        "unusable, 128+n after finishing the batch on signal n."
    )
    parser.add_argument("--adapter", required=True, metavar="FOLDER", help="folder that a run saved the student's adapter to")
    parser.add_argument("--output", required=True, metavar="FILE.jsonl", type=_jsonl, help="file that is written, or gone on with")
    parser.add_argument("--max_new_tokens", type=_positive, default=64, metavar="INT", help="tokens of a completion (default: 64)")
    parser.add_argument("--num_prompts", type=_positive, default=256, metavar="INT", help="prompts in all (default: 256)")
    parser.add_argument("--batch_size", type=_positive, default=8, metavar="INT", help="prompts at a time (default: 8)")
    parser.add_argument("--seed", type=_natural, default=0, metavar="INT", help="of the order of prompts (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    of_training = ("num_samples", "packing", "padding_side", "replay_dataset", "replay_ratio", "completion_column")
    add_settings(parser, BaseConfig, DataConfig, leave_out=of_training)


def _jsonl(text: str) -> str:
    if not text.endswith(".jsonl"):
        raise argparse.ArgumentTypeError(f"{text} does not end in .jsonl, by which --dataset_name will know it")
    return text


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is not at least 0")
    return value


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _limit(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
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
