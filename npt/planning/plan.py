"""The memory of a run before it is begun, and how many of its samples fit at once.

The activations are counted on fake models of a few layers, through the very strategies, evaluation
and losses that would run (npt/planning/fake_device.py); what each further layer adds is the
difference of two counts. All rows are taken to be full, since that must fit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import astuple, replace
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
from npt.planning.fake_device import FakeDevice, bytes_of
from npt.planning.memory import MemoryPlan, Term, shown, state_terms
from npt.planning.workload import Depth, Workload
from npt.step.gradient_window import IN_FLIGHT

MASK_BYTES = 1 + 4
"""Of a pair of tokens: whether one attends to the other, and the number added to its score."""

MOST = Depth(1, 2, 1, 1)
"""Layers of the models that are counted: what more of them add is carried on from these."""

Run = Callable[[Any, Any, Batch], object]
"""What is counted: (model, teacher or None, batch) -> anything."""


class Planner:
    """Counts the memory of a workload; nothing is counted twice. base_bytes: of a base that is
    loaded. counts: of another planner for the same model and device, which are added to.
    """

    def __init__(
        self,
        workload: Workload,
        base_bytes: int | None = None,
        counts: dict[Any, int] | None = None,
    ):
        self.workload = w = workload
        # a card that is not here is counted with the kernels of the CPU
        here = w.device.type != "cuda" or torch.cuda.is_available()
        self._device = FakeDevice(w.device if here else "cpu")
        self._models: dict[tuple[Depth, bool], Any] = {}
        self.counts: dict[Any, int] = {} if counts is None else counts
        base = base_bytes if base_bytes is not None else self._base_bytes(w.quantization, w.stored)
        name = "base" if w.quantization is None else f"base, {w.quantization.upper()}"
        self._fixed = [Term(name, base)]
        if w.teacher is not None:
            self._fixed.append(Term("teacher of its own", self._base_bytes(None, w.teacher)))
        in_flight = 0
        if w.device.type == "cuda":  # results are read late (npt/step/gradient_window.py)
            in_flight = 1 if w.training.skip_spikes or w.processes > 1 else IN_FLIGHT
        self._fixed += state_terms(w.shape.adapter_numbers(w.form), in_flight=in_flight)

    def plan(
        self, samples_at_once: int | None = None, evaluated_at_once: int | None = None
    ) -> MemoryPlan:
        """Return the memory of the run, by default with all samples of a micro-batch at once, and
        as many evaluated.
        """
        c = self.workload.training
        samples = c.batch_size if samples_at_once is None else samples_at_once
        evaluated = samples if evaluated_at_once is None else evaluated_at_once
        evaluated = min(evaluated, c.eval_samples)
        terms = [*self._mask(samples, evaluated), *self._training(samples)]
        terms += self._evaluation(evaluated)
        return MemoryPlan((*self._fixed, *terms), samples, evaluated)

    def fitting(self, limit: int) -> MemoryPlan:
        """Return the plan with the most samples at once whose peak stays below a limit.

        A micro-batch is split evenly, so that the passes are few and none is larger than needed.

        Raises:
            ConfigError: one sample does not fit; the largest term is named.
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
        """Return the peak with one sample at a time, None if it is above a limit; what costs least
        to count comes first and may say so alone.
        """
        peak, mask = 0, self._mask(1, 1)
        for count in (
            list,
            lambda: [self._logits_of_evaluation(1)],
            partial(self._training, 1, split=False),
            partial(self._evaluation, 1),
        ):
            peak = max(peak, self._peak_of([*mask, *count()]))
            if peak > limit:
                return None
        return peak

    def _mask(self, samples: int, evaluated: int) -> list[Term]:
        """[B, 1, T, T] bool of padded or packed rows, and a layer's attention's fp32 of it."""
        each, name = MASK_BYTES * self.workload.length**2, "attention mask of padded rows"
        return [
            Term(name, samples * each, ("micro-batch",)),
            Term(name, evaluated * each, ("evaluation",)),
        ]

    def _training_peak(self, samples: int) -> int:
        """Return the peak of micro-batches and steps with so many samples at once."""
        return self._peak_of([*self._mask(samples, 0), *self._training(samples, split=False)])

    def _evaluation_peak(self, samples: int) -> int:
        """Return the peak of evaluations with so many at once, the state of training included."""
        samples = min(samples, self.workload.training.eval_samples)
        return self._peak_of([*self._mask(0, samples), *self._evaluation(samples)])

    def _peak_of(self, terms: list[Term]) -> int:
        return MemoryPlan((*self._fixed, *terms), 1, 1).peak

    def _training(self, samples: int, split: bool = True) -> list[Term]:
        """Return the terms of the largest stage. split: name the logits apart, with more counts."""
        found = [self._stage(config, samples, split) for config in self.workload.stages.values()]
        return max(found, key=lambda terms: sum(term.bytes for term in terms))

    def _stage(self, config: TrainConfig, samples: int, split: bool) -> list[Term]:
        config = replace(config, layer_weights="uniform")
        phase = ("micro-batch",)
        layer, kept = self._driven(config, samples)
        terms = [Term("activations kept of every layer", kept, phase)]
        if config.logit_kl_weight and split:
            other = replace(
                config,
                hidden_weight=config.hidden_weight or 1.0,
                logit_kl_weight=0.0,
                logit_loss="kl",
                logit_temperature=1.0,
                jsd_weight=0.5,
            )
            without = sum(self._driven(other, samples))
            logits = max(0, layer - max(0, without - kept))
            layer -= logits
            terms.append(Term("logits", logits, phase))
        return [Term("activations, one layer at a time", layer, phase), *terms]

    def _driven(self, config: TrainConfig, samples: int) -> tuple[int, int]:
        depth = self.workload.depth
        if not config.logit_kl_weight:
            depth = replace(depth, after=0)  # nothing runs there

        def run(model: Any, teacher: Any, batch: Batch) -> object:
            return drive(model, batch, config, teacher)

        return self._by_depth(run, ("train", config), samples, depth)

    def _evaluation(self, samples: int) -> list[Term]:
        """Return the larger of a batch's forwards, which keep the teacher's states, and of the
        comparison of its logits after them.
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
        run = partial(_comparison, self._device)
        count = self._count(run, "comparison", samples, Depth(0, 1, 0, 0))
        return Term("logits of an evaluation", count, ("evaluation",))

    def _by_depth(self, run: Run, name: Any, samples: int, depth: Depth) -> tuple[int, int]:
        """Return (what does not grow with the layers, what they all add) of a run, from counts on
        small models.
        """
        small = Depth(*map(min, astuple(depth), astuple(MOST)))
        counted = total = self._count(run, name, samples, small)
        kept = 0
        for part in ("converted", "between", "after"):
            has, wanted = getattr(small, part), getattr(depth, part)
            if wanted > has:
                more = self._count(run, name, samples, replace(small, **{part: has + 1}))
                total += (wanted - has) * (more - counted)
                kept += wanted * (more - counted)
        kept = min(kept, total)
        return total - kept, kept

    def _count(self, run: Run, name: Any, samples: int, depth: Depth) -> int:
        w = self.workload
        adapter = w.small_adapter(depth, max(w.ranks))
        key = (name, samples, depth, w.length, w.quantization, w.stored, w.teacher, adapter)
        if key not in self.counts:
            model = self._model(depth, False)
            teacher = None if w.teacher is None else self._model(depth, True)
            batch = self._device.batch(samples, w.length)
            self.counts[key] = self._device.peak_of(lambda: run(model, teacher, batch))
        return self.counts[key]

    def _model(self, depth: Depth, teacher: bool) -> Any:
        w = self.workload
        if (depth, teacher) not in self._models:
            config = w.small_config(depth.layers)
            if teacher:
                assert w.teacher is not None
                attention = w.teacher_attention or w.attn_implementation
                made = self._device.base(
                    config, None, w.teacher, upcast=True, attn_implementation=attention
                )
            else:
                made = self._device.base(
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
            bytes_of(self._device.base(self.workload.small_config(n), quantization, stored))
            for n in (1, 2)
        )
        return one + (self.workload.config.num_hidden_layers - 1) * (two - one)


def _forwards(model: Any, teacher: Any, batch: Batch) -> object:
    """Run `npt.evaluate` on a batch up to its logits; without padding, whose mask it would read."""
    errors = BatchErrors(model, batch)
    hidden = []
    with torch.no_grad():
        for mode in MODES:
            with errors.watching(mode):
                output = model.model(input_ids=batch.input_ids, use_cache=False)
                hidden.append(output.last_hidden_state)
    return errors, hidden


def _comparison(device: FakeDevice, model: Any, teacher: Any, batch: Batch) -> object:
    """Run `npt.evaluate` on the states after the last layer."""
    rows = len(batch.input_ids) * (batch.input_ids.shape[1] - 1)
    with torch.no_grad():
        hidden: dict[str, torch.Tensor] = {
            mode: torch.empty(rows, model.config.hidden_size, device=device.device)
            for mode in MODES
        }
        targets = device.tensor(rows, dtype=torch.int64)
        heads = dict.fromkeys(hidden, model.lm_head)
        pairs = [(mode, "teacher") for mode in MODES]
        return compare_pairs(hidden, heads, targets, model.config.vocab_size, pairs)


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from 1 to `most` that fits, with all below it, or 0."""
    if fits(most):
        return most
    return bisect_left(range(1, most), True, key=lambda number: not fits(number))


