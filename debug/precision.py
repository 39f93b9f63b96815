"""Compare number formats of a base: error and headroom of each, layer by layer, against fp32.

The two errors say different things. The residual stream's is what has piled up by a layer, on the
variant's own stream. That of a layer's own update is taken with the fp32 stream as its input: it is
what this layer adds, whatever came before.

Headroom is how many times the largest value could still double before its format has no number for
it. fp16 ends at 65504; bf16 goes as far as fp32, and pays in digits. It holds for the tokens of the
pass.

One variant is in memory at a time. Kept of fp32 are the valid tokens' residual stream, on the host
(D * (L + 1) * 4 bytes a token: 540 KB for D = 4096, L = 32), and lm_head.

Shapes: B batch, T time, D hidden, H heads, N valid tokens, P tokens followed by one to predict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from npt.adapters.converted import decoder_layers
from npt.adapters.fit import check_length
from npt.adapters.stream import Stream, open_stream
from npt.base.load import read_config
from npt.base.precision import quantization_of
from npt.config import DataConfig
from npt.data.batch import Batch, batches
from npt.data.source import check_source, open_source, own_heldout
from npt.diagnostics.variants import REFERENCE, VARIANTS, load_variant
from npt.distill.hidden_losses import nmse_per_token
from npt.errors import ConfigError
from npt.evaluation.heldout import evaluation_samples
from npt.evaluation.metrics import Figures, compare_tokens, figures, per_sample_sums, predicting

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
"""The measured places of a layer, in the order of its pass.

qk: attention logits after the rotary embedding, before they are scaled down, of any two valid
tokens of a row: eager attention stores them so, and before it masks. attention: after o_proj.
residual_mid: h + a. product: act(gate) * up, the input of down_proj. residual: the layer's output.
"""


@dataclass(frozen=True)
class Extent:
    """The largest size of the finite values at one checkpoint, and the number of the others."""

    absmax: float
    non_finite: int

    def headroom(self, dtype: torch.dtype) -> float:
        """Return log2 of the dtype's largest finite number over absmax, below 0 if it does not fit;
        -inf if a value is not finite in the first place.
        """
        if self.non_finite:
            return -math.inf
        return math.inf if self.absmax == 0 else math.log2(torch.finfo(dtype).max / self.absmax)

    def as_dict(self) -> dict[str, float]:
        bits = {f"headroom_{name}": self.headroom(dtype) for name, dtype in HALVES.items()}
        return {**asdict(self), **bits}


HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Errors:
    """Relative errors ||x - x_fp32|| / ||x_fp32|| over the valid tokens, NaN or inf if a token has
    no finite one. non_finite: tokens whose state holds a non-finite value.
    """

    mean: float
    worst: float
    non_finite: int


@dataclass(frozen=True)
class LayerFigures:
    """One decoder layer of a variant.

    Attributes:
        residual: errors of its output on the variant's own stream.
        update: of what it adds to fp32's stream.
        checkpoints: by name.
    """

    residual: Errors
    update: Errors
    checkpoints: dict[str, Extent]

    def tightest(self, dtype: torch.dtype) -> tuple[str, float]:
        """Return the checkpoint with the least headroom, and its bits."""
        bits = {name: extent.headroom(dtype) for name, extent in self.checkpoints.items()}
        return min(bits.items(), key=lambda item: item[1])


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
        """Layer, checkpoint and count of the first non-finite values on the variant's stream."""
        bad = (
            (index, name, extent.non_finite)
            for index, layer in enumerate(self.layers)
            for name, extent in layer.checkpoints.items()
            if extent.non_finite
        )
        return next(bad, None)

    @property
    def failing_layers(self) -> list[int]:
        """Layers that give non-finite values even on fp32's stream: those at fault, not those that
        were handed a bad one. If fp32's stream itself does not fit, that is every layer after."""
        return [index for index, layer in enumerate(self.layers) if layer.update.non_finite]

    def tightest(self, dtype: torch.dtype) -> tuple[int, str, float]:
        """Return layer and checkpoint with the least headroom, and its bits."""
        index = min(range(len(self.layers)), key=lambda i: self.layers[i].tightest(dtype)[1])
        return index, *self.layers[index].tightest(dtype)

    def as_dict(self) -> dict[str, Any]:
        first = self.first_non_finite
        names = ("layer", "checkpoint", "count")
        layers = [
            {
                "layer": index,
                "residual": asdict(layer.residual),
                "update": asdict(layer.update),
                "checkpoints": {name: e.as_dict() for name, e in layer.checkpoints.items()},
            }
            for index, layer in enumerate(self.layers)
        ]
        return {
            "quantization": self.quantization,
            "compute_dtype": str(self.dtype).removeprefix("torch."),
            **self.figures.as_dict(),
            "first_non_finite": None if first is None else dict(zip(names, first, strict=True)),
            "failing_layers": self.failing_layers,
            "layers": layers,
        }


