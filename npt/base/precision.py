"""The precision policy, put into force and audited.

Under 4-bit quantisation everything computes in fp32, except the products of packed weights if bf16
was asked for (`compute_dtype`): those round their operands and result to bf16, whose range is
fp32's. Four things work against that quietly:

- `Linear4bit` takes `compute_dtype` from its first input if it is not set;
- on CPUs with AVX512-BF16 it repacks its weight at the first evaluation forward, computes in bf16
  from then on, whatever `compute_dtype` says, and gives no input gradient any more;
- its backward dequantises to the checkpoint's dtype, its forward to the input's: with a bf16
  checkpoint the gradient is that of a rounded weight;
- weights kept in bf16 (embedding, lm_head) pull the residual stream down to bf16.

`enforce_policy` removes all four; `audit_precision` reads the effect back from the modules.
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

from npt.base.device import check_card
from npt.base.linear import (
    UpcastEmbedding,
    UpcastLinear,
    dense_weight,
    effective_dtype,
    is_plain_linear,
    quantized_linears,
    refuse_unread,
    short_name,
)
from npt.base.norms import FUSED
from npt.errors import PrecisionError

_UPCAST: dict[type[nn.Module], type[nn.Module]] = {
    nn.Embedding: UpcastEmbedding,
    nn.Linear: UpcastLinear,
}
_HALF = (torch.float16, torch.bfloat16)
_DECLARED = "_npt_compute_dtype"

ROWS, OUTPUTS = 64, 256
"""Rows that are multiplied, and outputs that are compared: enough for two digits of the error."""

LARGEST_ERROR = 1e-3
"""Relative error of a product up to which `auto` takes the faster setting. TF32 is off by some
3e-4, in fp32's range; bf16 by 2e-3. The weights themselves are off by 9e-2 in NF4."""


@dataclass(frozen=True)
class PrecisionReport:
    """Dtypes found on a model, for `run.json`: numbers of modules by names such as 'float32'."""

    quantization: str | None
    compute_dtype: dict[str, int]
    stored_dtype: dict[str, int]
    adapter_dtype: dict[str, int]
    matmul_precision: str


def enforce_policy(model: PreTrainedModel, compute_dtype: torch.dtype = torch.float32) -> None:
    """Make a model compute in fp32, except products of packed weights, which do in `compute_dtype`.

    Weights stored in 16 bit stay so. Classes are swapped in place, so parameter names and tied
    weights remain. They are swapped again when the vocabulary is resized, which makes a new head.
    """
    setattr(model, _DECLARED, compute_dtype)
    settle_policy(model, compute_dtype)
    vars(model)["resize_token_embeddings"] = MethodType(resize_token_embeddings, model)


def settle_policy(part: nn.Module, compute_dtype: torch.dtype) -> None:
    """Make a part of a model compute as `enforce_policy` says."""
    for _, module in quantized_linears(part):
        module.compute_dtype = compute_dtype
        module.compute_type_is_set = True
        module.support_avx512bf16_for_cpu = False
        if module.weight.quant_state is not None:
            module.weight.quant_state.dtype = compute_dtype
        if module.bias is not None:
            # The first forward would cast it and so change the base's hash.
            module.bias.data = module.bias.data.to(compute_dtype)
    for module in part.modules():
        if type(module) in _UPCAST and module.weight.dtype in _HALF:
            module.__class__ = _UPCAST[type(module)]
        elif type(module) in FUSED:
            module.__class__ = FUSED[type(module)]


def resize_token_embeddings(model: PreTrainedModel, *arguments: Any, **named: Any) -> Any:
    """Resize the vocabulary as transformers does, and keep to the policy."""
    resized = type(model).resize_token_embeddings(model, *arguments, **named)
    enforce_policy(model, declared_dtype(model))
    return resized


def declared_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of the base's products: declared if it is packed, else `policy_dtype`."""
    if quantized_linears(model):
        return getattr(model, _DECLARED, torch.float32)
    return policy_dtype(model)


