"""`npt pretrain`."""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from npt.cli.arguments import base_config, load, load_adapter, with_adapter
from npt.cli.defaults import offer_auto, over, with_data, with_defaults
from npt.config import BaseConfig, DataConfig, NPTConfig, TrainConfig, flag_of
from npt.console import make_console, silent_console
from npt.errors import ConfigError, TooLittleTextError
from npt.flags import add_settings, build, read_yaml, with_safe_mode
from npt.presets import presets

REFUSED_SHARE_WORTH_SAYING = 0.01

_TRAINING = (BaseConfig, NPTConfig, DataConfig, TrainConfig)


def pretrain(given: dict[str, Any]) -> int:
    """Distil adapters from a base: load, convert, train, evaluate."""
    idle = next(
        (
            name
            for name in ("calibration_tokens", "calibration_inputs", "calibration_rounds")
            if name in given
        ),
        None,
    )
    if "config" in given:
        given = over(
            read_yaml(
                given["config"], _TRAINING, {"safe_mode": bool, "any_base": bool, "adapter": str}
            ),
            given,
        )
    given = with_adapter(with_safe_mode(given))
    any_base, start = given.pop("any_base", False), given.get("adapter")
    base = base_config(given)
    found = with_data(given, base.model_name)
    given, said = found.given, found.said
    chosen = with_defaults(given, _taken_up(given))
    adapter, data, training = _settings(chosen.given)
    if start is not None and (idle is not None or training.rank_budget is not None):
        raise ConfigError(
            f"--{idle or 'rank_budget'} is about a start that is solved, but --adapter {start} is"
            " one; drop one of the two"
        )
    if idle is not None and adapter.init != "calibrated":
        raise ConfigError(
            f"--{idle} is {given[idle]}, which means nothing without --init calibrated; add it or"
            " drop the other"
        )
    if any_base and training.resume is None and start is None:
        raise ConfigError(
            "--any_base is about --resume or --adapter, which are missing; add one, or drop"
            " --any_base"
        )
    from npt.distributed.processes import join_processes

    processes = join_processes(training.rank_timeout)
    try:
        with processes.member():
            _check_placing(
                base, [name for name, _ in training.stage_shares], processes.size, adapter.init
            )
            console = make_console() if processes.main else silent_console()
            _say(console, *said, *chosen.said)
            checked = _check(processes, base, adapter, data, training, start)
            with _start_trackers(processes, training, checked) as trackers:
                rest = (any_base, start, console, trackers)
                try:
                    return _train(processes, base, checked, data, training, *rest)
                except TooLittleTextError:
                    if processes.size > 1 or not chosen.fallback:
                        raise
                    # but for the trackers nothing has begun yet
                    chosen = with_defaults(given, solvable=False)
                    _say(console, *chosen.said)
                    adapter, data, training = _settings(chosen.given)
                    return _train(
                        processes,
                        base,
                        _check(processes, base, adapter, data, training, start),
                        data,
                        training,
                        *rest,
                    )
    finally:
        processes.close()


def _taken_up(given: dict[str, Any]) -> dict[str, Any]:
    """Settings, by flag, of the run that `--resume` names, as far as they can be read here; whether
    it can be taken up is seen later.
    """
    resume, output = given.get("resume"), given.get("output_dir")
    places = (
        []
        if resume is None
        else (
            [Path(output)]
            if resume == "auto" and output
            else [Path(resume), Path(resume).parent.parent]
        )
    )
    for place in places:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            settings = json.loads((place / "run.json").read_text(encoding="utf-8")).get(
                "settings", {}
            )
            flags = {f.name: flag_of(f) for cls in _TRAINING for f in fields(cls)}
            return {flags[name]: value for name, value in settings.items() if name in flags}
    return {}


def _settings(given: dict[str, Any]) -> tuple[NPTConfig, DataConfig, TrainConfig]:
    """What is trained, on what, and how."""
    start = given.get("adapter")
    adapter = build(NPTConfig, given) if start is None else _form_of(start, given)
    return adapter, build(DataConfig, given), build(TrainConfig, given)


