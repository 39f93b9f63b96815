"""The parts of a run: model, settings, processes, and the checkpoint that it resumes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from npt.adapters.attach import adapter_shapes, at_random_start, set_adapters
from npt.adapters.converted import adapter_parameters
from npt.base.attention import attention_name, repeats_exactly
from npt.base.identity import BaseIdentity
from npt.base.load import COMPUTE
from npt.base.precision import declared_dtype, quantization_of
from npt.base.recipe import Recipe
from npt.calibration.calibrate import check_calibration
from npt.config import DataConfig, TrainConfig
from npt.console import make_console, say, silent_console
from npt.data.chat import date_of, fix_date, has_template
from npt.data.source import Record
from npt.distill.splitting import MicroBatchSplitter
from npt.distill.strategies import Strategy, strategy_of
from npt.distributed.join import join_processes
from npt.distributed.processes import ProcessGroup
from npt.distributed.sharded_base import processes_of
from npt.errors import ConfigError
from npt.guard.schedule import kind_of_run
from npt.runs.checkpoint import Checkpoint, read_checkpoint
from npt.runs.resume import Resumed, changed_settings, find_resumed, plain_settings
from npt.runs.run_folder import check_free, default_folder
from npt.runs.signals import StopOnSignal
from npt.runs.trackers import Trackers
from npt.train.run_checks import check_model, check_window, teacher_record
from npt.versions import versions

MAY_DIFFER = ("model_name", "dataset_name", "replay_dataset")
"""Settings in which the processes of a run may differ: paths on their machines."""


@dataclass
class RunOptions:
    """Options of a Trainer that few callers need; see there.

    report: write `report.html` and the figures for it.
    """

    eval_data: Iterable[Record] | None = None
    replay_data: Iterable[Record] | None = None
    settings: Mapping[str, Any] | None = None
    console: Console | None = None
    processes: ProcessGroup | None = None
    any_base: bool = False
    trackers: Trackers | None = None
    report: bool = True


class RunSetup:
    """Model, settings and processes of a run, checked; arguments as of the Trainer."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        teacher: PreTrainedModel | None,
        config: TrainConfig,
        data_config: DataConfig,
        options: RunOptions,
    ):
        self.model, self.tokenizer, self.teacher = model, tokenizer, teacher
        self.config, self.data_config, self.options = config, data_config, options
        sharing = processes_of(model)
        if sharing is not None and options.processes not in (None, sharing):
            raise ConfigError(
                "the base is sharded over other processes than the Trainer was given; leave the"
                " argument processes out"
            )
        self.processes = sharing or options.processes or join_processes(config.rank_timeout)
        self.console = options.console or make_console()
        if not self.processes.main:
            self.console = silent_console()
        self.stop = StopOnSignal()
        self.splitter = MicroBatchSplitter(config.batch_size)
        self.strategy: Strategy = strategy_of(config, teacher)
        self.device = next(model.parameters()).device

    def check(self) -> None:
        """Refuse a run that cannot be trained; find its checkpoint to resume, and its folder."""
        config = self.config
        self.adapter_config = check_model(self.model, config, self.data_config)
        self.teacher_record = teacher_record(self.model, self.teacher)
        check_window(config, self.data_config, self.processes.size)
        # before an exchange that only some settings bring: it would be paired with another one
        self.processes.agree(self._shared_settings())
        self.resumed = self._find_resumed()
        if self.checkpoint is None and at_random_start(self.model):
            check_calibration(self.adapter_config)
        self.folder_path = Path(self.processes.first(lambda: str(self._choose_folder())))
        self.changed: Mapping[str, tuple[Any, Any]] = {}
        if self.checkpoint is not None:
            saved = self.checkpoint.record["settings"]
            now = self.all_settings()
            ranks = saved.get("ranks")
            spent = self.adapter_config.spends_ranks and ranks is not None
            self.changed = changed_settings(saved, {**now, "ranks": ranks} if spent else now)
            if spent:
                self._take_ranks(tuple(ranks))
        # a chat template writes the date of the run's start, on every process and after a resume
        begun = None if self.checkpoint is None else self.checkpoint.record.get("date")
        if has_template(self.tokenizer):
            fix_date(self.tokenizer, self.processes.first(lambda: begun or date_of(self.tokenizer)))

    def _take_ranks(self, ranks: tuple[int, ...]) -> None:
        """Give the adapters the ranks that the start of the run was given; the checkpoint has their
        numbers.
        """
        config = replace(self.adapter_config, ranks=ranks)
        shapes = adapter_shapes(self.model, config)
        set_adapters(self.model, config, {name: torch.zeros(s) for name, s in shapes.items()})
        self.adapter_config = config

    @property
    def date(self) -> str | None:
        """The date that the chat template writes; None without one."""
        return date_of(self.tokenizer) if has_template(self.tokenizer) else None

    @property
    def window_size(self) -> int:
        """Micro-batches of a window, over all processes."""
        return self.config.gradient_accumulation_steps * self.processes.size

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint that the run resumes from."""
        return None if self.resumed is None else self.resumed.checkpoint

    @property
    def goes_on(self) -> bool:
        """True if the run continues in the folder of an earlier one."""
        return self.resumed is not None and self.resumed.goes_on

    @property
    def resume_step(self) -> int | None:
        """The step at which the run's folder is continued; None for a new one."""
        return self.resumed.step if self.resumed is not None and self.goes_on else None

    @property
    def deterministic(self) -> bool:
        """True if every step gives the same bits again, backward of attention included."""
        return self.config.strategy != "end_to_end" or repeats_exactly(self.model)

    def say(self, line: str) -> None:
        """Print a line on the main process."""
        say(self.console, line)

    def schedule(self, total_steps: int | None) -> str:
        """Return the learning-rate schedule that a run of this length has."""
        return kind_of_run(self.config.scheduler_type, total_steps)

    def all_settings(self) -> dict[str, Any]:
        """Return every setting, as `run.json` keeps them."""
        found: dict[str, Any] = {
            "attn_implementation": attention_name(self.model),
            "processes": self.processes.size,
        }
        if quantization_of(self.model) is not None:
            names = {dtype: name for name, dtype in COMPUTE.items()}
            found["compute_dtype"] = names.get(declared_dtype(self.model), "other")
        configs = (self.adapter_config, self.data_config, self.config)
        merged = {name: value for part in configs for name, value in asdict(part).items()}
        return {**(self.options.settings or {}), **merged, **self.teacher_record, **found}

    def description(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the description of the run for trackers, from the content of `run.json`."""
        names = ("base_hash", "precision", "versions", "device", "processes")
        recipe = Recipe.of(self.model)
        return {
            **{name: record[name] for name in (*names, "trainable_parameters")},
            "base_loading": None if recipe is None else recipe.as_record(),
            "converted_layers": record["layers"],
            "folder": str(self.folder_path),
        }

    def agree(self, base: BaseIdentity, facts: Mapping[str, Any]) -> None:
        """Refuse processes that would not do the same; `facts` are further values to compare."""
        if self.processes.size == 1:
            return
        tensors = adapter_parameters(self.model).values()
        adapters = sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in tensors)).hexdigest()
        self.processes.agree(
            {
                **self._shared_settings(),
                "a base of hash": base.strict,
                "adapters of hash": adapters,
                **facts,
                "a checkpoint of step": None if self.checkpoint is None else self.checkpoint.step,
                "a device of kind": self.device.type,
                **{f"version of {name}": version for name, version in versions().items()},
            }
        )

    def _shared_settings(self) -> dict[str, Any]:
        """Return what every process of a run must have alike, known before its data."""
        plain = plain_settings(self.all_settings())
        settings = {f"--{name}": value for name, value in plain.items() if name not in MAY_DIFFER}
        return {**settings, "a chat template": has_template(self.tokenizer)}

    def _find_resumed(self) -> Resumed | None:
        """Find the run to resume. The main process looks; the others read what it found."""
        if self.config.resume is None:
            return None
        found: list[Resumed] = []

        def find() -> tuple[str, str | None, bool]:
            found.append(find_resumed(str(self.config.resume), self.config.output_dir))
            checkpoint = found[0].checkpoint
            path = None if checkpoint is None else str(checkpoint.folder)
            return str(found[0].folder), path, found[0].goes_on

        folder, path, goes_on = self.processes.first(find)
        if found:
            return found[0]
        checkpoint = None if path is None else read_checkpoint(Path(path))
        return Resumed(Path(folder), checkpoint, goes_on)

    def _choose_folder(self) -> Path:
        """Return the run's folder: a new one, or the one that is continued."""
        if self.resumed is not None:
            return self.resumed.folder
        trackers = self.options.trackers
        if trackers is not None and trackers.active:
            return trackers.folder
        folder = Path(self.config.output_dir) if self.config.output_dir else default_folder()
        check_free(folder)
        return folder
