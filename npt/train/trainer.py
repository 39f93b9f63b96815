"""`Trainer`: the loop from samples to a trained adapter, with its run folder."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.attach import (
    adapter_parameters,
    adapter_shapes,
    attached_config,
    check_length,
    format_layers,
    is_attached,
    npt_layers,
    set_adapters,
)
from npt.adapters.consolidate import consolidated
from npt.adapters.files.run_layout import CHECKPOINTS
from npt.adapters.sharding import is_sharded
from npt.base.attention import attention_name, repeats_exactly
from npt.base.identity import base_hash, base_identity
from npt.base.load import COMPUTE, TEACHERS
from npt.base.precision import audit_precision, declared_dtype, policy_dtype, quantization_of
from npt.base.quantization_error import product_errors
from npt.base.recipe import Recipe
from npt.calibration.calibrate import check_calibration
from npt.calibration.report import Calibration
from npt.config import DataConfig, NPTConfig, TrainConfig, parse_steps
from npt.console import make_console, silent_console
from npt.data.batch import Batch, batches, pad_id_of
from npt.data.encoding import listed_columns
from npt.data.loader import Ahead, Loaded, Loader, Other, Position
from npt.data.mix import (
    REPLAY,
    Source,
    as_read,
    evaluated_on,
    mixture_line,
    open_sources,
    per_source,
)
from npt.data.sample import Sample
from npt.data.samples import no_sample
from npt.data.source import BUILTIN, Record
from npt.diagnostics.guards import base_fault, require, tensor_fault
from npt.distill.loss_weights import layer_weights
from npt.distill.stages import stages_of
from npt.distill.strategies import Strategy, drive
from npt.distributed.processes import Ranks, join_ranks
from npt.distributed.sharded_base import ranks_of
from npt.errors import (
    AdapterFileError,
    CheckpointError,
    ConfigError,
    DataError,
    RankError,
    StoppedError,
    TooManyRefusalsError,
    kind_of,
)
from npt.evaluation.attribution import Reference, refer
from npt.evaluation.evaluate import Fidelity, evaluate
from npt.evaluation.modulation import measure_modulation
from npt.planning.measure import storage_bytes, tensors_of
from npt.planning.memory import MemoryPlan, shown
from npt.planning.plan import Planner
from npt.planning.workload import Workload
from npt.random_state import random_state, set_random_state
from npt.runs.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from npt.runs.data_fingerprint import check_same_data, data_fingerprint
from npt.runs.null_run_folder import NullRunFolder
from npt.runs.resume import Resumed, changed_settings, find_resumed, plain_settings
from npt.runs.run_folder import (
    BROKEN,
    EVENTS,
    METRICS,
    MODULATION,
    REPORT,
    RUN,
    SUPERSEDED,
    RunFolder,
    check_free,
    default_folder,
    versions,
)
from npt.runs.signals import StopOnSignal
from npt.runs.trackers import Trackers, check_trackers, start_trackers, undisturbed
from npt.runs.wandb_run import best_of, known_run
from npt.step.guarded_update import EXACT
from npt.step.schedule import kind_of_run, rate_table
from npt.step.splitting import MicroBatchSplitter, catch_oom, free_memory
from npt.step.train_step import TrainStep, check_unfrozen
from npt.stored import read_json
from npt.train.calibrated_start import (
    calibrated_start,
    is_solved,
    leaves_enough,
    solved_on,
    where_training_begins,
)
from npt.train.loop import Loop
from npt.train.progress import ProgressDisplay
from npt.train.run_context import RunActions, RunContext, Window
from npt.train.run_report import write_report
from npt.train.smoke import smoke_test
from npt.train.tracker_samples import Looks

MODULATION_SAMPLES = 8
"""Evaluation samples that the modulation is looked at on: thousands of multipliers for each of a
thousand tokens or two.
"""

T = TypeVar("T")

_PLACES = ("resume", "output_dir", "model_name", "dataset_name", "replay_dataset", "dataset_mix")
"""Settings in which the ranks of a run may differ: where a machine keeps what has to be the same is
shown by its content.
"""


@dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    refused: micro-batches and windows. heldout: whether `fidelity` is of held-out text; False where
    there was too little of it. signal: number of the signal that ended the run early, if one did.
    """

    folder: Path
    steps: int
    tokens: int
    refused: int
    micro_batches: int
    refused_by_kind: dict[str, int]
    seconds: float
    fidelity: Fidelity | None
    heldout: bool
    signal: int | None = None

    @property
    def refused_share(self) -> float:
        """Refusals per micro-batch that was tried."""
        return self.refused / max(1, self.micro_batches)

    @property
    def exit_status(self) -> int:
        return 0 if self.signal is None else 128 + self.signal


def check_trainable(config: NPTConfig, data: DataConfig | None, own_teacher: bool = False) -> None:
    """Refuse combinations that cannot be trained, before a base is loaded.

    Args:
        config: of the adapters.
        data: what is trained on, where the settings say it.
        own_teacher: whether the teacher is another model than the student's base.

    Raises:
        ConfigError: the adapters keep the attention residual and the base is the teacher, so both
            are the same from the start.
        DataError: the built-in text's held-out files, which every evaluation is on.
    """
    if config.residual == "keep" and not own_teacher:
        raise ConfigError(
            "--residual keep starts equal to its base, so there is nothing to learn from it; give a"
            " 4-bit base an unquantised teacher with --teacher_precision bf16, or use --residual"
            " modulate"
        )
    if data is not None and data.dataset_name == BUILTIN and data.dataset_split != "train":
        raise DataError(
            f"--dataset_split {data.dataset_split} of the built-in text is what runs are evaluated"
            " on; train on 'train'"
        )


def check_replay(data: DataConfig, given: bool = False) -> None:
    """Refuse a share of nothing.

    Args:
        data: what is trained on.
        given: whether there are records to replay that `data` does not name.

    Raises:
        ConfigError: a ratio without a data set to replay.
    """
    if data.replay_ratio is not None and data.replay_dataset is None and not given:
        raise ConfigError(
            f"--replay_ratio is {data.replay_ratio} without --replay_dataset; name the data set"
        )


def check_looks(config: TrainConfig) -> None:
    """Refuse looks at a student whose base is shared among processes: rank 0 alone would take them.

    Raises:
        ConfigError: there are to be some.
    """
    if config.sample_steps is not None:
        raise ConfigError(
            f"--sample_steps is {config.sample_steps}, but a sharded base writes no text; drop it,"
            " or --shard_base"
        )


