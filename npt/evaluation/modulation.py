"""The effect of the adapters on a student's tokens: how far multipliers move, how many sit at their
bounds, how large the additive terms are.

A loss does not show that a multiplicative term has run into its bounds, so that it has no gradient
left, or that an additive term has outgrown the product it corrects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_mode, attached_config, npt_layers
from npt.adapters.layer import NPTAdapter
from npt.adapters.modulation import multiplier_spread
from npt.config import TARGETS
from npt.data.batch import Batch
from npt.errors import DataError
from npt.evaluation.metrics import checked_batches, evaluating, final_states
from npt.random_state import kept_random_state

SATURATED = 0.99
"""A multiplier is saturated beyond this share of the way from the middle of its form's range to an
end.
"""

Stages = dict[str, Tensor | None]


@dataclass(frozen=True)
class TargetModulation:
    """One target of one layer; what its form does not have is None.

    Attributes:
        product_rms: of what the additive term is added to.
        add_rms: of the additive term.
        saturated: share of the multipliers at their bounds.
        bad: share of the multipliers that are not finite.
        mean: of the finite multipliers.
        std: of the finite multipliers.
    """

    product_rms: float
    add_rms: float | None
    saturated: float | None = None
    bad: float | None = None
    mean: float | None = None
    std: float | None = None


@dataclass(frozen=True)
class LayerModulation:
    """One converted layer.

    Attributes:
        stream_rms: of the residual stream that the MLP's output is added to.
        targets: the figures of each target.
    """

    stream_rms: float
    targets: dict[str, TargetModulation]


@dataclass(frozen=True)
class Modulation:
    """All converted layers by index.

    Attributes:
        tokens: valid tokens.
        mult_bound: beta.
        additive_scale: alpha.
        layers: the figures of each layer.
    """

    tokens: int
    mult_bound: float
    additive_scale: float
    layers: dict[int, LayerModulation]

    @property
    def saturated(self) -> tuple[float, str]:
        """The share of all multipliers at their bounds, and the layer and target with the most;
        targets of other widths weigh alike.
        """
        shares = {
            f"layer {index}, {name}": target.saturated
            for index, layer in self.layers.items()
            for name, target in layer.targets.items()
            if target.saturated is not None
        }
        if not shares:
            return 0.0, "no layer"
        return sum(shares.values()) / len(shares), max(shares, key=lambda name: shares[name])

    def as_dict(self) -> dict[str, Any]:
        """Plain values; `layers` by the index as text."""
        layers = {str(index): asdict(layer) for index, layer in self.layers.items()}
        return {**asdict(self), "layers": layers}


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
    return Modulation(
        tokens,
        config.mult_bound,
        config.additive_scale,
        {index: of.result() for (index, _), of in zip(layers, sums, strict=True)},
    )


@contextmanager
def observed(
    observers: Sequence[tuple[NPTAdapter, Callable[[Stages], None] | None]],
) -> Iterator[None]:
    """Show each adapter's stages to its observer."""
    previous = [adapter.observer for adapter, _ in observers]
    try:
        for adapter, observer in observers:
            adapter.observer = observer
        yield
    finally:
        for (adapter, _), observer in zip(observers, previous, strict=True):
            adapter.observer = observer


class _Sums:
    """Sums of one layer's modulation, in fp64 on the layer's device: nothing waits for them.

    Attributes:
        valid: [N], positions of the valid tokens of the current batch.
    """

    def __init__(self, adapter: NPTAdapter):
        self.config = adapter.config
        self.valid: Tensor | None = None
        self._sums: dict[str, Tensor] = {}  # by "residual", target, or "m_<target>"
        self._sizes: dict[str, int] = {}  # elements in them

    def __call__(self, stages: Stages) -> None:
        stream = stages.get("stream")
        if stream is not None:
            rows = self._rows(stream)
            self._add("residual", _squares(rows), rows)
        for name in self.config.targets:
            product = stages.get(TARGETS[name].stage)
            if product is None:
                continue
            rows, m, s = self._rows(product), stages.get(f"m_{name}"), stages.get(f"s_{name}")
            added = torch.zeros((), dtype=torch.float64, device=rows.device)
            if s is not None:
                shift = self._rows(s)
                added, rows = _squares(shift), rows - shift
            self._add(name, torch.stack([added, _squares(rows)]), rows)
            if m is not None:
                multipliers = self._rows(m)
                self._add(f"m_{name}", self._spread(multipliers), multipliers)

    def _add(self, key: str, part: Tensor, rows: Tensor) -> None:
        self._sums[key] = self._sums[key] + part if key in self._sums else part
        self._sizes[key] = self._sizes.get(key, 0) + rows.numel()

    def _rows(self, states: Tensor) -> Tensor:
        """Return the valid tokens' rows of [B, T, O], as fp32: [N, O]."""
        assert self.valid is not None
        rows = states.reshape(-1, states.shape[-1])
        return rows.index_select(0, self.valid.to(states.device)).to(torch.float32)

    def _spread(self, m: Tensor) -> Tensor:
        """Return [4] of [N, O] multipliers m: how many are saturated and not finite, and the sum
        and the sum of squares of m - 1.
        """
        finite = torch.isfinite(m)
        away = torch.where(finite, m - 1.0, 0.0)
        middle, half = multiplier_spread(self.config.mult_form, self.config.mult_bound)
        saturated = (finite & ((m - middle).abs() > SATURATED * half)).sum().double()
        bad = (~finite).sum().double()
        return torch.stack([saturated, bad, away.sum(dtype=torch.float64), _squares(away)])

    def result(self) -> LayerModulation:
        """Return the layer's figures."""
        stream = math.sqrt(float(self._sums["residual"]) / self._sizes["residual"])
        targets = [target for target in TARGETS if target in self._sums]
        return LayerModulation(stream, {target: self._result(target) for target in targets})

    def _result(self, target: str) -> TargetModulation:
        n = self._sizes[target]
        added, product = (math.sqrt(x / n) for x in self._sums[target].tolist())
        add_rms = added if target in self.config.shifted else None
        if f"m_{target}" not in self._sums:
            return TargetModulation(product, add_rms)
        saturated, bad, total, squares = self._sums[f"m_{target}"].tolist()
        finite = n - bad
        mean = total / finite if finite else math.nan
        std = math.sqrt(max(0.0, squares / finite - mean * mean)) if finite else math.nan
        return TargetModulation(product, add_rms, saturated / n, bad / n, 1.0 + mean, std)


def _squares(values: Tensor) -> Tensor:
    """Return the sum of squares, [] in fp64, which neither overflows as fp32 nor hides a NaN."""
    return torch.linalg.vector_norm(values, dtype=torch.float64).square()
