"""`npt pretrain`."""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from npt.cli.arguments import (
    add_adapter,
    add_switch,
    check_partners,
    check_run,
    load,
    load_adapter,
    load_teacher,
    with_base,
)
from npt.cli.defaults import (
    SETTINGS,
    add_config,
    add_run_settings,
    with_config,
    with_data,
    with_defaults,
)
from npt.config import BaseConfig, DataConfig, NPTConfig, TrainConfig, flag_of
from npt.console import make_console, silent_console
from npt.errors import ConfigError
from npt.flags import build, with_safe_mode

REFUSED_SHARE_WORTH_SAYING = 0.01


class _Run(NamedTuple):
    """The settings of a run.

    Attributes:
        start: the saved adapter that training starts from, if any.
        any_base: whether that adapter may come from another base.
        resumes: whether the run resumes a checkpoint.
    """

    base: BaseConfig
    adapter: NPTConfig
    data: DataConfig
    training: TrainConfig
    start: Any
    any_base: bool
    resumes: bool = False


def pretrain(flags: dict[str, Any]) -> int:
    """Train a student: adapters on a frozen base, by distillation.

    In each converted layer of the base, the attention output is not added to the
    residual stream. It goes into a low-rank adapter, which shifts the stream and
    can also modulate the MLP (--targets). Training makes the converted model (the
    student) predict what the original (the teacher) predicts.

    All context passes through the adapters, so you can inspect the effect of context
    on a token (npt generate --html), carry it over to another prompt (npt
    transplant), or write it into the weights (npt consolidate).

    First try the tiny model that comes with NPT; it takes a few minutes on a CPU.
    Then use your own model and data:

        npt pretrain --config tiny
        npt pretrain --model_name MODEL --use_quantization --dataset_name FILE

    A run prints how close the student is to its teacher, and writes a folder with
    the adapter and report.html. A micro-batch whose loss or gradient is NaN or Inf
    is refused: it is skipped, changes nothing and is logged. On N GPUs, run the
    script pretrain_npt_safe.py, which takes the same flags:

        torchrun --standalone --nproc_per_node N pretrain_npt_safe.py --config tiny
    """
    tokens = flags.get("calibration_tokens")
    flags, base = with_base(with_safe_mode(with_config(flags)))
    any_base = flags.pop("any_base", False)
    flags, data_notes = with_data(flags, base.model_name)
    flags, notes = with_defaults(flags, _resumed_flags(flags), model_name=base.model_name)
    data, training = build(DataConfig, flags), build(TrainConfig, flags)
    start = flags.get("adapter")
    adapter = build(NPTConfig, flags) if start is None else _form_of(start, flags)
    if tokens is not None and (start is not None or adapter.init != "calibrated"):
        raise ConfigError(
            f"--calibration_tokens {tokens} has no effect without a closed-form start: remove it,"
            " or use --init calibrated without --adapter"
        )
    check_partners({**flags, "any_base": any_base}, {"any_base": "adapter"})
    from npt.distributed.join import join_processes

    run = _Run(base, adapter, data, training, start, any_base)
    processes = join_processes()
    try:
        with processes.member():
            _check_placing(base, processes.size)
            console = make_console() if processes.main else silent_console()
            console.say(*data_notes, *notes)
            # loading a large base takes minutes: check everything else first
            processes.agree({"--resume": training.resume, "--output_dir": training.output_dir})
            resumes, ranks = processes.first(lambda: _check_folder(run))
            if resumes:
                run = run._replace(adapter=replace(adapter, ranks=ranks), resumes=True)
            check_run(base, run.adapter, data, training, starts=not resumes and start is None)
            return _train(processes, console, run)
    finally:
        processes.close()


