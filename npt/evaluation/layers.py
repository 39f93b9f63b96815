"""Distance of each layer's output from the teacher's, measured during the model's own forward.

Teacher-forced: the layer is fed the teacher's state, so the figure shows the error of this layer
alone. Free-running: the layer is fed the student's state, so the figure shows how errors compound
with depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_mode
from npt.adapters.layer import Mode, NPTLayer, student_output
from npt.adapters.token_modulation import observed
from npt.batch import Batch
from npt.distill.hidden_losses import nmse_per_token
from npt.evaluation.metrics import mean_and_error
from npt.hooks import within

COMPARED: tuple[Mode, ...] = ("floor", "student")

Key = tuple[int, str]
"""(layer, figure)."""


class LayerErrors:
    """NMSE of converted layers. For every batch, run teacher, then floor and student inside
    `watching`, then call `add`.

    Memory: the teacher's states after every such layer, N * D values per layer, until `add`.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[tuple[int, NPTLayer]]):
        self._model = model
        self._layers = layers
        self._targets: dict[int, Tensor] = {}
        self._per_token: dict[Key, Tensor] = {}
        self._sums: dict[Key, list[Tensor]] = {}
        self._counts: list[Tensor] = []

    @contextmanager
    def watching(self, batch: Batch, mode: Mode) -> Iterator[None]:
        """Set the model to `mode` and compare its layers during a forward on this batch."""
        with adapter_mode(self._model, mode), ExitStack() as stack:
            for index, layer in self._layers:
                if mode == "teacher":
                    self._watch_teacher(batch, index, layer, stack)
                else:
                    self._watch_stream(batch, index, layer, mode, stack)
            yield

    def _watch_teacher(self, batch: Batch, index: int, layer: Any, stack: ExitStack) -> None:
        attention: list[Tensor] = []

        def forced(_: Any, args: tuple[Tensor, ...], named: dict[str, Any], output: Tensor) -> None:
            t = _rows(batch, output)
            self._targets[index] = t
            hidden = args[0] if args else named["hidden_states"]
            h = _rows(batch, hidden).to(t.device)
            a = _rows(batch, attention.pop())

            # floor and student start from the teacher's h and attention: neither needs a forward
            def compare() -> None:
                for mode in COMPARED:
                    layer.npt.mode = mode
                    error = nmse_per_token(student_output(layer, h, a)[0], t)
                    name = f"nmse_{mode}"
                    self._per_token[index, name] = error

            try:
                within(layer, compare)
            finally:
                layer.npt.mode = "teacher"

        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            attention.append(output[0])

        stack.callback(layer.self_attn.register_forward_hook(keep).remove)
        stack.callback(layer.register_forward_hook(forced, with_kwargs=True).remove)

    def _watch_stream(
        self, batch: Batch, index: int, layer: Any, mode: Mode, stack: ExitStack
    ) -> None:
        def compare(_module: Any, _inputs: Any, output: Tensor) -> None:
            error = nmse_per_token(_rows(batch, output), self._targets[index])
            self._per_token[index, f"free_running_{mode}"] = error

        stack.callback(layer.register_forward_hook(compare).remove)
        if mode == "student" and layer.npt.config.active:
            stack.enter_context(observed([(layer.npt, partial(self._count, batch, index))]))

    def _count(self, batch: Batch, index: int, stages: dict[str, Tensor | None]) -> None:
        """Keep how many numbers of each token's code are not 0."""
        if (z := stages.get("z")) is not None:
            self._per_token[index, "active"] = (_rows(batch, z) != 0).sum(dim=-1)

    def add(self, batch: Batch) -> None:
        """Sum a batch's errors per sample, in fp64 on the host, and free its states."""
        count, length = batch.input_ids.shape
        rows = batch.valid_index.cpu() // length  # [N], the sample of each valid token
        for key, values in self._per_token.items():
            sums = torch.zeros(count, dtype=torch.float64)
            sums.index_add_(0, rows, values.to("cpu", torch.float64))
            self._sums.setdefault(key, []).append(sums)
        tokens = batch.attention_mask.sum(dim=-1)
        self._counts.append(tokens.to("cpu", torch.float64))
        self._targets = {}
        self._per_token = {}

    def figures(self) -> dict[int, dict[str, float]]:
        """Return per layer the mean NMSE per valid token by name, with a threshold the student's
        `active` numbers, and their standard errors over samples as `<name>_se`.
        """
        counts = torch.cat(self._counts)
        layers: dict[int, dict[str, float]] = {}
        for (index, name), parts in sorted(self._sums.items(), key=lambda item: item[0][0]):
            layer = layers.setdefault(index, {})
            layer[name], layer[f"{name}_se"] = mean_and_error(torch.cat(parts), counts)
        return layers


def _rows(batch: Batch, states: Tensor) -> Tensor:
    """Return the rows of valid tokens, [N, D], from states [B, T, D]."""
    valid = batch.valid_index.to(states.device)
    return states.reshape(-1, states.shape[-1]).index_select(0, valid)