def _teacher_settings(model: PreTrainedModel, teacher: PreTrainedModel | None) -> dict[str, Any]:
    """What is put on record of a teacher of its own, or that there is none.

    Raises:
        ConfigError: it has other shapes than the student, is quantised, or lies elsewhere.
    """
    if teacher is None:
        return {"teacher_precision": None, "teacher_attention": None, "teacher": None}
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        one, other = getattr(teacher.config, name), getattr(model.config, name)
        if one != other:
            raise ConfigError(
                f"the teacher has {name} {one}, the student's base {other}; load both from the same"
                " model"
            )
    if quantization_of(teacher) is not None:
        raise ConfigError("the teacher is quantised as well; load it with npt.load_teacher")
    if teacher.device != model.device:
        raise ConfigError(
            f"the teacher is on {teacher.device}, the student's base on {model.device}; load both"
            " on one device"
        )
    if is_attached(teacher):
        raise ConfigError("the teacher has adapters of its own; load it with npt.load_teacher")
    dtype = teacher.model.layers[0].mlp.up_proj.weight.dtype
    stored = next((name for name, known in TEACHERS.items() if known == dtype), None)
    if stored is None:
        raise ConfigError(
            f"the teacher is stored in {str(dtype).removeprefix('torch.')}; load it with"
            " npt.load_teacher"
        )
    return {
        "teacher_precision": stored,
        "teacher_attention": attention_name(teacher),
        "teacher": base_hash(teacher),
    }


