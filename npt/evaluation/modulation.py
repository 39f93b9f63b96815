"""The effect of the adapters on a student's tokens: how far multipliers move, how many sit at their
bounds, how large the additive terms are.

A loss does not show that a multiplicative term has run into its bounds, so that it has no gradient
left, or that an additive term has outgrown the product it corrects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_mode, attached_config, evaluating, npt_layers
from npt.adapters.layer import NPTAdapter
from npt.adapters.token_modulation import observed
from npt.config import TARGETS
from npt.data.batch import Batch
from npt.errors import DataError
from npt.evaluation.metrics import checked_batches, final_states
from npt.random_state import kept_random_state

SATURATED = 0.99
"""A multiplier is saturated beyond this share of the way from the middle of its form's range to an
end.
"""

Stages = dict[str, Tensor | None]


@dataclass(frozen=True)
class Modulation:
    """The modulation of the converted layers.

    Attributes:
        tokens: valid tokens.
        mult_bound: beta.
        layers: by index {"stream_rms", "targets": {target: figures}}. The figures are `product_rms`
            and `add_rms`, of the additive term and of what it is added to; `saturated` and `bad`,
            the shares of multipliers at their bounds and not finite; `mean` and `std`, of the
            finite ones. What the form of a target does not have is None.
    """

    tokens: int
    mult_bound: float
    layers: dict[int, dict[str, Any]]

    @property
    def saturated(self) -> tuple[float, str]:
        """The share of all multipliers at their bounds, and the layer and target with the most;
        targets of other widths weigh alike.
        """
        shares = {
            f"layer {index}, {name}": target["saturated"]
            for index, layer in self.layers.items()
            for name, target in layer["targets"].items()
            if target["saturated"] is not None
        }
        if not shares:
            return 0.0, "no layer"
        return sum(shares.values()) / len(shares), max(shares, key=lambda name: shares[name])

    def as_dict(self) -> dict[str, Any]:
        """Plain values; `layers` by the index as text."""
        return {**asdict(self), "layers": {str(index): x for index, x in self.layers.items()}}


@kept_random_state()
def measure_modulation(
    model: PreTrainedModel, batches: Iterable[Batch], between: Callable[[], None] | None = None
) -> Modulation:
    """Measure the student's modulation of the valid tokens of some batches. The model does not
    change. `between` is called before every batch, and may raise.

    Raises:
        DataError: no batch, or token ids outside the vocabulary.
    """
    config = attached_config(model)
    layers = npt_layers(model)
    sums = [_Sums(layer.npt) for _, layer in layers]
    tokens = 0
    with (
        observed([(layer.npt, of) for (_, layer), of in zip(layers, sums, strict=True)]),
        torch.no_grad(),
        evaluating(model),
        adapter_mode(model, "student"),
    ):
        for batch in checked_batches(model, batches, "modulation data", between):
            for of_layer in sums:
                of_layer.valid = batch.valid_index
            final_states(model, batch)
            tokens += batch.tokens
    if not tokens:
        raise DataError("no token to look at the modulation on; check the data")
    figures = {index: of.result() for (index, _), of in zip(layers, sums, strict=True)}
    return Modulation(tokens, config.mult_bound, figures)


class _Sums:
    """Sums of one layer's modulation, in fp64 on the layer's device: nothing waits for them.

    Attributes:
        valid: [N], positions of the valid tokens of the current batch.
    """

    def __init__(self, adapter: NPTAdapter):
        self._config, self._multiplied = adapter.config, frozenset(adapter.M)
        self.valid: Tensor | None = None
        self._sums: dict[str, Tensor] = {}  # by target; of the residual stream too

    def __call__(self, stages: Stages) -> None:
        shown = {name: TARGETS[name].stage for name in self._config.targets}
        for key, stage in {"residual": "stream", **shown}.items():
            if stages.get(stage) is not None:
                terms = (stages[stage], stages.get(f"s_{key}"), stages.get(f"m_{key}"))
                part = self._part(*(None if term is None else self._rows(term) for term in terms))
                self._sums[key] = self._sums[key] + part if key in self._sums else part

    def _rows(self, states: Tensor) -> Tensor:
        """Return the valid tokens' rows of [B, T, O], as fp32: [N, O]."""
        assert self.valid is not None
        rows = states.reshape(-1, states.shape[-1])
        return rows.index_select(0, self.valid.to(states.device)).to(torch.float32)

    def _part(self, result: Any, shift: Tensor | None, m: Tensor | None) -> Tensor:
        """Return [7] of [N, O] results, shifts in them and multipliers m: how many numbers; squares
        of results without shifts, and of shifts; how many m are saturated, how many not finite; sum
        and squares of m - 1.
        """
        nothing = torch.zeros((), dtype=torch.float64, device=result.device)
        count = torch.full_like(nothing, result.numel())
        added = nothing if shift is None else _squares(shift)
        product = _squares(result if shift is None else result - shift)
        if m is None:
            return torch.stack([count, product, added, *[nothing] * 4])
        finite = torch.isfinite(m)
        away = torch.where(finite, m - 1.0, 0.0)
        middle, half = self._config.multiplier_spread
        saturated = (finite & ((m - middle).abs() > SATURATED * half)).sum().double()
        bad, total = (~finite).sum().double(), away.sum(dtype=torch.float64)
        return torch.stack([count, product, added, saturated, bad, total, _squares(away)])

    def result(self) -> dict[str, Any]:
        """Return the layer's figures."""
        count, squares, *_ = self._sums["residual"].tolist()
        targets = {target: self._result(target) for target in TARGETS if target in self._sums}
        return {"stream_rms": math.sqrt(squares / count), "targets": targets}

    def _result(self, target: str) -> dict[str, float | None]:
        count, product, added, saturated, bad, total, squares = self._sums[target].tolist()
        figures: dict[str, float | None] = dict.fromkeys(("saturated", "bad", "mean", "std"))
        if target in self._multiplied:
            finite = count - bad
            mean = total / finite if finite else math.nan
            std = math.sqrt(max(0.0, squares / finite - mean * mean)) if finite else math.nan
            shares = {"saturated": saturated / count, "bad": bad / count}
            figures = {**shares, "mean": 1.0 + mean, "std": std}
        add_rms = math.sqrt(added / count) if target in self._config.shifted else None
        return {"product_rms": math.sqrt(product / count), "add_rms": add_rms, **figures}


def _squares(values: Tensor) -> Tensor:
    """Return the sum of squares, [] in fp64, which neither overflows as fp32 nor hides a NaN."""
    return torch.linalg.vector_norm(values, dtype=torch.float64).square()
