"""How strongly each converted layer modulates each token of a text, as plain numbers.

In an NPT layer attention reaches a token's MLP only through the modulation, so the change that the
modulation makes shows the effect of the context there:

    change = ||MLP'(x) - MLP(x)|| / ||MLP(x)||

for the same input x, with and without the modulation: 0 is no change, 1 a change as large as the
output itself. Effects on later layers are not included.

Shapes: T tokens, L converted layers, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_mode, attached_config, evaluating, npt_layers
from npt.adapters.layer import NPTLayer, student_output
from npt.adapters.token_modulation import as_row, observed
from npt.config import TARGETS
from npt.evaluation.contexts import Number
from npt.evaluation.metrics import COLUMNS, compare_tokens, most_likely
from npt.hooks import within

Stages = dict[str, Tensor | None]

_CONTEXT = 8
"""Tokens to decode before a token, since a token decoded alone loses its leading space."""


@dataclass(frozen=True)
class ModulationMap:
    """The student's modulation along a text and its KL from the teacher, in fp32 on the host.
    Non-finite numbers are kept.

    Attributes:
        ids: [T], token ids of the text.
        layers: indices of the L converted layers.
        targets: names of the targets.
        change: [T, L], ||MLP'(x) - MLP(x)|| / ||MLP(x)||.
        kl: [T], KL(teacher, student) in nats between their predictions of each token; NaN for the
            first token, which nothing predicts.
        teacher_first: [T] int64, the teacher's most likely token at each position; -1 for the
            first.
        student_first: the student's, in the same form.
        codes: by layer z, [T, R], if only some of its numbers are active; else empty.
    """

    ids: Tensor
    layers: tuple[int, ...]
    targets: tuple[str, ...]
    change: Tensor
    kl: Tensor
    teacher_first: Tensor
    student_first: Tensor
    codes: dict[int, Tensor]

    def texts(self, tokenizer: Any) -> list[str]:
        """Return the text of each token: `token_texts` of `ids`."""
        return token_texts(tokenizer, self.ids.tolist())

    def as_dict(self, tokenizer: Any) -> dict[str, Any]:
        """Return plain values with three digits, and the text of each token, for JSON and for
        `npt/report/generated.py`.
        """
        values: dict[str, Any] = {
            "tokens": self.texts(tokenizer),
            "layers": list(self.layers),
            "change": _rounded(self.change.tolist()),
            "kl": _rounded(self.kl.tolist()),
            "teacher_first": _decoded(tokenizer, self.teacher_first),
            "student_first": _decoded(tokenizer, self.student_first),
        }
        if self.codes:
            values["active"] = [self.active_numbers(token) for token in range(len(self.ids))]
        return values

    def active_numbers(self, token: int) -> list[list[list[float]]]:
        """Return by layer a token's active numbers, as pairs of index and value, largest first."""
        layers = []
        for code in self.codes.values():
            row = code[token]  # [R]
            order = row.abs().argsort(descending=True)[: int(row.count_nonzero())]
            values = _rounded(row[order].tolist())
            layers.append([list(pair) for pair in zip(order.tolist(), values, strict=True)])
        return layers

    def strongest(self, count: int) -> list[tuple[Number, int, float]]:
        """Return the numbers with the largest sums of squares over the text, each with the token at
        which it is largest and its value there.
        """
        found = []
        for layer, code in self.codes.items():
            for sign in (1, -1):
                sizes = (sign * code).clamp_min(0.0)  # [T, R]
                totals = sizes.square().sum(dim=0)
                tops = sizes.max(dim=0)
                for index, total in enumerate(totals.tolist()):
                    if total > 0:
                        value = sign * float(tops.values[index])
                        where = (Number(layer, index, sign), int(tops.indices[index]), value)
                        found.append((total, where))
        found.sort(key=lambda pair: pair[0], reverse=True)
        return [where for _, where in found[:count]]