def _resumed_flags(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, by flag, of the run that `--resume` names, as far as they are readable;
    whether it can be resumed is checked later.
    """
    resume, output = flags.get("resume"), flags.get("output_dir")
    if resume is None:
        return {}
    folders = [Path(resume), Path(resume).parent.parent]
    if resume == "auto" and output:
        folders = [Path(output)]
    for path in (*(folder / "run.json" for folder in folders), Path(resume) / "state.json"):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            record = json.loads(path.read_text(encoding="utf-8"))
            settings = record.get("settings", {})
            names = {f.name: flag_of(f) for cls in SETTINGS for f in fields(cls)}
            return {names[name]: value for name, value in settings.items() if name in names}
    return {}


def _form_of(start: Any, flags: dict[str, Any]) -> NPTConfig:
    """Return the form of a saved adapter; ConfigError for a flag that asks for another form."""
    form = start.config
    asked = build(NPTConfig, {flag_of(f): getattr(form, f.name) for f in fields(form)} | flags)
    for f in fields(form):
        was, wanted = getattr(form, f.name), getattr(asked, f.name)
        if wanted != was:
            raise ConfigError(
                f"--{flag_of(f)} is {wanted}, but --adapter {start} has {was}: remove one of them"
            )
    return form


def _check_placing(base: BaseConfig, processes: int) -> None:
    if base.shard_base and processes == 1:
        raise ConfigError("--shard_base needs several processes: start them with torchrun")
    if base.shard_base and base.teacher_precision is not None:
        raise ConfigError(
            f"--teacher_precision {base.teacher_precision} loads a whole unquantised model in every"
            " process, so --shard_base saves nothing: remove one of them"
        )


def _check_folder(run: _Run) -> tuple[bool, Any]:
    """Check the run folder. Return whether the run resumes a checkpoint, and that checkpoint's
    ranks, as JSON for the other processes.
    """
    from npt.distributed.processes import ProcessGroup
    from npt.runs.resume import changed_settings, find_origin

    adapter, training = run.adapter, run.training
    origin = find_origin(training.resume, training.output_dir, ProcessGroup())
    if origin.checkpoint is None:
        return False, None
    recorded = origin.checkpoint.record["settings"]
    # ranks that the closed-form start chose
    ranks = recorded.get("ranks") if adapter.spends_ranks else adapter.ranks
    asked = {name: value for part in run[:4] for name, value in asdict(part).items()}
    changed_settings(recorded, {**asked, "ranks": ranks})
    return True, ranks


def _train(processes: Any, console: Any, run: _Run) -> int:
    import npt
    from npt.adapters.attach import AttachReport
    from npt.evaluation.table import print_fidelity
    from npt.runs.signals import StopOnSignal

    base, adapter, data, training, start, any_base, resumes = run
    with StopOnSignal(at_once=True) as stop:  # loading and preparing can take minutes
        model, tokenizer = load(
            base, console, processes.device, adapter=start, layers_later=base.shard_base
        )
        if base.share_embeddings:
            console.say(
                "--share_embeddings has no effect: teacher and student share the whole base"
            )
        teacher = load_teacher(base, console, model.device)
        shard = partial(npt.shard_base, model, processes) if base.shard_base else None
        if start is None or resumes:
            console.say(str(npt.attach(model, adapter, seed=training.seed)))
            if shard is not None:
                shard()
        else:
            load_adapter(model, start, any_base, console, shard)
            console.say(f"training starts from {start}: {AttachReport.of(model)}")
        if shard is not None:
            console.say(f"the base is sharded over {processes.size} processes")
        trainer = npt.Trainer(
            model,
            tokenizer,
            None,
            training,
            data_config=data,
            settings={**asdict(base), "adapter": None if start is None else str(start)},
            console=console,
            processes=processes,
            teacher=teacher,
        )
        stop.check()  # an error raised inside a destructor is lost
        result = trainer.train()
    if result.fidelity is not None:
        console.print()
        print_fidelity(result.fidelity, console, "held-out" if result.heldout else "TRAINING")
    console.say(
        f"{result.steps} steps, {result.tokens:,} tokens in {result.seconds:.0f} s,"
        f" {result.refused} refusals; results are in {result.folder}"
    )
    share = result.refused / max(1, result.micro_batches)
    if share > REFUSED_SHARE_WORTH_SAYING:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(result.refused_by_kind.items()))
        console.say(
            f"warning: {share:.1%} of {result.micro_batches} micro-batches were refused ({kinds}):"
            " read events.jsonl before you use this adapter"
        )
    for cause in result.diverged:
        console.say(f"warning: the run diverged: {cause}")
    return result.exit_status


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    unset = argparse.SUPPRESS
    text = "let --adapter be used with another base if the shapes match; prints a warning"
    add_switch(parser, "any_base", text, unset)
    text = "start from a saved adapter and use its base, rank, layers and targets; PATH"
    add_adapter(parser, text, required=False, default=unset)
    add_run_settings(parser)
