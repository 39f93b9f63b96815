"""The data of a run: sources, held-out samples, where training begins, and its windows.

A run has one source, or with another mixed in against forgetting two. The end of the first is an
epoch's end; the other is repeated. Which source a sample is of is drawn from the seed and the
sample's number (npt/data/samples.py).

A calibrated start is fitted to the first samples of the first epoch, and training begins after
them, unless too little would be left: the losses of tokens that were fitted are half of later ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from transformers import LlamaForCausalLM

from npt.adapters.attach import at_random_start
from npt.adapters.converted import attached_config, npt_layers
from npt.adapters.fit import format_layers
from npt.config import MAX_STEPS, DataConfig
from npt.data.batch import Batch, Sample
from npt.data.encoding import filled, no_sample
from npt.data.samples import Loader, Position, Samples, Window, windows, within
from npt.data.source import READERS, Record, check_source, is_local, open_source, own_heldout
from npt.errors import ConfigError, DataError, kind_of
from npt.evaluation.heldout import evaluation_samples
from npt.runs.checkpoint import Checkpoint
from npt.runs.resume import check_same_data, data_fingerprint
from npt.train.setup import RunSetup

RESIZING = frozenset({"batch_size", "gradient_accumulation_steps", "processes"})
"""Settings that change how many samples a window has."""

LEFT_OUT = 0.1
"""Share of the training data that is left out, at most, because the start was fitted to it."""

FIRST, REPLAY = "data", "replay data"
"""The sources of a run, as messages name them."""


@dataclass(frozen=True)
class Source:
    """A data set of a run.

    Attributes:
        records: empty until it is opened.
        held_out: records of its own that nobody trains on.
    """

    label: str
    share: float
    config: DataConfig
    records: Iterable[Record] = ()
    held_out: Iterable[Record] | None = None


def sources_of(config: DataConfig) -> tuple[Source, ...]:
    """Return the sources that settings name, unopened."""
    plain, other = replace(config, replay_dataset=None, replay_ratio=None), config.replay_dataset
    if other is None:
        return (Source(FIRST, 1.0, plain),)
    here = other in READERS or is_local(other)
    split = "train" if here else config.dataset_split
    second = replace(
        plain, dataset_name=other, dataset_config=None, dataset_split=split, num_samples=None
    )
    share = config.replay_share
    return Source(FIRST, 1 - share, plain), Source(REPLAY, share, second)


def check_sources(config: DataConfig) -> None:
    """Check every source as `check_source` does."""
    for source in sources_of(config):
        check_source(source.config)


def open_sources(config: DataConfig, data: Iterable[Record] | None = None) -> list[Source]:
    """Open the sources of a run, each with columns that it has, or take `data` as the first."""
    first, *others = sources_of(config)
    if data is None:
        records = open_source(first.config)
        opened = [replace(first, records=records, held_out=own_heldout(first.config))]
    else:
        # a generator can be read once only
        kept = data if iter(data) is not data or config.streaming else list(data)
        opened = [replace(first, records=kept)]
    for other in others:
        records = open_source(other.config)
        columns = fitting_columns(other.config, records)
        opened.append(replace(other, records=records, config=columns))
    return opened


def fitting_columns(config: DataConfig, records: Iterable[Record]) -> DataConfig:
    """Return a run's settings without columns that the first record of a source lacks."""
    usual = DataConfig.text_column
    if config.prompt_column is None and config.text_column == usual:
        return config
    first = next(iter(records), None)
    if not isinstance(first, Mapping):
        return config
    first = filled(first)
    if config.prompt_column is not None and config.prompt_column not in first:
        config = replace(config, prompt_column=None, completion_column=None)
    if config.text_column not in first and usual in first:
        config = replace(config, text_column=usual)
    return config


