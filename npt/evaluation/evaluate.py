"""Compare student and floor with the teacher on the same held-out tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from npt.adapters.converted import adapters_disabled, attached_config, evaluating
from npt.adapters.layer import Mode
from npt.config import DataConfig
from npt.data.batch import Sample, batches
from npt.data.samples import cut
from npt.data.source import Record
from npt.errors import DataError
from npt.evaluation.layers import LayerErrors
from npt.evaluation.metrics import (
    Figures,
    Pair,
    checked_batches,
    compare_pairs,
    figures,
    final_states,
    nan_for_null,
    per_sample_sums,
    predicting,
)
from npt.random_state import kept_random_state

if TYPE_CHECKING:
    from npt.evaluation.greedy import Divergence

MODES: tuple[Mode, ...] = ("teacher", "floor", "student")

COMPARISONS = {
    "unquantized_to_4bit": ("teacher", "unquantized"),
    "4bit_to_npt": ("student", "teacher"),
    "unquantized_to_npt": ("student", "unquantized"),
}
"""Name in `fidelity.json`, and (model, what it is measured against)."""


@dataclass(frozen=True)
class Fidelity:
    """Figures of each model, and of each layer.

    Attributes:
        teacher: the base.
        floor: the converted layers without attention.
        student: the student.
        initial: the student before training.
        layers: of each converted layer the NMSE over all valid tokens, fed the teacher's h
            (`nmse_<model>`) and of the model's own stream (`free_running_<model>`), with `_se`.
        divergence: where greedy texts part, if that was asked for.
        attribution: `COMPARISONS`, if an unquantised base was given.
        positions: the student's figures by how many tokens of the text lie before the one that
            predicts, in octaves ("0-1", "2-3", "4-7", ...) that two samples or more reach.
    """

    teacher: Figures
    floor: Figures
    student: Figures
    initial: Figures | None = None
    layers: dict[int, dict[str, float]] = field(default_factory=dict)
    divergence: Divergence | None = None
    attribution: dict[str, Figures] = field(default_factory=dict)
    positions: dict[str, Figures] = field(default_factory=dict)

    @property
    def aim(self) -> Figures:
        """The student against the model it is to be like: the unquantised base if that was
        measured, else its teacher.
        """
        return self.attribution.get("unquantized_to_npt", self.student)

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `fidelity.json`."""
        values = {name: value for name, value in asdict(self).items() if value or name == "layers"}
        return {**values, "layers": {str(index): layer for index, layer in self.layers.items()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Fidelity:
        """Return the figures of an `as_dict`, now or of an earlier version, through JSON or not;
        null becomes NaN.
        """
        models = {
            name: Figures.from_dict(values[name])
            for name in (*MODES, "initial")
            if values.get(name) or name in MODES
        }
        divergence = None
        if values.get("divergence"):
            from npt.evaluation.greedy import Divergence

            divergence = Divergence.from_dict(values["divergence"])
        attribution, positions = (
            {name: Figures.from_dict(f) for name, f in values.get(kind, {}).items()}
            for kind in ("attribution", "positions")
        )
        layers = {int(index): nan_for_null(layer) for index, layer in values["layers"].items()}
        return cls(
            **models,
            layers=layers,
            divergence=divergence,
            attribution=attribution,
            positions=positions,
        )

    def after(self, initial: Fidelity) -> Fidelity:
        """Return these figures of the trained student, with those of `initial`'s student, the one
        before training.
        """
        layers = {
            index: values
            | {
                key.replace("_student", "_initial"): value
                for key, value in initial.layers.get(index, {}).items()
                if "_student" in key
            }
            for index, values in self.layers.items()
        }
        return replace(self, initial=initial.student, layers=layers)


@dataclass(frozen=True)
class Reference:
    """Outputs of an unquantised base, of which nothing but its head is kept.

    Attributes:
        states: of each sample the states that its tokens are predicted from, [P, D], on the host.
        head: lm_head.
    """

    states: tuple[Tensor, ...]
    head: nn.Module


@torch.no_grad()
@kept_random_state()
def reference_outputs(
    model: PreTrainedModel, samples: Sequence[Sample], *, batch_size: int = 8
) -> Reference:
    """Run the unquantised base on the samples and keep its outputs, so that it need not be in
    memory together with the student.

    Of a model with adapters, the teacher runs. Memory: P * D values on the host for P predicted
    tokens (1 GiB for 64 Ki tokens of D 4096 in fp32), and the head's V * D values.

    Raises:
        DataError: token ids outside the vocabulary.
    """
    states: list[Tensor] = []
    with evaluating(model), adapters_disabled(model):
        for batch in checked_batches(model, batches(samples, batch_size), "evaluation data"):
            predicted = predicting(batch).sum(dim=-1).tolist()
            states += final_states(model, batch).cpu().split(predicted)
    return Reference(tuple(states), model.lm_head)


@kept_random_state()
def evaluate(
    model: PreTrainedModel,
    tokenizer: Any,
    data: Iterable[Record] | Sequence[Sample],
    *,
    data_config: DataConfig | None = None,
    batch_size: int = 8,
    max_samples: int | None = None,
    divergence_prompts: int = 0,
    max_new_tokens: int = 64,
    unquantized: PreTrainedModel | Reference | None = None,
    between: Callable[[], None] | None = None,
) -> Fidelity:
    """Compare the student with its teacher and with its floor (the same layers, attention dropped)
    on the same tokens.

    Three forwards of the model a batch, and three of its head. Memory besides the model: the logits
    of a chunk of tokens, and the teacher's states after every converted layer, N * D values a
    layer, for one batch at a time.

    Args:
        model: with adapters attached; not changed.
        tokenizer: of the base model.
        data: records, or samples already cut. Of prompts with completions only the completions'
            tokens are predicted; the layers' NMSE is over all tokens.
        data_config: columns of the records and tokens of a sample.
        batch_size: samples at a time; does not change the figures beyond rounding.
        max_samples: use at most this many.
        divergence_prompts: continue the beginnings of so many samples greedily and see where the
            student leaves its teacher.
        max_new_tokens: of such a continuation.
        unquantized: the base before quantisation, to attribute the loss, or what
            `reference_outputs` kept of it for these samples.
        between: called before every batch; what it raises ends the evaluation.

    Raises:
        DataError: no tokens to evaluate on, or token ids outside the vocabulary.
        ConfigError: continuations that leave no room for a prompt.
        NumericalError: logits of greedy continuations that are not finite.
        ModelError: no adapters are attached.
    """
    attached_config(model)
    samples = _samples(data, tokenizer, data_config or DataConfig(), max_samples)
    reference = unquantized
    if isinstance(unquantized, PreTrainedModel):
        reference = reference_outputs(unquantized, samples, batch_size=batch_size)
    if reference is not None and len(reference.states) != len(samples):
        raise DataError("the unquantised base was run on other samples than are evaluated on")
    comparisons = COMPARISONS if reference is not None else {}
    pairs = dict.fromkeys([*((mode, "teacher") for mode in MODES), *comparisons.values()])
    sums: dict[Pair, list[Tensor]] = {pair: [] for pair in pairs}
    octaves: dict[int, list[Tensor]] = {}
    layer_errors = LayerErrors(model)
    divergence, done = None, 0
    with torch.no_grad(), evaluating(model):
        if divergence_prompts:
            from npt.evaluation.greedy import end_ids, measure_divergence, parting_prompts

            limit = getattr(model.config, "max_position_embeddings", None)
            prompts = parting_prompts(samples[:divergence_prompts], max_new_tokens, limit)
            ends = end_ids(model, tokenizer)
            divergence = measure_divergence(
                model, prompts, ends, max_new_tokens, batch_size, between
            )
        every = batches(samples, batch_size)
        for batch in checked_batches(model, every, "evaluation data", between):
            hidden: dict[str, Tensor] = {}
            for mode in MODES:
                with layer_errors.watching(batch, mode):
                    hidden[mode] = final_states(model, batch)
            layer_errors.add(batch)
            heads = dict.fromkeys(hidden, model.lm_head)
            size = len(batch.input_ids)
            if reference is not None:
                states = torch.cat(reference.states[done : done + size])
                hidden["unquantized"] = states.to(batch.input_ids.device)
                heads["unquantized"] = reference.head
            predicted = predicting(batch)
            rows, targets = predicted.nonzero()[:, 0], batch.labels[:, 1:][predicted]
            per_token = compare_pairs(hidden, heads, targets, model.config.vocab_size, list(sums))
            for pair, columns in per_token.items():
                sums[pair].append(per_sample_sums(columns, rows, size))
            octave = batch.position_ids[:, :-1][predicted].clamp(min=1).float().frexp().exponent
            for index in octave.unique().tolist():
                columns = per_token["student", "teacher"][octave == index]
                inside = per_sample_sums(columns, rows[octave == index], size)
                octaves.setdefault(index, []).append(inside)
            done += size
    per_sample = {pair: torch.cat(parts) for pair, parts in sums.items()}
    if not len(per_sample["student", "teacher"]):
        raise DataError("no token to predict in the evaluation data; check labels and prompts")
    measured = {pair: figures(parts) for pair, parts in per_sample.items()}
    teacher, floor, student = (measured[mode, "teacher"] for mode in MODES)
    return Fidelity(
        teacher,
        floor,
        student,
        layers=layer_errors.figures(),
        divergence=divergence,
        attribution={name: measured[pair] for name, pair in comparisons.items()},
        positions={
            f"{2 ** (index - 1) if index > 1 else 0}-{2**index - 1}": figures(torch.cat(parts))
            for index, parts in sorted(octaves.items())
            if sum(map(len, parts)) > 1  # one sample has no standard error
        },
    )


def _samples(
    data: Iterable[Record] | Sequence[Sample], tokenizer: Any, config: DataConfig, limit: int | None
) -> list[Sample]:
    items = iter(data)
    first = list(itertools.islice(items, 1))
    every: Iterable[Any] = itertools.chain(first, items)
    if not (first and isinstance(first[0], Sample)):
        every = cut(every, tokenizer, config)
    samples = list(itertools.islice(every, limit))
    if not samples:
        raise DataError("no text of two tokens or more to evaluate on; check the data")
    return samples
