"""Predict the peak memory of training from the shape of the model.

The peak is in one of three phases: a micro-batch, whose graph is alive; an optimizer step, which
keeps the state before it until the new state is verified; or an evaluation. The factors count the
tensors that are alive together; they were fitted to runs of many shapes.
All rows are assumed to be full. Loading the base, the closed-form start and the process itself are
not included.

Shapes: N tokens computed at once, T tokens of a row, D hidden, F ffn, R rank, V vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from npt.adapters.trained import BLOCK
from npt.base.load import COMPUTE
from npt.config import STREAM, BaseConfig, NPTConfig, TrainConfig
from npt.device import default_device
from npt.distill.logit_losses import LOGIT_CHUNK, chunk_rows
from npt.doctor.shape import Shape
from npt.errors import ConfigError
from npt.guard.window import IN_FLIGHT

PHASES = ("micro-batch", "step", "evaluation")
"""Phases that can contain the peak."""

FP32 = 4
"""Bytes per number of adapters, their gradients and moments, and most activations."""

LOGITS = {"kl": 7.25, "reverse_kl": 7.25, "cross_entropy": 3.0}
"""Number of tensors of a chunk of logits that are alive at once, by loss."""


def shown(size: float) -> str:
    """Format bytes as in `6.20 GiB`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(size) >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} bytes"


def available(device: torch.device) -> int | None:
    """Return the bytes that are free for a run on this device, or None if unknown."""
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return None
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    try:
        _, _, rest = Path("/proc/meminfo").read_text(encoding="ascii").partition("MemAvailable:")
        return 1024 * int(rest.split()[0])
    except (OSError, IndexError, ValueError):
        return None


@dataclass(frozen=True)
class Term:
    """One use of memory, and the phases in which it is alive."""

    name: str
    bytes: int
    phases: tuple[str, ...] = PHASES


