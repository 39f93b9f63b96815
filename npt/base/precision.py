"""The precision policy: its enforcement and its audit.

A 4-bit base computes in fp32. With `compute_dtype="bf16"`, 4-bit products round their operands and
result to bf16, which has fp32's range. Four defaults silently break this policy:

- `Linear4bit` takes an unset `compute_dtype` from its first input.
- On CPUs with AVX512-BF16, `Linear4bit` repacks its weight at the first evaluation forward. From
  then on it computes in bf16, whatever `compute_dtype` says, and returns no input gradient.
- The backward of `Linear4bit` dequantises to the checkpoint's dtype, its forward to the input's.
  With a bf16 checkpoint the gradient belongs to a rounded weight.
- Weights kept in bf16 (embedding, lm_head) lower the residual stream to bf16.

`enforce_policy` overrides all four. `audit_precision` reads the result off the modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from npt.base.linear import (
    UpcastEmbedding,
    UpcastLinear,
    dense_weight,
    effective_dtype,
    is_plain_linear,
    quant_types,
    refuse_unread,
    short_name,
)
from npt.base.norms import FUSED
from npt.device import check_card
from npt.errors import PrecisionError
from npt.packed import quantized_linears

_UPCAST: dict[type[nn.Module], type[nn.Module]] = {
    nn.Embedding: UpcastEmbedding,
    nn.Linear: UpcastLinear,
}
_HALF = (torch.float16, torch.bfloat16)
_DECLARED = "_npt_compute_dtype"

ROWS = 64
OUTPUTS = 256
"""Rows to multiply and outputs to compare: enough for two digits of the error."""

LARGEST_ERROR = 1e-3
"""Largest relative error of a product for which `auto` selects TF32. The error of TF32 is about
3e-4, of bf16 2e-3, of NF4 weights 9e-2."""


@dataclass(frozen=True)
class PrecisionReport:
    """Precision found on a model, for `run.json`.

    Attributes:
        quantization: as by `quantization_of`.
        compute_dtype: number of modules by dtype, such as 'float32'.
        stored_dtype: number of the base's tensors by dtype.
        adapter_dtype: number of the adapters' tensors by dtype.
        matmul_precision: torch's precision of fp32 products.
    """

    quantization: str | None
    compute_dtype: dict[str, int]
    stored_dtype: dict[str, int]
    adapter_dtype: dict[str, int]
    matmul_precision: str


def enforce_policy(model: PreTrainedModel, compute_dtype: torch.dtype = torch.float32) -> None:
    """Make a model compute in fp32, and its 4-bit products in `compute_dtype`.

    Weights stored in 16 bits stay so. Classes are swapped in place, so parameter names and tied
    weights remain. Resizing the vocabulary applies the policy again.
    """
    setattr(model, _DECLARED, compute_dtype)
    settle_policy(model, compute_dtype)
    vars(model)["resize_token_embeddings"] = MethodType(resize_token_embeddings, model)


def settle_policy(part: nn.Module, compute_dtype: torch.dtype) -> None:
    """Apply the policy to part of a model; see `enforce_policy`."""
    for _, module in quantized_linears(part):
        module.compute_dtype = compute_dtype
        module.compute_type_is_set = True
        module.support_avx512bf16_for_cpu = False
        if module.weight.quant_state is not None:
            module.weight.quant_state.dtype = compute_dtype
        if module.bias is not None:
            # the first forward would cast the bias and so change the base's hash
            module.bias.data = module.bias.data.to(compute_dtype)
    for module in part.modules():
        if type(module) in _UPCAST and module.weight.dtype in _HALF:
            module.__class__ = _UPCAST[type(module)]
        elif type(module) in FUSED:
            module.__class__ = FUSED[type(module)]


def resize_token_embeddings(model: PreTrainedModel, *arguments: Any, **named: Any) -> Any:
    """Resize the vocabulary as transformers does, then apply the policy again."""
    resized = type(model).resize_token_embeddings(model, *arguments, **named)
    enforce_policy(model, declared_dtype(model))
    return resized


def declared_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of the base's products: declared if it is 4-bit, else `policy_dtype`."""
    if quantized_linears(model):
        return getattr(model, _DECLARED, torch.float32)
    return policy_dtype(model)


def policy_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype that the base must compute in, except 4-bit products: fp32 if quantised,
    else the dtype of its final norm.
    """
    return torch.float32 if quantized_linears(model) else model.model.norm.weight.dtype


def quantization_of(model: nn.Module) -> str | None:
    """Return 'nf4', 'fp4', 'mixed' for a model with both, or None."""
    kinds = quant_types(model)
    if not kinds:
        return None
    return kinds.pop() if len(kinds) == 1 else "mixed"


def matmul_precision() -> str:
    """Return torch's precision of fp32 products. (The getter of torch's older interface raises
    after `TrainingArguments(tf32=True)`, which uses the newer one.)
    """
    if torch.backends.mkldnn.matmul.fp32_precision == "bf16":  # type: ignore[attr-defined]
        return "medium"
    return "high" if tf32_allowed() else "highest"


def tf32_allowed() -> bool:
    """Return whether CUDA may round the operands of fp32 products to TF32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


