"""How a base was loaded, as an adapter writes it down, so that whoever loads the adapter gets the
base that it was trained on.
"""

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
"""Where `adapter_config.json` has it."""


@dataclass(frozen=True)
class Recipe:
    """Arguments of `npt.load_base` beside the name.

    quantization: `nf4`, `fp4`, or None. double_quant: whether the absmax of blocks is itself
    quantised, as `load_base` does; a checkpoint that is stored in 4 bit may be without.
    compute_dtype: of 4-bit products. use_fp16: of an unquantised base.
    """

    quantization: str | None = None
    double_quant: bool = False
    compute_dtype: str = "fp32"
    use_fp16: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel) -> Recipe | None:
        """How a loaded base was loaded; None where `load_base` could not load it so, as one with
        layers of both 4-bit codes.
        """
        packed, dtype = quantization_of(model), declared_dtype(model)
        if packed is None:
            return (
                cls(use_fp16=dtype == torch.float16)
                if dtype in (torch.float16, torch.float32)
                else None
            )
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
        """What a file says, None where it does not, or says what cannot be."""
        found = record.get(ENTRY)
        if not isinstance(found, Mapping) or set(found) != {f.name for f in fields(cls)}:
            return None
        recipe = cls(**found)
        sound = (
            recipe.quantization in (None, *QUANT_TYPES) and recipe.compute_dtype in COMPUTE_DTYPES
        )
        return (
            recipe
            if sound and isinstance(recipe.use_fp16, bool) and isinstance(recipe.double_quant, bool)
            else None
        )

    def as_record(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def flags(self) -> dict[str, Any]:
        """The same as the command line's flags, those that mean something beside one another."""
        if self.quantization is None:
            return {"use_quantization": False, "use_fp16": self.use_fp16}
        return {
            "use_quantization": True,
            "quant_type": self.quantization,
            "compute_dtype": self.compute_dtype,
        }

    @property
    def changed(self) -> dict[str, Any]:
        """Those arguments of `load_base` that are not its defaults."""
        return {
            name: value
            for name, value in self.arguments.items()
            if value != getattr(Recipe(), name)
        }

    @property
    def arguments(self) -> dict[str, Any]:
        """The same as arguments of `load_base`."""
        return {
            "quantization": self.quantization,
            "compute_dtype": self.compute_dtype,
            "use_fp16": self.use_fp16,
        }
