"""How far each number format carries a base: its error and its headroom, layer by layer, against
the same base in fp32.

Two errors, because they say different things. The residual stream's is what has piled up by a
layer, on the variant's own stream. That of a layer's own update is taken with the fp32 stream as
its input: it is what this layer adds, whoever came before.

Headroom is how many times the largest value could still double before its format has no number for
it. fp16 ends at 65504; bf16 goes as far as fp32, and pays in digits. It is taken of the values of
the pass, so it holds for these tokens.

One variant is in memory at a time. What is kept of fp32 is the valid tokens' residual stream, on
the host (D * (L + 1) * 4 bytes a token: 540 KB for D = 4096, L = 32), and lm_head.

Shapes: B batch, T time, D hidden, H heads, N valid tokens, P tokens that a token to predict
follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from npt.adapters.attach import decoder_layers
from npt.adapters.fit import check_length
from npt.adapters.stream import Stream, open_stream
from npt.base.load import load_base, read_config
from npt.base.precision import compute_in, quantization_of
from npt.config import DataConfig
from npt.data.batch import IGNORE_INDEX, Batch, batches, pad_id_of
from npt.data.source import check_source, open_source, own_heldout
from npt.distill.divergence import nmse_per_token
from npt.errors import ConfigError, ModelError
from npt.evaluation.heldout import evaluation_samples
from npt.evaluation.metrics import Figures, compare_tokens, figures, per_sample_sums

REFERENCE = "fp32"

VARIANTS: dict[str, tuple[str | None, torch.dtype]] = {
    REFERENCE: (None, torch.float32),
    "bf16": (None, torch.bfloat16),
    "fp16": (None, torch.float16),
    "nf4": ("nf4", torch.float32),
    "fp4": ("fp4", torch.float32),
    "nf4-bf16": ("nf4", torch.bfloat16),
    "nf4-fp16": ("nf4", torch.float16),
}
"""By name: the 4-bit code of the weights, or None, and what everything is computed in. fp32 under a
4-bit code is how this package runs a quantised base; 16 bit under one is how it is often run
elsewhere."""

CHECKPOINTS = (
    "input_norm",
    "q",
    "k",
    "v",
    "qk",
    "attention",
    "residual_mid",
    "mlp_norm",
    "gate",
    "up",
    "product",
    "down",
    "residual",
)
"""Where a layer is looked at, in the order of its pass.

qk: attention logits after the rotary embedding, before they are scaled down, of any two valid
tokens of a row: eager attention stores them so, and before it masks. attention: after o_proj.
residual_mid: h + a. product: act(gate) * up, what goes into down_proj. residual: the layer's
output.
"""


@dataclass(frozen=True)
class Extent:
    """The values at one checkpoint. absmax: largest size of the finite ones. non_finite: how many
    are not.
    """

    absmax: float
    non_finite: int

    def headroom(self, dtype: torch.dtype) -> float:
        """Bits: log2 of the dtype's largest finite number over absmax, below 0 where it does not
        fit; -inf where a value is not finite in the first place."""
        if self.non_finite:
            return -math.inf
        return math.inf if self.absmax == 0 else math.log2(torch.finfo(dtype).max / self.absmax)

    def joined(self, other: Extent) -> Extent:
        return Extent(max(self.absmax, other.absmax), self.non_finite + other.non_finite)


@dataclass(frozen=True)
class Errors:
    """Relative errors ||x - x_fp32|| / ||x_fp32|| over the valid tokens, NaN or inf where a token
    has no finite one.

    mean, worst: over tokens. non_finite: tokens whose state holds a non-finite value.
    """

    mean: float
    worst: float
    non_finite: int


@dataclass(frozen=True)
class LayerFigures:
    """One decoder layer of a variant. residual: of its output on the variant's own stream. update:
    of what it adds to fp32's stream."""

    residual: Errors
    update: Errors
    checkpoints: dict[str, Extent]

    def tightest(self, dtype: torch.dtype) -> tuple[str, float]:
        """The checkpoint with the least headroom, and its bits."""
        name = min(self.checkpoints, key=lambda c: self.checkpoints[c].headroom(dtype))
        return name, self.checkpoints[name].headroom(dtype)


