"""The data of a run: sources, held-out samples, where training begins, and its windows.

A run reads one source, or two if replay data are mixed in against forgetting. An epoch ends with
the first source; the replay data repeat. A sample's source depends only on the seed and the
sample's number (npt/data/samples.py).

The closed-form start is fitted to the first samples of the first epoch. Training begins after them
unless too few would be left, because losses on fitted tokens are half as large as later ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import LlamaForCausalLM

from npt.adapters.converted import attached, npt_layers
from npt.adapters.fit import format_layers
from npt.batch import Batch, Sample
from npt.config import MAX_STEPS
from npt.data.encoding import no_sample, unused_columns
from npt.data.first_look import FirstLook, data_warnings
from npt.data.samples import Loader, Position, Samples, Window, windows, within
from npt.data.source import Given, Record, passed_over, records_from
from npt.errors import ConfigError, DataError
from npt.evaluation.heldout import evaluation_samples
from npt.runs.checkpoint import Checkpoint
from npt.runs.resume import check_same_data, data_fingerprint
from npt.train.setup import RunSetup
from npt.train.sources import FIRST, REPLAY, open_sources

RESIZING = frozenset({"batch_size", "gradient_accumulation_steps", "processes"})
"""Settings that change the number of samples in a window."""

LEFT_OUT = 0.1
"""Largest share of the training data to skip because the start was fitted to it."""


class RunData:
    """The training and evaluation data of a run; takes records as the Trainer does.

    Attributes:
        heldout: training leaves out all samples of evaluations.
        look: of the records that were searched for held-out samples.
        counted_from: steps made when the window size last changed, and how many micro-batches of
            the present size those steps equal.
        start: position at which training begins.
        start_samples: samples that the closed-form start is fitted to.
    """

    def __init__(self, setup: RunSetup, data: Given | None, eval_data: Given | None):
        self._setup = setup
        self.sources = open_sources(setup.data_config, self._given(data, "data"))
        named = self.sources if data is None else self.sources[1:]
        for source in named:
            line = passed_over(source.config)
            if line is not None:
                setup.say(line)
        evaluated = self._given(eval_data, "eval_data")
        self._check_stream(evaluated)
        self.look = FirstLook()
        leave_out = self._hold_out(evaluated)
        self.loader = self._make_loader(leave_out)
        if not self.eval_samples:  # there are samples, but every one has ids outside the vocabulary
            raise DataError(
                "no sample to evaluate on: every sample has ids outside the vocabulary"
                f" [0, {setup.model.config.vocab_size}); use the model's own tokenizer"
            )
        self.identity = {REPLAY: data_fingerprint(None)}
        self.identity |= {source.label: data_fingerprint(source.records) for source in self.sources}
        self.counted_from = {"steps": 0, "micro_batches": 0}
        self.start_samples: list[Sample] = []
        self.start = Position()
        checkpoint = setup.origin.checkpoint
        if checkpoint is not None:
            check_same_data(checkpoint.record["data"], self.identity)
            self.counted_from = self._last_resize(checkpoint)
            self.start = setup.origin.progress.position
        elif makes_start(setup.model):
            self.start_samples, after = self._first_samples()
            # losses on the samples of the start would look better than they are
            if self._leaves_enough(after):
                self.start = after
        self.total_steps = self.count_steps(self.start.begun)
        # the passes above looked ahead: count what training reads
        self.loader.samples.count_anew()
        self._coming = self.loader.batches(self.start)

    def windows(self) -> Generator[Window]:
        """Yield the run's windows until a signal; close it to end the thread that prepares them."""
        stop = partial(getattr, self._setup.stop, "number")
        return windows(self._coming, self._setup.window_size, stop)

    @property
    def reads_again(self) -> bool:
        """Whether training reads a text more than once."""
        config = self._setup.config
        if config.max_steps is None:
            return config.num_epochs > 1
        if not self.loader.samples.sized:
            return False
        # counting reads all records: only where training will read as many
        records: Any = self.sources[0].records
        fewest = min(len(records), self._setup.data_config.num_samples or len(records))
        drawn = config.max_steps * self._setup.window_size * config.batch_size
        return drawn > fewest and drawn > (self.loader.samples.count() or 0)

    def first_batch(self) -> Batch:
        """Return the first training batch without consuming it."""
        first = next(self._coming, None)
        if first is None:
            raise no_sample(self.loader.samples.counts)
        self._coming = itertools.chain([first], self._coming)
        return first[0]

    def note(self) -> str:
        """Return a line about layers, steps and evaluation samples."""
        steps = "an unknown number of" if self.total_steps is None else str(self.total_steps)
        layers = format_layers(tuple(index for index, _ in npt_layers(self._setup.model)))
        samples = f"{len(self.eval_samples)} held-out samples"
        if not self.heldout:
            samples = f"{len(self.eval_samples)} TRAINING samples (too little data to hold any out)"
        return f"training layers {layers} for {steps} steps; evaluating on {samples}"

    def warnings(self) -> Iterator[str]:
        """Yield warnings about the first source."""
        return data_warnings(self.look.copies.share, self.heldout)

    def columns_not_used(self) -> str:
        """Return a line about the columns of the first source; empty if all are used."""
        counts = self.look.counts
        columns = unused_columns(counts)
        if not columns:
            return ""
        return f"{FIRST}: columns not used: {columns} (of the first {counts.records:,})"

    def count_steps(self, begun: int) -> int | None:
        """Return the optimizer steps of a run that skips `begun` samples; None if unknown."""
        config = self._setup.config
        window = self._setup.window_size
        if config.max_steps is not None:
            return config.max_steps
        micro_batches = self.loader.count(MAX_STEPS * window, begun)
        if micro_batches is None:
            return None
        if micro_batches == MAX_STEPS * window:
            raise ConfigError(
                f"--num_epochs {config.num_epochs} makes {MAX_STEPS} steps or more; lower it"
            )
        left = max(0, micro_batches - self.counted_from["micro_batches"])
        return self.counted_from["steps"] + math.ceil(left / window)

    def _given(self, data: Given | None, what: str) -> Iterable[Record] | None:
        if data is None:
            return None
        # the split that is set is that of the run's own dataset
        config = replace(self._setup.data_config, dataset_split="train")
        records: Iterable[Record] = records_from(data, config, what)
        return records

    def _check_stream(self, eval_data: Iterable[Record] | None) -> None:
        records = self.sources[0].records
        setup = self._setup
        # to hold samples out, or to fit the start, costs a pass of its own
        rereads = eval_data is None or setup.config.num_epochs > 1 or makes_start(setup.model)
        if rereads and iter(records) is records:
            raise ConfigError(
                "a streamed generator can be read only once; pass a list, or pass eval_data and use"
                " --num_epochs 1 and --init random"
            )

    def _hold_out(self, eval_data: Iterable[Record] | None) -> list[bool]:
        """Choose the evaluation samples; return per source whether training must leave some out."""
        setup = self._setup
        first, *others = self.sources
        size = setup.config.eval_samples
        vocabulary = setup.model.config.vocab_size
        held_out = first.held_out if eval_data is None else eval_data
        self.eval_samples, self.heldout = evaluation_samples(
            first.records, setup.tokenizer, first.config, size, vocabulary, held_out, self.look
        )
        if eval_data is not None and not self.heldout:  # it would be training samples
            raise DataError(
                "eval_data has no sample to evaluate on: its records are empty, too short, or have"
                f" ids outside the vocabulary [0, {vocabulary}); fix them or omit eval_data"
            )
        # replay data always leave out one sample in twenty
        return [self.heldout and held_out is None] + [True] * len(others)

    def _make_loader(self, leave_out: list[bool]) -> Loader:
        """Return the loader of all sources, each in its own order."""
        setup = self._setup
        config = setup.config
        every = []
        for number, (source, hold_out) in enumerate(zip(self.sources, leave_out, strict=True)):
            try:
                samples = Samples(
                    source.records,
                    setup.tokenizer,
                    source.config,
                    seed=config.seed + number,
                    hold_out=hold_out,
                )
            except DataError as error:
                if source.label == FIRST:
                    raise
                raise DataError(f"{source.label}: {error}") from error
            every.append(samples)
        loader = Loader(
            every[0],
            config.batch_size,
            epochs=config.num_epochs if config.max_steps is None else math.inf,
            replay=every[1] if len(every) > 1 else None,
            share=self.sources[-1].share,
            seed=config.seed,
        )
        # pinned, so that the copy to the GPU does not block
        loader.pin = setup.device.type == "cuda"
        return loader

    def _first_samples(self) -> tuple[list[Sample], Position]:
        """Return the training samples to fit the start to, and the position after them."""
        first = []
        position = Position()
        left = self._setup.config.calibration_tokens
        vocabulary = self._setup.model.config.vocab_size
        # replay data only prevent forgetting, so the start is not fitted to them
        for sample, place in self.loader.samples.walk():
            position = Position(place, begun=position.begun + 1)
            for usable in within([sample], vocabulary):
                first.append(replace(usable, taught=None))  # the student reads no context
                left -= len(usable.input_ids)
            if left < 2:  # calibration stops here too
                break
        return first, position

    def _leaves_enough(self, after: Position) -> bool:
        """Return whether the run can skip the samples that its start was fitted to: LEFT_OUT of all
        at most. With `max_steps`, or a stream, one more sample is enough.
        """
        samples = self.loader.samples
        config = self._setup.config
        if not samples.sized or config.max_steps is not None:
            return next(samples.walk(after.place), None) is not None
        steps = self.count_steps(after.begun) or 0
        later = steps * self._setup.window_size * config.batch_size
        return after.begun <= LEFT_OUT * (after.begun + later)

    def _last_resize(self, checkpoint: Checkpoint) -> dict[str, int]:
        changed = self._setup.changed
        if RESIZING.isdisjoint(changed):
            return dict(checkpoint.record["counted_from"])
        progress = checkpoint.progress
        tried = progress.micro_batches
        if "batch_size" in changed:
            tried = math.ceil(progress.position.drawn / self._setup.config.batch_size)
        return {"steps": progress.step, "micro_batches": tried}


def makes_start(model: LlamaForCausalLM) -> bool:
    """Return whether the closed-form start is asked for and the adapters are untouched."""
    record = attached(model)
    return record.config.init == "calibrated" and record.random_start
