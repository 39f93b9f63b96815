"""`evaluate`: student and floor against the teacher, on the same held-out tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.attach import attached_config
from npt.adapters.layer import Mode
from npt.config import DataConfig
from npt.data.batch import Batch, Sample, batches, find_fault, pad_id_of
from npt.data.samples import cut
from npt.data.source import Record
from npt.errors import DataError
from npt.evaluation.attribution import COMPARISONS, UNQUANTIZED, Reference, refer, samples_hash
from npt.evaluation.greedy import end_ids
from npt.evaluation.greedy_divergence import Divergence, measure_divergence, parting_prompts
from npt.evaluation.layers import BatchErrors, LayerErrors
from npt.evaluation.metrics import Figures, Pair, compare_pairs, figures, per_sample_sums
from npt.evaluation.states import final_states, predicting
from npt.random_state import kept_random_state

MODES: tuple[Mode, ...] = ("teacher", "floor", "student")


@dataclass(frozen=True)
class Fidelity:
    """Figures of each model, and of each layer.

    layers: of converted layer i the NMSE, over all `layer_tokens`, fed the teacher's h, as
    `nmse_<model>`, and of the model's own stream behind it, as `free_running_<model>`; each with
    its `_se`. unconverted_layers: the latter for the layers behind the first converted one that
    were left as they are. divergence, attribution: where they were asked for. sources: the
    student's figures on the samples of each source, where they are of several.
    """

    teacher: Figures
    floor: Figures
    student: Figures
    initial: Figures | None = None
    layers: dict[int, dict[str, float]] = field(default_factory=dict)
    unconverted_layers: dict[int, dict[str, float]] = field(default_factory=dict)
    layer_tokens: int | None = None
    divergence: Divergence | None = None
    attribution: dict[str, Figures] = field(default_factory=dict)
    sources: dict[str, Figures] = field(default_factory=dict)

    @property
    def aim(self) -> Figures:
        """The student against what it is to be like: the unquantised base where that was measured,
        else its teacher.
        """
        return self.attribution.get("unquantized_to_npt", self.student)

    def as_dict(self) -> dict[str, Any]:
        """The content of `fidelity.json`."""
        named = {
            "teacher": self.teacher,
            "floor": self.floor,
            "initial": self.initial,
            "student": self.student,
        }
        found: dict[str, Any] = {name: f.as_dict() for name, f in named.items() if f is not None}
        found["layers"] = {str(index): values for index, values in self.layers.items()}
        if self.unconverted_layers:
            found["unconverted_layers"] = {
                str(index): values for index, values in self.unconverted_layers.items()
            }
        if self.layer_tokens is not None:
            found["layer_tokens"] = self.layer_tokens
        if self.divergence is not None:
            found["divergence"] = self.divergence.as_dict()
        if self.attribution:
            found["attribution"] = {name: f.as_dict() for name, f in self.attribution.items()}
        if self.sources:
            found["sources"] = {name: f.as_dict() for name, f in self.sources.items()}
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Fidelity:
        """The figures that `as_dict` gave, now or in an earlier version, through JSON or not; what
        JSON has no word for comes back as NaN."""

        def made(name: str) -> Figures | None:
            found = values.get(name)
            return Figures.from_dict(found) if found else None

        teacher, floor, student = made("teacher"), made("floor"), made("student")
        if teacher is None or floor is None or student is None:
            raise ValueError(
                f"figures of teacher, floor and student are needed, there are {', '.join(values)}"
            )
        parted = values.get("divergence")
        return cls(
            teacher,
            floor,
            student,
            made("initial"),
            _layers(values["layers"]),
            _layers(values.get("unconverted_layers", {})),
            values.get("layer_tokens"),
            Divergence.from_dict(parted) if parted else None,
            {
                name: Figures.from_dict(found)
                for name, found in values.get("attribution", {}).items()
            },
            {name: Figures.from_dict(found) for name, found in values.get("sources", {}).items()},
        )

    def after(self, initial: Fidelity) -> Fidelity:
        """These figures as those of the trained student, with `initial`'s student as the one before
        training.
        """

        def both(
            now: dict[int, dict[str, float]], before: dict[int, dict[str, float]]
        ) -> dict[int, dict[str, float]]:
            return {
                index: (
                    values
                    | {
                        f"{kind}_initial{tail}": before[index][f"{kind}_student{tail}"]
                        for kind in ("nmse", "free_running")
                        for tail in ("", "_se")
                        if f"{kind}_student{tail}" in before.get(index, {})
                    }
                )
                for index, values in now.items()
            }

        return Fidelity(
            self.teacher,
            self.floor,
            self.student,
            initial.student,
            both(self.layers, initial.layers),
            both(self.unconverted_layers, initial.unconverted_layers),
            self.layer_tokens,
            self.divergence,
            self.attribution,
            self.sources,
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

    Three forwards of the model a batch, and three of its head. Memory beside the model: the logits
    of a chunk of tokens, and the teacher's states behind every layer from the first converted one
    on, N * D values a layer, for one batch at a time.

    Args:
        model: with adapters attached; left as it was.
        tokenizer: of the base model.
        data: records, or samples already cut. Of prompts with completions only the completions'
            tokens are predicted; the layers' NMSE is over all tokens.
        max_length: tokens of a sample, when `data` are records.
        text_column, prompt_column, completion_column: fields that hold a record's text, or its
            prompt and completion.
        batch_size: samples at a time; does not change the figures beyond rounding.
        max_samples: use at most this many.
        divergence_prompts: continue the beginnings of so many samples greedily and see where the
            student parts from its teacher.
        max_new_tokens: of such a continuation.
        unquantized: the base before quantisation, for the attribution of what is lost; or what
            `attribution.refer` kept of it, for which it need not be in memory any more.
        between: called in front of every batch; what it raises ends the evaluation.
        sources: of each sample what its source is called, to have the student's figures on each
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
        prompts = parting_prompts(
            samples,
            divergence_prompts,
            max_new_tokens,
            getattr(model.config, "max_position_embeddings", None),
        )
    pad_id = pad_id_of(tokenizer)
    if unquantized is not None and not isinstance(unquantized, Reference):
        unquantized = refer(unquantized, samples, batch_size=batch_size, pad_id=pad_id)
    if unquantized is not None and unquantized.samples_hash != samples_hash(samples):
        raise DataError(
            "the unquantised base was run on other samples; pass attribution.refer the samples that"
            " are evaluated on"
        )
    device = next(model.parameters()).device
    pairs: list[Pair] = [(mode, "teacher") for mode in MODES]
    if unquantized is not None:
        pairs += [pair for pair in COMPARISONS.values() if pair not in pairs]
    sums: dict[Pair, list[Tensor]] = {pair: [] for pair in pairs}
    layer_errors = LayerErrors()
    parted = None
    done = 0
    scored: list[int] = []
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches(samples, batch_size, pad_id):
                if between is not None:
                    between()
                fault = find_fault(batch, model.config.vocab_size)
                if fault is not None:
                    raise DataError(
                        f"evaluation data: {fault}; is this the tokenizer of the model?"
                    )
                batch = batch.to(device)
                hidden = _compare_layers(model, batch, layer_errors)
                heads = dict.fromkeys(hidden, model.lm_head)
                if unquantized is not None:
                    rows = unquantized.states[done : done + len(batch.input_ids)]
                    hidden[UNQUANTIZED] = torch.cat(rows).to(device)
                    heads[UNQUANTIZED] = unquantized.head
                scored += [done + row for row in _compare(model, batch, hidden, heads, sums)]
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
    finally:
        for module in in_training:
            module.training = True
    if not sum(map(len, sums["teacher", "teacher"])):
        raise DataError("no token to predict in the evaluation data; check labels and prompts")
    found = {pair: figures(torch.cat(parts)) for pair, parts in sums.items()}
    layers = layer_errors.figures()
    return Fidelity(
        found["teacher", "teacher"],
        found["floor", "teacher"],
        found["student", "teacher"],
        None,
        {index: values for index, values in layers.items() if "nmse_student" in values},
        {index: values for index, values in layers.items() if "nmse_student" not in values},
        layer_errors.tokens,
        parted,
        (
            {name: found[pair] for name, pair in COMPARISONS.items()}
            if unquantized is not None
            else {}
        ),
        (
            {}
            if sources is None
            else _by_source(
                torch.cat(sums["student", "teacher"]), [sources[number] for number in scored]
            )
        ),
    )


def _by_source(sums: Tensor, sources: Sequence[str]) -> dict[str, Figures]:
    """Figures of the samples of each source, from the sums [C, ...] of each sample and what its
    source is called.
    """
    rows = {
        name: [number for number, other in enumerate(sources) if other == name] for name in sources
    }
    return {name: figures(sums[own]) for name, own in rows.items()}


def _layers(values: Mapping[str, Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    return {
        int(index): {key: math.nan if v is None else v for key, v in layer.items()}
        for index, layer in values.items()
    }


def _samples(
    data: Iterable[Record] | Sequence[Sample], tokenizer: Any, config: DataConfig, limit: int | None
) -> list[Sample]:
    samples: list[Sample] = []
    items = iter(data)
    first = next(items, None)
    if first is not None:
        rest: Iterable[Any] = itertools.chain([first], items)
        for sample in rest if isinstance(first, Sample) else cut(rest, tokenizer, config):
            if limit is not None and len(samples) == limit:
                break
            samples.append(sample)
    if not samples:
        raise DataError("no text of two tokens or more to evaluate on; check the data")
    return samples


def _compare_layers(
    model: PreTrainedModel, batch: Batch, layer_errors: LayerErrors
) -> dict[str, Tensor]:
    """Run each model on one batch: its final states, and the errors of its layers added to the
    others'.
    """
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
) -> list[int]:
    """Add the per-sample sums of one batch; the rows that have any, because something is predicted
    of them.
    """
    predicted = predicting(batch)
    rows = predicted.nonzero()[:, 0]
    per_pair = compare_pairs(
        hidden, heads, batch.labels[:, 1:][predicted], model.config.vocab_size, list(sums)
    )
    for pair, per_token in per_pair.items():
        sums[pair].append(per_sample_sums(per_token, rows, len(predicted)))
    return sorted(set(rows.tolist()))
