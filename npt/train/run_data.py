"""The data of a run: sources, held-out samples, where training begins, and its windows.

A calibrated start is fitted to the first samples of the first epoch, and training begins after
them: its first losses would else be those of tokens that were fitted, half of what later ones are.
If too little would be left, training begins with them all the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from transformers import LlamaForCausalLM

from npt.adapters.attach import at_random_start
from npt.adapters.converted import attached_config, npt_layers
from npt.adapters.fit import format_layers
from npt.base.identity import BaseIdentity
from npt.config import MAX_STEPS
from npt.data.batch import Batch, Sample
from npt.data.loader import Loaded, Loader, Other, Position
from npt.data.report import listed_columns, lost, no_sample
from npt.data.samples import Samples, within
from npt.data.source import Record
from npt.errors import ConfigError, DataError, kind_of
from npt.runs.resume import check_same_data, data_fingerprint
from npt.runs.run_folder import RunFolder
from npt.train.loop import windows_of
from npt.train.run_checks import check_replay
from npt.train.run_context import Window
from npt.train.run_setup import RunSetup
from npt.train.sources import REPLAY, Source, evaluation_of, open_sources, per_source, samples_of

RESIZING = frozenset({"batch_size", "gradient_accumulation_steps", "processes"})
"""Settings that change how many samples a window has."""

LEFT_OUT = 0.1
"""Share of the training data that is left out, at most, because the start was fitted to it."""


class RunData:
    """The data that a run trains on and is evaluated on.

    Args:
        setup: of the run, checked.
        data: records, as the Trainer takes them.

    Attributes:
        eval_samples: for evaluations. heldout: training leaves all of them out.
        start: position at which training begins. start_samples: the samples of a calibrated start.
        total_steps: of the run, None if unknown.
    """

    def __init__(self, setup: RunSetup, data: Iterable[Record] | None):
        self._setup = setup
        eval_data, replay_data = setup.options.eval_data, setup.options.replay_data
        check_replay(setup.data_config, replay_data is not None)
        if isinstance(data, Mapping):
            raise DataError(
                f"the data are {kind_of(data)} with {', '.join(map(str, data))}; pass one of its"
                " entries"
            )
        self.sources = open_sources(setup.data_config, data, replay_data)
        self._check_stream(eval_data)
        self._hold_out(eval_data)
        self.loader = self._make_loader(self.sources)
        self.identity = self._identify()
        self.counted_from = self._last_resize()
        self.start_samples: list[Sample] = []
        self.start, self.total_steps = self._choose_start()
        self._coming: Iterator[Loaded] = self.loader.batches(self.start)

    def windows(self) -> Generator[Window]:
        """Return the windows of the run, each of K batches for every process."""
        return windows_of(self._coming, self._setup.window_size, self._setup.stop)

    def first_batch(self) -> Batch:
        """Return the batch that training starts with, and put it back."""
        first = next(self._coming, None)
        if first is None:
            raise no_sample(self.loader.samples.counts)
        self._coming = itertools.chain([first], self._coming)
        return first.batch

    def agree(self, base: BaseIdentity) -> None:
        """Refuse processes whose model, settings or data differ."""
        facts = {"steps": self.total_steps, "evaluation samples": len(self.eval_samples)}
        self._setup.agree(base, {**self.identity, **facts})

    def note(self) -> str:
        """Return a line on what is trained, for how long, and the data of its evaluations."""
        kind = "held-out" if self.heldout else "TRAINING (too little data to hold any out)"
        of = "" if self.eval_labels is None else f" ({per_source(self.eval_labels)})"
        if of and not self.heldout:
            names = ", ".join(self._not_held_out)
            kind = f"partly TRAINING (too little of {names} to hold any out)"
        steps = "an unknown number of" if self.total_steps is None else str(self.total_steps)
        layers = format_layers(tuple(index for index, _ in npt_layers(self._setup.model)))
        return (
            f"training layers {layers} for {steps} steps; fidelity on {len(self.eval_samples)}"
            f" {kind} samples{of}"
        )

    def report(self, folder: RunFolder, warn: Callable[[str], None], position: Position) -> None:
        """Report which records were cut, left out or not used, at the run's end."""
        turns = [position.other(number)[0] for number in range(len(self.loader.others))]
        read = [self.loader.samples, *(other.samples for other in self.loader.others)]
        for source, samples, begun_again in zip(
            self.sources, read, [position.epoch, *turns], strict=True
        ):
            counts, label = samples.counts, source.label
            share = {"share": source.share} if len(self.sources) > 1 else {}
            folder.event("data", source=label, **share, begun_again=begun_again, **counts.as_dict())
            left_out = lost(counts)
            if left_out:
                warn(f"{label}: of {counts.records:,} records read, {left_out}")
            if counts.unused:
                self._setup.say(f"{label}: columns not used: {listed_columns(counts.unused)}")
            if begun_again and self._setup.config.max_steps is not None:
                self._setup.say(f"{label}: came to its end and was begun again {begun_again} times")

    def count_steps(self, begun: int = 0) -> int | None:
        """Return the optimizer steps of a run that begins after so many samples, if it is known."""
        config, most = self._setup.config, MAX_STEPS * self._setup.window_size
        if config.max_steps is not None:
            return config.max_steps
        micro_batches = self.loader.count(most, begun)
        if micro_batches is None:
            return None
        if micro_batches == most:
            raise ConfigError(
                f"--num_epochs is {config.num_epochs}, which makes {MAX_STEPS} steps and more;"
                " lower it"
            )
        made, tried = self.counted_from["steps"], self.counted_from["micro_batches"]
        return made + math.ceil(max(0, micro_batches - tried) / self._setup.window_size)

    def _check_stream(self, eval_data: Iterable[Record] | None) -> None:
        """Refuse to read a generator twice."""
        records, epochs = self.sources[0].records, self._setup.config.num_epochs
        if iter(records) is not records:
            return
        once = "a streamed generator can be read once only"
        if epochs > 1:
            raise ConfigError(f"--num_epochs is {epochs}, but {once}; pass a list")
        if eval_data is None:
            raise ConfigError(f"{once}; pass eval_data=... to have something to evaluate on")
        if self._setup.adapter_config.init == "calibrated":
            raise ConfigError(
                "--init calibrated reads training data before the run does, and"
                f" {once}; pass a list"
            )

    def _hold_out(self, eval_data: Iterable[Record] | None) -> None:
        """Choose evaluation samples, and whether training must leave some out."""
        setup, sources = self._setup, self.sources
        given = eval_data is not None
        from_ = [replace(sources[0], own=eval_data, evaluated=True)] if given else sources
        self.eval_samples, labels, held = evaluation_of(
            from_, setup.tokenizer, setup.config.eval_samples, setup.model.config.vocab_size
        )
        if given and not all(held):  # training samples would have been taken in their place
            raise DataError(
                "eval_data has no sample to evaluate on: its records are empty, too short, or have"
                f" ids outside the vocabulary [0, {setup.model.config.vocab_size}); mend them, or"
                " leave eval_data out"
            )
        self.heldout = all(held)
        self.eval_labels = labels if len(set(labels)) > 1 else None
        self._not_held_out = [
            source.label for source, heldout in zip(from_, held, strict=True) if not heldout
        ]
        # one sample in twenty of the replayed data is left out in any case
        self._leave_out = [not source.evaluated for source in sources]
        if not given:
            self._leave_out = [
                heldout and source.own is None
                for source, heldout in zip(sources, held, strict=True)
            ]

    def _make_loader(self, sources: list[Source]) -> Loader:
        """Return a loader over the first sources, of which nothing was read yet."""
        setup, config = self._setup, self._setup.config
        leave_out = self._leave_out[: len(sources)]
        samples, *others = samples_of(sources, setup.tokenizer, config.seed, leave_out)
        loader = Loader(
            samples,
            config.batch_size,
            epochs=config.num_epochs,
            endless=config.max_steps is not None,
            others=[
                Other(other, source.share, source.label)
                for other, source in zip(others, sources[1:], strict=True)
            ],
            seed=config.seed,
        )
        loader.pin = setup.device.type == "cuda"
        return loader

    def _identify(self) -> dict[str, Any]:
        """Return fingerprints of the data; refuse a resumed run other data than it had."""
        identity = {REPLAY: data_fingerprint(None)}
        identity |= {source.label: data_fingerprint(source.records) for source in self.sources}
        checkpoint = self._setup.checkpoint
        if checkpoint is not None:
            check_same_data(checkpoint.record["data"], identity)
        return identity

    def _choose_start(self) -> tuple[Position, int | None]:
        """Return where in the data this process begins, and how many steps the run then has."""
        setup = self._setup
        if setup.checkpoint is not None:
            position = setup.checkpoint.position
            return position, self.count_steps(position.begun)
        if makes_start(setup.model):
            # Replayed data are there against forgetting; the start need not fit them.
            loader = self._make_loader(self.sources[:1])
            self.start_samples, after = _first_samples(
                loader, setup.config.calibration_tokens, setup.model.config.vocab_size
            )
            steps = self.count_steps(after.begun)
            if self._leaves_enough(loader.samples, after, steps):
                return after, steps
        return Position(), self.count_steps()

    def _leaves_enough(self, samples: Samples, after: Position, steps: int | None) -> bool:
        """Return whether a run can begin after the samples that its start was fitted to.

        `num_epochs` hold `max_steps` without them, or a tenth of the samples is left out at most.
        """
        config = self._setup.config
        if not samples.sized:  # a stream is long, if it continues at all
            return next(samples.walk(0, after.place), None) is not None
        assert steps is not None
        later = steps * self._setup.window_size
        if config.max_steps is not None and self.loader.count(later, after.begun) == later:
            return True
        return after.begun <= LEFT_OUT * (after.begun + later * config.batch_size)

    def _last_resize(self) -> dict[str, int]:
        """Return the steps made when the size of a window changed last, and the micro-batches of
        the present size that they make.
        """
        checkpoint, changed = self._setup.checkpoint, self._setup.changed
        if checkpoint is None:
            return {"steps": 0, "micro_batches": 0}
        if not RESIZING & set(changed):
            return dict(checkpoint.record["counted_from"])
        tried = checkpoint.record["micro_batches"]
        if "batch_size" in changed:
            tried = math.ceil(checkpoint.position.drawn / self._setup.config.batch_size)
        return {"steps": checkpoint.step, "micro_batches": tried}


def makes_start(model: LlamaForCausalLM) -> bool:
    """Return whether a run on this model makes its start: asked for, and adapters untouched."""
    return attached_config(model).init == "calibrated" and at_random_start(model)


def _first_samples(loader: Loader, tokens: int, vocab_size: int) -> tuple[list[Sample], Position]:
    """Return the first samples of the first epoch, of so many tokens, and the position after them.

    Held-out samples are never among them, and equal settings and seeds give equal ones. The loader
    is not the run's own, whose place must not move.
    """
    found: list[Sample] = []
    position, left = Position(), tokens
    for (sample,), after in loader.groups(Position(), 1):
        if after.epoch:
            break
        position = replace(after, drawn=0, begun=position.begun + (after.place != position.place))
        for usable in within([sample], vocab_size):
            found.append(usable)
            left -= len(usable.input_ids)
        if left < 2:  # as calibration stops
            break
    return found, position