@dataclass(frozen=True)
class VariantFigures:
    """A variant against fp32. figures: of its predictions, with fp32 as the teacher."""

    name: str
    quantization: str | None
    dtype: torch.dtype
    layers: tuple[LayerFigures, ...]
    figures: Figures

    @property
    def first_non_finite(self) -> tuple[int, str, int] | None:
        """Layer, checkpoint and count of the first non-finite values on the variant's own
        stream.
        """
        for index, layer in enumerate(self.layers):
            for name, extent in layer.checkpoints.items():
                if extent.non_finite:
                    return index, name, extent.non_finite
        return None

    @property
    def failing_layers(self) -> tuple[int, ...]:
        """Layers that give non-finite values even on fp32's stream: those at fault, not those that
        were handed a bad one. Where fp32's stream itself does not fit, that is every layer that it
        is given to."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.update.non_finite)

    def tightest(self, dtype: torch.dtype) -> tuple[int, str, float]:
        """Layer and checkpoint with the least headroom, and its bits."""
        index = min(range(len(self.layers)), key=lambda i: self.layers[i].tightest(dtype)[1])
        return index, *self.layers[index].tightest(dtype)

    def as_dict(self) -> dict[str, Any]:
        first = self.first_non_finite
        return {
            "quantization": self.quantization,
            "compute_dtype": str(self.dtype).removeprefix("torch."),
            **self.figures.as_dict(),
            "first_non_finite": (
                None
                if first is None
                else dict(zip(("layer", "checkpoint", "count"), first, strict=True))
            ),
            "failing_layers": list(self.failing_layers),
            "layers": [
                {
                    "layer": index,
                    "residual": asdict(layer.residual),
                    "update": asdict(layer.update),
                    "checkpoints": {
                        name: {
                            **asdict(extent),
                            "headroom_fp16": extent.headroom(torch.float16),
                            "headroom_bf16": extent.headroom(torch.bfloat16),
                        }
                        for name, extent in layer.checkpoints.items()
                    },
                }
                for index, layer in enumerate(self.layers)
            ],
        }


@dataclass(frozen=True)
class PrecisionComparison:
    """All variants of one base on the same tokens, fp32 first. heldout: whether these are of
    held-out text.
    """

    model: str
    samples: int
    tokens: int
    heldout: bool
    variants: tuple[VariantFigures, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "samples": self.samples,
            "tokens": self.tokens,
            "heldout": self.heldout,
            "variants": {v.name: v.as_dict() for v in self.variants},
        }


@dataclass(frozen=True)
class _Pass:
    """fp32 on one batch. states: the stream in front of every layer and behind the last, [N, D]
    each, on the host. final: after the final norm, [P, D], on the host."""

    batch: Batch
    states: list[Tensor]
    final: Tensor


@dataclass(frozen=True)
class Reference:
    """What is kept of fp32."""

    passes: list[_Pass]
    head: nn.Module


def compare_precision(
    name: str = "tiny",
    data: DataConfig | None = None,
    *,
    count: int = 16,
    batch_size: int = 4,
    variants: Sequence[str] = tuple(VARIANTS),
    device: str | torch.device | None = None,
    watch: Callable[[str], None] | None = None,
) -> PrecisionComparison:
    """The same held-out batches through the base in each number format.

    Args:
        name: of the base: `tiny`, a folder or a hub id, stored unquantised.
        data: where samples come from and how long they are; default the built-in text.
        count: samples, of the same choice that training and evaluation make.
        batch_size: samples at a time; changes figures by rounding only.
        variants: names out of `VARIANTS`; fp32 is compared with itself in any case, which has to
            give 0.
        device: default the first CUDA device, else the CPU.
        watch: told of each variant before it is loaded.

    Raises:
        ConfigError: an unknown variant, no samples, or samples longer than the model has positions.
        ModelError: a base that cannot be loaded, or that is stored in 4 bit.
        DataError: no data.
    """
    data = data if data is not None else DataConfig()
    for variant in variants:
        if variant not in VARIANTS:
            raise ConfigError(f"variant {variant!r} is unknown; choose from {', '.join(VARIANTS)}")
    for flag, value in (("samples", count), ("batch_size", batch_size)):
        if value < 1:
            raise ConfigError(f"--{flag} is {value}; it must be at least 1")
    check_length(data.max_length, read_config(name))
    check_source(data)
    tell = watch if watch is not None else lambda variant: None
    tell(REFERENCE)
    model, tokenizer = load_variant(name, REFERENCE, device)
    own = own_heldout(data)
    samples, heldout = evaluation_samples(
        own if own is not None else open_source(data),
        tokenizer,
        data,
        count,
        model.config.vocab_size,
        own,
    )
    reference = refer(model, batches(samples, batch_size, pad_id_of(tokenizer)))
    measured = [measure(model, reference, REFERENCE)]
    for variant in dict.fromkeys(variants):
        if variant != REFERENCE:
            del model  # one at a time
            tell(variant)
            model, _ = load_variant(name, variant, device)
            measured.append(measure(model, reference, variant))
    return PrecisionComparison(
        name, len(samples), sum(len(s.input_ids) for s in samples), heldout, tuple(measured)
    )


def load_variant(
    name: str,
    variant: str,
    device: str | torch.device | None = None,
    *,
    attn_implementation: str = "sdpa",
) -> tuple[Any, Any]:
    """A base in one of the `VARIANTS`, and its tokenizer.

    The loader knows fp32, fp16 and the 4-bit codes; what else computes in 16 bit is converted after
    loading, so bf16 needs fp32's memory for a moment.

    Raises:
        ModelError: the base cannot be loaded, or is stored in 4 bit, so that there is no
            unquantised one to compare with.
    """
    quantization, dtype = VARIANTS[variant]
    in_fp16 = quantization is None and dtype == torch.float16
    how: dict[str, Any] = {"use_fp16": in_fp16, "attn_implementation": attn_implementation}
    model, tokenizer = load_base(name, quantization=quantization, device=device, **how)
    if quantization_of(model) != quantization:
        raise ModelError(
            f"{name} is stored as {quantization_of(model)}, so it has no fp32 to be compared with;"
            " name its unquantised original"
        )
    if dtype != torch.float32 and not in_fp16:
        compute_in(model, dtype)
    return model, tokenizer


@torch.no_grad()
def refer(model: PreTrainedModel, given: Iterable[Batch]) -> Reference:
    """Run the base in fp32 and keep what others are measured against.

    Args:
        model: without adapters.
        given: batches on the host.
    """
    passes = []
    for batch in given:
        stream = open_stream(model, batch.to(_device(model)))
        hidden, states = stream.hidden, [stream.rows(stream.hidden).cpu()]
        for layer in decoder_layers(model):
            hidden = stream.clean(layer(hidden, **stream.context_of(layer)))
            states.append(stream.rows(hidden).cpu())
        passes.append(_Pass(batch, states, _final(model, hidden, batch).cpu()))
    return Reference(passes, model.lm_head)


@torch.no_grad()
def measure(model: PreTrainedModel, reference: Reference, name: str = "") -> VariantFigures:
    """Run a variant on the reference's batches, on its own stream and layer by layer on the
    reference's.

    Args:
        model: the same base in another number format, without adapters.
        reference: of `refer`.
        name: for the report.
    """
    layers = decoder_layers(model)
    extents: list[dict[str, Extent]] = [{c: Extent(0.0, 0) for c in CHECKPOINTS} for _ in layers]
    residuals: list[list[Tensor]] = [[] for _ in layers]
    updates: list[list[Tensor]] = [[] for _ in layers]
    per_sample = []
    for one in reference.passes:
        stream = open_stream(model, one.batch.to(_device(model)))
        hidden = stream.hidden
        for index, layer in enumerate(layers):
            before, after = (state.to(hidden.device) for state in one.states[index : index + 2])
            # fp32's stream as this variant would hold it: what its format has no digits for is lost
            # before the layer is at work.
            given = before.to(hidden.dtype)
            out = stream.rows(layer(stream.scatter(given), **stream.context_of(layer)))
            updates[index].append(_errors_per_token(_update(out, given), after - before, out))
            with _watched(layer, stream, extents[index]):
                hidden = stream.clean(layer(hidden, **stream.context_of(layer)))
            rows = stream.rows(hidden)
            _take(extents[index], "residual", rows)
            residuals[index].append(_errors_per_token(rows, after, rows))
        per_sample.append(_compare(model, reference, one, _final(model, hidden, one.batch)))
    return VariantFigures(
        name,
        quantization_of(model),
        hidden.dtype,
        tuple(
            LayerFigures(_errors(r), _errors(u), e)
            for r, u, e in zip(residuals, updates, extents, strict=True)
        ),
        figures(torch.cat(per_sample)),
    )


def _device(model: PreTrainedModel) -> torch.device:
    return next(model.parameters()).device


def _final(model: PreTrainedModel, hidden: Tensor, batch: Batch) -> Tensor:
    """The states after the final norm from which a token is predicted: [B, T, D] -> [P, D]."""
    return model.model.norm(hidden[:, :-1][_predicted(batch).to(hidden.device)])


def _predicted(batch: Batch) -> Tensor:
    """[B, T - 1] bool: a valid token, followed by one to predict."""
    return (batch.labels[:, 1:] != IGNORE_INDEX) & batch.attention_mask[:, :-1].bool()


def _compare(model: PreTrainedModel, reference: Reference, one: _Pass, final: Tensor) -> Tensor:
    predicted = _predicted(one.batch)
    targets = one.batch.labels[:, 1:][predicted].to(final.device)
    per_token = compare_tokens(
        final,
        one.final.to(final.device),
        targets,
        model.lm_head,
        model.config.vocab_size,
        teacher_head=reference.head,
    )
    return per_sample_sums(per_token, predicted.nonzero()[:, 0], len(predicted))


def _update(out: Tensor, given: Tensor) -> Tensor:
    """What a layer has added to its input, [N, D], in fp32, in which the difference of two 16-bit
    numbers loses nothing here.
    """
    return out.to(torch.float32) - given.to(torch.float32)


def _errors_per_token(value: Tensor, target: Tensor, state: Tensor) -> Tensor:
    """[N, 2]: the relative error of each token, and 1 where its state is not finite."""
    bad = ~torch.isfinite(state).all(dim=-1)
    return torch.stack([nmse_per_token(value, target).sqrt(), bad.to(torch.float32)], dim=-1).cpu()


def _errors(parts: list[Tensor]) -> Errors:
    errors, bad = torch.cat(parts).to(torch.float64).unbind(dim=-1)
    return Errors(float(errors.mean()), float(errors.max()), int(bad.sum()))


def _take(extents: dict[str, Extent], name: str, values: Tensor) -> None:
    finite = torch.isfinite(values)
    size = torch.where(finite, values, 0).abs().max()
    extents[name] = extents[name].joined(Extent(float(size), values.numel() - int(finite.sum())))


@contextmanager
def _watched(layer: Any, stream: Stream, extents: dict[str, Extent]) -> Iterator[None]:
    """Within the context, what passes the checkpoints inside the layer is taken into `extents`, of
    valid tokens only.
    """
    kept: dict[str, Tensor] = {}

    with ExitStack() as stack:

        def at_output(module: nn.Module, name: str) -> None:
            def hook(_module: Any, _inputs: Any, output: Tensor) -> None:
                _take(extents, name, stream.rows(output))
                if name in ("q", "k"):
                    kept[name] = output

            stack.callback(module.register_forward_hook(hook).remove)

        def at_input(module: nn.Module, name: str) -> None:
            handle = module.register_forward_pre_hook(
                lambda _module, inputs: _take(extents, name, stream.rows(inputs[0]))
            )
            stack.callback(handle.remove)

        attention, mlp = layer.self_attn, layer.mlp
        at_output(layer.input_layernorm, "input_norm")
        for name, module in (
            ("q", attention.q_proj),
            ("k", attention.k_proj),
            ("v", attention.v_proj),
            ("attention", attention.o_proj),
        ):
            at_output(module, name)
        at_input(layer.post_attention_layernorm, "residual_mid")
        at_output(layer.post_attention_layernorm, "mlp_norm")
        at_output(mlp.gate_proj, "gate")
        at_output(mlp.up_proj, "up")
        at_input(mlp.down_proj, "product")
        at_output(mlp.down_proj, "down")
        yield
    for logits in _attention_logits(attention, kept["q"], kept["k"], stream):
        _take(extents, "qk", logits)


def _attention_logits(attention: Any, q: Tensor, k: Tensor, stream: Stream) -> Iterator[Tensor]:
    """q.k of every pair of valid tokens of a row, unscaled, in fp32, by row and key head.

    Args:
        attention: whose heads they are; some norm them, and some turn them by no rotary embedding.
        q: [B, T, H * width], as projected.
        k: [B, T, key heads * width]; a key head serves H / key heads query heads in a row.
    """
    q, k = (x.view(*x.shape[:2], -1, attention.head_dim) for x in (q, k))
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    if getattr(attention, "use_rope", True):
        q, k = apply_rotary_pos_emb(q, k, *stream.shared["position_embeddings"])
    group = q.shape[1] // k.shape[1]
    for row, valid in enumerate(stream.batch.attention_mask.bool()):
        of_q, of_k = q[row][:, valid].to(torch.float32), k[row][:, valid].to(torch.float32)
        for head, keys in enumerate(of_k):
            yield of_q[head * group : (head + 1) * group] @ keys.T