def remedies(
    workload: Workload, limit: int, counts: dict[Any, int] | None = None
) -> list[tuple[str, int]]:
    """Return settings any one of which would bring the peak below a limit of bytes, with one sample
    at a time, and the peak with it. counts: of the planner that found none to fit.
    """
    counts = {} if counts is None else counts
    tried = _less_memory(workload, limit)
    kinds: dict[str, list[tuple[str, Workload]]] = {}
    for flag, other in tried:
        kinds.setdefault(flag.split(" ")[0] if flag[:2] == "--" else flag, []).append((flag, other))

    def within(other: Workload) -> int | None:
        return Planner(other, counts=counts).peak_within(limit)

    found: dict[str, int] = {}
    for (mildest, least), *others in kinds.values():  # the mildest that fits is enough
        peak = within(least)
        if peak is not None:
            found[mildest] = peak
        # if the strongest does not fit, no other does
        elif others and (most := within(others[-1][1])) is not None:
            between = ((flag, within(other)) for flag, other in others[:-1])
            flag, peak = next(
                ((flag, less) for flag, less in between if less is not None), (others[-1][0], most)
            )
            found[flag] = peak
    return [(flag, found[flag]) for flag, _ in tried if flag in found]


def _less_memory(workload: Workload, limit: int) -> list[tuple[str, Workload]]:
    """Return settings that take less, and the run with each; of a kind the mildest first."""
    w, training = workload, workload.training
    tried: list[tuple[str, Workload]] = []

    def offer(flag: str, **changes: Any) -> None:
        tried.append((flag, replace(w, **changes)))

    if training.batch_size > 1:
        offer(f"--max_memory {limit}")
    if w.quantization is None:
        offer("--use_quantization", quantization="nf4", stored=torch.bfloat16)
    # with residual keep it has nothing to learn from its own base
    if w.teacher is not None and w.adapter.residual != "keep":
        offer("no --teacher_precision", teacher=None)
    if "end_to_end" in w.stages and not training.gradient_checkpointing:
        checkpointed = replace(training, gradient_checkpointing=True)
        offer("--gradient_checkpointing", training=checkpointed)
    if any(name != "local" for name in w.stages) and training.hidden_weight:
        local = replace(training, strategy="local", stages=None, **unset_of_end_to_end())
        offer("--strategy local", training=local)
    for share in (2, 4, 8):
        if w.length >= 64 * share:
            offer(f"--max_length {w.length // share}", length=w.length // share)
        budget = training.rank_budget
        if w.approximate and budget is not None and budget // share >= w.depth.converted:
            less = replace(training, rank_budget=budget // share)
            offer(f"--rank_budget {budget // share}", training=less)
        elif budget is None and w.adapter.ranks is None and w.adapter.rank >= share:
            rank = w.adapter.rank // share
            offer(f"--adapter_rank {rank}", adapter=replace(w.adapter, rank=rank))
    # such a list has an entry for each layer that is converted now
    listed = w.adapter.ranks is not None or training.layer_weight_list is not None
    if w.depth.converted > w.config.num_hidden_layers // 2 + 1 and not listed:
        offer("--layers upper_half", adapter=replace(w.adapter, layers="upper_half"))
    return tried