@contextmanager
def fp32_products(precision: str) -> Iterator[None]:
    """Within the context, let torch compute fp32 products at this precision."""
    earlier = matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        yield
    finally:
        torch.set_float32_matmul_precision(earlier)


def set_matmul_precision(setting: str, model: PreTrainedModel) -> None:
    """Set torch's precision of fp32 products: `highest`, `high` (TF32), or `auto`.

    `auto` selects `high` for a base that computes in fp32 on GPUs, if `high` changes products and
    their error stays within LARGEST_ERROR; else `highest`.
    """
    if setting == "high":
        check_card(next(model.parameters()).device, tf32=True)
    elif setting == "auto":
        setting = "high" if _tf32_suffices(model) else "highest"
    torch.set_float32_matmul_precision(setting)


def _tf32_suffices(model: PreTrainedModel) -> bool:
    on_gpu = all(parameter.is_cuda or parameter.is_meta for parameter in model.parameters())
    if not on_gpu or policy_dtype(model) != torch.float32:
        return False
    # equal errors: this GPU has no TF32
    exact = product_error(model, "highest")
    return exact < product_error(model, "high") <= LARGEST_ERROR


@torch.no_grad()
def product_error(model: PreTrainedModel, precision: str) -> float:
    """Return the largest error ||y - exact|| / ||exact||, against fp64, of products of normal rows
    with the (dequantised) weights of layer 0 and lm_head.
    """
    errors = []
    modules = (*model.model.layers[0].modules(), model.lm_head)
    with fp32_products(precision):
        for module in filter(is_plain_linear, modules):
            weight = dense_weight(module).float()
            # drawn on the host, so that every device and precision multiplies the same rows
            generator = torch.Generator().manual_seed(0)
            rows = torch.randn(ROWS, weight.shape[1], generator=generator)
            rows = rows.to(weight.device)
            exact = rows.double() @ weight[:OUTPUTS].double().T
            # the whole product, since its shape selects the kernel
            product = rows @ weight.T
            difference = torch.linalg.vector_norm(product[:, :OUTPUTS] - exact)
            errors.append(float(difference / torch.linalg.vector_norm(exact)))
    return float(torch.tensor(errors).max())  # NaN if any error is


def audit_precision(
    model: PreTrainedModel,
    expected: torch.dtype = torch.float32,
    *,
    within: nn.Module | None = None,
) -> PrecisionReport:
    """Read the effective compute dtype of all linear and embedding layers of a model, or of a part.

    Raises:
        ModelError: layers are still in their files (npt/base/layers.py).
        PrecisionError: autocast is on, or a module would not compute in the dtype declared at load
            time (4-bit weights), in fp32 (adapters) or in `expected` (all others).
    """
    computed = Counter[str]()
    stored = Counter[str]()
    adapters = Counter[str]()
    wrong: list[str] = []
    wanted = short_name(expected)
    of_packed = short_name(getattr(model, _DECLARED, expected))
    part = model if within is None else within
    refuse_unread(part)
    packed = {id(module) for _, module in quantized_linears(part)}
    for name, module in part.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            dtype = effective_dtype(module)
            computed[dtype] += 1
            # only 4-bit products may have a dtype of their own
            declared = of_packed if id(module) in packed else wanted
            if dtype != declared:
                wrong.append(f"{name} computes in {dtype}")
    for name, parameter in part.named_parameters():
        dtype = short_name(parameter.dtype)
        if ".npt." not in name:
            stored[dtype] += 1
            continue
        adapters[dtype] += 1
        if parameter.dtype != torch.float32:
            wrong.append(f"adapter {name} is {dtype}")
    # autocast overrides what the modules say of themselves
    for device in {p.device.type for p in part.parameters()}:
        if torch.is_autocast_enabled(device):
            dtype = short_name(torch.get_autocast_dtype(device))
            wrong.append(f"autocast to {dtype} is on for {device}")
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        mixed = packed and of_packed != wanted
        policy = f"{wanted}, 4-bit products in {of_packed}" if mixed else wanted
        raise PrecisionError(
            f"expected {policy}, but {wrong[0]}{more}: load the model with npt.load_base and"
            " disable autocast"
        )
    return PrecisionReport(
        quantization=quantization_of(part),
        compute_dtype=dict(computed),
        stored_dtype=dict(stored),
        adapter_dtype=dict(adapters),
        matmul_precision=matmul_precision(),
    )
