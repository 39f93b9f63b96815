"""The data of a run: sources, held-out samples, where training begins, and its windows."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from npt.adapters.attach import npt_layers
from npt.adapters.fit import format_layers
from npt.base.identity import BaseIdentity
from npt.data.batch import Batch, Sample
from npt.data.encoding import listed_columns
from npt.data.loader import Loaded, Loader, Other, Position, Prefetcher
from npt.data.samples import no_sample
from npt.data.source import Record
from npt.errors import ConfigError, DataError, kind_of
from npt.runs.data_fingerprint import check_same_data, data_fingerprint
from npt.runs.run_folder import RunFolder
from npt.train.calibrated_start import is_solved, leaves_enough, solved_on
from npt.train.run_checks import check_replay
from npt.train.run_context import Window
from npt.train.run_setup import RunSetup
from npt.train.sources import REPLAY, Source, evaluation_of, open_sources, per_source, samples_of

RESIZING = frozenset({"batch_size", "gradient_accumulation_steps", "processes"})
"""Settings that change how many samples a window has."""


class RunData:
    """What a run trains and is evaluated on.

    Args:
        setup: of the run, checked.
        data, eval_data, replay_data: records, as the Trainer takes them.

    Attributes:
        eval_samples: what is evaluated on. heldout: whether training leaves all of them out.
        start: position at which training begins. solved_on: the samples of a calibrated start.
        total_steps: of the run, None if unknown.
    """

    def __init__(
        self,
        setup: RunSetup,
        data: Iterable[Record] | None,
        eval_data: Iterable[Record] | None,
        replay_data: Iterable[Record] | None,
    ):
        self._setup = setup
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
        self.solved_on: list[Sample] = []
        self.start, self.total_steps = self._choose_start()
        self._coming: Iterator[Loaded] = self.loader.batches(self.start)

    def windows(self) -> Generator[Window]:
        """Yield windows of K batches for every process; closing ends the thread that prepares them.

        Windows continue from one epoch into the next; the last one of all may be shorter.
        """
        stop = self._setup.stop
        with contextlib.closing(
            Prefetcher(self._coming, stop=lambda: stop.number is not None)
        ) as ahead:
            stream = iter(ahead)
            while window := list(itertools.islice(stream, self._setup.window_size)):
                batches = [loaded.batch for loaded in window]
                yield Window(window[0].epoch, batches, window[-1].position)

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
        """Return a line that says what is trained, for how long, and on what it is evaluated."""
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
        """Report what became of the records: what was cut, left out or not used.

        Args:
            folder: for events.
            warn: prints a warning and keeps it.
            position: at its end.
        """
        turns = [position.other(number)[0] for number in range(len(self.loader.others))]
        read = [self.loader.samples, *(other.samples for other in self.loader.others)]
        for source, samples, begun_again in zip(
            self.sources, read, [position.epoch, *turns], strict=True
        ):
            counts, label = samples.counts, source.label
            share = {"share": source.share} if len(self.sources) > 1 else {}
            folder.event("data", source=label, **share, begun_again=begun_again, **counts.as_dict())
            lost = counts.lost()
            if lost:
                warn(f"{label}: of {counts.records:,} records read, {lost}")
            if counts.unused:
                self._setup.say(f"{label}: columns not used: {listed_columns(counts.unused)}")
            if begun_again and self._setup.data_config.dataset_mix is not None:
                self._setup.say(f"{label}: came to its end and was begun again {begun_again} times")

    def _check_stream(self, eval_data: Iterable[Record] | None) -> None:
        """Refuse to read a generator twice."""
        records, epochs = self.sources[0].records, self._setup.config.num_epochs
        if iter(records) is not records:
            return
        if epochs > 1:
            raise ConfigError(
                f"--num_epochs is {epochs}, but a streamed generator can be read once only; pass a"
                " list"
            )
        if eval_data is None:
            raise ConfigError(
                "a streamed generator can be read once only; pass eval_data=... to have something"
                " to evaluate on"
            )
        if self._setup.adapter_config.init == "calibrated":
            raise ConfigError(
                "--init calibrated reads training data before the run does, and a streamed"
                " generator can be read once only; pass a list"
            )

    def _hold_out(self, eval_data: Iterable[Record] | None) -> None:
        """Choose what to evaluate on, and what training must leave out."""
        setup, sources = self._setup, self.sources
        given = eval_data is not None
        from_ = [replace(sources[0], own=eval_data, evaluated=True)] if given else sources
        self.eval_samples, labels, held = evaluation_of(
            from_, setup.tokenizer, setup.config.eval_samples, setup.model.config.vocab_size
        )
        self.heldout = all(held)
        self.eval_labels = labels if len(set(labels)) > 1 else None
        self._not_held_out = [
            source.label for source, heldout in zip(from_, held, strict=True) if not heldout
        ]
        # one sample in twenty of what is replayed is left out in any case
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
        return Loader(
            samples,
            config.batch_size,
            setup.pad_id,
            side=setup.data_config.padding_side,
            epochs=config.num_epochs,
            others=[
                Other(other, source.share, source.label)
                for other, source in zip(others, sources[1:], strict=True)
            ],
            seed=config.seed,
            pin=setup.device.type == "cuda",
        )

    def _identify(self) -> dict[str, Any]:
        """Return fingerprints of the data; refuse a resumed run other data than it had."""
        mixed = self._setup.data_config.dataset_mix is not None
        identity = {} if mixed else {REPLAY: data_fingerprint(None)}
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
        if is_solved(setup.model):
            # Replayed data are there against forgetting; the start need not fit them.
            mixed = setup.data_config.dataset_mix is not None
            loader = self._make_loader(self.sources if mixed else self.sources[:1])
            self.solved_on, behind = solved_on(
                loader, setup.config.calibration_tokens, setup.model.config.vocab_size
            )
            steps = self.count_steps(behind.begun)
            if leaves_enough(loader.samples, behind, steps, setup.config, setup.window_size):
                return behind, steps
        return Position(), self.count_steps()

    def count_steps(self, begun: int = 0) -> int | None:
        """Return the optimizer steps of a run that begins after so many samples, if it is known."""
        c, size = self._setup.config, self._setup.window_size
        made, tried = self.counted_from["steps"], self.counted_from["micro_batches"]
        left = None if c.max_steps is None else max(0, c.max_steps - made)
        limit = None if left is None else tried + left * size
        micro_batches = self.loader.count(limit, begun)
        if micro_batches is None:
            return c.max_steps
        steps = made + math.ceil(max(0, micro_batches - tried) / size)
        return steps if c.max_steps is None else min(steps, c.max_steps)

    def _last_resize(self) -> dict[str, int]:
        """Return the steps made when the size of a window changed last, and how many micro-batches
        of the present size those were.
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
