"""What was refused and why, in words, on one process and on all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from npt.distributed.processes import ProcessGroup
from npt.errors import DataError, ProcessError

if TYPE_CHECKING:
    from npt.guard.outcome import MicroBatch, PendingWindow

UNGUARDED = "train unguarded with callbacks=[npt.guard.Report()], which says what is lost"

IN_LOSS, IN_GRADIENT, BEFORE = 1, 2, 4
"""What is wrong with a micro-batch on one process, if gradients are summed in its backward."""


@dataclass(frozen=True)
class Refusal:
    """One refused micro-batch or step.

    Attributes:
        kind: `data` (refused before any computation), `error`, `loss` or `gradient`; for a whole
            window `norm`, `spike`, `update` (parameters or moments after the step) or `card`.
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


def check_alike(
    figures: Mapping[str, Sequence[float]], window: int, steps: int, processes: ProcessGroup
) -> None:
    """Raise if processes had different data in a window, of which they would train on some twice,
    on some never, or differ after `steps` alike steps; a state is 0 if it is not finite.
    """
    data, states = figures["data"], figures.get("states", ())
    other = next((process for process, mark in enumerate(data) if mark != data[0]), None)
    if other is not None:
        message = (
            f"process {other} reads other data than process 0 in window {window + 1} (fingerprints"
            f" {data[other]:.0f} and {data[0]:.0f}); give all the same data in the same order"
        )
        raise processes.everywhere(ProcessError(message, DataError.exit_status))
    bad = [process for process, state in enumerate(states) if not state]
    wrong = bad or [process for process, state in enumerate(states) if state != states[0]]
    if wrong and len(bad) < len(states):
        where = ", ".join(map(str, wrong))
        message = (
            f"every process took step {steps + 1} alike, but what it left on process {where}"
            f" {'is not finite' if bad else 'differs'}; it was taken back: look at the hardware of"
            " these processes, then continue with --resume auto"
        )
        raise processes.everywhere(ProcessError(message))


def refusal_of(
    micro: MicroBatch, loss: float, names: Sequence[str], process: int
) -> Refusal | None:
    """Return why a micro-batch of this summed loss was refused that ran on this process; None if
    another's was summed with it and is to blame. If only the sum is bad, it is process 0's.
    """
    if micro.codes is not None:
        code = micro.codes[process]
        if not bool(code) and (process or bool(micro.codes.any())):
            return None
    if math.isfinite(loss):
        kind, (tensor, detail) = "gradient", describe_norms(micro.norms, names)
    else:
        bad = int((~micro.norms.isfinite()).sum())
        kind, tensor = "loss", None
        detail = f"loss is {loss}, and {bad or 'none'} of {len(names)} gradients are not finite"
    return Refusal(kind, detail, micro.index, micro.sample_ids, process, tensor)


def window_refusal(
    window: PendingWindow, names: Sequence[str], scalars: Mapping[str, float]
) -> Refusal:
    loss, norm = scalars["loss"], scalars["norm"]
    if math.isfinite(norm) and not scalars["spike"]:
        tensor = window.update.first_bad()
        detail = f"{tensor} was not finite after the step; the state before it was restored"
        return Refusal("update", detail, tensor=tensor)
    assert window.norms is not None
    tensor, description = describe_norms(window.norms, names)
    if not math.isfinite(norm):
        detail = f"gradient norm of the window is {norm}: {description}"
        return Refusal("norm", detail, tensor=tensor)
    above = [
        f"{name} {value:.4g} is above {limit:.4g}"
        for name, value, limit in zip(("loss", "norm"), (loss, norm), window.limits, strict=True)
        if value > limit
    ]
    detail = f"{' and '.join(above)}, the most that the accepted steps allow"
    return Refusal("spike", f"{detail}; the largest gradient is {tensor}'s", tensor=tensor)


def describe_norms(norms: Tensor, names: Sequence[str]) -> tuple[str, str]:
    """Return the first of a gradient's tensors that is not finite, or the largest, and a
    description of it; norms: [P].
    """
    values = norms.tolist()
    bad = [value for value in values if not math.isfinite(value)]
    value = bad[0] if bad else max(values)
    name = next(n for n, v in zip(names, values, strict=True) if v is value)
    if bad:
        return name, f"gradient of {name} has norm {value} ({len(bad)} of {len(values)} tensors)"
    return name, (
        f"every tensor's own norm is finite (largest {value:.3g}, of {name}), their sum of squares"
        " overflows"
    )