@torch.no_grad()
def modulation_map(model: PreTrainedModel, ids: Any) -> ModulationMap:
    """Run teacher and student over a text and measure the modulation of each token. The text may
    come from anywhere, and the model does not change. Memory: the logits of a few tokens at a time.

    Args:
        model: a model with adapters attached, or a view of one.
        ids: [T] or [1, T], token ids of the text, start token included.

    Raises:
        ConfigError: there are no tokens, or ids lie outside the vocabulary.
        ModelError: no adapters are attached.
    """
    config = attached_config(model)
    row = as_row(model, ids)
    layers = npt_layers(model)
    stages: dict[int, Stages] = {index: {} for index, _ in layers}
    changes: list[Tensor] = []
    codes: dict[int, Tensor] = {}

    def compare(index: int, layer: NPTLayer, *_: Any) -> None:
        plain = _unmodulated(layer, stages[index])
        moved = torch.linalg.vector_norm(_row(stages[index], "mlp") - plain, dim=-1)
        change = moved / torch.linalg.vector_norm(plain, dim=-1)  # [T]
        changes.append(change.cpu())
        if config.active:
            codes[index] = _row(stages[index], "z").cpu()
        stages[index].clear()  # the adapter's observer is its `update`

    with evaluating(model), ExitStack() as stack:
        with adapter_mode(model, "teacher"):
            of_teacher = model.model(row, use_cache=False).last_hidden_state[0, :-1]
        # at once after each layer, so that only one layer's stages are in memory
        for index, layer in layers:
            hook = layer.register_forward_hook(partial(compare, index))
            stack.callback(hook.remove)
        observers = [(layer.npt, stages[index].update) for index, layer in layers]
        with adapter_mode(model, "student"), observed(observers):
            of_student = model.model(row, use_cache=False).last_hidden_state[0, :-1]
        head = model.get_output_embeddings()
        size = model.config.vocab_size
        columns = compare_tokens(of_student, of_teacher, row[0, 1:], head, size).cpu()
        teacher_first = most_likely(of_teacher, head, size).cpu()
        student_first = most_likely(of_student, head, size).cpu()
    # nothing predicts the first token
    none = torch.tensor([-1])
    unknown = torch.tensor([torch.nan])
    return ModulationMap(
        ids=row[0].cpu(),
        layers=tuple(index for index, _ in layers),
        targets=tuple(target for target in TARGETS if target in config.targets),
        change=torch.stack(changes, dim=1),
        kl=torch.cat([unknown, columns[:, COLUMNS.index("kl")]]),
        teacher_first=torch.cat([none, teacher_first]),
        student_first=torch.cat([none, student_first]),
        codes=codes,
    )


def _unmodulated(layer: NPTLayer, stages: Stages) -> Tensor:
    """Return the unmodulated MLP output [T, D] for the same input."""
    plain: Stages = {}
    adapter: Any = layer.npt
    mode = adapter.mode
    try:
        with observed([(adapter, plain.update)]):
            adapter.mode = "floor"
            within(layer, partial(student_output, layer, stages["h"], stages["a"]))  # type: ignore[arg-type]
    finally:
        adapter.mode = mode
    return _row(plain, "mlp")


def _row(stages: Stages, name: str) -> Tensor:
    """Return the only row of a stage [1, T, O] in fp32: [T, O]."""
    states = stages[name]
    assert states is not None
    return states[0].to(torch.float32)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds, special tokens included.

    If a character spans several tokens, the last one gets the character and the others U+FFFD.
    """
    texts = []
    for number, token in enumerate(ids):
        context = list(ids[max(0, number - _CONTEXT) : number])
        # a character that is not complete yet
        earlier = tokenizer.decode(context).rstrip("\ufffd") if context else ""
        text = tokenizer.decode([*context, token])
        if text.startswith(earlier):
            texts.append(text.removeprefix(earlier))
        else:
            texts.append(tokenizer.decode([token]))
    return texts


def _decoded(tokenizer: Any, ids: Tensor) -> list[str | None]:
    return [None if token < 0 else tokenizer.decode([token]) for token in ids.tolist()]


def _rounded(values: Any) -> Any:
    if isinstance(values, list):
        return [_rounded(value) for value in values]
    return float(f"{values:.3g}")
