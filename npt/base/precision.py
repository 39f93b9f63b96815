"""The precision policy, put into force and audited.

Under 4-bit quantisation everything computes in fp32, but for the products of packed weights where
bf16 was asked for (`compute_dtype`): those round their operands and their result to bf16, whose
range is fp32's, and the residual stream, attention, norms, adapters, head and losses stay in fp32.
Four things work against that quietly:

- `Linear4bit` casts its input to `compute_dtype`, and takes that from its first input where it is
not set;
- on CPUs with AVX512-BF16 it repacks its weight at the first evaluation forward and computes in
bf16 from then on,
  whatever `compute_dtype` says, and gives no input gradient any more;
- its backward dequantises to the checkpoint's dtype, its forward to the input's: with a bf16
checkpoint the gradient is
  that of a rounded weight;
- weights that the checkpoint keeps in bf16 (embedding, lm_head) pull the residual stream down to
bf16.

`enforce_policy` removes all four; `audit_precision` reads the effect back from the modules and
raises where it differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from npt.base.linear import linear_kind, quantized_linears
from npt.errors import PrecisionError


class UpcastEmbedding(nn.Embedding):
    """An embedding stored in 16 bit whose output is fp32. The lookup is exact, so nothing
    is lost.
    """

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).to(torch.float32)


@linear_kind
class UpcastLinear(nn.Linear):
    """A linear layer stored in 16 bit that multiplies in fp32. See `cast_once` for products in a
    row.
    """

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(torch.float32)
        return F.linear(input.to(torch.float32), self._fp32_weight(), bias)

    def _fp32_weight(self) -> Tensor:
        kept = self.__dict__.get(_KEPT)
        if kept is None or self.weight.requires_grad:
            return self.weight.to(torch.float32)
        if not kept:
            kept.append(self.weight.to(torch.float32))
        return kept[0]


_KEPT = "_fp32_weight_kept"


@contextmanager
def cast_once(*modules: nn.Module) -> Iterator[None]:
    """Keep the fp32 weight that each `UpcastLinear` of `modules` makes at its first product until
    the context ends.

    A product casts its weight every time otherwise: of a head of V 128k and D 4,096 that is 3 GB
    read and written for each chunk of logits, and for each generated token. The modules are called
    as before, hooks included, and give the same bits. Within a context of the same module another
    one changes nothing. Weights must not be written meanwhile; one that is trained is not kept,
    since its gradient flows through the cast.

    Memory: 4 bytes a weight, as one product takes without it, for as long as the context lasts.

    Args:
        modules: of any class; those that cast nothing are left alone.
    """
    kept = list(
        dict.fromkeys(m for m in modules if isinstance(m, UpcastLinear) and _KEPT not in vars(m))
    )
    for module in kept:
        vars(module)[_KEPT] = []
    try:
        yield
    finally:
        for module in kept:
            del vars(module)[_KEPT]


_UPCAST: dict[type[nn.Module], type[nn.Module]] = {
    nn.Embedding: UpcastEmbedding,
    nn.Linear: UpcastLinear,
}
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PrecisionReport:
    """What was found on the model, for `run.json`. Dtypes are strings such as 'float32'; counts are
    modules.
    """

    quantization: str | None
    compute_dtype: dict[str, int]
    stored_dtype: dict[str, int]
    adapter_dtype: dict[str, int]
    matmul_precision: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


_DECLARED = "_npt_compute_dtype"


def enforce_policy(model: PreTrainedModel, compute_dtype: torch.dtype = torch.float32) -> None:
    """Make a quantised model compute in fp32 throughout, but for products of packed weights; what
    is stored in 16 bit stays stored so.

    Classes are swapped in place, so parameter names and tied weights remain.

    Args:
        model: quantised or not.
        compute_dtype: of products of packed weights, forward and backward. It is declared on the
            model, for the audit.
    """
    declare_dtype(model, compute_dtype)
    for _, module in quantized_linears(model):
        module.compute_dtype = compute_dtype
        module.compute_type_is_set = True
        module.support_avx512bf16_for_cpu = False
        if module.weight.quant_state is not None:
            module.weight.quant_state.dtype = compute_dtype
        if module.bias is not None:
            # which the first forward would do, and the base's hash with it
            module.bias.data = module.bias.data.to(compute_dtype)
    for module in model.modules():
        if type(module) in _UPCAST and module.weight.dtype in _HALF:
            module.__class__ = _UPCAST[type(module)]


def declare_dtype(model: PreTrainedModel, compute_dtype: torch.dtype) -> None:
    """Write down on the model what products of its packed weights are to compute in."""
    setattr(model, _DECLARED, compute_dtype)


def declared_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return what the base's products are to compute in: of packed weights as it was declared, else
    as `policy_dtype` says.
    """
    return (
        getattr(model, _DECLARED, torch.float32)
        if quantized_linears(model)
        else policy_dtype(model)
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def effective_dtype(module: Any) -> str:
    """The dtype a linear or embedding layer would compute its output in, as a string; what is
    unsure is said.

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
    if getattr(state, "packing_format_for_cpu", False) or (
        module.weight.device.type == "cpu" and module.support_avx512bf16_for_cpu
    ):
        return "bfloat16 (CPU repacking)"
    if not module.compute_type_is_set or module.compute_dtype is None:
        return "that of the first input"
    if state.dtype != module.compute_dtype:
        return f"{_short(module.compute_dtype)} forward, {_short(state.dtype)} backward"
    return _short(module.compute_dtype)


def policy_dtype(model: PreTrainedModel) -> torch.dtype:
    """What the base has to compute in, packed products aside: fp32 when it is quantised, else the
    dtype that its final norm is stored in."""
    return torch.float32 if quantized_linears(model) else model.model.norm.weight.dtype


def audit_precision(
    model: PreTrainedModel, expected: torch.dtype = torch.float32
) -> PrecisionReport:
    """Read the effective compute dtype of every linear and embedding layer off the modules.

    Args:
        model: quantised or not, with or without adapters.
        expected: what the base has to compute in; packed weights in what was declared when it was
            loaded. Adapters have to be fp32 whatever the base is.

    Raises:
        PrecisionError: a module would compute in another dtype, or autocast is on; the first is
            named, with the count.
    """
    computed, stored, adapters = Counter[str](), Counter[str](), Counter[str]()
    wrong: list[str] = []
    wanted, of_packed = _short(expected), _short(getattr(model, _DECLARED, expected))
    packed = {id(module) for _, module in quantized_linears(model)}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            found = effective_dtype(module)
            computed[found] += 1
            if found != (of_packed if id(module) in packed else wanted):
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
            wrong.append(
                f"autocast to {_short(torch.get_autocast_dtype(device))} is on for {device}"
            )
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        policy = (
            wanted
            if not packed or of_packed == wanted
            else f"{wanted}, 4-bit products in {of_packed}"
        )
        raise PrecisionError(
            f"expected {policy}, but {wrong[0]}{more}; load the model with npt.load_base and leave"
            " autocast off"
        )
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
