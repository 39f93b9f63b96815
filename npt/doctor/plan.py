"""The peak memory of a training, by formulas of its shape.

It is at one of three moments: in a micro-batch, whose graph is alive, at an optimizer step, while
the state before it is kept until the new one is verified, or in an evaluation. The factors count
tensors that are alive together: they were read off the code and fitted to runs of many shapes. All
rows are taken to be full. Loading a base, the closed-form start and the process itself are left
out.

Shapes: N tokens computed at once, T of a row, D hidden, F ffn, R rank, V vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from npt.adapters.trained import BLOCK
from npt.base.device import default_device
from npt.base.load import COMPUTE
from npt.config import STREAM, BaseConfig, NPTConfig, TrainConfig
from npt.distill.logit_losses import LOGIT_CHUNK, chunk_rows
from npt.doctor.shape import Shape
from npt.errors import ConfigError
from npt.guard.window import IN_FLIGHT

PHASES = ("micro-batch", "step", "evaluation")
"""Moments of the peak."""

FP32 = 4
"""Bytes of a number of an adapter, its gradients, its moments and of most activations."""

LOGITS = {"kl": 7.25, "reverse_kl": 7.25, "cross_entropy": 3.0}
"""Tensors of a chunk of logits alive at once, by the loss."""


def shown(size: float) -> str:
    """Return bytes as `6.20 GiB`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(size) >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} bytes"


