"""Compare student and floor with the teacher on the same held-out tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.converted import attached_config
from npt.adapters.layer import Mode
from npt.config import DataConfig
from npt.data.batch import Batch, Sample, batches
from npt.data.samples import cut
from npt.data.source import Record
from npt.errors import DataError
from npt.evaluation.attribution import (
    COMPARISONS,
    UNQUANTIZED,
    Reference,
    reference_outputs,
    samples_hash,
)
from npt.evaluation.greedy import Divergence, end_ids, measure_divergence, parting_prompts
from npt.evaluation.layers import BatchErrors, LayerErrors
from npt.evaluation.metrics import (
    Figures,
    Pair,
    check_ids,
    compare_pairs,
    evaluating,
    figures,
    final_states,
    nan_for_null,
    per_sample_sums,
    predicting,
)
from npt.random_state import kept_random_state

MODES: tuple[Mode, ...] = ("teacher", "floor", "student")


_Layers = dict[int, dict[str, float]]


@dataclass(frozen=True)
class Fidelity:
    """Figures of each model, and of each layer.

    layers: of converted layer i the NMSE, over all `layer_tokens`, fed the teacher's h, as
    `nmse_<model>`, and of the model's own stream after it, as `free_running_<model>`; each with
    its `_se`. unconverted_layers: the latter for unconverted layers after the first converted one.
    divergence, attribution: if they were asked for. sources: the student's figures by source, if
    the samples are of several. positions: its figures by how many tokens of the text lie before
    the one that predicts, in octaves ("0-1", "2-3", "4-7", ...) that two samples or more reach.
    """

    teacher: Figures
    floor: Figures
    student: Figures
    initial: Figures | None = None
    layers: _Layers = field(default_factory=dict)
    unconverted_layers: _Layers = field(default_factory=dict)
    layer_tokens: int | None = None
    divergence: Divergence | None = None
    attribution: dict[str, Figures] = field(default_factory=dict)
    sources: dict[str, Figures] = field(default_factory=dict)
    positions: dict[str, Figures] = field(default_factory=dict)

    @property
    def aim(self) -> Figures:
        """The student against the model it is to be like: the unquantised base if that was
        measured, else its teacher.
        """
        return self.attribution.get("unquantized_to_npt", self.student)

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `fidelity.json`."""
        found: dict[str, Any] = {}
        for name in ("teacher", "floor", "initial", "student"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name).as_dict()
        found["layers"] = {str(index): values for index, values in self.layers.items()}
        if self.unconverted_layers:
            found["unconverted_layers"] = {
                str(index): values for index, values in self.unconverted_layers.items()
            }
        if self.layer_tokens is not None:
            found["layer_tokens"] = self.layer_tokens
        if self.divergence is not None:
            found["divergence"] = self.divergence.as_dict()
        for name in ("attribution", "sources", "positions"):
            if getattr(self, name):
                found[name] = {key: f.as_dict() for key, f in getattr(self, name).items()}
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Fidelity:
        """Return the figures of an `as_dict`, now or of an earlier version, through JSON or not;
        null becomes NaN.
        """
        found = {
            name: Figures.from_dict(values[name])
            for name in ("teacher", "floor", "student", "initial")
            if values.get(name)
        }
        if not {"teacher", "floor", "student"} <= found.keys():
            raise ValueError(
                f"figures of teacher, floor and student are needed, there are {', '.join(values)}"
            )
        parted = values.get("divergence")

        def by_name(kind: str) -> dict[str, Figures]:
            return {name: Figures.from_dict(f) for name, f in values.get(kind, {}).items()}

        return cls(
            found["teacher"],
            found["floor"],
            found["student"],
            found.get("initial"),
            _layers(values["layers"]),
            _layers(values.get("unconverted_layers", {})),
            values.get("layer_tokens"),
            Divergence(**nan_for_null(parted)) if parted else None,
            by_name("attribution"),
            by_name("sources"),
            by_name("positions"),
        )

    def after(self, initial: Fidelity) -> Fidelity:
        """Return these figures of the trained student, with those of `initial`'s student, the one
        before training.
        """

        def both(now: _Layers, before: _Layers) -> _Layers:
            added = {
                index: {
                    key.replace("_student", "_initial"): value
                    for key, value in values.items()
                    if "_student" in key
                }
                for index, values in before.items()
            }
            return {index: values | added.get(index, {}) for index, values in now.items()}

        return replace(
            self,
            initial=initial.student,
            layers=both(self.layers, initial.layers),
            unconverted_layers=both(self.unconverted_layers, initial.unconverted_layers),
        )


