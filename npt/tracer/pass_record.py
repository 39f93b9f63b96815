"""What a pass computed, step by step, in memory or in a file, to compare another pass with."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from npt.errors import ConfigError, printable
from npt.files import write_bytes
from npt.stored import opened, shown
from npt.tracer.operations import names
from npt.tracer.tensors import dtype_name
from npt.tracer.verdict import Phase

DTYPES = names(
    "float64 float32 bfloat16 float16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool"
)
"""Results of these can be compared."""

# A pass is meant to compute in a dtype that at least this share of its results has.
_MEANT = 0.1


def rounding_in(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


class Step(NamedTuple):
    """The name of a result in both passes; `nth` counts equal ones."""

    module: str
    phase: Phase
    operation: str
    result: int
    shape: tuple[int, ...]
    nth: int


class Result(NamedTuple):
    """The result of a step.

    Attributes:
        read: the coarsest rounding of what its operation read.
        source: the line.
        value: the result on the host, if kept.
    """

    dtype: torch.dtype
    read: float
    source: str = ""
    value: Tensor | None = None


@dataclass
class PassRecord:
    """The results of a pass in order; `end` is the loss, or the mean of the first output."""

    results: dict[Step, Result] = field(default_factory=dict)
    end: str = ""

    @property
    def values(self) -> dict[Step, Tensor]:
        """The results that were kept."""
        results = self.results.items()
        return {step: result.value for step, result in results if result.value is not None}

    @property
    def unit(self) -> float:
        """The rounding error of the coarsest dtype that the pass is meant to compute in."""
        counts = Counter(rounding_in(result.dtype) for result in self.results.values())
        del counts[0.0]  # integers
        least = _MEANT * counts.total()
        return max((unit for unit, n in counts.items() if n >= least), default=0.0)

    def alone(self, step: Step, matched: Collection[Step]) -> str:
        """Name the unmatched operations just before a step."""
        steps = [*self.results]
        before = reversed(steps[: steps.index(step)])
        alone = [*takewhile(lambda earlier: earlier not in matched, before)]
        named = [self._named(earlier) for earlier in reversed(alone)]
        return ", ".join(dict.fromkeys(named))

    def _named(self, step: Step) -> str:
        line = self.results[step].source.split(" in ")[0]
        return f"{step.operation} ({line})" if line else step.operation

    def save(self, path: Path) -> None:
        values = self.values
        reads = [self.results[step].read for step in values]
        tensors = {str(i): value.contiguous() for i, value in enumerate(values.values())}
        metadata = {"npt_trace": json.dumps([*values]), "reads": json.dumps(reads), "end": self.end}
        write_bytes(path, safetensors.torch.save(tensors, metadata))

    @staticmethod
    def load(path: Path) -> PassRecord:
        """Return the record in a file, which may come from anybody, or raise ConfigError."""
        with opened(path, ConfigError) as stored:
            metadata = stored.metadata() or {}
            if "npt_trace" not in metadata:
                raise ConfigError(f"{path} was not written by against=; pass another file")
            try:
                record = PassRecord(end=printable(metadata["end"], one_line=True))
                steps = json.loads(metadata["npt_trace"])
                reads = json.loads(metadata["reads"])
                for i, (entry, read) in enumerate(zip(steps, reads, strict=True)):
                    value = stored.get_tensor(str(i))
                    step = _step_of(entry)
                    dtype = dtype_name(value.dtype)
                    if dtype not in DTYPES or value.shape != step.shape:
                        raise ValueError(
                            f"tensor {i} is {dtype} {[*value.shape]}, but its step {[*step.shape]}"
                        )
                    if not 0 <= read <= 1:
                        raise ValueError(f"{read} is not the rounding of a dtype")
                    record.results[step] = Result(value.dtype, read, value=value)
            except (LookupError, RecursionError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{path} is damaged ({type(error).__name__}: {shown(str(error))}): remove it,"
                    " and write the reference again"
                ) from error
        return record


def _step_of(entry: Any) -> Step:
    """Return a step read from JSON; ValueError or TypeError if it is none."""
    module, phase, operation, result, shape, nth = entry
    words = (module, phase, operation)
    if {*map(type, words)} != {str}:
        raise TypeError(f"{words} are not all text")
    numbers = (result, *shape, nth)
    if {*map(type, numbers)} != {int}:
        raise TypeError(f"{numbers} are not all whole numbers")
    return Step(module, phase, operation, result, tuple(shape), nth)