class Trainer:
    """Distil the attached adapters of `model` from the model itself, or from a teacher of its own.

    Everything that can be refused is refused before the run folder is made.

    Args:
        model: from `npt.load_base`, with `npt.attach` done.
        tokenizer: of the base model.
        data: records ({"text"}, {"prompt", "completion"} or {"input_ids"}): a list, a `datasets`
            object, a generator; None for what `data_config` names.
        config: training settings.
        data_config: how `data` is cut to samples.
        replay_data: records that are mixed in against forgetting, `replay_ratio` of all samples,
            over and over. They may be of another form than `data`. Default: what `data_config`
            names, if anything.
        eval_data: held-out records. Default: the built-in text's own held-out files where `data` is
            None and names it, else one sample in twenty of `data`, which training then leaves out.
        settings: further settings to put on record in `run.json`.
        console: where to report; default standard output.
        ranks: the processes that train together; default those that a launcher started with this
            one, or this one alone.
        teacher: from `npt.load_teacher`, an unquantised model to learn from; default the student's
            own base.
        any_base: go on from a checkpoint of another base too, if its shapes fit; a warning and
            `run.json` say in what the two differ.
        trackers: from `start_trackers`, of this run; default the configuration's, which then start
            before the smoke test.

    Of several processes each makes a Trainer of the same arguments; they share every window, and
    rank 0 writes and speaks.

    Raises:
        ConfigError, DataError: settings or data that cannot work.
        RankError: another process failed or was lost.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        data: Iterable[Record] | None = None,
        config: TrainConfig | None = None,
        *,
        data_config: DataConfig | None = None,
        eval_data: Iterable[Record] | None = None,
        replay_data: Iterable[Record] | None = None,
        settings: dict[str, Any] | None = None,
        console: Console | None = None,
        ranks: Ranks | None = None,
        teacher: PreTrainedModel | None = None,
        any_base: bool = False,
        trackers: Trackers | None = None,
    ):
        self.model, self.tokenizer, self.teacher, self.any_base = (
            model,
            tokenizer,
            teacher,
            any_base,
        )
        self._started_trackers = trackers
        self.config = config = config if config is not None else TrainConfig()
        self.data_config = data_config if data_config is not None else DataConfig()
        self.settings = settings or {}
        sharing = ranks_of(model)
        if sharing is not None and ranks not in (None, sharing):
            raise ConfigError(
                "the base is sharded over other ranks than the Trainer was given; leave the"
                " argument ranks out"
            )
        self.ranks = sharing or ranks or join_ranks(config.rank_timeout)
        self.console = (
            silent_console()
            if not self.ranks.main
            else console
            if console is not None
            else make_console()
        )
        with self.ranks.member():
            self._prepare(data, eval_data, replay_data)

    def _prepare(
        self,
        data: Iterable[Record] | None,
        eval_data: Iterable[Record] | None,
        replay_data: Iterable[Record] | None,
    ) -> None:
        config, data_config = self.config, self.data_config
        self.adapter_config = attached_config(self.model)
        check_unfrozen(adapter_parameters(self.model))
        check_trainable(
            self.adapter_config, data_config if data is None else None, self.teacher is not None
        )
        if consolidated(self.model):
            raise ConfigError(
                "a run does not record the updates that were consolidated into its base; call"
                " npt.unconsolidate first"
            )
        others = [name for name, _ in config.stage_shares if name != "local"]
        if is_sharded(self.model) and others:
            raise ConfigError(
                f"the base is sharded, which --strategy {others[0]} cannot do with; use --strategy"
                " local"
            )
        if is_sharded(self.model):
            check_looks(config)
        check_trackers(config)
        self._teacher_settings = _teacher_settings(self.model, self.teacher)
        check_replay(data_config, replay_data is not None)
        check_length(data_config.max_length, self.model.config)
        layer_weights(config, len(npt_layers(self.model)))  # a list has one for each
        self._check_window()
        self.resumed = self._find_resumed()
        if self._checkpoint is None:
            check_calibration(
                self.adapter_config,
                config.rank_budget,
                len(npt_layers(self.model)),
                self.model.config.hidden_size,
            )
        self.folder_path = Path(self.ranks.first(lambda: str(self._choose_folder())))
        self.changed = (
            {}
            if self._checkpoint is None
            else changed_settings(self._checkpoint.record["settings"], self._all_settings())
        )
        self.device = next(self.model.parameters()).device
        self.strategy: Strategy = (
            drive if self.teacher is None else partial(drive, teacher=self.teacher)
        )
        self.pad_id = pad_id_of(self.tokenizer)
        if isinstance(data, Mapping):
            raise DataError(
                f"the data are {kind_of(data)} with {', '.join(map(str, data))}; pass one of its"
                " entries"
            )
        self._prepare_data(open_sources(data_config, data, replay_data), eval_data)
        self.data_identity = self._identify_data()
        self._counted_from = self._last_change()
        self._solved_on: list[Sample] = []
        self.start, self.total_steps = self._choose_start()
        self._coming: Iterator[Loaded] = self.loader.batches(self.start)
        self.stages = stages_of(config, self.total_steps)
        self.stop = StopOnSignal()
        self.passes, self._evaluated_at_once = (
            MicroBatchSplitter(config.batch_size),
            MicroBatchSplitter(config.batch_size),
        )
        self.memory = self._plan_memory()
        # where memory ran out before there was a folder to write it to
        self._lacks: list[dict[str, Any]] = []
        self._folder: RunFolder | None = None
        self._trained = False
        # what a teacher of its own says of the evaluation samples
        self._reference: Reference | None = None

    @property
    def window_size(self) -> int:
        """Micro-batches of a window, over all ranks."""
        return self.config.gradient_accumulation_steps * self.ranks.size

    def _check_window(self) -> None:
        tokens = self.window_size * self.config.batch_size * self.data_config.max_length
        if tokens >= EXACT:
            raise ConfigError(
                f"a window may have {tokens} tokens (--gradient_accumulation_steps x --batch_size x"
                f" --max_length x {self.ranks.size} processes), and is counted exactly below"
                f" {EXACT} only; lower one of them"
            )

    def _plan_memory(self) -> MemoryPlan | None:
        """How much is computed at once for the predicted peak to stay below `max_memory`, where
        there is such a limit.

        Raises:
            ConfigError: one sample at a time is too much, or the base is not all on one device.
        """
        limit = self.config.max_memory_bytes
        if limit is None:
            return None
        if (
            is_sharded(self.model)
            or len({parameter.device for parameter in self.model.parameters()}) > 1
        ):
            raise ConfigError(
                f"--max_memory is {self.config.max_memory}, but the base is spread over several"
                " devices; lower --batch_size"
            )
        adapters = sum(parameter.nbytes for parameter in adapter_parameters(self.model).values())
        workload = Workload(
            self.model.config,
            self.adapter_config,
            self.config,
            self.data_config.max_length,
            quantization_of(self.model),
            self.model.model.embed_tokens.weight.dtype,
            None if self.teacher is None else self.teacher.model.embed_tokens.weight.dtype,
            self.device,
            self.ranks.size,
            attention_name(self.model),
            teacher_attention=self._teacher_settings["teacher_attention"],
        )
        plan = Planner(workload, storage_bytes(tensors_of(self.model)) - adapters).fitting(limit)
        self.passes.samples, self._evaluated_at_once.samples = (
            plan.samples_at_once,
            plan.evaluated_at_once,
        )
        self._planned_evenly = workload.approximate
        return plan

    def _find_resumed(self) -> Resumed | None:
        """What to go on from. Rank 0 alone looks for it and knows what is to be set aside; the
        others read what it found.
        """
        if self.config.resume is None:
            return None
        found: list[Resumed] = []

        def find() -> tuple[str, str | None, bool]:
            found.append(find_resumed(str(self.config.resume), self.config.output_dir))
            checkpoint = found[0].checkpoint
            return (
                str(found[0].folder),
                None if checkpoint is None else str(checkpoint.folder),
                found[0].goes_on,
            )

        folder, checkpoint, goes_on = self.ranks.first(find)
        return (
            found[0]
            if found
            else Resumed(
                Path(folder),
                None if checkpoint is None else read_checkpoint(Path(checkpoint)),
                goes_on,
            )
        )

    @property
    def _checkpoint(self) -> Checkpoint | None:
        return None if self.resumed is None else self.resumed.checkpoint

    def _choose_folder(self) -> Path:
        """The run's folder: a new one, or the one that a run goes on in."""
        if self.resumed is not None:
            return self.resumed.folder
        if self._started_trackers is not None and self._started_trackers.active:
            return self._started_trackers.folder
        folder = Path(self.config.output_dir) if self.config.output_dir else default_folder()
        check_free(folder)
        return folder

    def _all_settings(self) -> dict[str, Any]:
        settings = {
            **self.settings,
            **asdict(self.adapter_config),
            **asdict(self.data_config),
            **asdict(self.config),
        }
        found = {"attn_implementation": attention_name(self.model), "processes": self.ranks.size}
        if quantization_of(self.model) is not None:
            found["compute_dtype"] = {dtype: name for name, dtype in COMPUTE.items()}.get(
                declared_dtype(self.model), "other"
            )
        return {**settings, **self._teacher_settings, **found}

    @property
    def deterministic(self) -> bool:
        """Whether every step of the run gives the same bits again: where gradients cross attention,
        its backward has to.
        """
        return "end_to_end" not in dict(self.config.stage_shares) or repeats_exactly(self.model)

    def _prepare_data(self, sources: list[Source], eval_data: Iterable[Record] | None) -> None:
        config, first = self.config, sources[0]
        if iter(first.records) is first.records:
            if config.num_epochs > 1:
                raise ConfigError(
                    f"--num_epochs is {config.num_epochs}, but a streamed generator can be read"
                    " once only; pass a list"
                )
            if eval_data is None:
                raise ConfigError(
                    "a streamed generator can be read once only; pass eval_data=... to have"
                    " something to evaluate on"
                )
            if self.adapter_config.init == "calibrated":
                raise ConfigError(
                    "--init calibrated reads training data before the run does, and a streamed"
                    " generator can be read once only; pass a list"
                )
        given = eval_data is not None
        looked_at = [replace(first, own=eval_data, evaluated=True)] if given else sources
        self.eval_samples, labels, held = evaluated_on(
            looked_at, self.tokenizer, config.eval_samples, self.model.config.vocab_size
        )
        self.heldout = all(held)
        self._eval_labels = labels if len(set(labels)) > 1 else None
        self._not_held_out = [
            source.label for source, heldout in zip(looked_at, held, strict=True) if not heldout
        ]
        self.sources = sources
        # of what is replayed one sample in twenty stays out in any case
        self._leave_out = [not source.evaluated for source in sources]
        if not given:
            self._leave_out = [
                heldout and source.own is None
                for source, heldout in zip(sources, held, strict=True)
            ]
        self.loader = self._make_loader(sources)
        self.samples = self.loader.samples

    def _make_loader(self, sources: list[Source]) -> Loader:
        """Over samples of the first sources, that nothing was read of yet."""
        config = self.config
        samples, *others = as_read(
            sources, self.tokenizer, config.seed, self._leave_out[: len(sources)]
        )
        return Loader(
            samples,
            config.batch_size,
            self.pad_id,
            side=self.data_config.padding_side,
            epochs=config.num_epochs,
            others=[
                Other(other, source.share, source.label)
                for other, source in zip(others, sources[1:], strict=True)
            ],
            seed=config.seed,
            pin=self.device.type == "cuda",
        )

    def _identify_data(self) -> dict[str, Any]:
        """Which data these are, and that a run which goes on has the same."""
        identity = {REPLAY: data_fingerprint(None)} if self.data_config.dataset_mix is None else {}
        identity |= {source.label: data_fingerprint(source.records) for source in self.sources}
        if self._checkpoint is not None:
            check_same_data(self._checkpoint.record["data"], identity)
        return identity

    def _choose_start(self) -> tuple[Position, int | None]:
        """Where in the data this process begins, and how many steps the run then has."""
        if self._checkpoint is not None:
            return self._checkpoint.position, self._total_steps(self._checkpoint.position.begun)
        if is_solved(self.model):
            # What is replayed is there against forgetting, and not what the start is to be near on.
            loader = self._make_loader(
                self.sources if self.data_config.dataset_mix is not None else self.sources[:1]
            )
            self._solved_on, behind = solved_on(
                loader, self.config.calibration_tokens, self.model.config.vocab_size
            )
            steps = self._total_steps(behind.begun)
            if leaves_enough(loader.samples, behind, steps, self.config, self.window_size):
                return behind, steps
        return Position(), self._total_steps()

    def _total_steps(self, begun: int = 0) -> int | None:
        """Optimizer steps of a run that begins behind so many samples, as far as it can be known
        before it.
        """
        c, made, tried = (
            self.config,
            self._counted_from["steps"],
            self._counted_from["micro_batches"],
        )
        left = None if c.max_steps is None else max(0, c.max_steps - made)
        micro_batches = self.loader.count(
            None if left is None else tried + left * self.window_size, begun
        )
        if micro_batches is None:
            return c.max_steps
        steps = made + math.ceil(max(0, micro_batches - tried) / self.window_size)
        return steps if c.max_steps is None else min(steps, c.max_steps)

    def _last_change(self) -> dict[str, int]:
        """Steps made when the size of a window changed for the last time, and how many
        micro-batches of the present size those were.
        """
        if self._checkpoint is None:
            return {"steps": 0, "micro_batches": 0}
        if not {"batch_size", "gradient_accumulation_steps", "processes"} & set(self.changed):
            return dict(self._checkpoint.record["counted_from"])
        tried = self._checkpoint.record["micro_batches"]
        if "batch_size" in self.changed:
            tried = math.ceil(self._checkpoint.position.drawn / self.config.batch_size)
        return {"steps": self._checkpoint.step, "micro_batches": tried}

    @torch.inference_mode(False)  # whatever the caller is in
    def train(self) -> TrainResult:
        """Smoke test, evaluation, loop, evaluation.

        Raises:
            NumericalError, SmokeTestError: the base or an adapter holds a non-finite number, or one
                batch shows that training cannot work; before anything is written.
            TooManyRefusalsError: after the post-mortem was written.
            ConfigError: the run folder cannot be written, or the processes of the run differ in
                something.
            RankError: another process failed or was lost.
        """
        if self._trained:
            raise ConfigError(
                "this Trainer has trained already; make a new one, its data and output folder are"
                " used up"
            )
        self._trained = True
        self.stop.at_once = True  # until the loop there is nothing to save
        with self.ranks.member(), self.stop:
            result = self._train()
            # until rank 0 has written everything: a launcher may end the others when the first has
            # ended
            self.ranks.wait()
            return result

    def _train(self) -> TrainResult:
        # training does not draw from it, and what else does draws the same in every process
        torch.manual_seed(self.config.seed)
        check_unfrozen(adapter_parameters(self.model))
        require(tensor_fault(adapter_parameters(self.model)))
        require(base_fault(self.model))
        if self.teacher is not None:
            require(base_fault(self.teacher))
        self.base = base_identity(self.model)
        self._other_base = (
            None
            if self._checkpoint is None or not self.any_base
            else self._checkpoint.base_mismatch(self.base)
        )
        # A run that goes on has passed the smoke test, and what comes next may be a batch that it
        # is going to refuse.
        self._state = (
            None
            if self._checkpoint is None
            else self._checkpoint.state(self.model, self.base, check_base=not self.any_base)
        )
        # all have read the checkpoint then, before rank 0 changes anything in its folder
        self._agree()
        if self._started_trackers is not None:
            return self._tracked(self._started_trackers)
        resume_at = self.resumed.step if self.resumed is not None and self.resumed.goes_on else None
        with start_trackers(
            self.ranks, self.config, self.folder_path, resume_at=resume_at
        ) as trackers:
            return self._tracked(trackers)

    def _tracked(self, trackers: Trackers) -> TrainResult:
        """Train with trackers that have started, and close them once there is a run that they know
        of.
        """
        say = self._say
        if self.config.smoke_test and self._checkpoint is None:
            for config in {stage.config.strategy: stage.config for stage in self.stages}.values():
                say(self._smoke_test(config))
        self._calibrate()
        if self.memory is not None:
            at_once = f"{self.memory.samples_at_once} of {self.config.batch_size} samples at once"
            peak = f"predicted peak {shown(self.memory.peak)} in the {self.memory.phase}"
            even = ", with --rank_budget spent evenly" if self._planned_evenly else ""
            say(f"--max_memory {self.config.max_memory}: {at_once}, {peak}{even}")
        if self.data_config.dataset_mix is not None:
            say(mixture_line(self.data_config))
        say(self._evaluation_note())
        self.initial = self._evaluate() if self._checkpoint is None else self._checkpoint.initial
        self.record = self._record()
        self.stop.check()
        self.stop.at_once = False  # from here on there is a folder, and it is soon left in order
        folder = self._open_folder()
        try:
            self._begin(folder, trackers)
            status = 1
            try:
                result = self._run(folder, trackers)
                status = result.exit_status
                self._write_report(folder)
            except Exception as error:
                status = getattr(error, "exit_status", status)
                trackers.alert(f"npt gave up: {type(error).__name__}", str(error)[:1000])
                self._write_report(folder)
                raise
            finally:
                self._end_trackers(folder, trackers, status)
            return result
        finally:
            self._report_lost_lines(folder)
            folder.close()

    def _smoke_test(self, config: TrainConfig) -> str:
        """Of as many samples of the first batch as are computed at once."""
        batch = self._first_batch()

        def test() -> str:
            return smoke_test(self.model, self.passes.parts(batch)[0], self.strategy, config)

        return self._fitting(test, self.passes, batch, "the smoke test")

    def _fitting(
        self, act: Callable[[], T], passes: MicroBatchSplitter, batch: Batch, name: str
    ) -> T:
        """What `act` gives, with fewer samples at once for as long as memory does not do.

        Args:
            act: computes with `passes`.
            passes: are lowered.
            batch: the largest that it computes.
            name: of it.
        """
        while True:
            # a rank that stopped inside a layer is out of step with the others
            if is_sharded(self.model):
                return act()
            with catch_oom() as oom:
                return act()
            assert oom.message is not None
            free_memory()
            before, lack = passes.shrink(batch, oom.message), oom.message
            self._say(
                f"{name}: out of memory with {before} samples at once ({lack}); it is begun again"
                f" with {passes.samples}"
            )
            self._lacks.append(
                {
                    "during": name,
                    "samples": before,
                    "samples_at_once": passes.samples,
                    "message": lack,
                }
            )
            self._report_lacks()

    def _report_lacks(self) -> None:
        """Once there is a folder for it."""
        while self._folder is not None and self._lacks:
            self._folder.event("out_of_memory", **self._lacks.pop(0))

    def _calibrate(self) -> None:
        """Solve the adapters' start where that is asked for; a run that goes on has its own
        already.
        """
        self.calibration: Calibration | None = None
        if self._checkpoint is not None:
            return
        if self.teacher is not None and self.adapter_config.init == "calibrated":
            self._say(
                "the start is solved against the student's own base; training then goes on to the"
                " unquantised teacher"
            )
        if self.adapter_config.init == "calibrated":
            # Of its own: its graph goes through the whole teacher, and what that lacks memory for
            # says little of a micro-batch.
            passes = MicroBatchSplitter(min(self.config.batch_size, self.passes.samples))
            self.calibration = self._fitting(
                partial(self._solve_start, passes), passes, self._first_batch(), "the calibration"
            )
        if self.calibration is not None:
            self._say(where_training_begins(self.start, self.calibration))
            self._share_start()
            self.adapter_config = attached_config(self.model)
            self._agree()

    def _solve_start(self, passes: MicroBatchSplitter) -> Calibration | None:
        """In batches of as many samples as `passes` says; until all is solved the adapters are as
        they were.
        """
        return calibrated_start(
            self.model,
            self.tokenizer,
            self._solved_on,
            self.config,
            batch_size=passes.samples,
            console=self.console,
        )

    def _share_start(self) -> None:
        """What rank 0 has solved, on every rank. Each has solved it while it waited, but rounding
        is a matter of its cores and kernels.
        """
        if self.ranks.size == 1:
            return
        own = attached_config(self.model)
        ranks = self.ranks.gather_json(None if own.ranks is None else list(own.ranks))[0]
        config = replace(own, ranks=None if ranks is None else tuple(ranks))
        parameters, tensors = adapter_parameters(self.model), {}
        for name, shape in adapter_shapes(self.model, config).items():
            tensor = (
                parameters[name].detach().clone()
                if self.ranks.main
                else torch.zeros(shape, device=self.device)
            )
            tensors[name] = self.ranks.sum_(tensor)
        set_adapters(self.model, config, tensors)

    def _agree(self) -> None:
        """Refuse ranks that would not do the same: other settings, another base, other adapters to
        start from, other packages.
        """
        if self.ranks.size == 1:
            return
        settings = {
            f"--{name}": value
            for name, value in plain_settings(self._all_settings()).items()
            if name not in _PLACES
        }
        adapters = sha256(
            b"".join(
                p.detach().cpu().numpy().tobytes() for p in adapter_parameters(self.model).values()
            )
        ).hexdigest()
        self.ranks.agree(
            {
                **settings,
                "a base of hash": self.base.strict,
                "adapters of hash": adapters,
                **self.data_identity,
                "shares of a mixture": [share for _, share in self.data_config.mix],
                "a checkpoint of step": None if self._checkpoint is None else self._checkpoint.step,
                "steps": self.total_steps,
                "evaluation samples": len(self.eval_samples),
                "a device of kind": self.device.type,
                **{f"version of {name}": version for name, version in versions().items()},
            }
        )

    def _open_folder(self) -> RunFolder:
        """The run folder, which rank 0 writes."""
        if not self.ranks.main:
            return NullRunFolder(self.folder_path)
        return RunFolder(
            self.folder_path,
            resume_at=(
                self.resumed.step if self.resumed is not None and self.resumed.goes_on else None
            ),
        )

    def _begin(self, folder: RunFolder, trackers: Trackers) -> None:
        """What stands in the folder before anything else is done.

        Raises:
            ConfigError: it cannot be written, or another process has been at it.
        """
        if self.resumed is not None:
            self._set_aside(folder, self.resumed)
        before = self._record_before(folder)
        goes_on = self.resumed is not None and self.resumed.goes_on
        self.record["wandb_run"] = trackers.run_id or (known_run(folder.path) if goes_on else None)
        if self._checkpoint is not None and self.resumed is not None and self.resumed.goes_on:
            self.record["calibration"] = before.get("calibration")  # of the start that this run had
            self.record["other_base"] = self._other_base or before.get("other_base")
        try:
            folder.write(RUN, self.record)
        except OSError as error:
            folder.discard()
            raise ConfigError(
                f"--output_dir {folder.path} cannot be written: {error.strerror}; choose another"
                " folder"
            ) from error
        try:
            self.stop.check()
        except StoppedError:
            folder.discard()
            raise
        trackers.warn = partial(self._warn, folder)
        trackers.describe({**plain_settings(self._all_settings()), **self._description()})
        measured = {
            "floor": self.initial.floor,
            "teacher": self.initial.teacher,
            "initial": self.initial.aim,
        }
        trackers.summarize(measured, 0 if self.resumed is None else self.resumed.step)

    def _description(self) -> dict[str, Any]:
        """What trackers know the run by, beside its settings: what they were measured to mean, and
        what computes.
        """
        names = (
            "base_hash",
            "precision",
            "versions",
            "device",
            "processes",
            "trainable_parameters",
        )
        recipe = Recipe.of(self.model)
        return {
            **{name: self.record[name] for name in names},
            "base_loading": None if recipe is None else recipe.as_record(),
            "converted_layers": self.record["layers"],
            "folder": str(self.folder_path),
        }

    def _end_trackers(self, folder: RunFolder, trackers: Trackers, status: int) -> None:
        """What is left behind, and the end of the trackers: they may have to wait for a network,
        and a signal does not wait for them.
        """
        if not trackers.active:
            return
        self.stop.at_once = True
        try:
            trackers.files(
                {"settings": plain_settings(self._all_settings()), **self._description()}
            )
            trackers.close(status)
        except StoppedError as signal:
            self._warn(
                folder,
                f"signal {signal.exit_status - 128} ended the wait for trackers, which may lack the"
                " end of this run",
            )
        finally:
            self.stop.at_once = False

    def _set_aside(self, folder: RunFolder, resumed: Resumed) -> None:
        """Checkpoints that are not to be picked again: those that do not verify, and those behind
        the one that is gone on from.

        Raises:
            ConfigError: there are others than when the checkpoint was chosen.
        """
        if not resumed.goes_on:
            for problem in resumed.broken.values():
                self._warn(folder, problem)
            return
        there = folder.checkpoints()
        if tuple(path.name for path in there) != resumed.seen:
            raise ConfigError(
                f"another process has written to {folder.path} since its checkpoints were read;"
                " start again"
            )
        for path, problem in resumed.broken.items():
            self._warn(folder, f"{problem}; set aside as {folder.set_aside(path, BROKEN).name}")
        for path in folder.checkpoints():
            if (
                resumed.checkpoint is not None
                and int(path.name.removeprefix("step-")) > resumed.step
            ):
                aside = folder.set_aside(path, SUPERSEDED)
                self._warn(
                    folder,
                    f"the run goes on from step {resumed.step}; {path.name} is set aside as"
                    f" {aside.name}",
                )

    def _record_before(self, folder: RunFolder) -> dict[str, Any]:
        """`run.json` as it stands in the folder, empty where there is none."""
        try:
            return read_json(folder.path / RUN, CheckpointError)
        except CheckpointError:
            return {}

    def _run(self, folder: RunFolder, trackers: Trackers) -> TrainResult:
        folder.event(
            "start",
            device=str(self.device),
            total_steps=self.total_steps,
            processes=self.ranks.size,
        )
        self._folder = folder
        if self.memory is not None:
            folder.event("memory", max_memory=self.config.max_memory, **self.memory.as_dict())
        self._report_lacks()
        if self.calibration is not None:
            folder.event("calibration", **self.calibration.as_dict(), passed_over=self.start.begun)
        if self.resumed is not None:
            self._report_resumed(folder, self.resumed)
        if not self.deterministic:
            name = attention_name(self.model)
            self._warn(
                folder,
                f"the backward of {name} attention, as this base was loaded, may sum in another"
                " order each time: a run that is resumed will not equal this one bit for bit;"
                " npt.load_base in fp32 with --attn_implementation sdpa or eager does, and so does"
                " --strategy local",
            )
        if self._schedule_kind() != self.config.scheduler_type:
            message = (
                "the length of the stream is unknown, so the learning rate stays constant after"
                f" warm-up; --max_steps gives it its {self.config.scheduler_type} end"
            )
            self._warn(folder, message)
        if self.total_steps is not None and self.config.warmup_steps > self.total_steps:
            steps = (
                f"--warmup_steps is {self.config.warmup_steps}, but the run has {self.total_steps}"
                " steps"
            )
            self._warn(folder, f"{steps}: the learning rate will not reach --learning_rate")
        if self.total_steps is not None and self.config.trace_steps is not None:
            last = max(steps[-1] for steps in parse_steps(self.config.trace_steps))
            if last > self.total_steps:
                self._warn(
                    folder,
                    f"--trace_steps names step {last}, but the run has {self.total_steps} steps",
                )
        self._say(f"run folder {folder.path}")
        return self._loop(folder, trackers)

    def _report_resumed(self, folder: RunFolder, resumed: Resumed) -> None:
        checkpoint = resumed.checkpoint
        if checkpoint is None:
            self._say(f"no checkpoint below {resumed.folder}; the run starts at step 1")
        else:
            self._say(f"going on from {checkpoint.folder} at step {checkpoint.step}")
            if self._other_base is not None:
                self._warn(
                    folder,
                    f"--any_base: {checkpoint.folder} was trained on another base:"
                    f" {self._other_base}",
                )
        changed = {name: list(values) for name, values in self.changed.items()}
        folder.event(
            "resume",
            step=resumed.step,
            checkpoint=None if checkpoint is None else str(checkpoint.folder),
            changed=changed,
        )
        for name, (old, new) in self.changed.items():
            self._say(f"changed since: {name} was {old}, is {new}")

    def _loop(self, folder: RunFolder, trackers: Trackers) -> TrainResult:
        c = self.config
        rates = rate_table(c.learning_rate, self._schedule_kind(), c.warmup_steps, self.total_steps)
        display = ProgressDisplay(
            self.total_steps, self.console, first=0 if self.resumed is None else self.resumed.step
        )
        context = RunContext(
            self.model, c, folder, trackers, display, self.stop, self.record, self.ranks
        )
        step = TrainStep(
            self.model, self.strategy, c, rates, ranks=self.ranks, splitter=self.passes
        )
        actions = RunActions(
            self._evaluate,
            lambda: self._save(folder, loop),
            lambda fidelity: self._save_best(folder, loop, fidelity),
            self._make_look(folder, trackers) if c.sample_steps else None,
        )
        loop = Loop(context, step, self.total_steps, actions)
        if self._checkpoint is not None and self._state is not None and self.resumed is not None:
            self._state.restore(loop.step.window)
            loop.load_state(self._checkpoint.record, saved=self.resumed.goes_on)
            self._recall_passes(self._checkpoint)
            # fewer ranks may have saved
            set_random_state(self._state.random_states.get(self.ranks.rank, {}))
            self._state = None  # a copy of everything
        started = time.perf_counter()
        try:
            try:
                with contextlib.closing(self._windows()) as windows:
                    loop.run(windows)
            except BaseException as error:
                self._rescue(folder, loop, error)
                raise
            finally:
                display.close()
            seconds = time.perf_counter() - started
            number = self._signal()
            if number is not None:
                self._report_data(folder, loop)
                folder.event("signal", number=number, step=loop.steps)
            elif loop.steps == 0:
                folder.event("stopped", step=0, reason="no step was applied")
                if not loop.micro_batches:
                    raise self.ranks.everywhere(no_sample(self.samples.counts))
                said = (
                    f"the data ended without one applied step ({loop.refusals.total} refusals, see"
                    f" {folder.path / EVENTS})"
                )
                raise self.ranks.everywhere(DataError(said))
            if loop.unsaved:
                self._save(folder, loop, last=True)
        finally:
            loop.recording.draw()  # pictures can wait until all is saved
        number = self._signal()
        if number is not None:
            self._say(
                f"stopped by signal {number} at step {loop.steps}; the adapters are saved below"
                f" {folder.path / CHECKPOINTS}"
            )
        result = TrainResult(
            folder=folder.path,
            steps=loop.steps,
            tokens=loop.tokens,
            refused=loop.refusals.total,
            micro_batches=loop.micro_batches,
            refused_by_kind=dict(loop.refusals.by_kind),
            seconds=seconds,
            fidelity=None,
            heldout=self.heldout,
            signal=number,
        )
        return result if result.signal is not None else self._finish(folder, trackers, loop, result)

    def _make_look(self, folder: RunFolder, trackers: Trackers) -> Callable[[int], None]:
        """Show rank 0's trackers the student at a step. What goes wrong is said: an observer must
        not end the run that it looks at.
        """
        looks = Looks(
            self.model,
            self.tokenizer,
            self.eval_samples,
            teacher=self.teacher,
            batch_size=self.passes.samples,
            pad_id=self.pad_id,
            between=self.stop.check,
        )

        def look(step: int) -> None:
            if not trackers.active:
                return
            try:
                # the loop looks at the signal itself
                with undisturbed(), contextlib.suppress(StoppedError):
                    trackers.modulation(looks.modulation(MODULATION_SAMPLES), step)
                    trackers.texts(looks.texts(), step)
            except Exception as error:
                self._warn(
                    folder,
                    f"no texts and histograms for the trackers at step {step}: {type(error).__name__}: {error}"[
                        :500
                    ],
                )

        return look

    def _recall_passes(self, checkpoint: Checkpoint) -> None:
        """Where memory once did not do for more samples at once it is not tried again, unless
        another limit is asked for.
        """
        lowered = dict(enumerate(checkpoint.record.get("samples_at_once", []))).get(self.ranks.rank)
        if lowered is not None and "max_memory" not in self.changed:
            self.passes.samples = self.passes.shrunk_to = min(self.passes.samples, lowered)

    def _signal(self) -> int | None:
        """The number of the signal that came to this rank, or else to another; every rank has to
        ask.
        """
        numbers = [
            number
            for number in (self.stop.number, *self.ranks.gather_json(self.stop.number))
            if number is not None
        ]
        return numbers[0] if numbers else None

    def _rescue(self, folder: RunFolder, loop: Loop, error: BaseException) -> None:
        """Whatever ended the loop, broken data or a full disk, does not take the steps before it
        along; a second signal does not wait.
        """
        if isinstance(error, KeyboardInterrupt) and self.stop.number is not None:
            return
        if not isinstance(error, TooManyRefusalsError):  # the loop has said that one itself
            folder.event(
                "error", step=loop.steps, error=type(error).__name__, message=str(error)[:500]
            )
        # the others are elsewhere: whatever would wait for them has to be left out
        if not self.ranks.met_by_all(error):
            self.ranks.leave(error)
        try:
            loop.settle()  # a checkpoint has to bear the step that its weights are of
            if self.ranks.broken and loop.step.window.applied_steps != loop.steps:
                return  # they are of a step whose result could not be learnt from the others
            if loop.steps and loop.unsaved:
                self._save(folder, loop, last=True)
            if isinstance(error, TooManyRefusalsError):  # a multiplier at its bound may be why
                self._measure_modulation(folder, loop.steps)
        except Exception as second:  # the first one is what has to be seen
            folder.event(
                "error",
                step=loop.steps,
                error=type(second).__name__,
                message=f"not saved: {second}"[:500],
            )

    def _warn(self, folder: RunFolder, message: str) -> None:
        self._say(f"warning: {message}")
        folder.event("warning", message=message)

    def _finish(
        self, folder: RunFolder, trackers: Trackers, loop: Loop, result: TrainResult
    ) -> TrainResult:
        fidelity = None
        with contextlib.suppress(StoppedError):  # everything is saved; only the figures are missing
            fidelity = self._evaluate().after(self.initial)
        number = self._signal()
        if fidelity is None or (number is not None and self.ranks.size > 1):
            folder.event("signal", number=number, step=result.steps)
            return replace(result, signal=number)
        try:
            folder.write("fidelity.json", {**fidelity.as_dict(), "heldout": self.heldout})
        except OSError as error:
            self._warn(
                folder,
                f"fidelity.json could not be written below {folder.path}: {error}; npt evaluate"
                " measures the adapter again",
            )
        try:
            folder.save_final(self.model, self.base, fidelity.as_dict())
        except (OSError, SafetensorError, AdapterFileError) as error:
            kept = f"its numbers are below {folder.path / CHECKPOINTS}"
            self._warn(
                folder,
                f"the final adapter could not be written below {folder.path}: {error}; {kept}",
            )
        if self.config.eval_steps:
            loop.keep_if_best(fidelity)
        student = fidelity.student.as_dict()
        trackers.log({f"eval/{key}": value for key, value in student.items()}, result.steps)
        step, best = best_of(folder.path) or (result.steps, fidelity.aim)
        trackers.summarize({"final": fidelity.aim, "best": best}, result.steps, best_step=step)
        self._report_data(folder, loop)
        self._measure_modulation(folder, result.steps)
        folder.event(
            "done",
            steps=result.steps,
            tokens=result.tokens,
            refused=result.refused,
            refused_by_kind=result.refused_by_kind,
            seconds=round(result.seconds, 3),
        )
        return replace(result, fidelity=fidelity, signal=self._signal())

    def _write_report(self, folder: RunFolder) -> None:
        """`report.html`, however the run ended but for a second signal; nothing that goes wrong
        with it changes that end.
        """
        if not self.ranks.main:
            return
        try:
            write_report(folder.path)
        except Exception as error:  # an observer must not end the run that it looks at
            self._warn(
                folder,
                f"{REPORT} could not be written below {folder.path}: {type(error).__name__}: {error}"[
                    :500
                ],
            )

    def _measure_modulation(self, folder: RunFolder, step: int) -> None:
        """`modulation.json`, for the report: on a few of the samples that the run is evaluated on."""
        if not self.ranks.main:
            return
        few = batches(self.eval_samples[:MODULATION_SAMPLES], self.passes.samples, self.pad_id)
        try:
            with contextlib.suppress(StoppedError):  # the report does without
                found = measure_modulation(self.model, few, between=self.stop.check)
                folder.write(MODULATION, {"step": step, "heldout": self.heldout, **found.as_dict()})
        except Exception as error:  # an observer must not end the run that it looks at
            self._warn(
                folder,
                f"{MODULATION} could not be written below {folder.path}: {type(error).__name__}: {error}"[
                    :500
                ],
            )

    def _report_lost_lines(self, folder: RunFolder) -> None:
        if folder.lines_lost:
            self._warn(
                folder,
                f"{folder.lines_lost} lines of {METRICS} and {EVENTS} could not be written below"
                f" {folder.path}",
            )

    def _report_data(self, folder: RunFolder, loop: Loop) -> None:
        """What became of the records; what was cut or left out is said."""
        position = loop.position
        rounds = [
            position.epoch,
            *(position.turn(number)[0] for number in range(len(self.loader.others))),
        ]
        read = [self.samples, *(other.samples for other in self.loader.others)]
        for source, samples, begun_again in zip(self.sources, read, rounds, strict=True):
            share = {"share": source.share} if len(self.sources) > 1 else {}
            folder.event(
                "data",
                source=source.label,
                **share,
                begun_again=begun_again,
                **samples.counts.as_dict(),
            )
            lost = samples.counts.lost()
            if lost:
                self._warn(
                    folder, f"{source.label}: of {samples.counts.records:,} records read, {lost}"
                )
            if samples.counts.unused:
                self._say(
                    f"{source.label}: columns not used: {listed_columns(samples.counts.unused)}"
                )
            if begun_again and self.data_config.dataset_mix is not None:
                self._say(
                    f"{source.label}: came to its end and was begun again {begun_again} times"
                )

    def _save(self, folder: RunFolder, loop: Loop, last: bool = False) -> bool:
        """A checkpoint of what all ranks have, written by rank 0; False where it cannot be written,
        an older one stands, and the run goes on and says so loudly.

        Args:
            last: the run is over, so that nothing would be written later.

        Raises:
            CheckpointError: it cannot be written, and it is the last or the only one.
            RankError: another rank is lost, or its adapters and moments are not those of rank 0.
        """
        audit_precision(self.model, policy_dtype(self.model))
        states = self._gathered_states(loop)
        if self.ranks.broken:
            return self.ranks.main and self._write(
                folder, loop, states, [self.passes.shrunk_to], last
            )
        lowered = self.ranks.gather_json(self.passes.shrunk_to)
        return self.ranks.first(lambda: self._write(folder, loop, states, lowered, last))

    def _gathered_states(self, loop: Loop) -> dict[int, dict[str, Tensor]]:
        """The random state of every rank, that of this one where the others are gone; before it is
        saved, what they hold is compared.
        """
        if self.ranks.size == 1 or self.ranks.broken:
            return {self.ranks.rank: random_state()}
        own = {
            "held": loop.step.update.checksum(),
            "random": {name: state.tolist() for name, state in random_state().items()},
        }
        everyone = self.ranks.gather_json(own)
        for rank, other in enumerate(everyone):
            if other["held"] != everyone[0]["held"]:
                raise self.ranks.everywhere(
                    RankError(
                        f"rank {rank} holds other adapters or moments than rank 0 at step"
                        f" {loop.steps} (checksums {other['held']} and {everyone[0]['held']});"
                        " nothing was saved: look at the hardware of these processes, then go on"
                        " with --resume auto"
                    )
                )
        return {
            rank: {
                name: torch.tensor(state, dtype=torch.uint8)
                for name, state in other["random"].items()
            }
            for rank, other in enumerate(everyone)
        }

    def _write(
        self,
        folder: RunFolder,
        loop: Loop,
        states: dict[int, dict[str, Tensor]],
        lowered: list[int | None],
        last: bool,
    ) -> bool:
        record = {
            **loop.state(),
            "samples_at_once": lowered,
            "counted_from": self._counted_from,
            "settings": plain_settings(self._all_settings()),
            "data": self.data_identity,
            "initial": self.initial.as_dict(),
            "base_hash": self.base.strict,
            "versions": versions(),
        }

        def write(path: Path) -> None:
            write_checkpoint(path, self.model, loop.step.window, record, self.base, states)

        try:
            path = folder.save_checkpoint(loop.steps, write, self.config.save_total_limit)
        except (OSError, SafetensorError, CheckpointError) as error:
            standing = folder.checkpoints()
            good = f"the last good one is {standing[-1]}" if standing else "there is no other"
            folder.event(
                "save_failed",
                step=loop.steps,
                error=type(error).__name__,
                message=f"{error}; {good}"[:500],
            )
            if last or not standing:
                raise CheckpointError(
                    f"no checkpoint could be written at step {loop.steps}: {error}; {good}; make"
                    " room and go on with --resume"
                ) from error
            self._say(
                f"WARNING: no checkpoint at step {loop.steps}: {error}; {good}, training goes on"
            )
            return False
        folder.event("save", step=loop.steps, folder=str(path.relative_to(folder.path)))
        return True

    def _save_best(self, folder: RunFolder, loop: Loop, fidelity: Fidelity) -> None:
        try:
            folder.save_best(self.model, self.base, {"step": loop.steps, **fidelity.as_dict()})
        except (OSError, SafetensorError) as error:
            folder.event(
                "save_failed",
                step=loop.steps,
                error=type(error).__name__,
                message=f"best: {error}"[:500],
            )
            self._say(f"WARNING: the best adapters could not be kept at step {loop.steps}: {error}")

    def _record(self) -> dict[str, Any]:
        """The content of `run.json`."""
        return {
            "settings": self._all_settings(),
            "layers": [index for index, _ in npt_layers(self.model)],
            "trainable_parameters": sum(p.numel() for p in adapter_parameters(self.model).values()),
            "seed": self.config.seed,
            **self.base.as_record(),
            "other_base": self._other_base,
            "precision": audit_precision(self.model, policy_dtype(self.model)).as_dict(),
            "product_errors": None if is_sharded(self.model) else product_errors(self.model),
            "device": str(self.device),
            "deterministic": self.deterministic,
            "processes": self.ranks.size,
            "versions": versions(),
            "heldout": self.heldout,
            "sources": [{"name": source.label, "share": source.share} for source in self.sources],
            "calibration": None if self.calibration is None else self.calibration.as_dict(),
            "memory": None if self.memory is None else self.memory.as_dict(),
        }

    def _windows(self) -> Generator[Window]:
        """Windows of K batches for every rank, on from one epoch into the next; the last window of
        all may be shorter. Closing it ends the thread that prepares them."""
        with contextlib.closing(
            Ahead(self._coming, stop=lambda: self.stop.number is not None)
        ) as ahead:
            stream = iter(ahead)
            while window := list(itertools.islice(stream, self.window_size)):
                yield Window(
                    window[0].epoch, [loaded.batch for loaded in window], window[-1].position
                )

    def _first_batch(self) -> Batch:
        """The batch that training starts with. It is put back: a stream that can be read once loses
        none.
        """
        first = next(self._coming, None)
        if first is None:
            raise no_sample(self.samples.counts)
        self._coming = itertools.chain([first], self._coming)
        return first.batch

    def _evaluate(self) -> Fidelity:
        """Of no more samples at once than a micro-batch is computed with."""
        passes = self._evaluated_at_once
        passes.samples = min(passes.samples, self.passes.samples)
        largest = next(batches(self.eval_samples, passes.samples, self.pad_id))
        return self._fitting(self._evaluate_at_once, passes, largest, "an evaluation")

    def _evaluate_at_once(self) -> Fidelity:
        at_once = self._evaluated_at_once.samples
        if self.teacher is not None and self._reference is None:
            self._reference = refer(
                self.teacher, self.eval_samples, batch_size=at_once, pad_id=self.pad_id
            )
        return evaluate(
            self.model,
            self.tokenizer,
            self.eval_samples,
            batch_size=at_once,
            unquantized=self._reference,
            between=self.stop.check,
            sources=self._eval_labels,
        )

    def _evaluation_note(self) -> str:
        kind = "held-out" if self.heldout else "TRAINING (too little data to hold any out)"
        of = "" if self._eval_labels is None else f" ({per_source(self._eval_labels)})"
        if of and not self.heldout:
            kind = (
                f"partly TRAINING (too little of {', '.join(self._not_held_out)} to hold any out)"
            )
        steps = "an unknown number of" if self.total_steps is None else str(self.total_steps)
        layers = format_layers(tuple(index for index, _ in npt_layers(self.model)))
        return (
            f"training layers {layers} for {steps} steps; fidelity on {len(self.eval_samples)}"
            f" {kind} samples{of}"
        )

    def _schedule_kind(self) -> str:
        return kind_of_run(self.config.scheduler_type, self.total_steps)

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)
