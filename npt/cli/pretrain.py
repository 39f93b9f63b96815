"""`npt pretrain`."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from npt.cli.arguments import (
    add_adapter,
    add_config,
    add_run_settings,
    add_switch,
    check_run,
    load,
    load_adapter,
    load_teacher,
)
from npt.config import BaseConfig
from npt.console import make_console, silent_console
from npt.errors import ConfigError
from npt.train.resolve import RunSettings, resolve
from npt.train.sources import check_sources

REFUSED_SHARE_WORTH_SAYING = 0.01


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
    run = resolve(flags)
    # before torch is loaded, which takes a second
    rank = os.environ.get("RANK")
    if rank in (None, "0"):
        make_console().say(*run.notes)
    # a launcher's processes join first: the others would wait for one that lacks a file
    if rank is None:
        check_sources(run.data)
    from npt.distributed.join import join_processes

    processes = join_processes()
    try:
        with processes.member():
            # before anything that only some processes would do
            processes.agree({f"--{name}": value for name, value in _placing(run).items()})
            _check_placing(run.base, processes.size)
            console = make_console() if processes.main else silent_console()
            # loading a large base takes minutes: check everything else first
            resumes, ranks = processes.first(lambda: _check_folder(run))
            if resumes:
                run = replace(run, adapter=replace(run.adapter, ranks=ranks))
            check_run(run, starts=not resumes and run.start is None)
            return _train(processes, console, run, resumes)
    finally:
        processes.close()


def _placing(run: RunSettings) -> dict[str, Any]:
    """Return what all processes must agree on before any loads the base: a process that shards it,
    or packs it, otherwise than the others would wait for them, or abort in a collective.
    """
    base = asdict(run.base)
    del base["model_name"]  # a path on the process's machine
    folder = {"resume": run.training.resume, "output_dir": run.training.output_dir}
    return {**base, **folder}


def _check_placing(base: BaseConfig, processes: int) -> None:
    if base.shard_base and processes == 1:
        raise ConfigError("--shard_base needs several processes: start them with torchrun")
    if base.shard_base and base.teacher_precision is not None:
        raise ConfigError(
            f"--teacher_precision {base.teacher_precision} loads a whole unquantised model in every"
            " process, so --shard_base saves nothing: remove one of them"
        )


def _check_folder(run: RunSettings) -> tuple[bool, Any]:
    """Check the run folder. Return whether the run resumes a checkpoint, and that checkpoint's
    ranks, as JSON for the other processes.
    """
    from npt.distributed.processes import ProcessGroup
    from npt.runs.resume import changed_settings, find_origin

    origin = find_origin(run.training.resume, run.training.output_dir, ProcessGroup())
    if origin.checkpoint is None:
        return False, None
    recorded = origin.checkpoint.record["settings"]
    ranks = run.adapter.ranks
    if run.adapter.spends_ranks:  # the closed-form start chose them
        ranks = recorded.get("ranks")
    asked: dict[str, Any] = {}
    for part in run.parts:
        asked |= asdict(part)
    changed_settings(recorded, {**asked, "ranks": ranks})
    return True, ranks


def _train(processes: Any, console: Any, run: RunSettings, resumes: bool) -> int:
    import npt
    from npt.adapters.attach import AttachReport, add_multipliers
    from npt.evaluation.table import print_fidelity
    from npt.runs.signals import StopOnSignal

    base, adapter, data, training = run.parts
    with StopOnSignal(at_once=True) as stop:  # loading and preparing can take minutes
        model, tokenizer = load(
            base, console, processes.device, recipe=run.recipe, layers_later=base.shard_base
        )
        teacher = load_teacher(base, console, model.device)
        shard = partial(npt.shard_base, model, processes) if base.shard_base else None
        # a run that resumes reads its adapter from the checkpoint, wherever it started
        if run.start is None or resumes:
            console.say(str(npt.attach(model, adapter, seed=training.seed)))
            if shard is not None:
                shard()
        else:
            load_adapter(model, run.start, run.any_base, console, shard)
            if adapter.modulation != run.start.config.modulation:
                add_multipliers(model)
                console.say("added multipliers, which start at 1: the student is unchanged")
            console.say(f"training starts from {run.start}: {AttachReport.of(model)}")
        if shard is not None:
            console.say(f"the base is sharded over {processes.size} processes")
        trainer = npt.Trainer(
            model,
            tokenizer,
            None,
            training,
            data_config=data,
            settings={**asdict(base), "adapter": run.started_from},
            console=console,
            processes=processes,
            teacher=teacher,
        )
        stop.check()  # an error raised inside a destructor is lost
        result = trainer.train()
    if result.fidelity is not None:
        console.print()
        heldout = "held-out" if result.heldout else "TRAINING"
        print_fidelity(result.fidelity, console, f"{heldout} tokens of {data.dataset_name}")
    console.say(
        f"{result.steps} steps, {result.tokens:,} tokens in {result.seconds:.0f} s,"
        f" {result.refused} refusals; results are in {result.folder}"
    )
    # single refusals are what the guard is for; many say that the data or the settings are wrong
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
