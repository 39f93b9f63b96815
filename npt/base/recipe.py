"""How a base was loaded, as recorded with its adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from npt.base.precision import policy_dtype, quantization_of
from npt.config import COMPUTE_DTYPES, QUANT_TYPES
from npt.packed import quantized_linears

ENTRY = "base_loading"
"""Name of the entry in `adapter_config.json`."""

STORED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_DTYPE = "_npt_dtype"

_VALUES: dict[str, tuple[Any, ...]] = {
    "quantization": (None, *QUANT_TYPES),
    "double_quant": (True, False),
    "compute_dtype": COMPUTE_DTYPES,
    "use_fp16": (True, False),
    "dtype": (None, *STORED),
}


@dataclass(frozen=True)
class Recipe:
    """Arguments of `npt.load_base`, except the name.

    Attributes:
        quantization: `nf4`, `fp4`, or None.
        double_quant: whether the absmax of blocks is itself quantised.
        compute_dtype: of 4-bit products.
        use_fp16: whether an unquantised base computes in fp16.
        dtype: of an unquantised base in bf16, or of the weights that a 4-bit base keeps unpacked.
    """

    quantization: str | None = None
    double_quant: bool = False
    compute_dtype: str = "fp32"
    use_fp16: bool = False
    dtype: str | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Recipe | None:
        """Return the recipe of a base; None if `load_base` cannot load such a base."""
        packed = quantization_of(model)
        if packed is None:
            foreign = getattr(model.config, "quantization_config", None)
            return _WHOLE.get(policy_dtype(model)) if foreign is None else None
        if packed not in QUANT_TYPES:
            return None
        names = {dtype: name for name, dtype in STORED.items()}
        linears = [module for _, module in quantized_linears(model)]
        in_bf16 = all(module.compute_dtype == torch.bfloat16 for module in linears)
        unpacked = names.get(model.get_input_embeddings().weight.dtype)
        return cls(
            packed,
            double_quant=any(getattr(m.weight.quant_state, "nested", False) for m in linears),
            compute_dtype="bf16" if in_bf16 else "fp32",
            dtype=getattr(model, _DTYPE, unpacked),
        )

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Recipe | None:
        """Return the recipe in a file's record; None if it is missing or invalid."""
        entries = record.get(ENTRY)
        if not isinstance(entries, Mapping) or entries.keys() - _VALUES.keys():
            return None
        for name, values in _VALUES.items():
            # as written, since 1 == True
            if repr(entries.get(name)) not in map(repr, values):
                return None
        return cls(**entries)

    @property
    def flags(self) -> dict[str, Any]:
        """The flags of the command line that have an effect."""
        if self.quantization is None:
            return {"use_quantization": False, "use_fp16": self.use_fp16}
        return {
            "use_quantization": True,
            "quant_type": self.quantization,
            "compute_dtype": self.compute_dtype,
        }

    @property
    def storage(self) -> dict[str, Any]:
        """Arguments of `load_base` that have no flag."""
        return {"dtype": self.dtype, "double_quant": self.double_quant or self.quantization is None}

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `load_base` that differ from its defaults."""
        default = Recipe()
        usual = asdict(default) | default.storage
        mine = asdict(self) | self.storage
        return {name: value for name, value in mine.items() if value != usual[name]}


_WHOLE = {
    torch.float32: Recipe(),
    torch.float16: Recipe(use_fp16=True),
    torch.bfloat16: Recipe(dtype="bf16"),
}
"""Recipes of bases that are not quantised, by the dtype that they compute in."""


def note_dtype(model: PreTrainedModel, dtype: str | None) -> None:
    """Record the `dtype` that a 4-bit base was loaded with; None: the checkpoint's own."""
    setattr(model, _DTYPE, dtype)
