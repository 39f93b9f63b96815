"""`load_base`: load a frozen base model and its tokenizer under the precision policy."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Params4bit
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from npt.base.attention import implementation_of
from npt.base.layers import LATER, LAYERS, LayersLater, refuse_extra, refuse_faults, shape_faults
from npt.base.precision import audit_precision, enforce_policy, quantization_of
from npt.base.recipe import STORED, note_dtype
from npt.base.source import EMBEDDED, NO_CODE, find_base, load_tokenizer, read_config, reading
from npt.config import COMPUTE_DTYPES, QUANT_TYPES, check_attention
from npt.device import check_card, default_device
from npt.errors import ConfigError, ModelError
from npt.packed import quantized_linears

COMPUTE = {name: STORED[name] for name in COMPUTE_DTYPES}


@torch.inference_mode(False)  # gradients must be able to pass through the weights
def load_base(
    name: str = EMBEDDED,
    *,
    quantization: str | None = None,
    device: str | torch.device | None = None,
    use_fp16: bool = False,
    layers_later: bool = False,
    attn_implementation: str = "sdpa",
    compute_dtype: str = "fp32",
    dtype: str | None = None,
    double_quant: bool = True,
) -> tuple[Any, Any]:
    """Load a base model, frozen and in evaluation mode, and its tokenizer.

    Weights are read only from safetensors or GGUF. No code or pickle of the checkpoint is run.

    Args:
        name: `tiny` (embedded), a folder, a GGUF file, or a Hub id. Each load converts a GGUF file
            to 16 bits in a temporary folder; `npt.import_base` keeps the converted folder.
        quantization: `nf4`, `fp4` or None. A checkpoint stored in 4 bits stays in 4 bits.
        device: default the first CUDA device, else the CPU.
        use_fp16: compute an unquantised base in fp16. A 4-bit base ignores it with a warning.
        layers_later: leave all decoder layers but the first in their files until `shard_base` reads
            them one by one, so that no process holds the whole base.
        attn_implementation: `sdpa` (npt/base/attention.py) or `eager`.
        compute_dtype: of 4-bit products, forward and backward: `fp32`, or `bf16`, with fp32's range
            but 8 of its 24 bits of precision. The rest of a 4-bit base computes in fp32.
        dtype: of the stored weights, `fp32`, `bf16` or `fp16`; an unquantised base also computes in
            it. Default: fp32 (fp16 with `use_fp16`); for the unpacked weights of a 4-bit base the
            checkpoint's own.
        double_quant: quantise the scales of 4-bit weights as well.

    Raises:
        ConfigError: a choice is unknown, or arguments contradict each other.
        ModelError: no such model, an unsupported family, or missing or damaged weights.
        PrecisionError: a module would compute in another dtype.
    """
    check_choice("quantization", quantization, (*QUANT_TYPES, None))
    check_attention(attn_implementation)
    check_choice("compute_dtype", compute_dtype, COMPUTE_DTYPES)
    check_choice("dtype", dtype, (*STORED, None))
    if use_fp16 and dtype not in (None, "fp16"):
        raise ConfigError(f"use_fp16 contradicts dtype {dtype!r}: remove one of the two")
    device = torch.device(device or default_device())
    config = read_config(name)
    tokenizer = load_tokenizer(name)
    stored_packed = getattr(config, "quantization_config", None) is not None
    packed = quantization is not None or stored_packed
    if compute_dtype != "fp32" and not packed:
        raise ConfigError(
            f"--compute_dtype {compute_dtype} has no effect on {name}, which is not quantised: add"
            " --use_quantization or remove --compute_dtype"
        )
    if packed and use_fp16:
        warnings.warn(
            "--use_fp16 has no effect on a 4-bit base, which computes in"
            f" {compute_dtype} because fp16 overflows in 4-bit products: remove --use_fp16",
            stacklevel=2,
        )
    stored = STORED[dtype or ("fp16" if use_fp16 else "fp32")]
    of_products = COMPUTE[compute_dtype] if packed else stored
    check_card(device, bf16=of_products == torch.bfloat16)
    # what a 4-bit base keeps unpacked stays as the checkpoint has it; `enforce_policy` upcasts
    how: dict[str, Any] = {"dtype": "auto" if packed and dtype is None else stored}
    if quantization is not None and not stored_packed:
        how["quantization_config"] = packing_config(quantization, double_quant)
    later = None
    with ExitStack() as scratch:
        if layers_later:
            source = scratch.enter_context(_located(name))
            if stored_packed:  # headers do not hold the statistics of 4-bit weights
                how["key_mapping"] = {rf"^{LAYERS}\.": LATER}
            model = _read_weights(
                name, torch.device("meta"), attn_implementation, source=source, **how
            )
            # the temporary folder of a GGUF file must last until the last layer is read
            later = LayersLater(model, name, source, scratch.pop_all())
        else:
            model = _read_weights(name, device, attn_implementation, **how)
    if packed:
        _check_packed(model, name, quantization)
        enforce_policy(model, COMPUTE[compute_dtype])
        note_dtype(model, dtype)
    # recorded in saved adapters, instead of a folder of this installation
    model.config._name_or_path = name
    if later is None:
        return frozen(model, torch.float32 if packed else stored), tokenizer
    later.read_parts(device)  # audits each part, since the whole has empty layers
    return model.requires_grad_(False).eval(), tokenizer


def _check_packed(model: PreTrainedModel, name: str, quantization: str | None) -> None:
    """Raise ModelError for a base that is quantised otherwise than asked for."""
    # a checkpoint may be quantised by another library, or to 8 bits
    weights = [module.weight for _, module in quantized_linears(model)]
    if not weights or not all(isinstance(weight, Params4bit) for weight in weights):
        raise ModelError(
            f"{name} is quantised, but not to bitsandbytes' 4 bits: load its unquantised original"
        )
    stored = quantization_of(model)
    if quantization not in (None, stored):
        raise ModelError(
            f"{name} is stored as {stored}, not {quantization}: pass a matching --quant_type, or"
            " load its unquantised original"
        )


def frozen(model: Any, computing: torch.dtype) -> Any:
    """Freeze a model, set it to evaluation mode, check that it computes in a dtype, return it."""
    model.requires_grad_(False)
    model.eval()
    audit_precision(model, computing)
    return model


@torch.inference_mode(False)
def load_teacher(
    name: str,
    precision: str = "bf16",
    *,
    device: str | torch.device | None = None,
    attn_implementation: str = "sdpa",
) -> Any:
    """Load an unquantised teacher, from which a student can learn what its quantisation lost.

    Args:
        name: the student's base, as for `load_base`. It must not be stored in 4 bits.
        precision: of the stored weights, `bf16` (2 bytes each) or `fp32` (4). The teacher computes
            in fp32.
        device: as for `load_base`.
        attn_implementation: as for `load_base`.

    Raises as `load_base`.
    """
    check_choice("teacher_precision", precision, tuple(COMPUTE))
    check_attention(attn_implementation)
    config = read_config(name)
    check_teacher(name, config)
    device = torch.device(device or default_device())
    check_card(device)
    model = _read_weights(name, device, attn_implementation, dtype=COMPUTE[precision])
    enforce_policy(model)
    return frozen(model, torch.float32)


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise ConfigError for a value that is not among the choices."""
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; choose from {', '.join(map(str, choices))}")