@kept_random_state()
def evaluate(
    model: PreTrainedModel,
    tokenizer: Any,
    data: Iterable[Record] | Sequence[Sample],
    *,
    max_length: int = 256,
    text_column: str = "text",
    prompt_column: str | None = None,
    completion_column: str | None = None,
    batch_size: int = 8,
    max_samples: int | None = None,
    divergence_prompts: int = 0,
    max_new_tokens: int = 64,
    unquantized: PreTrainedModel | Reference | None = None,
    between: Callable[[], None] | None = None,
    sources: Sequence[str] | None = None,
) -> Fidelity:
    """Compare the student with its teacher and with its floor (the same layers, attention dropped)
    on the same tokens.

    Three forwards of the model a batch, and three of its head. Memory besides the model: the logits
    of a chunk of tokens, and the teacher's states after every layer from the first converted one
    on, N * D values a layer, for one batch at a time.

    Args:
        model: with adapters attached; not changed.
        tokenizer: of the base model.
        data: records, or samples already cut. Of prompts with completions only the completions'
            tokens are predicted; the layers' NMSE is over all tokens.
        max_length: tokens of a sample, when `data` are records.
        text_column: field of a record.
        prompt_column: likewise.
        completion_column: likewise.
        batch_size: samples at a time; does not change the figures beyond rounding.
        max_samples: use at most this many.
        divergence_prompts: continue the beginnings of so many samples greedily and see where the
            student parts from its teacher.
        max_new_tokens: of such a continuation.
        unquantized: the base before quantisation, to attribute the loss, or the outputs that
            `attribution.reference_outputs` kept of it, which need it in memory no longer.
        between: called before every batch; what it raises ends the evaluation.
        sources: of each sample the name of its source, to have the student's figures on each
            source as well.

    Raises:
        DataError: no tokens to evaluate on, token ids outside the vocabulary, or a reference for
            other samples.
        ConfigError: continuations that leave no room for a prompt.
        NumericalError: logits of greedy continuations that are not finite.
        ModelError: no adapters are attached.
    """
    attached_config(model)
    config = DataConfig(
        max_length=max_length,
        text_column=text_column,
        prompt_column=prompt_column,
        completion_column=completion_column,
    )
    samples = _samples(data, tokenizer, config, max_samples)
    prompts = []
    if divergence_prompts:
        positions = getattr(model.config, "max_position_embeddings", None)
        prompts = parting_prompts(samples, divergence_prompts, max_new_tokens, positions)
    if unquantized is not None and not isinstance(unquantized, Reference):
        unquantized = reference_outputs(unquantized, samples, batch_size=batch_size)
    if unquantized is not None and unquantized.samples_hash != samples_hash(samples):
        raise DataError(
            "the unquantised base was run on other samples; pass attribution.reference_outputs the"
            " samples that are evaluated on"
        )
    device = next(model.parameters()).device
    comparisons = COMPARISONS if unquantized is not None else {}
    pairs = dict.fromkeys([*((mode, "teacher") for mode in MODES), *comparisons.values()])
    sums: dict[Pair, list[Tensor]] = {pair: [] for pair in pairs}
    octaves: dict[int, list[Tensor]] = {}
    layer_errors = LayerErrors()
    parted = None
    done = 0
    scored: list[int] = []
    with torch.no_grad(), evaluating(model):
        for batch in batches(samples, batch_size):
            if between is not None:
                between()
            check_ids(batch, model, "evaluation data")
            batch = batch.to(device)
            hidden = _compare_layers(model, batch, layer_errors)
            heads = dict.fromkeys(hidden, model.lm_head)
            if unquantized is not None:
                rows = unquantized.states[done : done + len(batch.input_ids)]
                hidden[UNQUANTIZED] = torch.cat(rows).to(device)
                heads[UNQUANTIZED] = unquantized.head
            scored += [done + row for row in _compare(model, batch, hidden, heads, sums, octaves)]
            done += len(batch.input_ids)
        if prompts:
            parted = measure_divergence(
                model,
                prompts,
                end_ids(model, tokenizer),
                max_new_tokens=max_new_tokens,
                batch_size=batch_size,
                between=between,
            )
    if not scored:
        raise DataError("no token to predict in the evaluation data; check labels and prompts")
    per_sample = {pair: torch.cat(parts) for pair, parts in sums.items()}
    found = {pair: figures(parts) for pair, parts in per_sample.items()}
    layers = layer_errors.figures()
    converted = {i: values for i, values in layers.items() if "nmse_student" in values}
    by_source: dict[str, list[int]] = {}
    if sources is not None:
        for row, number in enumerate(scored):
            by_source.setdefault(sources[number], []).append(row)
    return Fidelity(
        found["teacher", "teacher"],
        found["floor", "teacher"],
        found["student", "teacher"],
        layers=converted,
        unconverted_layers={i: v for i, v in layers.items() if i not in converted},
        layer_tokens=layer_errors.tokens,
        divergence=parted,
        attribution={name: found[pair] for name, pair in comparisons.items()},
        sources={
            name: figures(per_sample["student", "teacher"][rows])
            for name, rows in by_source.items()
        },
        positions={
            f"{2**octave if octave else 0}-{2 ** (octave + 1) - 1}": figures(torch.cat(parts))
            for octave, parts in sorted(octaves.items())
            if sum(map(len, parts)) > 1  # one sample has no standard error
        },
    )