class RunData:
    """The data that a run trains on and is evaluated on; records as the Trainer takes them.

    Attributes:
        heldout: training leaves all samples of evaluations out.
        counted_from: the steps made when the size of a window changed last, and the micro-batches
            of the present size that they make.
        start: the position at which training begins.
        start_samples: those of a calibrated start.
    """

    def __init__(
        self,
        setup: RunSetup,
        data: Iterable[Record] | None,
        eval_data: Iterable[Record] | None = None,
    ):
        self._setup = setup
        if isinstance(data, Mapping):
            names = ", ".join(map(str, data))
            raise DataError(f"the data are {kind_of(data)} with {names}; pass one of its entries")
        self.sources = open_sources(setup.data_config, data)
        self._check_stream(eval_data)
        leave_out = self._hold_out(eval_data)
        self.loader = self._make_loader(leave_out)
        if not self.eval_samples:  # training has some, so all of them were left out for their ids
            raise DataError(
                "no sample to evaluate on: every one has ids outside the vocabulary"
                f" [0, {setup.model.config.vocab_size}); is this the tokenizer of the model?"
            )
        self.identity = {REPLAY: data_fingerprint(None)}
        self.identity |= {source.label: data_fingerprint(source.records) for source in self.sources}
        self.counted_from = {"steps": 0, "micro_batches": 0}
        self.start_samples: list[Sample] = []
        self.start = Position()
        if (checkpoint := setup.origin.checkpoint) is not None:
            check_same_data(checkpoint.record["data"], self.identity)
            self.counted_from = self._last_resize(checkpoint)
            self.start = checkpoint.position
        elif makes_start(setup.model):
            self.start_samples, after = self._first_samples()
            if self._leaves_enough(after):
                self.start = after
        self.total_steps = self.count_steps(self.start.begun)
        self.loader.samples.count_anew()
        self._coming = self.loader.batches(self.start)

    def windows(self) -> Generator[Window]:
        """Yield the run's windows until a signal; closing ends the thread that prepares them."""
        stop = partial(getattr, self._setup.stop, "number")
        return windows(self._coming, self._setup.window_size, stop)

    def first_batch(self) -> Batch:
        """Return the batch that training starts with, and put it back."""
        first = next(self._coming, None)
        if first is None:
            raise no_sample(self.loader.samples.counts)
        self._coming = itertools.chain([first], self._coming)
        return first[0]

    def note(self) -> str:
        """Return a line on what is trained, for how long, and the data of its evaluations."""
        steps = "an unknown number of" if self.total_steps is None else str(self.total_steps)
        layers = format_layers(tuple(index for index, _ in npt_layers(self._setup.model)))
        kind = "held-out" if self.heldout else "TRAINING (too little data to hold any out)"
        return (
            f"training layers {layers} for {steps} steps; fidelity on {len(self.eval_samples)}"
            f" {kind} samples"
        )

    def count_steps(self, begun: int = 0) -> int | None:
        """Return the optimizer steps of a run that begins after so many samples, if it is known."""
        config, window = self._setup.config, self._setup.window_size
        if config.max_steps is not None:
            return config.max_steps
        micro_batches = self.loader.count(MAX_STEPS * window, begun)
        if micro_batches is None:
            return None
        if micro_batches == MAX_STEPS * window:
            raise ConfigError(
                f"--num_epochs is {config.num_epochs}, which makes {MAX_STEPS} steps and more;"
                " lower it"
            )
        left = max(0, micro_batches - self.counted_from["micro_batches"])
        return self.counted_from["steps"] + math.ceil(left / window)

    def _check_stream(self, eval_data: Iterable[Record] | None) -> None:
        records, epochs = self.sources[0].records, self._setup.config.num_epochs
        again = epochs > 1 or eval_data is None or makes_start(self._setup.model)
        if again and iter(records) is records:
            raise ConfigError(
                "a streamed generator can be read once only; pass a list, or eval_data, one epoch"
                " and --init random"
            )

    def _hold_out(self, eval_data: Iterable[Record] | None) -> list[bool]:
        """Choose evaluation samples; return of which sources training must leave some out."""
        setup, first, others = self._setup, self.sources[0], self.sources[1:]
        size, vocabulary = setup.config.eval_samples, setup.model.config.vocab_size
        held_out = first.held_out if eval_data is None else eval_data
        self.eval_samples, self.heldout = evaluation_samples(
            first.records, setup.tokenizer, first.config, size, vocabulary, held_out
        )
        if eval_data is not None and not self.heldout:  # it would be training samples
            raise DataError(
                "eval_data has no sample to evaluate on: its records are empty, too short, or have"
                f" ids outside the vocabulary [0, {vocabulary}); mend them, or leave eval_data out"
            )
        # one sample in twenty of the replayed data is left out in any case
        return [self.heldout and held_out is None, *(True for _ in others)]

    def _make_loader(self, leave_out: list[bool]) -> Loader:
        """Return the loader of all sources, each in an order of its own."""
        setup, config, every = self._setup, self._setup.config, list[Samples]()
        for number, (source, hold_out) in enumerate(zip(self.sources, leave_out, strict=True)):
            part, seed = (source.records, setup.tokenizer, source.config), config.seed + number
            try:
                every.append(Samples(*part, seed=seed, hold_out=hold_out))
            except DataError as error:
                if source.label == FIRST:
                    raise
                raise DataError(f"{source.label}: {error}") from error
        loader = Loader(
            every[0],
            config.batch_size,
            epochs=config.num_epochs if config.max_steps is None else math.inf,
            replay=every[1] if len(every) > 1 else None,
            share=self.sources[-1].share,
            seed=config.seed,
        )
        loader.pin = setup.device.type == "cuda"
        return loader

    def _first_samples(self) -> tuple[list[Sample], Position]:
        """Return the samples of the first epoch that the start is fitted to, of which none is held
        out, and the position after them.
        """
        first: list[Sample] = []
        position, left = Position(), self._setup.config.calibration_tokens
        # replayed data are there against forgetting; the start need not fit them
        for sample, place in self.loader.samples.walk():
            position = Position(place, begun=position.begun + 1)
            for usable in within([sample], self._setup.model.config.vocab_size):
                first.append(usable)
                left -= len(usable.input_ids)
            if left < 2:  # as calibration stops
                break
        return first, position

    def _leaves_enough(self, after: Position) -> bool:
        """Return whether the run can begin after the samples that its start was fitted to: a tenth
        of them is left out at most. With `max_steps`, or a stream, one more sample is enough.
        """
        samples, batch_size = self.loader.samples, self._setup.config.batch_size
        if not samples.sized or self._setup.config.max_steps is not None:
            return next(samples.walk(after.place), None) is not None
        later = (self.count_steps(after.begun) or 0) * self._setup.window_size
        return after.begun <= LEFT_OUT * (after.begun + later * batch_size)

    def _last_resize(self, checkpoint: Checkpoint) -> dict[str, int]:
        changed = self._setup.changed
        if not RESIZING & set(changed):
            return dict(checkpoint.record["counted_from"])
        tried = checkpoint.record["micro_batches"]
        if "batch_size" in changed:
            tried = math.ceil(checkpoint.position.drawn / self._setup.config.batch_size)
        return {"steps": checkpoint.step, "micro_batches": tried}


def makes_start(model: LlamaForCausalLM) -> bool:
    """Return whether a run on this model makes its start: asked for, and adapters untouched."""
    return attached_config(model).init == "calibrated" and at_random_start(model)