def check_teacher(name: str, config: PreTrainedConfig) -> None:
    """Raise ModelError for a teacher whose configuration says that it is quantised."""
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"{name} is itself stored in 4 bits and cannot teach what quantisation lost: pass its"
            " unquantised original"
        )


def packing_config(quantization: str, double_quant: bool = True) -> BitsAndBytesConfig:
    """Return the configuration of quantisation to `nf4` or `fp4`, with products in fp32."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=torch.float32,
    )


def _read_weights(
    name: str, device: torch.device, attention: str, *, source: str | None = None, **how: Any
) -> PreTrainedModel:
    """Read a model from safetensors; refuse missing, misshapen or extra weights; run no code.

    Args:
        name, attention: as for `load_base`.
        device: with `meta`, only headers are read.
        source: `_located(name)`, if known.
        how: further arguments of `from_pretrained`.
    """
    how |= {
        **NO_CODE,
        "device_map": {"": device},
        "attn_implementation": implementation_of(attention),
        "ignore_mismatched_sizes": True,  # refused below, by name
        "use_safetensors": True,
        "output_loading_info": True,
    }
    located = _located(name) if source is None else nullcontext(source)
    with _quiet(), located as folder, reading("weights", name):
        model, report = AutoModelForCausalLM.from_pretrained(folder, **how)
    faults = [f"lacks the weight {key}" for key in sorted(report["missing_keys"])]
    shapes = {key: (stored, wanted) for key, stored, wanted in report["mismatched_keys"]}
    faults += shape_faults(model, shapes)
    refuse_faults(name, faults)
    refuse_extra(name, report["unexpected_keys"])
    return model


@contextmanager
def _located(name: str) -> Iterator[str]:
    """Yield the folder or hub id for transformers, or a temporary folder made from a GGUF file."""
    source = find_base(name)
    if isinstance(source, str):
        yield source
        return
    from npt.base.gguf.convert import convert

    with tempfile.TemporaryDirectory(prefix="npt-gguf-") as scratch:
        folder = Path(scratch, source.path.stem)
        convert(source, folder)
        yield str(folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and load report."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
