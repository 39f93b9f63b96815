"""`evaluate`: student and floor against the teacher, on the same held-out tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.adapter import Mode
from npt.adapters.attach import adapter_mode, attached_config, decoder_layers
from npt.adapters.layer import NPTLayer, attention_output, student_output
from npt.adapters.stream import model_inputs, open_stream
from npt.config import DataConfig
from npt.data.batch import IGNORE_INDEX, Batch, batches, find_fault, pad_id_of
from npt.data.sample import Sample
from npt.data.samples import cut
from npt.data.source import Record
from npt.errors import DataError
from npt.fidelity.divergence import nmse_per_token
from npt.fidelity.metrics import Figures, compare_tokens, figures, per_sample_sums


@dataclass(frozen=True)
class Fidelity:
    """Figures of each model; `layers[i]` holds the NMSE of converted layer i fed the teacher's h, as `nmse_<model>`."""

    teacher: Figures
    floor: Figures
    student: Figures
    initial: Figures | None = None
    layers: dict[int, dict[str, float]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The content of `fidelity.json`."""
        named = {"teacher": self.teacher, "floor": self.floor, "initial": self.initial, "student": self.student}
        return {name: f.as_dict() for name, f in named.items() if f is not None} | {
            "layers": {str(index): values for index, values in self.layers.items()}
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Fidelity:
        """The figures that `as_dict` gave, through JSON or not; what JSON has no word for comes back as NaN."""

        def made(name: str) -> Figures | None:
            found = values.get(name)
            numbers: dict[str, Any] = {} if found is None else {key: math.nan if value is None else value for key, value in found.items()}
            return Figures(**numbers) if numbers else None

        teacher, floor, student = made("teacher"), made("floor"), made("student")
        if teacher is None or floor is None or student is None:
            raise ValueError(f"figures of teacher, floor and student are needed, there are {', '.join(values)}")
        return cls(teacher, floor, student, made("initial"), {int(index): dict(layer) for index, layer in values["layers"].items()})

    def after(self, initial: Fidelity) -> Fidelity:
        """These figures as those of the trained student, with `initial`'s student as the one before training."""
        layers = {index: {**values, "nmse_initial": initial.layers[index]["nmse_student"]} for index, values in self.layers.items()}
        return Fidelity(self.teacher, self.floor, self.student, initial.student, layers)


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
    between: Callable[[], None] | None = None,
) -> Fidelity:
    """Compare the student with its teacher and with its floor (the same layers, attention dropped) on the same tokens.

    Args:
        model: with adapters attached; left as it was.
        tokenizer: of the base model.
        data: records, or samples already cut. Of prompts with completions only the completions' tokens are predicted; the layers'
            NMSE is over all tokens.
        max_length: tokens of a sample, when `data` are records.
        text_column, prompt_column, completion_column: fields that hold a record's text, or its prompt and completion.
        batch_size: samples at a time; does not change the figures beyond rounding.
        max_samples: use at most this many.
        between: called in front of every batch; what it raises ends the evaluation.

    Raises:
        DataError: no tokens to evaluate on, or token ids outside the vocabulary.
        ModelError: no adapters are attached.
    """
    attached_config(model)
    config = DataConfig(max_length=max_length, text_column=text_column, prompt_column=prompt_column, completion_column=completion_column)
    samples = _samples(data, tokenizer, config, max_samples)
    device = next(model.parameters()).device
    sums: dict[Mode, list[Tensor]] = {"teacher": [], "floor": [], "student": []}
    layer_sums: dict[int, dict[Mode, Tensor]] = {}
    tokens = 0
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches(samples, batch_size, pad_id_of(tokenizer)):
                if between is not None:
                    between()
                fault = find_fault(batch, model.config.vocab_size)
                if fault is not None:
                    raise DataError(f"evaluation data: {fault}; is this the tokenizer of the model?")
                batch = batch.to(device)
                _compare(model, batch, sums)
                _compare_layers(model, batch, layer_sums)
                tokens += batch.tokens
    finally:
        for module in in_training:
            module.training = True
    if not sum(map(len, sums["teacher"])):
        raise DataError("no token to predict in the evaluation data; check labels and prompts")
    per_model = {mode: figures(torch.cat(parts)) for mode, parts in sums.items()}
    layers = {index: {f"nmse_{mode}": float(total) / tokens for mode, total in by_mode.items()} for index, by_mode in layer_sums.items()}
    return Fidelity(per_model["teacher"], per_model["floor"], per_model["student"], None, layers)


def _samples(data: Iterable[Record] | Sequence[Sample], tokenizer: Any, config: DataConfig, limit: int | None) -> list[Sample]:
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


def _compare(model: PreTrainedModel, batch: Batch, sums: dict[Mode, list[Tensor]]) -> None:
    """Add the per-sample sums of one batch. The model's own forward is used: what a user gets is what is measured."""
    targets = batch.labels[:, 1:]
    predicted = (targets != IGNORE_INDEX) & batch.attention_mask[:, :-1].bool()
    rows = predicted.nonzero()[:, 0]
    # Padding is filled with a real token of its row: a broken embedding of the pad token is nobody's business here.
    first = batch.attention_mask.argmax(dim=-1, keepdim=True)
    filled = torch.where(batch.attention_mask.bool(), batch.input_ids, batch.input_ids.gather(1, first))
    inputs = model_inputs(model, replace(batch, input_ids=filled))
    hidden: dict[Mode, Tensor] = {}
    for mode in sums:
        with adapter_mode(model, mode):
            states = model.model(**inputs, use_cache=False).last_hidden_state
        hidden[mode] = states[:, :-1][predicted]
    for mode, parts in sums.items():
        per_token = compare_tokens(hidden[mode], hidden["teacher"], targets[predicted], model.lm_head, model.config.vocab_size)
        parts.append(per_sample_sums(per_token, rows, len(targets)))


def _compare_layers(model: PreTrainedModel, batch: Batch, sums: dict[int, dict[Mode, Tensor]]) -> None:
    """Add each converted layer's NMSE, floor and student, with the teacher's h as its input."""
    with adapter_mode(model, "teacher"):
        stream = open_stream(model, batch)
        hidden = stream.hidden
        for index, layer in enumerate(decoder_layers(model)):
            output = stream.clean(layer(hidden, **stream.context_of(layer)))
            if isinstance(layer, NPTLayer):
                h = stream.rows(hidden)
                a = stream.rows(attention_output(layer, hidden, **stream.context_of(layer)))
                t = stream.rows(output)
                for mode in ("floor", "student"):
                    layer.npt.mode = mode
                    nmse = nmse_per_token(student_output(layer, h, a)[0], t).sum(dtype=torch.float64).cpu()
                    layer.npt.mode = "teacher"
                    by_mode = sums.setdefault(index, {})
                    by_mode[mode] = by_mode.get(mode, torch.zeros((), dtype=torch.float64)) + nmse
            hidden = output
