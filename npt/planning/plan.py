"""What a run will take in memory, before it is begun, and how many of its samples can be computed
at once.

The activations are counted on hollow models of a few layers, through the very strategies,
evaluation and losses that would run (npt/planning/fake_model.py); what each further layer adds is
the difference of two counts. All rows are taken to be full, which is what has to fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from npt.config import TrainConfig, unset_of_end_to_end
from npt.data.batch import Batch
from npt.distill.strategies import drive
from npt.errors import ConfigError
from npt.evaluation.evaluate import MODES
from npt.evaluation.layers import BatchErrors
from npt.evaluation.metrics import compare_pairs
from npt.planning.fake_model import Hollow, bytes_of
from npt.planning.memory import MemoryPlan, Term, adapter_numbers, shown, state_terms
from npt.planning.workload import Depth, Workload
from npt.step.gradient_window import IN_FLIGHT

MASK_BYTES = 1 + 4
"""Of a pair of tokens: whether one attends to the other, and the number that is added to its score.
"""

Run = Callable[[Any, Any, Batch], object]
"""What is counted: (model, teacher or None, batch) -> anything."""


class Planner:
    """Counts what a workload takes; what was counted once is not counted again.

    Args:
        workload: the run.
        base_bytes: of the base that is loaded, where it is; else they are counted.
        counts: of another planner for the same model and device, which is not repeated and added
            to.
    """

    def __init__(
        self,
        workload: Workload,
        base_bytes: int | None = None,
        counts: dict[Any, int] | None = None,
    ):
        self.workload = workload
        self._hollow = Hollow(workload.device)
        self._models: dict[tuple[Depth, bool], Any] = {}
        self.counts: dict[Any, int] = {} if counts is None else counts
        w = workload
        base = base_bytes if base_bytes is not None else self._base_bytes(w.quantization, w.stored)
        self._fixed = [
            Term("base" if w.quantization is None else f"base, {w.quantization.upper()}", base)
        ]
        if w.teacher is not None:
            self._fixed.append(Term("teacher of its own", self._base_bytes(None, w.teacher)))
        self._fixed += state_terms(adapter_numbers(w.shape, w.form), in_flight=_in_flight(w))

    def plan(
        self, samples_at_once: int | None = None, evaluated_at_once: int | None = None
    ) -> MemoryPlan:
        """The memory of the run.

        Args:
            samples_at_once: of a micro-batch, default all of it.
            evaluated_at_once: of an evaluation, default as many.
        """
        c = self.workload.training
        samples = c.batch_size if samples_at_once is None else samples_at_once
        evaluated = samples if evaluated_at_once is None else evaluated_at_once
        evaluated = min(evaluated, c.eval_samples)
        terms = [
            *self._fixed,
            *self._mask(samples, evaluated),
            *self._training(samples),
            *self._evaluation(evaluated),
        ]
        return MemoryPlan(tuple(terms), samples, evaluated)

    def fitting(self, limit: int) -> MemoryPlan:
        """The plan with the most samples at once whose peak stays below a limit.

        A micro-batch is parted as evenly as can be, so that the passes are as few and none is
        larger than it has to be.

        Raises:
            ConfigError: one sample does not fit; what takes most is named.
        """
        batch_size = self.workload.training.batch_size
        samples = _largest(batch_size, lambda n: self._training_peak(n) <= limit)
        evaluated = _largest(batch_size, lambda n: self._evaluation_peak(n) <= limit)
        if not samples or not evaluated:
            plan = self.plan(1)
            raise ConfigError(
                f"--max_memory is {self.workload.training.max_memory}, but one sample of"
                f" {self.workload.length} tokens at a time is predicted to take {shown(plan.peak)}"
                f" (in the {plan.phase}), most of it {plan.largest.name}"
                f" ({shown(plan.largest.bytes)}); see npt doctor --plan for what would fit"
            )
        samples = -(-batch_size // -(-batch_size // samples))
        return self.plan(samples, min(samples, evaluated))

    def peak_within(self, limit: int) -> int | None:
        """The peak with one sample at a time, None if it is above a limit: what costs least to
        count comes first and may say so alone.
        """
        known = [*self._fixed, *self._mask(1, 1)]
        parts = (
            list,
            lambda: [self._logits_of_evaluation(1)],
            partial(self._training, 1, parted=False),
            partial(self._evaluation, 1),
        )
        peak = 0
        for part in parts:
            peak = max(peak, MemoryPlan((*known, *part()), 1, 1).peak)
            if peak > limit:
                return None
        return peak

    def _mask(self, samples: int, evaluated: int) -> list[Term]:
        """[B, 1, T, T] bool, which there is where rows are padded or packed, and the fp32 that a
        layer's attention makes of it.
        """
        each, name = MASK_BYTES * self.workload.length**2, "attention mask of padded rows"
        return [
            Term(name, samples * each, ("micro-batch",)),
            Term(name, evaluated * each, ("evaluation",)),
        ]

    def _training_peak(self, samples: int) -> int:
        """Of micro-batches and steps with so many samples at once; no evaluation is counted for it,
        nor the logits by themselves.
        """
        return self._peak_of(
            samples, [*self._mask(samples, 0), *self._training(samples, parted=False)]
        )

    def _evaluation_peak(self, samples: int) -> int:
        """Of evaluations with so many at once, the state beside them; no training is counted for
        it.
        """
        samples = min(samples, self.workload.training.eval_samples)
        return self._peak_of(samples, [*self._mask(0, samples), *self._evaluation(samples)])

    def _peak_of(self, samples: int, terms: list[Term]) -> int:
        return MemoryPlan((*self._fixed, *terms), samples, samples).peak

    def _training(self, samples: int, parted: bool = True) -> list[Term]:
        """Of the stage that takes most. parted: the logits by themselves, which is counts more."""
        found = [
            self._stage(config, samples, parted) for _, config in self.workload.stages.values()
        ]
        return max(found, key=lambda terms: sum(term.bytes for term in terms))

    def _stage(self, config: TrainConfig, samples: int, parted: bool) -> list[Term]:
        # what is hollow is not compiled, and takes no less
        config = replace(config, layer_weights="uniform", compile=False)
        depth, logits = self.workload.depth, 0
        if not config.logit_kl_weight:
            depth = replace(depth, behind=0)  # nothing runs there
        layer, kept = self._by_depth(partial(_drive, config), ("train", config), samples, depth)
        if config.logit_kl_weight and parted:
            other = replace(
                config,
                hidden_weight=config.hidden_weight or 1.0,
                logit_kl_weight=0.0,
                logit_loss="kl",
                logit_temperature=1.0,
                jsd_weight=0.5,
            )
            without = sum(
                self._by_depth(
                    partial(_drive, other), ("train", other), samples, replace(depth, behind=0)
                )
            )
            logits = max(0, layer - max(0, without - kept))
            layer -= logits
        micro = ("micro-batch",)
        terms = [
            Term("activations, one layer at a time", layer, micro),
            Term("activations kept of every layer", kept, micro),
        ]
        return [
            *terms,
            *([Term("logits", logits, micro)] if config.logit_kl_weight and parted else []),
        ]

    def _evaluation(self, samples: int) -> list[Term]:
        """The forwards of a batch, which keep the teacher's states, or the comparison of its logits
        behind them.
        """
        phase = ("evaluation",)
        layer, kept = self._by_depth(_forwards, "forwards", samples, self.workload.depth)
        logits = self._logits_of_evaluation(samples)
        if logits.bytes > layer + kept:
            return [logits]
        return [
            Term("evaluation, one layer at a time", layer, phase),
            Term("evaluation, states of every layer", kept, phase),
        ]

    def _logits_of_evaluation(self, samples: int) -> Term:
        count = self._count(
            partial(_comparison, self._hollow), "comparison", samples, Depth(0, 1, 0, 0)
        )
        return Term("logits of an evaluation", count, ("evaluation",))

    def _by_depth(self, run: Run, name: Any, samples: int, depth: Depth) -> tuple[int, int]:
        """(what does not grow with the layers, what they all add) of a run, from counts on small
        models.
        """
        most = Depth(1, 2, 1, 1)
        small = Depth(
            *(min(one, other) for one, other in zip(_numbers(depth), _numbers(most), strict=True))
        )
        counted = self._count(run, name, samples, small)
        total, kept = counted, 0
        for part in ("converted", "between", "behind"):
            there, wanted = getattr(small, part), getattr(depth, part)
            if wanted > there:
                slope = (
                    self._count(run, name, samples, replace(small, **{part: there + 1})) - counted
                )
                total += (wanted - there) * slope
                kept += wanted * slope
        kept = min(kept, total)
        return total - kept, kept

    def _count(self, run: Run, name: Any, samples: int, depth: Depth) -> int:
        w = self.workload
        adapter = w.small_adapter(depth, max(w.ranks))
        key = (name, samples, depth, w.length, w.quantization, w.stored, w.teacher, adapter)
        if key not in self.counts:
            model, teacher = self._model(depth, False), None
            if w.teacher is not None:
                teacher = self._model(depth, True)
            batch = self._hollow.batch(samples, w.length)
            self.counts[key] = self._hollow.peak_of(lambda: run(model, teacher, batch))
        return self.counts[key]

    def _model(self, depth: Depth, teacher: bool) -> Any:
        w = self.workload
        if (depth, teacher) not in self._models:
            config = w.small_config(depth.layers)
            if teacher:
                assert w.teacher is not None
                attention = w.teacher_attention or w.attn_implementation
                made = self._hollow.base(
                    config, None, w.teacher, upcast=True, attn_implementation=attention
                )
            else:
                made = self._hollow.base(
                    config,
                    w.quantization,
                    w.stored,
                    w.small_adapter(depth, max(w.ranks)),
                    attn_implementation=w.attn_implementation,
                    compute_dtype=w.compute_dtype,
                )
            self._models[depth, teacher] = made
        return self._models[depth, teacher]

    def _base_bytes(self, quantization: str | None, stored: torch.dtype) -> int:
        one, two = (
            bytes_of(self._hollow.base(self.workload.small_config(n), quantization, stored))
            for n in (1, 2)
        )
        return one + (self.workload.config.num_hidden_layers - 1) * (two - one)


def _in_flight(workload: Workload) -> int:
    """Steps at most whose state before them is kept because their results are not read yet
    (npt/step/gradient_window.py).
    """
    if workload.device.type != "cuda":
        return 0
    return 1 if workload.training.skip_spikes or workload.processes > 1 else IN_FLIGHT


def _drive(config: TrainConfig, model: Any, teacher: Any, batch: Batch) -> object:
    return drive(model, batch, config, teacher)


def _forwards(model: Any, teacher: Any, batch: Batch) -> object:
    """What `npt.evaluate` does with a batch up to its logits; without padding, whose mask it would
    look at.
    """
    errors = BatchErrors(model, batch)
    hidden = []
    with torch.no_grad():
        for mode in MODES:
            with errors.watching(mode):
                hidden.append(
                    model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
                )
    return errors, hidden


def _comparison(hollow: Hollow, model: Any, teacher: Any, batch: Batch) -> object:
    """What it does with the states behind the last layer."""
    rows = len(batch.input_ids) * (batch.input_ids.shape[1] - 1)
    with torch.no_grad():
        hidden: dict[str, torch.Tensor] = {
            mode: torch.empty(rows, model.config.hidden_size, device=hollow.device)
            for mode in MODES
        }
        targets = hollow.tensor(rows, dtype=torch.int64)
        heads = dict.fromkeys(hidden, model.lm_head)
        return compare_pairs(
            hidden, heads, targets, model.config.vocab_size, [(mode, "teacher") for mode in MODES]
        )


def _numbers(depth: Depth) -> tuple[int, int, int, int]:
    return depth.before, depth.converted, depth.between, depth.behind


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to `most` that fits, 0 where none does; what fits stays fitting
    below.
    """
    if fits(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def remedies(
    workload: Workload, limit: int, counts: dict[Any, int] | None = None
) -> list[tuple[str, int]]:
    """Settings any one of which would bring the peak below a limit, with one sample at a time, and
    what it would then be.

    Args:
        workload: that does not fit.
        limit: bytes.
        counts: of the planner that found this out.
    """
    counts = {} if counts is None else counts
    tried = _less_memory(workload, limit)
    kinds: dict[str, list[tuple[str, Workload]]] = {}
    for flag, other in tried:
        kinds.setdefault(flag.split(" ")[0] if flag[:2] == "--" else flag, []).append((flag, other))

    def within(other: Workload) -> int | None:
        return Planner(other, counts=counts).peak_within(limit)

    found: dict[str, int] = {}
    for (mildest, least), *others in kinds.values():  # the mildest that does is enough
        peak = within(least)
        if peak is not None:
            found[mildest] = peak
        # where the strongest does not do, no other does
        elif others and (most := within(others[-1][1])) is not None:
            between = ((flag, within(other)) for flag, other in others[:-1])
            flag, peak = next(
                ((flag, less) for flag, less in between if less is not None), (others[-1][0], most)
            )
            found[flag] = peak
    return [(flag, found[flag]) for flag, _ in tried if flag in found]


def _less_memory(workload: Workload, limit: int) -> list[tuple[str, Workload]]:
    """Settings that take less, and what they make of the run; of a kind the mildest first."""
    w, training = workload, workload.training
    tried: list[tuple[str, Workload]] = []
    if training.batch_size > 1:
        tried.append((f"--max_memory {limit}", w))
    if w.quantization is None:
        tried.append(("--use_quantization", replace(w, quantization="nf4", stored=torch.bfloat16)))
    # which has nothing to learn from its own base
    if w.teacher is not None and w.adapter.residual != "keep":
        tried.append(("no --teacher_precision", replace(w, teacher=None)))
    if "end_to_end" in w.stages and not training.gradient_checkpointing:
        tried.append(
            (
                "--gradient_checkpointing",
                replace(w, training=replace(training, gradient_checkpointing=True)),
            )
        )
    if any(name != "local" for name in w.stages) and training.hidden_weight:
        local = replace(training, strategy="local", stages=None, **unset_of_end_to_end())
        tried.append(("--strategy local", replace(w, training=local)))
    for share in (2, 4, 8):
        if w.length >= 64 * share:
            tried.append(
                (f"--max_length {w.length // share}", replace(w, length=w.length // share))
            )
        budget = training.rank_budget
        if w.approximate and budget is not None and budget // share >= w.depth.converted:
            tried.append(
                (
                    f"--rank_budget {budget // share}",
                    replace(w, training=replace(training, rank_budget=budget // share)),
                )
            )
        elif not w.approximate and w.adapter.ranks is None and w.adapter.rank >= share:
            less = replace(w.adapter, rank=w.adapter.rank // share)
            tried.append((f"--adapter_rank {less.rank}", replace(w, adapter=less)))
    # one for each layer that is converted now
    listed = w.adapter.ranks is not None or training.layer_weight_list is not None
    if w.depth.converted > w.config.num_hidden_layers // 2 + 1 and not listed:
        tried.append(
            ("--layers upper_half", replace(w, adapter=replace(w.adapter, layers="upper_half")))
        )
    return tried
