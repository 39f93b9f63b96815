"""The precision policy, put into force and audited.

Under 4-bit quantisation everything computes in fp32. Four things work against that quietly:

- `Linear4bit` casts its input to `compute_dtype`, and takes that from its first input where it is not set;
- on CPUs with AVX512-BF16 it repacks its weight at the first evaluation forward and computes in bf16 from then on,
  whatever `compute_dtype` says, and gives no input gradient any more;
- its backward dequantises to the checkpoint's dtype, its forward to the input's: with a bf16 checkpoint the gradient is
  that of a rounded weight;
- weights that the checkpoint keeps in bf16 (embedding, lm_head) pull the residual stream down to bf16.

`enforce_fp32` removes all four; `audit_precision` reads the effect back from the modules and raises where it differs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from npt.errors import PrecisionError
from npt.quant.linear import quantized_linears


class UpcastEmbedding(nn.Embedding):
    """An embedding stored in 16 bit whose output is fp32. The lookup is exact, so nothing is lost."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).to(torch.float32)


class UpcastLinear(nn.Linear):
    """A linear layer stored in 16 bit that multiplies in fp32."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(torch.float32)
        return F.linear(input.to(torch.float32), self.weight.to(torch.float32), bias)


_UPCAST: dict[type[nn.Module], type[nn.Module]] = {nn.Embedding: UpcastEmbedding, nn.Linear: UpcastLinear}
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PrecisionReport:
    """What was found on the model, for `run.json`. Dtypes are strings such as 'float32'; counts are modules."""

    quantization: str | None
    compute_dtype: dict[str, int]
    stored_dtype: dict[str, int]
    adapter_dtype: dict[str, int]
    matmul_precision: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def enforce_fp32(model: PreTrainedModel) -> None:
    """Make a quantised model compute in fp32 throughout; what is stored in 16 bit stays stored so.

    Classes are swapped in place, so parameter names and tied weights remain.
    """
    for _, module in quantized_linears(model):
        module.compute_dtype = torch.float32
        module.compute_type_is_set = True
        module.support_avx512bf16_for_cpu = False
        if module.weight.quant_state is not None:
            module.weight.quant_state.dtype = torch.float32
        if module.bias is not None:
            module.bias.data = module.bias.data.float()  # which the first forward would do, and the base's hash with it
    for module in model.modules():
        if type(module) in _UPCAST and module.weight.dtype in _HALF:
            module.__class__ = _UPCAST[type(module)]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def effective_dtype(module: Any) -> str:
    """The dtype a linear or embedding layer would compute its output in, as a string; what is unsure is said.

    Args:
        module: `Linear4bit`, `Linear` or `Embedding`, or a subclass.
    """
    if isinstance(module, UpcastEmbedding | UpcastLinear):
        return "float32"
    if not quantized_linears(module):
        return _short(module.weight.dtype)
    state = module.weight.quant_state
    if state is None:
        return "not quantised yet"
    if getattr(state, "packing_format_for_cpu", False) or (module.weight.device.type == "cpu" and module.support_avx512bf16_for_cpu):
        return "bfloat16 (CPU repacking)"
    if not module.compute_type_is_set or module.compute_dtype is None:
        return "that of the first input"
    if state.dtype != module.compute_dtype:
        return f"{_short(module.compute_dtype)} forward, {_short(state.dtype)} backward"
    return _short(module.compute_dtype)


def policy_dtype(model: PreTrainedModel) -> torch.dtype:
    """What the base has to compute in: fp32 when it is quantised, else the dtype that its final norm is stored in."""
    return torch.float32 if quantized_linears(model) else model.model.norm.weight.dtype


def audit_precision(model: PreTrainedModel, expected: torch.dtype = torch.float32) -> PrecisionReport:
    """Read the effective compute dtype of every linear and embedding layer off the modules.

    Args:
        model: quantised or not, with or without adapters.
        expected: what the base has to compute in. Adapters have to be fp32 whatever the base is.

    Raises:
        PrecisionError: a module would compute in another dtype, or autocast is on; the first is named, with the count.
    """
    computed, stored, adapters = Counter[str](), Counter[str](), Counter[str]()
    wrong: list[str] = []
    wanted = _short(expected)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            found = effective_dtype(module)
            computed[found] += 1
            if found != wanted:
                wrong.append(f"{name} computes in {found}")
    for name, parameter in model.named_parameters():
        found = _short(parameter.dtype)
        if ".npt." in name:
            adapters[found] += 1
            if parameter.dtype != torch.float32:
                wrong.append(f"adapter {name} is {found}")
        else:
            stored[found] += 1
    for device in {p.device.type for p in model.parameters()}:
        if torch.is_autocast_enabled(device):
            wrong.append(f"autocast to {_short(torch.get_autocast_dtype(device))} is on for {device}")
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise PrecisionError(f"expected {wanted}, but {wrong[0]}{more}; load the model with npt.load_base and leave autocast off")
    return PrecisionReport(
        quantization=quantization_of(model),
        compute_dtype=dict(computed),
        stored_dtype=dict(stored),
        adapter_dtype=dict(adapters),
        matmul_precision=torch.get_float32_matmul_precision(),
    )


def quantization_of(model: PreTrainedModel) -> str | None:
    """'nf4', 'fp4' or None, as found on the modules; 'mixed' where they differ."""
    kinds = {module.weight.quant_type for _, module in quantized_linears(model)}
    return None if not kinds else kinds.pop() if len(kinds) == 1 else "mixed"
