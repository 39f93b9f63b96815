"""The distance of each layer's output from the teacher's, taken while the model's own forward runs.

Teacher-forced: the layer is fed the teacher's state, so its figure is its own fault alone.
Free-running: the student's stream after the layer against the teacher's stream there, so its figure
shows how error compounds with depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_mode, decoder_layers
from npt.adapters.layer import Mode, NPTLayer, student_output, whole
from npt.data.batch import Batch
from npt.distill.hidden_losses import nmse_per_token
from npt.evaluation.metrics import mean_and_error

COMPARED: tuple[Mode, ...] = ("floor", "student")

Key = tuple[int, str]
"""(layer, figure)."""


class BatchErrors:
    """NMSE of one batch's tokens by layer: pass the teacher through `watching` first, then floor
    and student.

    Until the batch is done the teacher's states after every layer from the first converted one on
    are kept: N * D values a layer.
    """

    def __init__(self, model: PreTrainedModel, batch: Batch):
        self._model, self._batch = model, batch
        self._layers: list[Any] = list(decoder_layers(model))
        self._first = next(
            index for index, layer in enumerate(self._layers) if isinstance(layer, NPTLayer)
        )
        self._targets: dict[int, Tensor] = {}
        self._per_token: dict[Key, Tensor] = {}

    @contextmanager
    def watching(self, mode: Mode) -> Iterator[None]:
        """Let the model compute `mode`, and compare its layers."""
        with adapter_mode(self._model, mode), ExitStack() as stack:
            for index, layer in enumerate(self._layers[self._first :], self._first):
                if mode == "teacher":
                    self._watch_teacher(index, layer, stack)
                else:
                    self._watch_stream(index, layer, mode, stack)
            yield

    def _watch_teacher(self, index: int, layer: Any, stack: ExitStack) -> None:
        attention: list[Tensor] = []

        def forced(
            _module: Any, args: tuple[Tensor, ...], named: dict[str, Any], output: Tensor
        ) -> None:
            t = self._targets[index] = self._rows(output)
            if not isinstance(layer, NPTLayer):
                return
            hidden = args[0] if args else named["hidden_states"]
            h, a = self._rows(hidden).to(t.device), self._rows(attention.pop())
            try:
                with whole(layer):
                    for mode in COMPARED:
                        layer.npt.mode = mode
                        self._per_token[index, f"nmse_{mode}"] = nmse_per_token(
                            student_output(layer, h, a)[0], t
                        )
            finally:
                layer.npt.mode = "teacher"

        if isinstance(layer, NPTLayer):
            stack.callback(
                layer.self_attn.register_forward_hook(
                    lambda _module, _inputs, output: attention.append(output[0])
                ).remove
            )
        stack.callback(layer.register_forward_hook(forced, with_kwargs=True).remove)

    def _watch_stream(self, index: int, layer: Any, mode: Mode, stack: ExitStack) -> None:
        def compare(_module: Any, _inputs: Any, output: Tensor) -> None:
            self._per_token[index, f"free_running_{mode}"] = nmse_per_token(
                self._rows(output), self._targets[index]
            )

        stack.callback(layer.register_forward_hook(compare).remove)

    def _rows(self, states: Tensor) -> Tensor:
        """Return the valid tokens' rows of [B, T, D] states: [N, D]."""
        valid = self._batch.valid_index.to(states.device)
        return states.reshape(-1, states.shape[-1]).index_select(0, valid)

    def per_sample(self) -> dict[Key, Tensor]:
        """Return sums over each row's valid tokens: [B] fp64 on the host."""
        count, length = self._batch.input_ids.shape
        row = self._batch.valid_index.cpu() // length
        device = self._batch.input_ids.device
        # one wait for all
        table = torch.stack([values.to(device) for values in self._per_token.values()])
        sums = torch.zeros(len(table), count, dtype=torch.float64)
        sums.index_add_(1, row, table.to("cpu", torch.float64))
        return dict(zip(self._per_token, sums, strict=True))


class LayerErrors:
    """Per-sample sums of all batches, and the means per token that come of them."""

    def __init__(self) -> None:
        self._sums: dict[Key, list[Tensor]] = {}
        self._counts: list[Tensor] = []

    def add(self, errors: BatchErrors, batch: Batch) -> None:
        for key, sums in errors.per_sample().items():
            self._sums.setdefault(key, []).append(sums)
        self._counts.append(batch.attention_mask.sum(dim=-1).to("cpu", torch.float64))

    @property
    def tokens(self) -> int:
        return int(torch.cat(self._counts).sum())

    def figures(self) -> dict[int, dict[str, float]]:
        """Return by layer the mean NMSE per valid token by name, and its standard error over
        samples as `<name>_se`.
        """
        counts = torch.cat(self._counts)
        found: dict[int, dict[str, float]] = {}
        for (index, name), parts in sorted(self._sums.items(), key=lambda item: item[0][0]):
            layer = found.setdefault(index, {})
            layer[name], layer[f"{name}_se"] = mean_and_error(torch.cat(parts), counts)
        return found
