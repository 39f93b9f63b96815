"""The modulation of every token of a text by every converted layer, as plain numbers.

In an NPT layer attention reaches a token's MLP through the modulation alone. So what the modulation
changes, token by token and layer by layer, is what the context does there. The main number is the
change of the MLP's output,

    change = ||MLP'(x) - MLP(x)|| / ||MLP(x)||

for the same input x, with the modulation and without: 0 if it changes nothing, 1 if the change is
as large as the output itself. Unlike the size of m or s alone it is the same quantity for
every form, bound and scale of an adapter. Left out: the change that later layers make of it.

Shapes: T tokens, L converted layers, K targets, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_mode, attached_config, npt_layers
from npt.adapters.layer import NPTLayer, student_output, whole
from npt.adapters.token_modulation import as_row
from npt.base.linear import cast_once
from npt.config import STREAM, TARGETS
from npt.distill.hidden_losses import nmse_per_token
from npt.distill.logit_losses import LOGIT_CHUNK, kl_of_logs
from npt.evaluation.metrics import evaluating

_CONTEXT = 8
"""Tokens that are decoded before a token, at least: alone it would lose its leading space."""


@dataclass(frozen=True)
class ModulationMap:
    """The student's modulation along a text, and its distance from the teacher there.

    All numbers are fp32 on the host. A number that is not finite stays so.

    ids: [T], the text. layers: L indices. targets: K names, of gate, up and down.
    change: [T, L], ||MLP'(x) - MLP(x)|| / ||MLP(x)||, the MLP's output with its modulation and
    without, for the same input.
    of_stream: [T, L], the same difference over the norm of the residual stream that it is added to.
    products: [T, L, K], ||y' - y|| / ||y||, y being the product that the target modulates.
    mult: [T, L, K], RMS of m - 1 over the channels; NaN if the form has no multiplier.
    add: [T, L, K], ||s|| / ||y||; NaN if the form has no additive term.
    distance: [T, L], ||o - t||^2 / ||t||^2 of the student's stream after the layer, fed by the
    layers before it, from the teacher's.
    kl: [T], KL(teacher, student) in nats of the predictions of each token from those before it.
    teacher_p, student_p: [T], the probability of the token to each of them.
    teacher_first, student_first: [T] int64, the token that each finds most likely there.
    Nothing predicts the first token: its entries are NaN, and -1.
    """

    ids: Tensor
    layers: tuple[int, ...]
    targets: tuple[str, ...]
    change: Tensor
    of_stream: Tensor
    products: Tensor
    mult: Tensor
    add: Tensor
    distance: Tensor
    kl: Tensor
    teacher_p: Tensor
    student_p: Tensor
    teacher_first: Tensor
    student_first: Tensor

    def texts(self, tokenizer: Any) -> list[str]:
        """Return the text of each token: `token_texts` of `ids`."""
        return token_texts(tokenizer, self.ids.tolist())

    def as_dict(self, tokenizer: Any = None) -> dict[str, Any]:
        """Return plain values with three digits, for JSON and for `npt/report/generated.py`.

        tokenizer: names the tokens; None shows their ids.
        """
        return {
            "tokens": self.texts(tokenizer),
            "layers": list(self.layers),
            "targets": list(self.targets),
            **{
                name: _rounded(getattr(self, name).tolist())
                for name in ("change", "of_stream", "products", "distance", "kl")
            },
            "teacher_p": _rounded(self.teacher_p.tolist()),
            "student_p": _rounded(self.student_p.tolist()),
            "teacher_first": _names(tokenizer, self.teacher_first.tolist()),
            "student_first": _names(tokenizer, self.student_first.tolist()),
        }


@torch.no_grad()
def modulation_map(model: PreTrainedModel, ids: Any) -> ModulationMap:
    """Run teacher and student over a text, and measure the modulation of each of its tokens.

    The text need not be the student's own: `ids` may be a text that the teacher or a person wrote.
    The model does not change. Memory: the teacher's states after each converted layer, 4 L T D
    bytes, and the logits of a few tokens at a time.

    Args:
        model: with adapters attached, or a view of such a model.
        ids: [T], or [1, T], token ids of the text, its start token included.

    Raises:
        ConfigError: no tokens, or ids outside the vocabulary.
        ModelError: no adapters are attached.
    """
    config = attached_config(model)
    row = as_row(model, ids)
    targets = tuple(target for target in TARGETS if target in config.targets)
    watches = [_Watch(layer, targets) for _, layer in npt_layers(model)]
    with evaluating(model):
        with adapter_mode(model, "teacher"), _taken(watches, "take_teacher"):
            taught = model.model(row, use_cache=False).last_hidden_state[0, :-1]
        with adapter_mode(model, "student"), _taken(watches, "take_student"):
            own = model.model(row, use_cache=False).last_hidden_state[0, :-1]
        predictions = _predictions(model.get_output_embeddings(), taught, own, row[0, 1:])
    found = {
        name: torch.stack([watch.found[name] for watch in watches], dim=1)
        for name in ("change", "of_stream", "products", "mult", "add", "distance")
    }
    layers = tuple(index for index, _ in npt_layers(model))
    return ModulationMap(row[0].cpu(), layers, targets, **found, **predictions)


@contextmanager
def _taken(watches: Sequence[_Watch], how: str) -> Iterator[None]:
    """Call a method of each watch after its layer's forward."""
    with ExitStack() as stack:
        for watch in watches:
            stack.callback(watch.layer.register_forward_hook(getattr(watch, how)).remove)
            if how == "take_student":
                stack.enter_context(watch.watching())
        yield