def _form_of(start: Any, given: dict[str, Any]) -> NPTConfig:
    """The form of a saved adapter, beside which the flags may say nothing else.

    Raises:
        ConfigError: a flag says something else.
    """
    form = start.config
    asked = build(
        NPTConfig, {**{flag_of(f): getattr(form, f.name) for f in fields(NPTConfig)}, **given}
    )
    other = next(
        (f for f in fields(NPTConfig) if getattr(asked, f.name) != getattr(form, f.name)), None
    )
    if other is not None:
        was, wanted = (getattr(config, other.name) for config in (form, asked))
        raise ConfigError(
            f"--{flag_of(other)} is {wanted}, but --adapter {start} has {was}, which training"
            " keeps; drop one of the two"
        )
    return form


def _check_placing(base: BaseConfig, strategies: list[str], processes: int, init: str) -> None:
    """Refuse ways to place the base that do not go with the processes or the strategy."""
    if processes > 1 and base.device_map is not None:
        raise ConfigError(
            f"--device_map {base.device_map} gives all GPUs to one process, but {processes} were"
            " started; take --shard_base"
        )
    if processes == 1 and base.shard_base:
        raise ConfigError(
            "--shard_base shares the base among processes, but there is one; start several with"
            " torchrun, or take --device_map"
        )
    if base.shard_base and init == "calibrated":
        raise ConfigError(
            "--init calibrated needs the whole base in one process; drop --shard_base, or use"
            " --init random"
        )
    if base.shard_base and base.teacher_precision is not None:
        raise ConfigError(
            f"--teacher_precision {base.teacher_precision} puts a whole unquantised model beside a"
            " base that --shard_base shares out; drop one of the two"
        )
    other = next((strategy for strategy in strategies if strategy != "local"), None)
    if base.shard_base and other is not None:
        raise ConfigError(
            f"--strategy {other} does not go with --shard_base, which has one layer of the base at"
            " a time; take --strategy local"
        )


def _say(console: Any, *lines: str) -> None:
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


@dataclass(frozen=True)
class _Checked:
    """What is known of a run before its base is loaded.

    adapter: with the ranks of the run that is gone on with. goes_on: from a checkpoint. folder: the
    run's; resume_at: the step that the run in it goes on from. config: of the base.
    """

    adapter: NPTConfig
    goes_on: bool
    folder: Path
    resume_at: int | None
    config: Any


def _check(
    processes: Any,
    base: BaseConfig,
    adapter: NPTConfig,
    data: DataConfig,
    training: TrainConfig,
    start: Any,
) -> _Checked:
    """Refuse what can be refused before the minutes that loading a large base takes."""
    from npt.adapters.fit import check_fit
    from npt.base.load import check_teacher, read_config
    from npt.calibration.calibrate import check_calibration
    from npt.planning.plan import Planner
    from npt.planning.workload import Workload
    from npt.runs.resume import changed_settings, find_resumed
    from npt.runs.run_folder import check_free, default_folder
    from npt.runs.trackers import check_trackers
    from npt.train.run_checks import check_replay, check_samples_shown, check_trainable
    from npt.train.sources import check_sources

    def check_folder() -> tuple[bool, Any, str, int | None]:
        """Whether a checkpoint is gone on from, the ranks that a budget was spent on in its run,
        the run's folder and the step it is at.
        """
        if training.resume is not None:
            resumed = find_resumed(training.resume, training.output_dir)
            place = str(resumed.folder), resumed.step if resumed.goes_on else None
            if resumed.checkpoint is not None:
                before = resumed.checkpoint.record["settings"]
                spent = before.get("ranks") if training.rank_budget is not None else adapter.ranks
                now = {
                    name: value
                    for part in (base, adapter, data, training)
                    for name, value in asdict(part).items()
                }
                changed_settings(before, {**now, "ranks": spent})
                return True, spent, *place
            return False, None, *place
        folder = default_folder() if training.output_dir is None else Path(training.output_dir)
        check_free(folder)
        return False, None, str(folder), None

    goes_on, spent, folder, resume_at = processes.first(check_folder)
    if goes_on:
        adapter = replace(adapter, ranks=spent)
    config = read_config(base.model_name)
    if base.teacher_precision is not None:
        check_teacher(base.model_name, config)
    layers = check_fit(adapter, config, data.max_length)
    if not goes_on and start is None:
        check_calibration(adapter, training.rank_budget, len(layers), config.hidden_size)
    check_sources(data)
    check_trackers(training)
    check_trainable(adapter, data, base.teacher_precision is not None)
    check_replay(data)
    if base.shard_base:
        check_samples_shown(training)
    if training.max_memory_bytes is not None:
        workload = Workload.of(
            base,
            config,
            adapter,
            training,
            data.max_length,
            processes.device,
            processes=processes.size,
        )
        # as the loaded base is going to be asked
        Planner(workload).fitting(training.max_memory_bytes)
    return _Checked(adapter, goes_on, Path(folder), resume_at, config)