def policy_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype that the base must compute in, packed products aside: fp32 if it is
    quantised, else the dtype of its final norm.
    """
    return torch.float32 if quantized_linears(model) else model.model.norm.weight.dtype


def quantization_of(model: nn.Module) -> str | None:
    """Return 'nf4', 'fp4', None, or 'mixed' for a model with layers of both."""
    kinds = {module.weight.quant_type for _, module in quantized_linears(model)}
    return None if not kinds else kinds.pop() if len(kinds) == 1 else "mixed"


def matmul_precision() -> str:
    """Return torch's precision of fp32 products, whichever of its two interfaces set it; the older
    one's getter raises after `TrainingArguments(tf32=True)`, which uses the newer one.
    """
    if torch.backends.mkldnn.matmul.fp32_precision == "bf16":  # type: ignore[attr-defined]
        return "medium"
    return "high" if tf32_allowed() else "highest"


def tf32_allowed() -> bool:
    """Return whether CUDA may round the operands of fp32 products to TF32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


@contextmanager
def fp32_products(precision: str) -> Iterator[None]:
    """Let torch compute fp32 products at this precision within the context."""
    earlier = matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        yield
    finally:
        torch.set_float32_matmul_precision(earlier)


def set_matmul_precision(setting: str, model: PreTrainedModel) -> None:
    """Set torch's precision of fp32 products: `highest`, `high` (TF32), or `auto`.

    `auto` is `high` for a base that computes in fp32 on GPUs, if that makes products faster and no
    product is off by more than LARGEST_ERROR; else `highest`.
    """
    if setting == "auto":
        on_gpu = all(parameter.is_cuda or parameter.is_meta for parameter in model.parameters())
        setting = "highest"
        if on_gpu and policy_dtype(model) == torch.float32:
            exact, fast = (product_error(model, each) for each in ("highest", "high"))
            setting = "high" if exact < fast <= LARGEST_ERROR else "highest"
    elif setting == "high":
        check_card(next(model.parameters()).device, tf32=True)
    torch.set_float32_matmul_precision(setting)


@torch.no_grad()
def product_error(model: PreTrainedModel, precision: str) -> float:
    """Return the largest error ||y - exact|| / ||exact||, against fp64, of products of normal
    numbers with the weights of the first layer and lm_head, a 4-bit one dequantised.
    """
    errors = []
    with fp32_products(precision):
        for module in filter(is_plain_linear, (*model.model.layers[0].modules(), model.lm_head)):
            weight = dense_weight(module).float()
            x = torch.randn(ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
            x = x.to(weight.device)
            exact = x.double() @ weight[:OUTPUTS].double().T
            difference = torch.linalg.vector_norm((x @ weight.T)[:, :OUTPUTS] - exact)
            errors.append(float(difference / torch.linalg.vector_norm(exact)))
    return float(torch.tensor(errors).max())  # NaN if one is


def audit_precision(
    model: PreTrainedModel,
    expected: torch.dtype = torch.float32,
    *,
    within: nn.Module | None = None,
) -> PrecisionReport:
    """Read the effective compute dtype of every linear and embedding layer off the modules, or of
    those within a part.

    Raises:
        ModelError: layers are still in their files (npt/base/layers.py).
        PrecisionError: autocast is on, or a module would compute in another dtype: of packed
            weights what was declared on loading, of adapters fp32, of the rest `expected`.
    """
    computed, stored, adapters = Counter[str](), Counter[str](), Counter[str]()
    wrong: list[str] = []
    wanted, of_packed = short_name(expected), short_name(getattr(model, _DECLARED, expected))
    part = model if within is None else within
    refuse_unread(part)
    packed = {id(module) for _, module in quantized_linears(part)}
    for name, module in part.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            dtype = effective_dtype(module)
            computed[dtype] += 1
            if dtype != (of_packed if id(module) in packed else wanted):
                wrong.append(f"{name} computes in {dtype}")
    for name, parameter in part.named_parameters():
        dtype = short_name(parameter.dtype)
        (adapters if ".npt." in name else stored)[dtype] += 1
        if ".npt." in name and parameter.dtype != torch.float32:
            wrong.append(f"adapter {name} is {dtype}")
    for device in {p.device.type for p in part.parameters()}:
        if torch.is_autocast_enabled(device):
            dtype = short_name(torch.get_autocast_dtype(device))
            wrong.append(f"autocast to {dtype} is on for {device}")
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        mixed = packed and of_packed != wanted
        policy = f"{wanted}, 4-bit products in {of_packed}" if mixed else wanted
        raise PrecisionError(
            f"expected {policy}, but {wrong[0]}{more}; load the model with npt.load_base and leave"
            " autocast off"
        )
    counts = dict(computed), dict(stored), dict(adapters)
    return PrecisionReport(quantization_of(part), *counts, matmul_precision())