class _Watch:
    """One layer's pass over the text: its products, and what becomes of them."""

    def __init__(self, layer: NPTLayer, targets: Sequence[str]):
        self.layer: Any = layer
        self.targets = targets
        self.found: dict[str, Tensor] = {}
        self._taught: Tensor | None = None
        self._stages: dict[str, Tensor | None] = {}
        self._plain: dict[str, Tensor] = {}  # a target's product as the frozen weight gives it

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See the layer's stages and products."""
        adapter = self.layer.npt
        before, adapter.observer = adapter.observer, self._stages.update
        try:
            with ExitStack() as stack:
                for target in self.targets:
                    part = self.layer.get_submodule(TARGETS[target].module)
                    stack.callback(part.register_forward_hook(self._keep(target)).remove)
                yield
        finally:
            adapter.observer = before

    def _keep(self, target: str) -> Any:
        def keep(_module: Any, _inputs: Any, output: Tensor) -> None:
            self._plain.setdefault(target, output)  # the first is the modulated pass

        return keep

    def take_teacher(self, _module: Any, _inputs: Any, output: Tensor) -> None:
        self._taught = output[0].to(torch.float32)

    def take_student(self, _module: Any, _inputs: Any, output: Tensor) -> None:
        assert self._taught is not None
        seen = self._stages
        stream, plain = _row(seen["stream"]), _row(self._unmodulated(seen["h"], seen["a"]))
        moved = torch.linalg.vector_norm(_row(seen["mlp"]) - plain, dim=-1)
        found = {
            "change": moved / torch.linalg.vector_norm(plain, dim=-1),
            "of_stream": moved / torch.linalg.vector_norm(stream, dim=-1),
            "distance": nmse_per_token(output[0], self._taught),
        }
        by_target = zip(*(self._target(target) for target in self.targets), strict=True)
        found |= {
            name: torch.stack(values, dim=-1)
            for name, values in zip(("products", "mult", "add"), by_target, strict=True)
        }
        self.found = {name: value.to("cpu", torch.float32) for name, value in found.items()}
        self._taught, self._plain = None, {}
        self._stages.clear()  # the adapter's observer is its `update`

    def _unmodulated(self, hidden: Any, attention: Any) -> Tensor | None:
        """Return the MLP's output for the same input, without the modulation."""
        adapter, stages = self.layer.npt, dict[str, Tensor | None]()
        before = adapter.observer, adapter.mode
        adapter.observer, adapter.mode = stages.update, "floor"
        try:
            with whole(self.layer):
                student_output(self.layer, hidden, attention)
        finally:
            adapter.observer, adapter.mode = before
        return stages["mlp"]

    def _target(self, target: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return the target's columns of `products`, `mult` and `add`: [T] each."""
        y, after = _row(self._plain[target]), _row(self._stages[TARGETS[target].stage])
        if target == STREAM:
            after = after - _row(self._stages["h"])
        size = torch.linalg.vector_norm(y, dim=-1)
        m, s = self._stages.get(f"m_{target}"), self._stages[f"s_{target}"]
        none = torch.full_like(size, torch.nan)
        return (
            torch.linalg.vector_norm(after - y, dim=-1) / size,
            none if m is None else (_row(m) - 1).square().mean(dim=-1).sqrt(),
            none if s is None else torch.linalg.vector_norm(_row(s), dim=-1) / size,
        )


def _row(states: Tensor | None) -> Tensor:
    """Return the one row of [1, T, O] states, in fp32: [T, O]."""
    assert states is not None
    return states[0].to(torch.float32)


def _predictions(head: Any, taught: Tensor, own: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return the predictions of the tokens after the first, from [T - 1, D] final states."""
    parts: list[tuple[Tensor, ...]] = []
    rows = max(1, LOGIT_CHUNK // head.weight.shape[0])
    with cast_once(head):
        for start in range(0, len(targets), rows):
            chunk = slice(start, start + rows)
            log_p, log_q = (
                torch.log_softmax(head(states[chunk]).to(torch.float32), dim=-1)
                for states in (taught, own)
            )
            pick = targets[chunk].to(log_p.device).unsqueeze(-1)
            parts.append(
                (
                    kl_of_logs(log_p, log_q),
                    log_p.gather(-1, pick).squeeze(-1).exp(),
                    log_q.gather(-1, pick).squeeze(-1).exp(),
                    log_p.argmax(dim=-1),
                    log_q.argmax(dim=-1),
                )
            )
    names = ("kl", "teacher_p", "student_p", "teacher_first", "student_first")
    found: dict[str, Tensor] = {}
    for place, name in enumerate(names):
        whole_number = name.endswith("first")
        first = torch.tensor([-1] if whole_number else [torch.nan])
        found[name] = torch.cat([first, *(part[place].cpu() for part in parts)])
    return found


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text of each token within its text, special tokens included.

    A token may be a part of a character: its text is then U+FFFD, and the character belongs to the
    token that ends it. Without a tokenizer that decodes it is the id.
    """
    if not hasattr(tokenizer, "decode"):
        return [str(token) for token in ids]
    found = []
    for place, token in enumerate(ids):
        before = list(ids[max(0, place - _CONTEXT) : place])
        earlier = _decoded(tokenizer, before).rstrip("\ufffd")
        text = _decoded(tokenizer, [*before, token])
        inside = text.startswith(earlier)
        found.append(text[len(earlier) :] if inside else _decoded(tokenizer, [token]))
    return found


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    if not ids:
        return ""
    return tokenizer.decode(ids)


def _names(tokenizer: Any, ids: Sequence[int]) -> list[str | None]:
    if not hasattr(tokenizer, "decode"):
        return [None if token < 0 else str(token) for token in ids]
    return [None if token < 0 else _decoded(tokenizer, [token]) for token in ids]


def _rounded(values: Any) -> Any:
    """Return the numbers of nested lists with three digits."""
    if isinstance(values, list):
        return [_rounded(value) for value in values]
    return float(f"{values:.3g}")
