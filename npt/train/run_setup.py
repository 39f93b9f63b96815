"""The parts of a run: model, settings, processes, and the checkpoint that it resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from npt.adapters.attach import adapter_shapes, at_random_start, set_adapters
from npt.adapters.converted import adapter_parameters, npt_layers
from npt.base.attention import attention_name, repeats_exactly
from npt.base.identity import BaseIdentity
from npt.base.load import COMPUTE
from npt.base.precision import declared_dtype, quantization_of
from npt.base.recipe import Recipe
from npt.calibration.calibrate import check_calibration
from npt.config import DataConfig, TrainConfig
from npt.console import make_console, say, silent_console
from npt.data.chat import date_of, fix_date, has_template
from npt.distill.strategies import Strategy, strategy_of
from npt.distributed.join import join_processes
from npt.distributed.processes import ProcessGroup
from npt.distributed.sharded_base import processes_of
from npt.errors import ConfigError
from npt.runs.checkpoint import read_checkpoint
from npt.runs.resume import Resumed, changed_settings, find_resumed, plain_settings
from npt.runs.run_folder import check_free, default_folder
from npt.runs.signals import StopOnSignal
from npt.runs.trackers import Trackers
from npt.runs.versions import versions
from npt.step.splitting import MicroBatchSplitter
from npt.train.run_checks import check_model, teacher_record

MAY_DIFFER = ("model_name", "dataset_name", "replay_dataset", "dataset_mix")
"""Settings in which the processes of a run may differ: paths on their machines."""


def processes_for(
    model: PreTrainedModel, processes: ProcessGroup | None, timeout: float
) -> ProcessGroup:
    """Return the processes that share the base, else those given or that a launcher started."""
    sharing = processes_of(model)
    if sharing is not None and processes not in (None, sharing):
        raise ConfigError(
            "the base is sharded over other processes than the Trainer was given; leave the"
            " argument processes out"
        )
    return sharing or processes or join_processes(timeout)


class RunSetup:
    """Model, settings and processes of a run, checked; arguments as of the Trainer.

    Attributes:
        adapter_config: with the ranks that a resumed run's start was given.
        resumed: where the run continues, None for a new one; `checkpoint` is its own.
        goes_on: the run continues in the folder of an earlier one.
        changed: settings that the resumed run had otherwise, with both values.
        folder_path: of the run, which is not made yet.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        teacher: PreTrainedModel | None,
        config: TrainConfig,
        data_config: DataConfig,
        processes: ProcessGroup,
        settings: Mapping[str, Any] | None = None,
        console: Console | None = None,
        trackers: Trackers | None = None,
    ):
        self.model, self.tokenizer, self.teacher = model, tokenizer, teacher
        self.config, self.data_config, self.processes = config, data_config, processes
        self.console = (console or make_console()) if processes.main else silent_console()
        self.stop = StopOnSignal()
        self.splitter = MicroBatchSplitter(config.batch_size)
        self.strategy: Strategy = strategy_of(config, teacher)
        self.device = next(model.parameters()).device
        self._settings = settings or {}
        self.adapter_config = check_model(model, config, data_config, processes.size)
        self._teacher_record = teacher_record(model, teacher)
        # before an exchange that only some settings bring: it would be paired with another one
        processes.agree(self._shared_settings())
        self.resumed = None if config.resume is None else self._find_resumed(config.resume)
        self.checkpoint = None if self.resumed is None else self.resumed.checkpoint
        self.goes_on = self.resumed is not None and self.resumed.goes_on
        if self.checkpoint is None and (at_random_start(model) or config.rank_budget):
            layers, width = len(npt_layers(model)), model.config.hidden_size
            check_calibration(self.adapter_config, config.rank_budget, layers, width)
        self.folder_path = Path(processes.first(lambda: str(self._choose_folder(trackers))))
        self.changed: Mapping[str, tuple[Any, Any]] = {}
        date = None
        if self.checkpoint is not None:
            saved = self.checkpoint.record["settings"]
            date = self.checkpoint.record.get("date")
            if self.adapter_config.spends_ranks and saved.get("ranks") is not None:
                # the checkpoint has their numbers
                ranked = replace(self.adapter_config, ranks=tuple(saved["ranks"]))
                self.changed = changed_settings(saved, self.all_settings() | asdict(ranked))
                zeros = {name: torch.zeros(s) for name, s in adapter_shapes(model, ranked).items()}
                set_adapters(model, ranked, zeros)
                self.adapter_config = ranked
            else:
                self.changed = changed_settings(saved, self.all_settings())
        # a chat template writes the date of the run's start, on every process and after a resume
        if has_template(tokenizer):
            fix_date(tokenizer, processes.first(lambda: date or date_of(tokenizer)))

    @property
    def date(self) -> str | None:
        """The date that the chat template writes; None without one."""
        return date_of(self.tokenizer) if has_template(self.tokenizer) else None

    @property
    def window_size(self) -> int:
        """Micro-batches of a window, over all processes."""
        return self.config.gradient_accumulation_steps * self.processes.size

    @property
    def first_step(self) -> int:
        """The steps that the resumed run has made."""
        return 0 if self.resumed is None else self.resumed.step

    @property
    def resume_step(self) -> int | None:
        """The step at which the run's folder is continued; None for a new one."""
        return self.first_step if self.goes_on else None

    @property
    def deterministic(self) -> bool:
        """True if every step gives the same bits again, backward of attention included."""
        return "end_to_end" not in dict(self.config.stage_shares) or repeats_exactly(self.model)

    def say(self, line: str) -> None:
        """Print a line on the main process."""
        say(self.console, line)

    def all_settings(self) -> dict[str, Any]:
        """Return every setting, as `run.json` keeps them."""
        settings = dict(self._settings)
        for part in (self.adapter_config, self.data_config, self.config):
            settings |= asdict(part)
        if quantization_of(self.model) is not None:
            names = {dtype: name for name, dtype in COMPUTE.items()}
            settings["compute_dtype"] = names.get(declared_dtype(self.model), "other")
        attention = {"attn_implementation": attention_name(self.model)}
        return {**settings, **self._teacher_record, **attention, "processes": self.processes.size}

    def description(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings and facts for trackers, from the content of `run.json`."""
        names = ("base_hash", "precision", "versions", "device", "processes")
        recipe = Recipe.of(self.model)
        return {
            "settings": plain_settings(self.all_settings()),
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
                "shares of a mixture": [share for _, share in self.data_config.mix],
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

    def _find_resumed(self, resume: str) -> Resumed:
        """Find the run to resume. The main process looks; the others read what it found."""
        resumed: Resumed | None = None

        def find() -> tuple[str, str | None, bool]:
            nonlocal resumed
            resumed = find_resumed(resume, self.config.output_dir)
            checkpoint = resumed.checkpoint
            path = None if checkpoint is None else str(checkpoint.folder)
            return str(resumed.folder), path, resumed.goes_on

        folder, path, goes_on = self.processes.first(find)
        if resumed is not None:
            return resumed
        return Resumed(Path(folder), None if path is None else read_checkpoint(Path(path)), goes_on)

    def _choose_folder(self, trackers: Trackers | None) -> Path:
        """Return the run's folder: a new one, or the one that is continued."""
        if self.resumed is not None:
            return self.resumed.folder
        if trackers is not None and trackers.active:
            return trackers.folder
        folder = Path(self.config.output_dir) if self.config.output_dir else default_folder()
        check_free(folder)
        return folder