@dataclass(frozen=True)
class MemoryPlan:
    """The predicted memory of training, term by term."""

    terms: tuple[Term, ...]

    def of(self, *phases: str) -> int:
        """Return the largest number of bytes in these phases."""
        sizes = []
        for phase in phases:
            alive = [term.bytes for term in self.terms if phase in term.phases]
            sizes.append(sum(alive))
        return max(sizes)

    @property
    def phase(self) -> str:
        """The phase that contains the peak."""
        return max(PHASES, key=self.of)

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return self.of(self.phase)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan for JSON."""
        return {
            **asdict(self),
            "peak_bytes": self.peak,
            "phase": self.phase,
            "phases": {phase: self.of(phase) for phase in PHASES},
        }


@dataclass(frozen=True)
class Workload:
    """The run to plan.

    Attributes:
        config: configuration of the base.
        length: tokens per row.
        quantization: nf4, fp4 or None.
        stored: dtype of weights that are not in 4 bits.
        teacher: dtype of a separate teacher; None if the base is the teacher.
        eager: whether attention stores the scores of all pairs of tokens.
        compute_dtype: dtype of products with 4-bit weights.
        processes: number of processes that share the base; the plan is for one of them.
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
        """Return the run of these settings; ConfigError if `shard_base` lacks `processes`."""
        if base.shard_base and processes is None:
            raise ConfigError(
                "--shard_base shares the base among several processes: add --processes N"
            )
        packed = getattr(config, "quantization_config", None) is not None
        quantization = base.quant_type if packed else base.quantization
        stored = torch.float16 if base.use_fp16 else torch.float32
        if quantization is not None:
            stored = getattr(config, "dtype", None) or torch.float32
        teacher = None
        if base.teacher_precision is not None:
            teacher = COMPUTE[base.teacher_precision]
        return cls(
            config,
            adapter,
            training,
            length,
            quantization,
            stored,
            teacher,
            device or default_device(),
            eager=base.attn_implementation == "eager",
            compute_dtype=COMPUTE[base.compute_dtype],
            processes=processes or 1,
        )

    @property
    def shape(self) -> Shape:
        return Shape.of(self.config)

    @property
    def ranks(self) -> dict[int, int]:
        """The rank of each converted layer."""
        return self.shape.converted(self.adapter)

    def plan(self) -> MemoryPlan:
        """Return the memory of the run, term by term."""
        samples = self.training.batch_size
        evaluated = min(samples, self.training.eval_samples)
        terms = [*self._held(), *self._micro_batch()]
        terms.append(self._evaluation(evaluated))
        # a [B, 1, T, T] bool mask, and a copy in fp32 in the attention of one layer
        mask = 5 * self.length**2
        terms.append(Term("mask of padded rows", samples * mask, ("micro-batch",)))
        terms.append(Term("mask of padded rows", evaluated * mask, ("evaluation",)))
        return MemoryPlan(tuple(term for term in terms if term.bytes))

    def _held(self) -> list[Term]:
        """Return the memory that a run holds in all phases. On a GPU the results of some steps are
        read late (npt/guard/window.py), and the state before each of them is kept.
        """
        size = FP32 * self.shape.adapter_numbers(self.adapter)
        late = 0
        if self.device.type == "cuda":
            late = 1 if self.training.skip_spikes else IN_FLIGHT
        base = base_bytes(self.shape, self.quantization, self.stored, self.processes)
        teacher = 0
        if self.teacher is not None:
            teacher = base_bytes(self.shape, None, self.teacher)
        name = "base"
        if self.quantization is not None:
            name += f", {self.quantization.upper()}"
        if self.processes > 1:
            name += f", 1/{self.processes} of layers"
        return [
            Term(name, base),
            Term("layers that are gathered", self._gathered, ("micro-batch", "evaluation")),
            Term("separate teacher", teacher),
            Term("adapters", size),
            Term("AdamW's two moments", 2 * size),
            Term("gradients of a micro-batch", size),
            Term("gradients of the window", size),
            Term("state before the step", 3 * size, ("step",)),
            Term("states of steps in flight", late * 3 * size),
        ]

    @property
    def _gathered(self) -> int:
        """Return the bytes of layers that FSDP has gathered at once: the current layer, the buffer
        that it was copied from, and the next layer.
        """
        if self.processes == 1:
            return 0
        deeper = replace(self.shape, layers=self.shape.layers + 3)
        own = base_bytes(self.shape, self.quantization, self.stored)
        return base_bytes(deeper, self.quantization, self.stored) - own

    def _micro_batch(self) -> list[Term]:
        """Return the activations of a micro-batch.

        In a layer with a graph, attention keeps its input, q, k, v, its output and a sum per head.
        A plain MLP keeps three tensors [N, F], a converted MLP two.
        """
        s = self.shape
        config = self.training
        d = s.hidden
        ff = s.ffn
        n = config.batch_size * self.length
        first = min(self.ranks)
        last = max(self.ranks)
        count = len(self.ranks)
        rank = max(self.ranks.values())
        size = FP32 if self.quantization else self.stored.itemsize
        # numbers of a token in a layer with a graph
        attention = 2 * (d + s.query_width + s.key_width) + s.heads
        if self.eager:
            attention += s.heads * self.length
        down = "down" in self.adapter.targets
        # without padding, rows are views of the states; a padded batch copies them
        compared = config.hidden_weight > 0
        added = (2 * compared + down) * d + rank
        if self.adapter.token_part:  # its input, and a - l before and after the division by r
            added += 3 * d + self.adapter.token_rank + 3 * rank
        # The modulation is computed in blocks of rows (npt/adapters/trained.py), except for other
        # forms than the default and for a base that computes in 16 bits.
        if self.adapter.mult_form == "sigmoid" and size == FP32:
            whole = 0
            rows = BLOCK.get(self.device.type, BLOCK["cuda"]) // ff
            scratch = (2 + self._low_rank) * min(n, max(rank, rows, 1)) * ff
        else:
            whole = 2 * self._low_rank * n * ff * FP32 // size
            scratch = 2 * n * ff
        scratch += down * n * d
        plain = n * (attention + 3 * ff)
        converted = n * (attention + added + 2 * ff) + whole
        # a 4-bit weight that is dequantised for a product
        dense = 0
        if self.quantization:
            dense = d * ff * self.compute_dtype.itemsize // FP32
        if config.strategy != "end_to_end":  # one layer at a time, with four [N, F]
            kept = 0
            apart: float = 2 * (STREAM in self.adapter.targets)
            apart += 0.5 * (self.compute_dtype.itemsize < FP32)
            states = 6 * d + 3 * (s.query_width + s.key_width)
            layer = int(n * ((4 + apart) * ff + states)) + scratch + dense + whole
            taught = config.strategy == "propagated"
            if taught or last - first >= count:  # plain layers run too
                layer = max(layer, n * ((7 - taught) * ff + 4 * d))
        else:
            # a loss on logits needs the layers above the last converted one too
            end = s.layers if config.logit_kl_weight else last + 1
            layers = end - first
            kept = count * converted + (layers - count) * plain
            layer = 3 * n * ff + scratch + 2 * dense
            if config.gradient_checkpointing:
                # the inputs are kept, and backward computes one layer again
                layer += max(converted, plain if layers > count else 0)
                kept = n * d * (layers + count * compared)
        logits = 0
        if config.logit_kl_weight:
            chunk = min(n, chunk_rows(self.device, s.vocab)) * s.vocab
            numbers = self._logits(LOGITS[config.logit_loss] * chunk, n)
            # the memory of a layer is free again when the logits are computed
            logits = max(0, FP32 * numbers - size * layer)
        return [
            Term("activations kept", size * kept, ("micro-batch",)),
            Term("activations of one layer", size * layer, ("micro-batch",)),
            Term("logits beyond these", logits, ("micro-batch",)),
        ]

    def _evaluation(self, samples: int) -> Term:
        """Return the larger of two terms: forward passes, which keep the teacher's states, and the
        comparison of logits after them.
        """
        s = self.shape
        n = samples * self.length
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
        """Return the numbers in a chunk of logits, in a 16-bit head cast to fp32, and in states."""
        head = self.shape.head_weights if self.stored.itemsize < FP32 else 0
        return int(chunk) + head + 3 * n * self.shape.hidden


def base_bytes(
    shape: Shape, quantization: str | None, stored: torch.dtype, processes: int = 1
) -> int:
    """Return the bytes of a base, or of one process's shard of it.

    A 4-bit weight takes 4 bits, one byte of scale per 64 weights, and one fp32 scale per 256 of
    these scales. Embedding, head and norms stay unquantised. Only the layers' weights are sharded.
    """
    rest = (2 - shape.tied) * shape.head_weights + shape.hidden
    norms = 2 * shape.layers * shape.hidden
    numbers = shape.layers * shape.layer_weights
    share: float = stored.itemsize * (numbers + norms)
    scales = 0.0
    if quantization is not None:
        share = numbers / 2 + stored.itemsize * norms
        scales = numbers * (1 + 4 / 256) / 64
    return int(share / processes + scales) + stored.itemsize * rest