def _start_trackers(processes: Any, training: TrainConfig, checked: _Checked) -> Any:
    """Trackers may have to wait for a network, and a signal does not wait for them."""
    from npt.runs.signals import StopOnSignal
    from npt.runs.trackers import start_trackers

    with StopOnSignal(at_once=True):
        return start_trackers(processes, training, checked.folder, resume_at=checked.resume_at)


def _train(
    processes: Any,
    base: BaseConfig,
    checked: _Checked,
    data: DataConfig,
    training: TrainConfig,
    any_base: bool,
    start: Any,
    console: Any,
    trackers: Any,
) -> int:
    """One of the run's processes."""
    import npt
    from npt.adapters.attach import AttachReport
    from npt.evaluation.table import print_fidelity
    from npt.runs.signals import StopOnSignal

    adapter, goes_on = checked.adapter, checked.goes_on
    with StopOnSignal(at_once=True) as stop:  # while the base is loaded and the data are prepared
        device, pack_on = ("cpu", processes.device) if base.shard_base else (processes.device, None)
        model, tokenizer = load(base, console, device, pack_on)
        if base.share_embeddings:
            console.print(
                "--share_embeddings: teacher and student share the whole base in any case,"
                " embeddings included"
            )
        teacher = None
        if base.teacher_precision is not None:
            attention = base.attn_implementation
            teacher = npt.load_teacher(
                base.model_name,
                base.teacher_precision,
                device=model.device,
                attn_implementation=attention,
            )
            console.print(
                f"teacher {base.model_name}: unquantised, stored in {base.teacher_precision},"
                " computes in fp32"
            )
        if start is None or goes_on:
            console.print(str(npt.attach(model, adapter, seed=training.seed)), soft_wrap=True)
        else:
            load_adapter(model, {"adapter": start, "any_base": any_base}, console)
            console.print(
                f"training goes on from {start}: {AttachReport.of(model)}", soft_wrap=True
            )
        if base.shard_base:
            npt.shard_base(model, processes)
            console.print(f"the base is sharded over {processes.size} processes", soft_wrap=True)
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
            any_base=any_base,
            trackers=trackers,
        )
        stop.check()  # what is raised inside a destructor goes no further
        result = trainer.train()
    if result.fidelity is not None:
        console.print()
        print_fidelity(result.fidelity, console, "held-out" if result.heldout else "TRAINING")
    console.print(
        f"{result.steps} steps, {result.tokens:,} tokens in {result.seconds:.0f} s,"
        f" {result.refused} refusals; everything is in {result.folder}",
        soft_wrap=True,
    )
    if result.refused_share > REFUSED_SHARE_WORTH_SAYING:
        kinds = ", ".join(
            f"{count} {kind}" for kind, count in sorted(result.refused_by_kind.items())
        )
        console.print(
            f"warning: {result.refused_share:.1%} of {result.micro_batches} micro-batches were"
            f" refused ({kinds}); see events.jsonl before trusting this run",
            soft_wrap=True,
        )
    return result.exit_status


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        default=argparse.SUPPRESS,
        help=(
            f"settings by flag name, a file or a preset ({', '.join(presets())}); flags given"
            " beside it win"
        ),
    )
    parser.add_argument(
        "--safe_mode",
        action="store_true",
        default=argparse.SUPPRESS,
        help="additive modulation only: short for --modulation additive",
    )
    parser.add_argument(
        "--any_base",
        action="store_true",
        default=argparse.SUPPRESS,
        help=(
            "with --resume or --adapter: another base than theirs too, if its shapes fit; a"
            " warning, events.jsonl and run.json tell"
        ),
    )
    parser.add_argument(
        "--adapter",
        metavar="PATH",
        default=argparse.SUPPRESS,
        help=(
            "go on from a saved adapter (its folder, a run's, a checkpoint, or USER/NAME on the"
            " hub), on its base and in its form, as a new run with moments and schedule of its own;"
            " --resume takes those up"
        ),
    )
    add_settings(parser, *_TRAINING)
    offer_auto(parser)
