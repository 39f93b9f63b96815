"""Compare the student and its floor with the teacher on the same held-out tokens."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from npt.adapters.converted import attached_config, evaluating, npt_layers
from npt.adapters.layer import Mode
from npt.batch import Batch, Sample, batches
from npt.calibration.samples import samples_of
from npt.config import DataConfig
from npt.data.source import Given
from npt.errors import ConfigError, DataError
from npt.evaluation.greedy import Divergence, end_ids, measure_divergence, parting_prompts
from npt.evaluation.layers import LayerErrors
from npt.evaluation.metrics import (
    Figures,
    Pair,
    change_of,
    checked_batches,
    compare_pairs,
    figures,
    final_states,
    per_sample_sums,
    predicting,
)
from npt.evaluation.reading import reading
from npt.figures import Change, nan_for_null
from npt.random_state import kept_random_state

MODES: tuple[Mode, ...] = ("teacher", "floor", "student")

COMPARISONS = {
    "unquantized_to_4bit": ("teacher", "unquantized"),
    "4bit_to_npt": ("student", "teacher"),
    "unquantized_to_npt": ("student", "unquantized"),
}
"""Name in `fidelity.json`, and (model, model that it is compared with)."""


@dataclass(frozen=True)
class Fidelity:
    """Agreement of each model, and of each layer, with the teacher.

    Attributes:
        teacher: the base compared with itself.
        floor: the student without context: the converted layers with their attention dropped, and
            with the token part alone if there is one.
        student: the student.
        initial: the student before training.
        layers: per converted layer, the mean NMSE per valid token when the layer is fed the
            teacher's h (`nmse_<model>`) or the model's own (`free_running_<model>`), and the
            student's `active` numbers of a token, with `_se`. Empty if the teacher reads contexts.
        divergence: where greedy continuations diverge, if it was measured.
        attribution: figures by name in `COMPARISONS`, if an unquantised base was given.
        positions: the student's figures by position of the predicting token in its text, in octaves
            ("0-1", "2-3", "4-7", ...) that at least two samples reach.
        change: what training changed.
        samples: the sums of `aim` for each sample, [C, len(COLUMNS)]; only checkpoints keep them.
    """

    teacher: Figures
    floor: Figures
    student: Figures
    initial: Figures | None = None
    layers: dict[int, dict[str, float]] = field(default_factory=dict)
    divergence: Divergence | None = None
    attribution: dict[str, Figures] = field(default_factory=dict)
    positions: dict[str, Figures] = field(default_factory=dict)
    change: Change | None = None
    samples: list[list[float]] = field(default_factory=list, compare=False, repr=False)

    @property
    def aim(self) -> Figures:
        """The student against the unquantised base if that was given, else against its teacher."""
        return self.attribution.get("unquantized_to_npt", self.student)

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `fidelity.json`."""
        values = asdict(replace(self, samples=[]))
        values = {name: value for name, value in values.items() if value or name == "layers"}
        return {**values, "layers": {str(index): layer for index, layer in self.layers.items()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Fidelity:
        """Return figures from an `as_dict`, with `samples` if they were added; null becomes NaN."""
        read: dict[str, Any] = {name: Figures.from_dict(values[name]) for name in MODES}
        if "initial" in values:  # not in a run without training
            read["initial"] = Figures.from_dict(values["initial"])
        if "divergence" in values:
            read["divergence"] = Divergence.from_dict(values["divergence"])
        if "change" in values:
            read["change"] = Change(**nan_for_null(values["change"]))
        return cls(
            **read,
            layers={int(index): nan_for_null(layer) for index, layer in values["layers"].items()},
            attribution=_by_name(values.get("attribution", {})),
            positions=_by_name(values.get("positions", {})),
            samples=values.get("samples", []),
        )

    def after(self, initial: Fidelity, judged_by: str = "kl") -> Fidelity:
        """Return these figures with those of `initial`, measured before training, and the change of
        the figure `judged_by` added.
        """
        layers = {}
        for index, values in self.layers.items():
            layers[index] = dict(values)
            for key, value in initial.layers.get(index, {}).items():
                if "_student" in key:
                    layers[index][key.replace("_student", "_initial")] = value
        # a resumed run may evaluate on other samples
        change = change_of(judged_by, initial.aim, self.aim, initial.samples, self.samples)
        return replace(self, initial=initial.student, layers=layers, change=change)


def _by_name(values: Mapping[str, Any]) -> dict[str, Figures]:
    return {name: Figures.from_dict(stored) for name, stored in values.items()}


@dataclass(frozen=True)
class Reference:
    """Outputs of an unquantised base, kept so that the base itself can be freed.

    Attributes:
        states: per sample, the final states of the P predicting tokens, [P, D], on the host.
        head: its lm_head.
    """

    states: tuple[Tensor, ...]
    head: nn.Module


@kept_random_state()
def reference_outputs(
    model: PreTrainedModel, samples: Sequence[Sample], *, batch_size: int = 8
) -> Reference:
    """Run the unquantised base on the samples and return its outputs, so that it need not be in
    memory together with the student. If the model has adapters, its teacher runs.

    Memory: P * D values on the host for P predicted tokens (1 GiB for 64 Ki tokens of D 4096 in
    fp32), and the head's V * D values.

    Raises:
        DataError: token ids lie outside the vocabulary.
    """
    states: list[Tensor] = []
    with reading(model, "teacher"):
        for batch in checked_batches(model, batches(samples, batch_size), "evaluation data"):
            predicted = predicting(batch).sum(dim=-1).tolist()
            states += final_states(model, batch.taught).cpu().split(predicted)
    return Reference(tuple(states), model.lm_head)


@kept_random_state()
def evaluate(
    model: PreTrainedModel,
    tokenizer: Any,
    data: Given | Sequence[Sample],
    *,
    data_config: DataConfig | None = None,
    batch_size: int = 8,
    max_samples: int | None = None,
    divergence_prompts: int = 0,
    max_new_tokens: int = 64,
    unquantized: PreTrainedModel | Reference | None = None,
    between: Callable[[], None] | None = None,
) -> Fidelity:
    """Compare the student with its teacher, and with the floor (the student without context), on
    the same tokens. If the data have contexts (`context_column`), the teacher alone reads them. The
    model does not change.

    Each batch takes three forwards of the model and of its head. Besides the model this needs
    memory for the logits of a chunk of tokens and, for one batch at a time, for the teacher's
    states after every converted layer: N * D values per layer.

    Args:
        model: a model with adapters attached.
        tokenizer: tokenizer of the base.
        data: records, the path of a file of them, or samples already cut. For prompts with
            completions, only the tokens of the completions are predicted; the NMSE of the layers
            covers all tokens.
        data_config: how to cut records into samples.
        batch_size: samples at a time; changes the figures only by rounding.
        max_samples: evaluate at most this many samples.
        divergence_prompts: continue the beginnings of this many samples greedily and find where the
            student diverges from its teacher.
        max_new_tokens: length limit of such a continuation.
        unquantized: the base before quantisation, or its `reference_outputs` on these samples, to
            measure what quantisation and conversion each cost.
        between: called before every batch; an exception from it ends the evaluation.

    Raises:
        DataError: there are no tokens to evaluate on, or ids lie outside the vocabulary.
        ConfigError: `max_new_tokens` leaves no room for a prompt, or continuations are asked for
            although the data have contexts.
        NumericalError: the logits of a greedy continuation are not finite.
        ModelError: no adapters are attached.
    """
    attached_config(model)
    every = samples_of(data, tokenizer, data_config or DataConfig())
    samples = list(itertools.islice(every, max_samples))
    if not samples:
        raise DataError("no text of two tokens or more to evaluate on; check the data")
    # run before the student, whose passes then need its states alone
    reference = unquantized
    if isinstance(unquantized, PreTrainedModel):
        reference = reference_outputs(unquantized, samples, batch_size=batch_size)
    if reference is not None and len(reference.states) != len(samples):
        raise DataError(
            f"unquantized holds outputs of {len(reference.states)} samples, but {len(samples)} are"
            " evaluated; run reference_outputs on the same samples"
        )
    # all that is compared on a batch, so that each model's head runs once
    pairs: list[Pair] = [(mode, "teacher") for mode in MODES]
    aimed_at = ("student", "teacher")
    comparisons = {}
    if reference is not None:
        comparisons = COMPARISONS
        pairs += [pair for pair in comparisons.values() if pair not in pairs]
        aimed_at = comparisons["unquantized_to_npt"]
    sums = _Sums(pairs)
    layers = npt_layers(model)
    if any(sample.taught is not None for sample in samples):
        layers = []  # those that read different rows cannot be compared
        if divergence_prompts:
            raise ConfigError(
                f"--divergence_prompts {divergence_prompts} does not support data with contexts:"
                " remove it, or --context_column"
            )
    layer_errors = LayerErrors(model, layers)
    divergence = None
    done = 0
    with torch.no_grad(), evaluating(model):
        if divergence_prompts:
            limit = getattr(model.config, "max_position_embeddings", None)
            prompts = parting_prompts(samples[:divergence_prompts], max_new_tokens, limit)
            ends = end_ids(model, tokenizer)
            divergence = measure_divergence(
                model, prompts, ends, max_new_tokens, batch_size, between
            )
        parts = batches(samples, batch_size)
        for batch in checked_batches(model, parts, "evaluation data", between):
            hidden = _states_by_mode(model, batch, layer_errors)
            heads = dict.fromkeys(hidden, model.lm_head)
            end = done + len(batch.input_ids)
            if reference is not None:  # whose samples are in the order of the batches
                states = torch.cat(reference.states[done:end])
                hidden["unquantized"] = states.to(batch.input_ids.device)
                heads["unquantized"] = reference.head
            done = end
            targets = batch.labels[:, 1:][predicting(batch)]
            per_token = compare_pairs(hidden, heads, targets, model.config.vocab_size, pairs)
            del hidden  # before the next batch's forward passes
            sums.add(batch, per_token)
    measured = sums.figures()
    return Fidelity(
        teacher=measured["teacher", "teacher"],
        floor=measured["floor", "teacher"],
        student=measured["student", "teacher"],
        samples=sums.of(aimed_at).tolist(),
        layers=layer_errors.figures(),
        divergence=divergence,
        attribution={name: measured[pair] for name, pair in comparisons.items()},
        positions=sums.by_position(),
    )


class _Sums:
    """Sums over each sample's tokens of what a comparison measures: of every pair of models, and of
    student and teacher by octave of the predicting token's position in its text.
    """

    def __init__(self, pairs: Iterable[Pair]):
        self._of_pairs: dict[Pair, list[Tensor]] = {pair: [] for pair in pairs}
        self._of_octaves: dict[int, list[Tensor]] = defaultdict(list)

    def add(self, batch: Batch, per_token: Mapping[Pair, Tensor]) -> None:
        """Add the P predicted tokens of a batch: by pair, [P, len(COLUMNS)]."""
        predicted = predicting(batch)  # [B, T - 1], P of them True
        rows = predicted.nonzero()[:, 0]
        size = len(predicted)
        for pair, columns in per_token.items():
            self._of_pairs[pair].append(per_sample_sums(columns, rows, size))
        position = batch.position_ids[:, :-1][predicted].clamp(min=1)
        # the binary exponent: 1 for the positions 0 and 1, 2 for 2 and 3, 3 for 4 to 7
        octave = position.float().frexp().exponent
        columns = per_token["student", "teacher"]
        for index in octave.unique().tolist():
            inside = octave == index
            sums = per_sample_sums(columns[inside], rows[inside], size)
            self._of_octaves[index].append(sums)

    def of(self, pair: Pair) -> Tensor:
        """Return the sums of a pair, [C, len(COLUMNS)]; DataError if there are none."""
        sums = torch.cat(self._of_pairs[pair])
        if not len(sums):
            raise DataError("no token to predict in the evaluation data; check labels and prompts")
        return sums

    def figures(self) -> dict[Pair, Figures]:
        return {pair: figures(self.of(pair)) for pair in self._of_pairs}

    def by_position(self) -> dict[str, Figures]:
        found = {}
        for index, parts in sorted(self._of_octaves.items()):
            sums = torch.cat(parts)
            if len(sums) > 1:  # one sample has no standard error
                first = 2 ** (index - 1) if index > 1 else 0
                found[f"{first}-{2**index - 1}"] = figures(sums)
        return found


def _states_by_mode(
    model: PreTrainedModel, batch: Batch, layer_errors: LayerErrors
) -> dict[str, Tensor]:
    """Return the final states of the P predicting tokens, [P, D], of teacher, floor and student."""
    hidden: dict[str, Tensor] = {}
    for mode in MODES:
        read = batch.taught if mode == "teacher" else batch
        with layer_errors.watching(read, mode):
            hidden[mode] = final_states(model, read)
    layer_errors.add(batch)
    return hidden
