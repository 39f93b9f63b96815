"""`Trainer`: the loop from samples to a trained adapter, with its run folder."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import LlamaForCausalLM

from npt.adapters.attach import adapter_parameters, attached_config, format_layers, npt_layers
from npt.config import DataConfig, TrainConfig
from npt.data.batch import Batch, batches, collate, find_fault, pad_id_of
from npt.data.builtin import builtin_text
from npt.data.samples import Sample, Samples, cut, held_out, spread
from npt.data.source import BUILTIN, Record, open_source
from npt.distill.postmortem import write_postmortem
from npt.distill.progress import ProgressDisplay
from npt.distill.run_folder import RunFolder, check_free, default_folder, versions
from npt.distill.schedule import learning_rate_scale
from npt.distill.signals import StopOnSignal
from npt.distill.smoke import smoke_test
from npt.distill.strategies import STRATEGIES, MicroBatch
from npt.distill.trackers import Trackers
from npt.distill.transaction import Transaction, WindowResult
from npt.errors import ConfigError, DataError, NotSupportedError, TooManyRefusalsError
from npt.fidelity.evaluate import Fidelity, evaluate
from npt.quant.load import base_hash
from npt.quant.precision import audit_precision, policy_dtype

ADAM_BETAS = (0.9, 0.999)


@dataclass(frozen=True)
class TrainResult:
    """What a run came to. `signal` is the number of the signal that ended it early, if one did."""

    folder: Path
    steps: int
    tokens: int
    refused: int
    seconds: float
    fidelity: Fidelity | None
    signal: int | None = None

    @property
    def exit_status(self) -> int:
        return 0 if self.signal is None else 128 + self.signal


class Trainer:
    """Distil the attached adapters of `model` from the model itself.

    Everything that can be refused is refused before the run folder is made.

    Args:
        model: from `npt.load_base`, with `npt.attach` done.
        tokenizer: of the base model.
        data: records ({"text"} or {"input_ids"}): a list, a `datasets` object, a generator; None for what `data_config` names.
        config: training settings.
        data_config: how `data` is cut to samples.
        eval_data: held-out records. Default: the built-in text's own held-out files where `data` is None and names it, else
            one sample in twenty of `data`, which training then leaves out.
        settings: further settings to put on record in `run.json`.
        console: where to report; default standard output.

    Raises:
        ConfigError, DataError: settings or data that cannot work.
        NotSupportedError: the adapters keep the attention residual, so the student equals its teacher from the start.
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
        settings: dict[str, Any] | None = None,
        console: Console | None = None,
    ):
        self.model, self.tokenizer = model, tokenizer
        self.config = config = config if config is not None else TrainConfig()
        self.data_config = data_config = data_config if data_config is not None else DataConfig()
        self.adapter_config = attached_config(model)
        if self.adapter_config.residual == "keep":
            raise NotSupportedError(
                "--residual keep starts equal to its teacher, so there is nothing to distil until a teacher of higher precision is "
                "supported; use --residual modulate"
            )
        self.folder_path = Path(config.output_dir) if config.output_dir else default_folder()
        check_free(self.folder_path)
        self.console = console if console is not None else Console()
        self.settings = settings or {}
        self.device = next(model.parameters()).device
        self.strategy = STRATEGIES[config.strategy]
        self.pad_id = pad_id_of(tokenizer)
        if data is None:
            data = open_source(data_config)
            if eval_data is None and data_config.dataset_name == BUILTIN:
                eval_data = builtin_text("heldout")
        self._prepare_data(data, eval_data)
        self._epoch_0: Iterator[Sample] = iter(self.samples.epoch(0))
        self.total_steps = self._total_steps()
        self.stop = StopOnSignal()

    def _prepare_data(self, data: Iterable[Record], eval_data: Iterable[Record] | None) -> None:
        config, data_config = self.config, self.data_config
        one_pass = iter(data) is data
        if one_pass and not data_config.streaming:
            data, one_pass = list(data), False
        self.heldout = True
        own_eval = eval_data is not None
        if own_eval:
            self.eval_samples = spread(cut(eval_data or (), self.tokenizer, data_config), config.eval_samples)
        elif one_pass:
            raise ConfigError("a streamed generator can be read once only; pass eval_data=... to have something to evaluate on")
        else:
            self.eval_samples = held_out(data, self.tokenizer, data_config, config.eval_samples)
        self.samples = Samples(data, self.tokenizer, data_config, seed=config.seed, hold_out=not own_eval and bool(self.eval_samples))
        if not self.eval_samples:
            self.heldout = False
            self.eval_samples = list(itertools.islice(self.samples.epoch(0), config.eval_samples))

    def _total_steps(self) -> int | None:
        """Optimizer steps of the run, as far as it can be known before it."""
        c = self.config
        needed = None if c.max_steps is None else c.max_steps * c.gradient_accumulation_steps * c.batch_size
        size = self.samples.count(needed)
        if size is None or size == needed:
            return c.max_steps
        micro_batches = c.num_epochs * math.ceil(size / c.batch_size)
        steps = math.ceil(micro_batches / c.gradient_accumulation_steps)
        return steps if c.max_steps is None else min(steps, c.max_steps)

    def train(self) -> TrainResult:
        """Smoke test, evaluation, loop, evaluation.

        Raises:
            SmokeTestError: before anything is written.
            TooManyRefusalsError: after the post-mortem was written.
            ConfigError: the run folder cannot be written.
        """
        say = self._say
        if self.config.smoke_test:
            say(smoke_test(self.model, self._first_batch(), self.strategy, self.config))
        say(self._evaluation_note())
        initial = self._evaluate()
        folder = RunFolder(self.folder_path)
        try:
            return self._run(folder, initial)
        finally:
            folder.close()

    def _run(self, folder: RunFolder, initial: Fidelity) -> TrainResult:
        self.base_hash = base_hash(self.model)
        record = self._record()
        folder.write("run.json", record)
        folder.event("start", device=str(self.device), total_steps=self.total_steps)
        if self._schedule_kind() != self.config.scheduler_type:
            message = (
                "the length of the stream is unknown, so the learning rate stays constant after warm-up; "
                f"--max_steps gives it its {self.config.scheduler_type} end"
            )
            self._say(f"warning: {message}")
            folder.event("warning", message=message)
        self._say(f"run folder {folder.path}")
        trackers = Trackers(self.config, folder.path, record["settings"])
        try:
            with self.stop:
                result = self._loop(folder, trackers)
                if result.signal is not None:
                    return result
                return self._finish(folder, trackers, initial, result)
        finally:
            trackers.close()

    def _loop(self, folder: RunFolder, trackers: Trackers) -> TrainResult:
        config, parameters = self.config, adapter_parameters(self.model)
        optimizer = torch.optim.AdamW(
            parameters.values(), lr=config.learning_rate, betas=ADAM_BETAS, weight_decay=config.weight_decay, fused=True
        )
        transaction: Transaction[MicroBatch] = Transaction(parameters, optimizer, config.max_grad_norm)
        display = ProgressDisplay(self.total_steps, self.console)
        started = logged_at = time.perf_counter()
        step = tokens = tokens_at_log = refused = in_a_row = 0
        last_save = -1
        window: list[Batch] = []
        self.model.eval()
        try:
            for window in self._windows():
                for batch in window:
                    if self.stop.number is None:
                        self._micro_batch(transaction, batch)
                if self.stop.number is not None:
                    break
                rate = config.learning_rate * learning_rate_scale(step, self._schedule_kind(), config.warmup_steps, self.total_steps)
                result = transaction.commit(rate)
                refused += len(result.refusals)
                longest, in_a_row = _bad_in_a_row(in_a_row, len(window), result)
                for refusal in result.refusals:
                    folder.event("refusal", step=step + 1, rank=0, **asdict(refusal))
                    display.say(f"refused at step {step + 1}, {refusal}")
                if longest >= config.max_consecutive_bad:
                    self._give_up(folder, window, result, optimizer, step, longest)
                if not result.applied:
                    continue
                step += 1
                tokens += result.tokens
                metrics = None
                if step % config.log_steps == 0 or step == 1 or step == self.total_steps:
                    now = time.perf_counter()
                    metrics = self._metrics(result, step, rate, tokens, refused)
                    metrics["tokens_per_second"] = (tokens - tokens_at_log) / (now - logged_at)
                    logged_at, tokens_at_log = now, tokens
                    folder.metrics(metrics)
                    trackers.log(metrics, step)
                display.step(step, metrics, refused)
                working_until = time.perf_counter()
                if config.save_steps and step % config.save_steps == 0:
                    self._save(folder, step)
                    last_save = step
                if config.eval_steps and step % config.eval_steps == 0 and step != self.total_steps:
                    student = self._evaluate().student.as_dict()
                    folder.event("evaluation", step=step, student=student)
                    trackers.log({f"eval/{key}": value for key, value in student.items()}, step)
                    display.say(f"step {step}: held-out perplexity ratio {student['perplexity_ratio']:.4f}, KL {student['kl']:.4f}")
                logged_at += time.perf_counter() - working_until  # saving and evaluating is not training
                if step == config.max_steps:
                    break
        finally:
            display.close()
        seconds = time.perf_counter() - started
        if self.stop.number is not None:
            folder.event("signal", number=self.stop.number, step=step)
        if step == 0 and self.stop.number is None:
            folder.event("stopped", step=0, reason="no step was applied")
            raise DataError(f"the data ended without one applied step ({refused} refusals, see {folder.path / 'events.jsonl'})")
        if last_save != step:
            self._save(folder, step)
        if self.stop.number is not None:
            self._say(f"stopped by signal {self.stop.number} at step {step}; the adapters are saved below {folder.path / 'checkpoints'}")
        return TrainResult(folder.path, step, tokens, refused, seconds, None, self.stop.number)

    def _micro_batch(self, transaction: Transaction[MicroBatch], batch: Batch) -> None:
        fault = find_fault(batch, self.model.config.vocab_size)
        if fault is not None:
            transaction.refuse(fault, batch.sample_ids)
            return
        moved = batch.to(self.device)

        def fill() -> MicroBatch:
            with torch.autocast(self.device.type, enabled=False):
                return self.strategy(self.model, moved, self.config)

        transaction.micro_batch(fill, batch.sample_ids)

    def _metrics(self, result: WindowResult[MicroBatch], step: int, rate: float, tokens: int, refused: int) -> dict[str, Any]:
        """One metrics line: means per valid token over the window's survivors."""
        parts = result.survivors

        def mean(name: str) -> float:
            return sum(float(getattr(part, name)) for part in parts) / result.tokens

        per_layer = torch.stack([part.layer_nmse for part in parts]).sum(dim=0) / result.tokens
        metrics = {
            "step": step,
            "loss": mean("loss"),
            "loss_nmse": mean("nmse"),
            "loss_reg": mean("reg"),
            "grad_norm": result.grad_norm,
            "lr": rate,
            "tokens": tokens,
            "refused_total": refused,
        }
        if self.config.logit_kl_weight:
            metrics["loss_kl"] = mean("kl")
        for (index, _), value in zip(npt_layers(self.model), per_layer.tolist(), strict=True):
            metrics[f"layers.{index}.nmse"] = value
        return metrics

    def _finish(self, folder: RunFolder, trackers: Trackers, initial: Fidelity, result: TrainResult) -> TrainResult:
        fidelity = self._evaluate().after(initial)
        folder.write("fidelity.json", {**fidelity.as_dict(), "heldout": self.heldout})
        student = fidelity.student.as_dict()
        trackers.log({f"eval/{key}": value for key, value in student.items()}, result.steps)
        folder.event("done", steps=result.steps, tokens=result.tokens, refused=result.refused, seconds=round(result.seconds, 3))
        return replace(result, fidelity=fidelity, signal=self.stop.number)

    def _give_up(
        self, folder: RunFolder, window: list[Batch], result: WindowResult[MicroBatch], optimizer: Any, step: int, in_a_row: int
    ) -> None:
        where = write_postmortem(folder.path, self.model, optimizer, window, result.refusals, step)
        folder.event("stopped", step=step, reason=f"{in_a_row} refusals in a row", postmortem=str(where.relative_to(folder.path)))
        raise TooManyRefusalsError(
            f"stopped at step {step}: {in_a_row} refusals in a row (--max_consecutive_bad {self.config.max_consecutive_bad}), the last: "
            f"{result.refusals[-1]}; see {where}"
        )

    def _save(self, folder: RunFolder, step: int) -> None:
        audit_precision(self.model, policy_dtype(self.model))
        path = folder.save_checkpoint(self.model, step, self.base_hash, self.config.save_total_limit)
        folder.event("save", step=step, folder=str(path.relative_to(folder.path)))

    def _record(self) -> dict[str, Any]:
        """The content of `run.json`."""
        return {
            "settings": {**self.settings, **asdict(self.adapter_config), **asdict(self.data_config), **asdict(self.config)},
            "layers": [index for index, _ in npt_layers(self.model)],
            "trainable_parameters": sum(p.numel() for p in adapter_parameters(self.model).values()),
            "seed": self.config.seed,
            "base_hash": self.base_hash,
            "precision": audit_precision(self.model, policy_dtype(self.model)).as_dict(),
            "device": str(self.device),
            "versions": versions(),
            "heldout": self.heldout,
        }

    def _windows(self) -> Iterator[list[Batch]]:
        """Windows of K batches, on from one epoch into the next; the last window of all may be shorter."""
        c = self.config
        epochs = itertools.chain([self._epoch_0], (self.samples.epoch(number) for number in range(1, c.num_epochs)))
        stream = (b for epoch in epochs for b in batches(epoch, c.batch_size, self.pad_id))
        while window := list(itertools.islice(stream, c.gradient_accumulation_steps)):
            yield window

    def _first_batch(self) -> Batch:
        """The batch that training starts with. Its samples are put back: a stream that can be read once loses none."""
        samples = list(itertools.islice(self._epoch_0, self.config.batch_size))
        if not samples:
            raise DataError("no sample of two tokens or more came out of the data; check --dataset_name and --text_column")
        self._epoch_0 = itertools.chain(samples, self._epoch_0)
        return collate(samples, self.pad_id)

    def _evaluate(self) -> Fidelity:
        return evaluate(self.model, self.tokenizer, self.eval_samples, batch_size=8)

    def _evaluation_note(self) -> str:
        kind = "held-out" if self.heldout else "TRAINING (too little data to hold any out)"
        steps = "an unknown number of" if self.total_steps is None else str(self.total_steps)
        layers = format_layers(tuple(index for index, _ in npt_layers(self.model)))
        return f"training layers {layers} for {steps} steps; fidelity on {len(self.eval_samples)} {kind} samples"

    def _schedule_kind(self) -> str:
        return self.config.scheduler_type if self.total_steps is not None else "constant"

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def _bad_in_a_row(before: int, micro_batches: int, result: WindowResult[MicroBatch]) -> tuple[int, int]:
    """The longest row of refusals that this window made or went on with, and the row that stands at its end.

    A micro-batch that counted ends a row. In a window that was refused as a whole none counted.
    """
    if not result.applied:
        row = before + len(result.refusals)
        return row, row
    bad = {refusal.micro_batch for refusal in result.refusals}
    longest = row = before
    for index in range(micro_batches):
        row = row + 1 if index in bad else 0
        longest = max(longest, row)
    return longest, row