@dataclass(frozen=True)
class Comparison:
    """All variants of one base on the same tokens, fp32 first. heldout: of held-out text."""

    model: str
    samples: int
    tokens: int
    heldout: bool
    variants: tuple[VariantFigures, ...]

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "variants": {v.name: v.as_dict() for v in self.variants}}


@dataclass(frozen=True)
class Pass:
    """fp32 on one batch, on the host.

    Attributes:
        states: the streams before every layer and after the last, [N, D] each.
        final: after the final norm, [P, D].
        head: lm_head.
    """

    batch: Batch
    states: list[Tensor]
    final: Tensor
    head: nn.Module


def compare_precision(
    name: str = "tiny",
    data: DataConfig | None = None,
    *,
    count: int = 16,
    batch_size: int = 4,
    variants: Sequence[str] = tuple(VARIANTS),
    device: str | torch.device | None = None,
    watch: Callable[[str], None] = lambda variant: None,
) -> Comparison:
    """Run the same held-out batches through the base in each number format.

    Args:
        name: of the base: `tiny`, a folder or a hub id, stored unquantised.
        data: source and length of samples; default the built-in text.
        count: samples, of the same choice that training and evaluation make.
        batch_size: samples at a time; changes figures by rounding only.
        variants: names out of `VARIANTS`; fp32 is compared with itself in any case, which must give
            0.
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
    watch(REFERENCE)
    model, tokenizer = load_variant(name, REFERENCE, device)
    own = own_heldout(data)
    source = own if own is not None else open_source(data)
    samples, heldout = evaluation_samples(
        source, tokenizer, data, count, model.config.vocab_size, own
    )
    reference = reference_passes(model, batches(samples, batch_size))
    measured = [measure(model, reference, REFERENCE)]
    for variant in dict.fromkeys(variants):
        if variant != REFERENCE:
            del model  # one at a time
            watch(variant)
            model, _ = load_variant(name, variant, device)
            measured.append(measure(model, reference, variant))
    tokens = sum(len(s.input_ids) for s in samples)
    return Comparison(name, len(samples), tokens, heldout, tuple(measured))


@torch.no_grad()
def reference_passes(model: PreTrainedModel, host_batches: Iterable[Batch]) -> list[Pass]:
    """Run the base, without adapters, in fp32 on batches on the host."""
    passes = []
    for batch in host_batches:
        stream = open_stream(model, batch.to(model.device))
        hidden, states = stream.hidden, [stream.rows(stream.hidden).cpu()]
        for layer in decoder_layers(model):
            hidden = stream.clean(layer(hidden, **stream.context_of(layer)))
            states.append(stream.rows(hidden).cpu())
        passes.append(Pass(batch, states, _final(model, hidden, batch).cpu(), model.lm_head))
    return passes


@torch.no_grad()
def measure(model: PreTrainedModel, reference: list[Pass], name: str = "") -> VariantFigures:
    """Run a variant on the reference's batches, on its own stream and layer by layer on the
    reference's.

    Args:
        model: the same base in another number format, without adapters.
        reference: of `reference_passes`.
        name: for the report.
    """
    layers = decoder_layers(model)
    extents = [{name: Extent(0.0, 0) for name in CHECKPOINTS} for _ in layers]
    residuals: list[list[Tensor]] = [[] for _ in layers]
    updates: list[list[Tensor]] = [[] for _ in layers]
    per_sample = []
    for one in reference:
        stream = open_stream(model, one.batch.to(model.device))
        hidden = stream.hidden
        for index, layer in enumerate(layers):
            before, after = (state.to(hidden.device) for state in one.states[index : index + 2])
            # fp32's stream in this variant's dtype: digits that it has no room for are lost before
            # the layer runs.
            rounded = before.to(hidden.dtype)
            out = stream.rows(layer(stream.scatter(rounded), **stream.context_of(layer)))
            # in fp32, in which the difference of two 16-bit numbers loses nothing
            update = out.to(torch.float32) - rounded.to(torch.float32)
            updates[index].append(_errors_per_token(update, after - before, out))
            with _watched(layer, stream, extents[index]):
                hidden = stream.clean(layer(hidden, **stream.context_of(layer)))
            rows = stream.rows(hidden)
            _take(extents[index], "residual", rows)
            residuals[index].append(_errors_per_token(rows, after, rows))
        per_sample.append(_compare(model, one, _final(model, hidden, one.batch)))
    measured = zip(map(_errors, residuals), map(_errors, updates), extents, strict=True)
    return VariantFigures(
        name,
        quantization_of(model),
        hidden.dtype,
        tuple(LayerFigures(*layer) for layer in measured),
        figures(torch.cat(per_sample)),
    )


def _final(model: PreTrainedModel, hidden: Tensor, batch: Batch) -> Tensor:
    """Return the states after the final norm from which a token is predicted, [P, D]."""
    return model.model.norm(hidden[:, :-1][predicting(batch).to(hidden.device)])


def _compare(model: PreTrainedModel, one: Pass, final: Tensor) -> Tensor:
    predicted = predicting(one.batch)
    per_token = compare_tokens(
        final,
        one.final.to(final.device),
        one.batch.labels[:, 1:][predicted].to(final.device),
        model.lm_head,
        model.config.vocab_size,
        teacher_head=one.head,
    )
    return per_sample_sums(per_token, predicted.nonzero()[:, 0], len(predicted))


def _errors_per_token(value: Tensor, target: Tensor, state: Tensor) -> Tensor:
    """Return [N, 2]: the relative error of each token, and 1 if its state is not finite."""
    bad = ~torch.isfinite(state).all(dim=-1)
    return torch.stack([nmse_per_token(value, target).sqrt(), bad.to(torch.float32)], dim=-1).cpu()


def _errors(parts: list[Tensor]) -> Errors:
    errors, bad = torch.cat(parts).to(torch.float64).unbind(dim=-1)
    return Errors(float(errors.mean()), float(errors.max()), int(bad.sum()))


def _take(extents: dict[str, Extent], name: str, values: Tensor) -> None:
    finite = torch.isfinite(values)
    size = float(torch.where(finite, values, 0).abs().max())
    bad = values.numel() - int(finite.sum())
    extents[name] = Extent(max(extents[name].absmax, size), extents[name].non_finite + bad)


@contextmanager
def _watched(layer: Any, stream: Stream, extents: dict[str, Extent]) -> Iterator[None]:
    """Take the valid tokens' values at the layer's checkpoints into `extents` within the
    context.
    """
    attention, mlp = layer.self_attn, layer.mlp
    outputs = {
        "input_norm": layer.input_layernorm,
        "q": attention.q_proj,
        "k": attention.k_proj,
        "v": attention.v_proj,
        "attention": attention.o_proj,
        "mlp_norm": layer.post_attention_layernorm,
        "gate": mlp.gate_proj,
        "up": mlp.up_proj,
        "down": mlp.down_proj,
    }
    inputs = {"residual_mid": layer.post_attention_layernorm, "product": mlp.down_proj}
    kept: dict[str, Tensor] = {}

    def on_output(name: str, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        kept[name] = output
        _take(extents, name, stream.rows(output))

    def on_input(name: str, _module: nn.Module, given: tuple[Tensor, ...]) -> None:
        _take(extents, name, stream.rows(given[0]))

    with ExitStack() as stack:
        for name, module in outputs.items():
            stack.enter_context(module.register_forward_hook(partial(on_output, name)))
        for name, module in inputs.items():
            stack.enter_context(module.register_forward_pre_hook(partial(on_input, name)))
        yield
    for logits in _attention_logits(attention, kept["q"], kept["k"], stream):
        _take(extents, "qk", logits)


def _attention_logits(attention: Any, q: Tensor, k: Tensor, stream: Stream) -> Iterator[Tensor]:
    """Yield q.k of every pair of valid tokens of a row, unscaled, in fp32, by row and key head.

    Args:
        attention: of these heads; some norm them, and some turn them by no rotary embedding.
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
