"""What was refused, and why, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from npt.guard.outcome import LaunchedWindow, MicroBatch


@dataclass(frozen=True)
class Refusal:
    """One refused micro-batch or step.

    Attributes:
        kind: `data` (refused before any computation), `error`, `loss` or `gradient`; for a whole
            window `norm`, `spike` or `update` (parameters or moments after the step).
        detail: in words.
        micro_batch: index in the window over all processes, None for a whole window.
        sample_ids: of the micro-batch.
        process: that computed it.
        tensor: the first that was not finite, by name; of finite gradients that are too large, the
            largest.
    """

    kind: str
    detail: str
    micro_batch: int | None = None
    sample_ids: tuple[str, ...] = ()
    process: int = 0
    tensor: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as events and post-mortems store it: the process as `rank`, the tensor in
        `detail` alone.
        """
        values = asdict(self)
        process = values.pop("process")
        del values["tensor"]
        return {**values, "rank": process}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Refusal:
        """Return what `as_dict` gave, now or in an earlier version."""
        names = tuple(map(str, values["sample_ids"]))
        kind, detail, index = (values[key] for key in ("kind", "detail", "micro_batch"))
        return cls(kind, detail, index, names, values["rank"])

    def __str__(self) -> str:
        where = (
            "the whole window" if self.micro_batch is None else f"micro-batch {self.micro_batch}"
        )
        where += f" on process {self.process}" if self.process else ""
        samples = f" (samples {', '.join(self.sample_ids)})" if self.sample_ids else ""
        return f"{where}{samples}: {self.kind}: {self.detail}"


def refusal_of(micro: MicroBatch, loss: float, names: Sequence[str], process: int) -> Refusal:
    """Return why a micro-batch was refused that ran on this process; its summed loss is given."""
    names = names[: len(micro.norms)]  # more may have joined since
    kind, detail, tensor = "loss", f"loss is {loss}", None
    if not math.isfinite(loss):
        bad = int((~micro.norms.isfinite()).sum())
        detail += f", and {bad or 'none'} of {len(names)} gradients are not finite"
    else:
        kind, detail = "gradient", describe_norms(micro.norms, names)
        tensor = worst(micro.norms, names)
    return Refusal(kind, detail, micro.index, micro.sample_ids, process, tensor)


def window_refusal(
    window: LaunchedWindow, names: Sequence[str], scalars: Mapping[str, float]
) -> Refusal:
    """Return why a window was refused as a whole."""
    loss, norm = scalars["loss"], scalars["norm"]
    if not scalars["finite_norm"]:
        assert window.norms is not None
        detail = f"gradient norm of the window is {norm}: {describe_norms(window.norms, names)}"
        return Refusal("norm", detail, tensor=worst(window.norms, names))
    if scalars["spike"]:
        assert window.spikes is not None and window.norms is not None
        largest = worst(window.norms, names)
        detail = window.spikes.describe(loss, norm, window.limits)
        return Refusal("spike", f"{detail}; the largest gradient is {largest}'s", tensor=largest)
    bad = window.update.first_bad()
    detail = f"{bad} was not finite after the step; the state before it was restored"
    return Refusal("update", detail, tensor=bad)


def worst(norms: Tensor, names: Sequence[str]) -> str:
    """Return the first of a gradient's tensors that is not finite, or the largest; norms: [P]."""
    values = norms.tolist()
    bad = [place for place, value in enumerate(values) if not math.isfinite(value)]
    return names[bad[0] if bad else values.index(max(values))]


def describe_norms(norms: Tensor, names: Sequence[str]) -> str:
    """Return which of a gradient's tensors is not finite, in words; norms: [P]."""
    values = norms.tolist()
    bad = [(n, v) for n, v in zip(names, values, strict=True) if not math.isfinite(v)]
    if not bad:
        return (
            f"every tensor's own norm is finite (largest {max(values):.3g}, of"
            f" {worst(norms, names)}), their sum of squares overflows"
        )
    return f"gradient of {bad[0][0]} has norm {bad[0][1]} ({len(bad)} of {len(values)} tensors)"