def _layers(values: Mapping[str, Mapping[str, Any]]) -> _Layers:
    return {int(index): nan_for_null(layer) for index, layer in values.items()}


def _samples(
    data: Iterable[Record] | Sequence[Sample], tokenizer: Any, config: DataConfig, limit: int | None
) -> list[Sample]:
    items = iter(data)
    first = list(itertools.islice(items, 1))
    rest: Iterable[Any] = itertools.chain(first, items)
    if not (first and isinstance(first[0], Sample)):
        rest = cut(rest, tokenizer, config)
    samples = list(itertools.islice(rest, limit))
    if not samples:
        raise DataError("no text of two tokens or more to evaluate on; check the data")
    return samples


def _compare_layers(
    model: PreTrainedModel, batch: Batch, layer_errors: LayerErrors
) -> dict[str, Tensor]:
    """Run each model on one batch; return its final states, and add the errors of its layers."""
    errors = BatchErrors(model, batch)
    hidden: dict[str, Tensor] = {}
    for mode in MODES:
        with errors.watching(mode):
            hidden[mode] = final_states(model, batch)
    layer_errors.add(errors, batch)
    return hidden


def _compare(
    model: PreTrainedModel,
    batch: Batch,
    hidden: Mapping[str, Tensor],
    heads: Mapping[str, torch.nn.Module],
    sums: dict[Pair, list[Tensor]],
    octaves: dict[int, list[Tensor]],
) -> list[int]:
    """Add the per-sample sums of one batch, the student's by octave of position as well; return the
    rows in which something is predicted.
    """
    predicted = predicting(batch)
    rows, columns = predicted.nonzero(as_tuple=True)
    per_pair = compare_pairs(
        hidden, heads, batch.labels[:, 1:][predicted], model.config.vocab_size, list(sums)
    )
    for pair, per_token in per_pair.items():
        sums[pair].append(per_sample_sums(per_token, rows, len(predicted)))
    student = per_pair["student", "teacher"]
    octave = batch.position_ids[rows, columns].clamp(min=1).to(torch.float64).frexp().exponent - 1
    for index in octave.unique().tolist():
        inside = octave == index
        found = per_sample_sums(student[inside], rows[inside], len(predicted))
        octaves.setdefault(index, []).append(found)
    return sorted(set(rows.tolist()))
