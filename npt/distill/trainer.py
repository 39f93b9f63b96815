"""`Trainer`: the loop from samples to a trained adapter, with its run folder."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError
from torch import Tensor
from transformers import LlamaForCausalLM

from npt.adapters.attach import adapter_parameters, attached_config, check_length, format_layers, npt_layers
from npt.config import REPLAY_RATIO, DataConfig, NPTConfig, TrainConfig, parse_steps
from npt.console import make_console, silent_console
from npt.data.batch import Batch, pad_id_of
from npt.data.loader import Ahead, Loaded, Loader, Position
from npt.data.samples import Samples, evaluation_samples
from npt.data.source import BUILTIN, Record, open_source, own_heldout, replay_source
from npt.distill.checkpoint import Checkpoint, random_state, read_checkpoint, set_random_state, write_checkpoint
from npt.distill.loop import Loop, Window
from npt.distill.progress import ProgressDisplay
from npt.distill.ranks import Ranks, join_ranks
from npt.distill.resume import Resumed, changed_settings, find_resumed, plain_settings
from npt.distill.run_folder import RunFolder, check_free, default_folder, versions
from npt.distill.schedule import kind_of_run, rate_table
from npt.distill.signals import StopOnSignal
from npt.distill.smoke import smoke_test
from npt.distill.strategies import STRATEGIES
from npt.distill.trackers import Trackers
from npt.distill.transaction import EXACT
from npt.distill.unwritten import UnwrittenFolder
from npt.errors import CheckpointError, ConfigError, DataError, NotSupportedError, NPTError, RankError, StoppedError, TooManyRefusalsError
from npt.fidelity.evaluate import Fidelity, evaluate
from npt.health.guards import base_fault, require, tensor_fault
from npt.quant.load import base_hash
from npt.quant.precision import audit_precision, policy_dtype

_PLACES = ("resume", "output_dir", "model_name", "dataset_name", "replay_dataset")
"""Settings in which the ranks of a run may differ: where a machine keeps what has to be the same is shown by its content."""


@dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    refused: micro-batches and windows. heldout: whether `fidelity` is of held-out text; False where there was too little of it.
    signal: number of the signal that ended the run early, if one did.
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


def check_trainable(config: NPTConfig, data: DataConfig | None) -> None:
    """Refuse combinations that cannot be trained, before a base is loaded.

    Args:
        config: of the adapters.
        data: what is trained on, where the settings say it.

    Raises:
        NotSupportedError: the adapters keep the attention residual, so the student equals its teacher from the start.
        DataError: the built-in text's held-out files, which every evaluation is on.
    """
    if config.residual == "keep":
        raise NotSupportedError(
            "--residual keep starts equal to its teacher, so there is nothing to distil until a teacher of higher precision is "
            "supported; use --residual modulate"
        )
    if data is not None and data.dataset_name == BUILTIN and data.dataset_split != "train":
        raise DataError(f"--dataset_split {data.dataset_split} of the built-in text is what runs are evaluated on; train on 'train'")


class Trainer:
    """Distil the attached adapters of `model` from the model itself.

    Everything that can be refused is refused before the run folder is made.

    Args:
        model: from `npt.load_base`, with `npt.attach` done.
        tokenizer: of the base model.
        data: records ({"text"} or {"input_ids"}): a list, a `datasets` object, a generator; None for what `data_config` names.
        config: training settings.
        data_config: how `data` is cut to samples.
        replay_data: records that are mixed in against forgetting, `replay_ratio` of all samples; default what `data_config` names.
        eval_data: held-out records. Default: the built-in text's own held-out files where `data` is None and names it, else
            one sample in twenty of `data`, which training then leaves out.
        settings: further settings to put on record in `run.json`.
        console: where to report; default standard output.
        ranks: the processes that train together; default those that a launcher started with this one, or this one alone.

    Of several processes each makes a Trainer of the same arguments; they share every window, and rank 0 writes and speaks.

    Raises:
        ConfigError, DataError: settings or data that cannot work.
        NotSupportedError: the adapters keep the attention residual, so the student equals its teacher from the start.
        RankError: another process failed or was lost.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
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
    ):
        self.model, self.tokenizer = model, tokenizer
        self.config = config = config if config is not None else TrainConfig()
        self.data_config = data_config if data_config is not None else DataConfig()
        self.settings = settings or {}
        self.ranks = ranks if ranks is not None else join_ranks(config.rank_timeout)
        self.console = silent_console() if not self.ranks.main else console if console is not None else make_console()
        with self.ranks.member():
            self._prepare(data, eval_data, replay_data)

    def _prepare(self, data: Iterable[Record] | None, eval_data: Iterable[Record] | None, replay_data: Iterable[Record] | None) -> None:
        config, data_config = self.config, self.data_config
        self.adapter_config = attached_config(self.model)
        check_trainable(self.adapter_config, data_config if data is None else None)
        check_length(data_config.max_length, self.model.config)
        self._check_window()
        self.resumed = self._find_resumed()
        self.folder_path = Path(self.ranks.first(lambda: str(self._choose_folder())))
        self.changed = self._check_settings()
        self.device = next(self.model.parameters()).device
        self.strategy = STRATEGIES[config.strategy]
        self.pad_id = pad_id_of(self.tokenizer)
        if data is None:
            data = open_source(data_config)
            eval_data = eval_data if eval_data is not None else own_heldout(data_config)
        self._prepare_data(data, eval_data)
        self.loader = self._make_loader(replay_data)
        self._coming: Iterator[Loaded] = self.loader.batches(self._start)
        self.total_steps = self._total_steps()
        self.stop = StopOnSignal()
        self._trained = False

    @property
    def window_size(self) -> int:
        """Micro-batches of a window, over all ranks."""
        return self.config.gradient_accumulation_steps * self.ranks.size

    def _check_window(self) -> None:
        tokens = self.window_size * self.config.batch_size * self.data_config.max_length
        if tokens >= EXACT:
            raise ConfigError(
                f"a window may have {tokens} tokens (--gradient_accumulation_steps x --batch_size x --max_length x {self.ranks.size} "
                f"processes), and is counted exactly below {EXACT} only; lower one of them"
            )

    def _find_resumed(self) -> Resumed | None:
        """What to go on from. Rank 0 alone looks for it, since it sets aside what does not verify."""
        if self.config.resume is None:
            return None
        found: list[Resumed] = []

        def find() -> list[str | None]:
            found.append(find_resumed(str(self.config.resume), self.config.output_dir))
            checkpoint = found[0].checkpoint
            return [str(found[0].folder), None if checkpoint is None else str(checkpoint.folder)]

        folder, checkpoint = self.ranks.first(find)
        return found[0] if found else Resumed(Path(str(folder)), None if checkpoint is None else read_checkpoint(Path(checkpoint)))

    @property
    def _checkpoint(self) -> Checkpoint | None:
        return None if self.resumed is None else self.resumed.checkpoint

    @property
    def _start(self) -> Position:
        return Position() if self._checkpoint is None else Position.from_dict(self._checkpoint.record["position"])

    def _choose_folder(self) -> Path:
        """The run's folder: a new one, or the one that a run goes on in."""
        if self.resumed is None:
            folder = Path(self.config.output_dir) if self.config.output_dir else default_folder()
            check_free(folder)
            return folder
        if not self._goes_on:
            check_free(self.resumed.folder)
        return self.resumed.folder

    @property
    def _goes_on(self) -> bool:
        """Whether the run writes on in the folder of the one that it resumes."""
        if self.resumed is None:
            return False
        checkpoint = self.resumed.checkpoint
        return checkpoint is None or checkpoint.folder.absolute().parent.parent == self.resumed.folder.absolute()

    @property
    def _resume_at(self) -> int | None:
        """The step from which the folder's logs are written on; None for a new folder."""
        if not self._goes_on:
            return None
        return 0 if self._checkpoint is None else self._checkpoint.step

    def _check_settings(self) -> dict[str, tuple[Any, Any]]:
        """Settings that differ from those of the run that is resumed, where that is allowed."""
        if self._checkpoint is None:
            return {}
        return changed_settings(self._checkpoint.record["settings"], plain_settings(self._all_settings()))

    def _all_settings(self) -> dict[str, Any]:
        settings = {**self.settings, **asdict(self.adapter_config), **asdict(self.data_config), **asdict(self.config)}
        return {**settings, "processes": self.ranks.size}

    def _prepare_data(self, data: Iterable[Record], eval_data: Iterable[Record] | None) -> None:
        config, data_config = self.config, self.data_config
        if isinstance(data, Mapping):
            raise DataError(f"the data are a {type(data).__name__} with {', '.join(map(str, data))}; pass one of its entries")
        one_pass = iter(data) is data
        if one_pass and data_config.streaming and config.num_epochs > 1:
            raise ConfigError(f"--num_epochs is {config.num_epochs}, but a streamed generator can be read once only; pass a list")
        if one_pass and not data_config.streaming:
            data, one_pass = list(data), False
        if one_pass and eval_data is None:
            raise ConfigError("a streamed generator can be read once only; pass eval_data=... to have something to evaluate on")
        self.eval_samples, self.heldout = evaluation_samples(
            data, self.tokenizer, data_config, config.eval_samples, self.model.config.vocab_size, eval_data
        )
        self.samples = Samples(data, self.tokenizer, data_config, seed=config.seed, hold_out=eval_data is None and self.heldout)

    def _make_loader(self, replay_data: Iterable[Record] | None) -> Loader:
        config, data_config = self.config, self.data_config
        if replay_data is None and data_config.replay_dataset is not None:
            replay_data = open_source(replay_source(data_config))
        replay = None
        if replay_data is not None:
            replay_config = replace(data_config, num_samples=None)
            replay = Samples(replay_data, self.tokenizer, replay_config, seed=config.seed + 1)
        share = data_config.replay_share or (REPLAY_RATIO if replay is not None else 0.0)
        return Loader(
            self.samples,
            config.batch_size,
            self.pad_id,
            side=data_config.padding_side,
            epochs=config.num_epochs,
            replay=replay,
            replay_share=share,
            seed=config.seed,
        )

    def _total_steps(self) -> int | None:
        """Optimizer steps of the run, as far as it can be known before it."""
        c = self.config
        micro_batches = self.loader.count(None if c.max_steps is None else c.max_steps * self.window_size)
        if micro_batches is None:
            return c.max_steps
        steps = math.ceil(micro_batches / self.window_size)
        return steps if c.max_steps is None else min(steps, c.max_steps)

    def train(self) -> TrainResult:
        """Smoke test, evaluation, loop, evaluation.

        Raises:
            NumericalError, SmokeTestError: the base or an adapter holds a non-finite number, or one batch shows that training
                cannot work; before anything is written.
            TooManyRefusalsError: after the post-mortem was written.
            ConfigError: the run folder cannot be written, or the processes of the run differ in something.
            RankError: another process failed or was lost.
        """
        if self._trained:
            raise ConfigError("this Trainer has trained already; make a new one, its data and output folder are used up")
        self._trained = True
        self.stop.at_once = True  # until the loop there is nothing to save
        with self.ranks.member(), self.stop:
            result = self._train()
            self.ranks.wait()  # until rank 0 has written everything: a launcher may end the others when the first has ended
            return result

    def _train(self) -> TrainResult:
        say = self._say
        require(tensor_fault(adapter_parameters(self.model)))
        require(base_fault(self.model))
        self.base_hash = base_hash(self.model)
        self._agree()
        if self.config.smoke_test:
            say(smoke_test(self.model, self._first_batch(), self.strategy, self.config))
        say(self._evaluation_note())
        known = None if self._checkpoint is None else self._checkpoint.record["initial"]
        self.initial = self._evaluate() if known is None else Fidelity.from_dict(known)
        self.record = self._record()
        folder = RunFolder(self.folder_path, resume_at=self._resume_at) if self.ranks.main else UnwrittenFolder(self.folder_path)
        try:
            folder.write("run.json", self.record)
            try:
                shown = self.config if self.ranks.main else replace(self.config, use_wandb=False, use_tensorboard=False)
                trackers = Trackers(shown, folder.path, self.record["settings"])
            except ConfigError:
                folder.discard()
                raise
            try:
                return self._run(folder, trackers)
            finally:
                trackers.close()
        finally:
            folder.close()

    def _agree(self) -> None:
        """Refuse ranks that would not do the same: other settings, another base, other adapters to start from, other packages."""
        if self.ranks.size == 1:
            return
        settings = {f"--{name}": value for name, value in plain_settings(self._all_settings()).items() if name not in _PLACES}
        adapters = sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in adapter_parameters(self.model).values())).hexdigest()
        self.ranks.agree(
            {
                **settings,
                "a base of hash": self.base_hash,
                "adapters of hash": adapters,
                "a checkpoint of step": None if self._checkpoint is None else self._checkpoint.step,
                "steps": self.total_steps,
                "evaluation samples": len(self.eval_samples),
                "a device of kind": self.device.type,
                **{f"version of {name}": version for name, version in versions().items()},
            }
        )

    def _run(self, folder: RunFolder, trackers: Trackers) -> TrainResult:
        folder.event("start", device=str(self.device), total_steps=self.total_steps, processes=self.ranks.size)
        if self.resumed is not None:
            self._report_resumed(folder, self.resumed)
        if self._schedule_kind() != self.config.scheduler_type:
            message = (
                "the length of the stream is unknown, so the learning rate stays constant after warm-up; "
                f"--max_steps gives it its {self.config.scheduler_type} end"
            )
            self._warn(folder, message)
        if self.total_steps is not None and self.config.warmup_steps > self.total_steps:
            steps = f"--warmup_steps is {self.config.warmup_steps}, but the run has {self.total_steps} steps"
            self._warn(folder, f"{steps}: the learning rate will not reach --learning_rate")
        if self.total_steps is not None and self.config.trace_steps is not None:
            last = max(steps[-1] for steps in parse_steps(self.config.trace_steps))
            if last > self.total_steps:
                self._warn(folder, f"--trace_steps names step {last}, but the run has {self.total_steps} steps")
        self._say(f"run folder {folder.path}")
        result = self._loop(folder, trackers)
        return result if result.signal is not None else self._finish(folder, trackers, result)

    def _report_resumed(self, folder: RunFolder, resumed: Resumed) -> None:
        for problem in resumed.problems:
            self._warn(folder, problem)
        checkpoint = resumed.checkpoint
        if checkpoint is None:
            self._say(f"no checkpoint below {resumed.folder}; the run starts at step 1")
        else:
            self._say(f"going on from {checkpoint.folder} at step {checkpoint.step}")
        changed = {name: list(values) for name, values in self.changed.items()}
        folder.event(
            "resume",
            step=0 if checkpoint is None else checkpoint.step,
            checkpoint=None if checkpoint is None else str(checkpoint.folder),
            changed=changed,
        )
        for name, (old, new) in self.changed.items():
            self._say(f"changed since: {name} was {old}, is {new}")

    def _loop(self, folder: RunFolder, trackers: Trackers) -> TrainResult:
        c = self.config
        rates = rate_table(c.learning_rate, self._schedule_kind(), c.warmup_steps, self.total_steps)
        display = ProgressDisplay(self.total_steps, self.console)
        loop = Loop(
            self.model,
            self.strategy,
            c,
            rates,
            self.total_steps,
            folder,
            trackers,
            display,
            self.stop,
            self._evaluate,
            lambda: self._save(folder, loop),
            lambda fidelity: self._save_best(folder, loop, fidelity),
            self.record,
            self.ranks,
        )
        torch.manual_seed(c.seed)  # nothing draws from it, and a checkpoint that holds it is the same in every process
        if self._checkpoint is not None:
            self._checkpoint.restore(self.model, loop.transaction, self.base_hash)
            loop.load_state(self._checkpoint.record)
            set_random_state(self._checkpoint.random_state(self.ranks.rank))
        self.stop.at_once = False
        started = time.perf_counter()
        try:
            loop.run(self._windows())
        except BaseException as error:
            self._rescue(folder, loop, error)
            raise
        finally:
            display.close()
        seconds = time.perf_counter() - started
        number = self._signal()
        if number is not None:
            folder.event("signal", number=number, step=loop.steps)
        elif loop.steps == 0:
            folder.event("stopped", step=0, reason="no step was applied")
            raise DataError(f"the data ended without one applied step ({loop.refused} refusals, see {folder.path / 'events.jsonl'})")
        if loop.last_save != loop.steps:
            self._save(folder, loop)
        if number is not None:
            self._say(f"stopped by signal {number} at step {loop.steps}; the adapters are saved below {folder.path / 'checkpoints'}")
        return TrainResult(
            folder=folder.path,
            steps=loop.steps,
            tokens=loop.tokens,
            refused=loop.refused,
            micro_batches=loop.micro_batches,
            refused_by_kind=dict(loop.refused_by_kind),
            seconds=seconds,
            fidelity=None,
            heldout=self.heldout,
            signal=number,
        )

    def _signal(self) -> int | None:
        """The number of the signal that came to this rank, or else to another; every rank has to ask."""
        numbers = [number for number in (self.stop.number, *self.ranks.gather_json(self.stop.number)) if number is not None]
        return numbers[0] if numbers else None

    def _rescue(self, folder: RunFolder, loop: Loop, error: BaseException) -> None:
        """Whatever ended the loop, broken data or a full disk, does not take the steps before it along."""
        if not isinstance(error, TooManyRefusalsError):  # the loop has said that one itself
            folder.event("error", step=loop.steps, error=type(error).__name__, message=str(error)[:500])
        if not self.ranks.met_by_all(error):  # the others are elsewhere: whatever would wait for them has to be left out
            self.ranks.leave(error)
        with contextlib.suppress(NPTError):
            loop.settle()  # a checkpoint has to bear the step that its weights are of
        if loop.transaction.in_flight:
            return
        if loop.steps and loop.last_save != loop.steps:
            try:
                self._save(folder, loop)
            except (NPTError, OSError, SafetensorError) as second:
                folder.event("error", step=loop.steps, error=type(second).__name__, message=f"not saved: {second}"[:500])

    def _warn(self, folder: RunFolder, message: str) -> None:
        self._say(f"warning: {message}")
        folder.event("warning", message=message)

    def _finish(self, folder: RunFolder, trackers: Trackers, result: TrainResult) -> TrainResult:
        fidelity = None
        with contextlib.suppress(StoppedError):  # everything is saved; only the figures are missing
            fidelity = self._evaluate().after(self.initial)
        number = self._signal()
        if fidelity is None or (number is not None and self.ranks.size > 1):
            folder.event("signal", number=number, step=result.steps)
            return replace(result, signal=number)
        folder.write("fidelity.json", {**fidelity.as_dict(), "heldout": self.heldout})
        student = fidelity.student.as_dict()
        trackers.log({f"eval/{key}": value for key, value in student.items()}, result.steps)
        self._report_data(folder)
        folder.event(
            "done",
            steps=result.steps,
            tokens=result.tokens,
            refused=result.refused,
            refused_by_kind=result.refused_by_kind,
            seconds=round(result.seconds, 3),
        )
        return replace(result, fidelity=fidelity, signal=number)

    def _report_data(self, folder: RunFolder) -> None:
        """What became of the records; what was cut or left out is said."""
        counts = self.samples.counts
        folder.event("data", **counts.as_dict())
        lost = [
            f"{number} {what} cut" for what, number in (("prompts", counts.cut_prompts), ("completions", counts.cut_completions)) if number
        ]
        lost += [f"{number} records skipped ({reason})" for reason, number in sorted(counts.skipped.items())]
        if lost:
            self._warn(folder, f"of {counts.records} records read: {', '.join(lost)}")

    def _save(self, folder: RunFolder, loop: Loop) -> None:
        """A checkpoint of what all ranks have, written by rank 0. Where it cannot be written and an older one stands, the run goes on
        and says so loudly.

        Raises:
            OSError, CheckpointError: there is no older one.
            RankError: another rank is lost, or its adapters and moments are not those of rank 0.
        """
        audit_precision(self.model, policy_dtype(self.model))
        states = self._gathered_states(loop)
        if self.ranks.broken:
            if self.ranks.main:
                self._write(folder, loop, states)
        else:
            self.ranks.first(lambda: self._write(folder, loop, states))

    def _gathered_states(self, loop: Loop) -> dict[int, dict[str, Tensor]]:
        """The random state of every rank, that of this one where the others are gone; before it is saved, what they hold is compared."""
        if self.ranks.size == 1 or self.ranks.broken:
            return {self.ranks.rank: random_state()}
        own = {"held": loop.transaction.checksum(), "random": {name: state.tolist() for name, state in random_state().items()}}
        everyone = self.ranks.gather_json(own)
        for rank, other in enumerate(everyone):
            if other["held"] != everyone[0]["held"]:
                raise self.ranks.everywhere(
                    RankError(
                        f"rank {rank} holds other adapters or moments than rank 0 at step {loop.steps} (checksums {other['held']} and "
                        f"{everyone[0]['held']}); nothing was saved: look at the hardware of these processes, then go on with --resume auto"
                    )
                )
        return {
            rank: {name: torch.tensor(state, dtype=torch.uint8) for name, state in other["random"].items()}
            for rank, other in enumerate(everyone)
        }

    def _write(self, folder: RunFolder, loop: Loop, states: dict[int, dict[str, Tensor]]) -> None:
        record = {
            **loop.state(),
            "settings": plain_settings(self._all_settings()),
            "initial": self.initial.as_dict(),
            "base_hash": self.base_hash,
            "versions": versions(),
        }

        def write(path: Path) -> None:
            write_checkpoint(path, self.model, loop.transaction, record, self.base_hash, states)

        try:
            path = folder.save_checkpoint(loop.steps, write, self.config.save_total_limit)
        except (OSError, SafetensorError, CheckpointError) as error:
            standing = folder.checkpoints()
            folder.event("save_failed", step=loop.steps, error=type(error).__name__, message=str(error)[:500])
            if not standing:
                raise
            self._say(f"WARNING: no checkpoint at step {loop.steps}: {error}; the last good one is {standing[-1]}, training goes on")
            return
        folder.event("save", step=loop.steps, folder=str(path.relative_to(folder.path)))

    def _save_best(self, folder: RunFolder, loop: Loop, fidelity: Fidelity) -> None:
        try:
            folder.save_best(self.model, self.base_hash, {"step": loop.steps, **fidelity.as_dict()})
        except (OSError, SafetensorError) as error:
            folder.event("save_failed", step=loop.steps, error=type(error).__name__, message=f"best: {error}"[:500])
            self._say(f"WARNING: the best adapters could not be kept at step {loop.steps}: {error}")

    def _record(self) -> dict[str, Any]:
        """The content of `run.json`."""
        return {
            "settings": self._all_settings(),
            "layers": [index for index, _ in npt_layers(self.model)],
            "trainable_parameters": sum(p.numel() for p in adapter_parameters(self.model).values()),
            "seed": self.config.seed,
            "base_hash": self.base_hash,
            "precision": audit_precision(self.model, policy_dtype(self.model)).as_dict(),
            "device": str(self.device),
            "processes": self.ranks.size,
            "versions": versions(),
            "heldout": self.heldout,
        }

    def _windows(self) -> Iterator[Window]:
        """Windows of K batches for every rank, on from one epoch into the next; the last window of all may be shorter."""
        ahead = Ahead(self._coming, stop=lambda: self.stop.number is not None)
        try:
            stream = iter(ahead)
            while window := list(itertools.islice(stream, self.window_size)):
                yield Window(window[0].epoch, [loaded.batch for loaded in window], window[-1].position)
        finally:
            ahead.close()

    def _first_batch(self) -> Batch:
        """The batch that training starts with. It is put back: a stream that can be read once loses none."""
        first = next(self._coming, None)
        if first is None:
            raise DataError("no sample of two tokens or more came out of the data; check --dataset_name and --text_column")
        self._coming = itertools.chain([first], self._coming)
        return first.batch

    def _evaluate(self) -> Fidelity:
        return evaluate(self.model, self.tokenizer, self.eval_samples, batch_size=self.config.batch_size, between=self.stop.check)

    def _evaluation_note(self) -> str:
        kind = "held-out" if self.heldout else "TRAINING (too little data to hold any out)"
        steps = "an unknown number of" if self.total_steps is None else str(self.total_steps)
        layers = format_layers(tuple(index for index, _ in npt_layers(self.model)))
        return f"training layers {layers} for {steps} steps; fidelity on {len(self.eval_samples)} {kind} samples"

    def _schedule_kind(self) -> str:
        return kind_of_run(self.config.scheduler_type, self.total_steps)

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)
