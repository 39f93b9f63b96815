"""The arguments that a base was loaded with, written down with its adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from transformers import PreTrainedModel

from npt.base.linear import quantized_linears
from npt.base.precision import declared_dtype, quantization_of
from npt.config import COMPUTE_DTYPES, QUANT_TYPES

ENTRY = "base_loading"
"""The entry of `adapter_config.json`."""


@dataclass(frozen=True)
class Recipe:
    """Arguments of `npt.load_base`, the name aside.

    quantization: `nf4`, `fp4`, or None. double_quant: the absmax of blocks is itself quantised, as
    by `load_base`; a checkpoint stored in 4 bit may lack it. compute_dtype: of 4-bit products.
    use_fp16: of an unquantised base.
    """

    quantization: str | None = None
    double_quant: bool = False
    compute_dtype: str = "fp32"
    use_fp16: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel) -> Recipe | None:
        """Return that of a loaded base; None if `load_base` cannot load one like it."""
        packed, dtype = quantization_of(model), declared_dtype(model)
        if packed is None:
            known = dtype in (torch.float16, torch.float32)
            return cls(use_fp16=dtype == torch.float16) if known else None
        if packed not in QUANT_TYPES:
            return None
        nested = {
            bool(module.weight.quant_state.nested)
            for _, module in quantized_linears(model)
            if module.weight.quant_state is not None
        }
        return cls(packed, True in nested, "bf16" if dtype == torch.bfloat16 else "fp32")

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Recipe | None:
        """Return that of a file's record; None if it has none, or one that cannot be."""
        found = record.get(ENTRY)
        if not isinstance(found, Mapping) or set(found) != {f.name for f in fields(cls)}:
            return None
        recipe = cls(**found)
        sound = (
            recipe.quantization in (None, *QUANT_TYPES)
            and recipe.compute_dtype in COMPUTE_DTYPES
            and isinstance(recipe.use_fp16, bool)
            and isinstance(recipe.double_quant, bool)
        )
        return recipe if sound else None

    def as_record(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def flags(self) -> dict[str, Any]:
        """The command line's flags, those that mean something together."""
        if self.quantization is None:
            return {"use_quantization": False, "use_fp16": self.use_fp16}
        return {
            "use_quantization": True,
            "quant_type": self.quantization,
            "compute_dtype": self.compute_dtype,
        }

    @property
    def changed(self) -> dict[str, Any]:
        """Arguments of `load_base` that are not its defaults."""
        usual = Recipe().arguments
        return {name: value for name, value in self.arguments.items() if value != usual[name]}

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `load_base`."""
        return {
            "quantization": self.quantization,
            "compute_dtype": self.compute_dtype,
            "use_fp16": self.use_fp16,
        }