def available(device: torch.device) -> int | None:
    """Return the bytes that a run on this device could have now; None if nothing says it."""
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return None
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return int(dict(line.split(":", 1) for line in lines)["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


@dataclass(frozen=True)
class Term:
    """Something that takes memory in some phases."""

    name: str
    bytes: int
    phases: tuple[str, ...] = PHASES


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a training, term by term."""

    terms: tuple[Term, ...]

    def of(self, *phases: str) -> int:
        """Return the bytes at the highest moment of these phases."""
        return max(sum(term.bytes for term in self.terms if p in term.phases) for p in phases)

    @property
    def phase(self) -> str:
        """The phase with the peak."""
        return max(PHASES, key=self.of)

    @property
    def peak(self) -> int:
        """Bytes of the phase with the peak."""
        return self.of(self.phase)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        peak = {"peak_bytes": self.peak, "phase": self.phase}
        return asdict(self) | peak | {"phases": {phase: self.of(phase) for phase in PHASES}}


@dataclass(frozen=True)
class Workload:
    """A run that is planned.

    Attributes:
        config: of the base.
        length: tokens of a row.
        quantization: nf4, fp4 or None.
        stored: dtype of what is not packed.
        teacher: dtype of a teacher of its own, None if the base teaches.
        eager: attention keeps the scores of every pair of tokens.
        compute_dtype: of products of packed weights.
        processes: that share the base, one on each device; the plan is that of one of them.
    """

    config: PreTrainedConfig
    adapter: NPTConfig
    training: TrainConfig
    length: int
    quantization: str | None = None
    stored: torch.dtype = torch.float32
    teacher: torch.dtype | None = None
    device: torch.device = field(default_factory=default_device)
    eager: bool = False
    compute_dtype: torch.dtype = torch.float32
    processes: int = 1

    @classmethod
    def of(
        cls, base: BaseConfig, config: PreTrainedConfig, adapter: NPTConfig, training: TrainConfig,
        length: int, device: torch.device | None = None, processes: int | None = None,
    ) -> Workload:  # fmt: skip
        """Return the run that settings ask for; ConfigError for a base that an unknown number of
        processes share.
        """
        if base.shard_base and processes is None:
            raise ConfigError(
                "--shard_base shares the base among processes, each with a device of its own; say"
                " with --processes N how many"
            )
        packed = getattr(config, "quantization_config", None) is not None
        quantization = base.quant_type if packed else base.quantization
        stored = torch.float16 if base.use_fp16 else torch.float32
        if quantization is not None:
            stored = getattr(config, "dtype", None) or torch.float32
        return cls(
            config, adapter, training, length, quantization, stored,
            None if base.teacher_precision is None else COMPUTE[base.teacher_precision],
            device or default_device(), base.attn_implementation == "eager",
            COMPUTE[base.compute_dtype], processes or 1,
        )  # fmt: skip

    @property
    def shape(self) -> Shape:
        return Shape.of(self.config)

    @property
    def ranks(self) -> dict[int, int]:
        """Rank of each converted layer."""
        return self.shape.converted(self.adapter)

    def plan(self) -> MemoryPlan:
        """Return the memory of the run, term by term."""
        samples = self.training.batch_size
        evaluated = min(samples, self.training.eval_samples)
        terms = [*self._held(), *self._micro_batch()]
        terms.append(self._evaluation(evaluated))
        # [B, 1, T, T] bool of padded or packed rows, and a layer's attention's fp32 of it
        for phase, rows_at_once in (("micro-batch", samples), ("evaluation", evaluated)):
            terms.append(Term("mask of padded rows", 5 * rows_at_once * self.length**2, (phase,)))
        return MemoryPlan(tuple(term for term in terms if term.bytes))

    def _held(self) -> list[Term]:
        """Return what a run holds whatever it computes. On a GPU some steps' results are read late
        (npt/guard/window.py), and the state before each is kept.
        """
        s, kind = self.shape, self.quantization
        size = FP32 * s.adapter_numbers(self.adapter)
        late = 0
        if self.device.type == "cuda":
            late = 1 if self.training.skip_spikes else IN_FLIGHT
        teacher = 0 if self.teacher is None else base_bytes(s, None, self.teacher)
        name = "base" if kind is None else f"base, {kind.upper()}"
        if self.processes > 1:
            name += f", 1/{self.processes} of layers"
        return [
            Term(name, base_bytes(s, kind, self.stored, self.processes)),
            Term("layers that are gathered", self._gathered, ("micro-batch", "evaluation")),
            Term("teacher of its own", teacher),
            Term("adapters", size),
            Term("AdamW's two moments", 2 * size),
            Term("micro-batch's gradients", size),
            Term("window's gradients", size),
            Term("state before the step", 3 * size, ("step",)),
            Term("states of steps in flight", late * 3 * size),
        ]

    @property
    def _gathered(self) -> int:
        """Return the bytes of the layers that are whole at a time: FSDP keeps one that computes,
        what it was copied from, and the next one.
        """
        if self.processes == 1:
            return 0
        s, more = self.shape, replace(self.shape, layers=self.shape.layers + 3)
        one, other = (base_bytes(x, self.quantization, self.stored) for x in (s, more))
        return other - one

    def _micro_batch(self) -> list[Term]:
        """Return the activations of one stage.

        Of a layer with a graph attention keeps its input, q, k, v, the output and a sum for each
        head; a plain MLP keeps three [N, F], a converted one two.
        """
        s, config, ranks, targets = self.shape, self.training, self.ranks, self.adapter.targets
        n, d, ff = config.batch_size * self.length, s.hidden, s.ffn
        first, last, count = min(ranks), max(ranks), len(ranks)
        attention = 2 * (d + s.query_width + s.key_width) + s.heads
        attention += s.heads * self.length if self.eager else 0
        compared, down = config.hidden_weight > 0, "down" in targets
        # Rows are views of states where none is padded; a padded batch copies them.
        added = (2 * compared + down) * d + max(ranks.values())
        # Each term of the modulation takes a block of rows (npt/adapters/trained.py). Another form
        # than the default and a base that computes in 16 bit are run operation by operation.
        size = FP32 if self.quantization else self.stored.itemsize
        rows, whole = BLOCK.get(self.device.type, BLOCK["cuda"]) // ff, 0
        block, low = min(n, max(*ranks.values(), rows, 1)) * ff, self._low_rank
        if self.adapter.mult_form != "sigmoid" or size < FP32:
            block, low, whole = n * ff, 0, 2 * low * n * ff * FP32 // size
        plain, converted = n * (attention + 3 * ff), n * (attention + added + 2 * ff) + whole
        scratch = (2 + low) * block + down * n * d
        dense = d * ff * self.compute_dtype.itemsize // FP32 if self.quantization else 0
        if config.strategy != "end_to_end":  # one layer at a time, of four [N, F]
            apart = 2 * (STREAM in targets) + 0.5 * (self.compute_dtype.itemsize < FP32)
            states = 6 * d + 3 * (s.query_width + s.key_width)
            kept, layer = 0, int(n * ((4 + apart) * ff + states)) + scratch + dense + whole
            taught = config.strategy == "propagated"
            if taught or last - first >= count:  # next to which plain layers run
                layer = max(layer, n * ((7 - taught) * ff + 4 * d))
        else:
            layers = (s.layers if config.logit_kl_weight else last + 1) - first
            kept = count * converted + (layers - count) * plain
            layer = 3 * n * ff + scratch + 2 * dense
            if config.gradient_checkpointing:
                layer += max(converted, plain if layers > count else 0)
                kept = n * d * (layers + count * compared)
        logits = 0
        if config.logit_kl_weight:
            chunk = min(n, chunk_rows(self.device, s.vocab)) * s.vocab
            numbers = self._logits(LOGITS[config.logit_loss] * chunk, n)
            logits = max(0, FP32 * numbers - size * layer)
        return [
            Term("activations kept", size * kept, ("micro-batch",)),
            Term("activations of one layer", size * layer, ("micro-batch",)),
            Term("logits beyond them", logits, ("micro-batch",)),
        ]

    def _evaluation(self, samples: int) -> Term:
        """Return the larger of a batch's forwards, which keep the teacher's states, and of the
        comparison of its logits after them.
        """
        s, n = self.shape, samples * self.length
        logits = self._logits(5.25 * min(n, LOGIT_CHUNK // s.vocab) * s.vocab, n)
        layers = int(n * ((3.3 + 1.4 * self._low_rank) * s.ffn + 9 * s.hidden))
        layers += n * s.hidden * (s.layers - min(self.ranks) + 1)
        name = "logits of an evaluation" if logits > layers else "layers of an evaluation"
        return Term(name, FP32 * max(logits, layers), ("evaluation",))

    @property
    def _low_rank(self) -> int:
        terms = (*self.adapter.shifted, *self.adapter.multiplied)
        return sum(target in ("gate", "up") for target in terms)

    def _logits(self, chunk: float, n: int) -> int:
        """Return numbers of a chunk of logits, of a head in 16 bit cast to fp32, and of states."""
        head = self.shape.head_weights if self.stored.itemsize < FP32 else 0
        return int(chunk) + head + 3 * n * self.shape.hidden


def base_bytes(
    shape: Shape, quantization: str | None, stored: torch.dtype, processes: int = 1
) -> int:
    """Return the bytes of a base, or what one of several processes keeps of it: its share of the
    layers' weights, and all of the rest.

    A packed number takes 4 bits, a byte of scale for 64 of them, and for 256 scales one of their
    own in fp32; embedding, head and norms are never packed. Scales are not shared out.
    """
    rest = (2 - shape.tied) * shape.head_weights + shape.hidden
    norms, numbers = 2 * shape.layers * shape.hidden, shape.layers * shape.layer_weights
    share: float = stored.itemsize * (numbers + norms)
    scales = 0.0
    if quantization is not None:
        share, scales = numbers / 2 + stored.itemsize * norms, numbers * (1 + 4 / 256) / 64
    return int(share / processes + scales) + stored.itemsize * rest
