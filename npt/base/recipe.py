"""The arguments that a base was loaded with, written down with its adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from transformers import PreTrainedModel

from npt.base.linear import quantized_linears
from npt.base.precision import policy_dtype, quantization_of
from npt.config import COMPUTE_DTYPES, QUANT_TYPES

ENTRY = "base_loading"
"""The entry of `adapter_config.json`."""

STORED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_DTYPE = "_npt_dtype"


@dataclass(frozen=True)
class Recipe:
    """Arguments of `npt.load_base`, the name aside.

    quantization: `nf4`, `fp4`, or None. double_quant: the absmax of blocks is itself quantised, as
    by `load_base`; a base that the user packed, or a checkpoint stored in 4 bit, may lack it.
    compute_dtype: of 4-bit products. use_fp16: of an unquantised base. dtype: of an unquantised
    base in bf16, and of what a base that the user packed keeps unpacked.
    """

    quantization: str | None = None
    double_quant: bool = False
    compute_dtype: str = "fp32"
    use_fp16: bool = False
    dtype: str | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Recipe | None:
        """Return that of a base, loaded by `load_base` or by the user; None if `load_base` cannot
        load one like it.
        """
        packed = quantization_of(model)
        if packed is None:
            dtype = policy_dtype(model)
            otherwise = getattr(model.config, "quantization_config", None) is not None
            if otherwise or dtype not in STORED.values():
                return None
            return cls(
                use_fp16=dtype == torch.float16, dtype="bf16" if dtype == torch.bfloat16 else None
            )
        if packed not in QUANT_TYPES:
            return None
        linears = [module for _, module in quantized_linears(model)]
        nested = any(
            m.weight.quant_state is not None and m.weight.quant_state.nested for m in linears
        )
        products = {module.compute_dtype for module in linears}
        kept = model.get_input_embeddings().weight.dtype
        stored = next((name for name, known in STORED.items() if known == kept), None)
        return cls(
            packed,
            nested,
            "bf16" if products == {torch.bfloat16} else "fp32",
            dtype=getattr(model, _DTYPE, stored),
        )

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Recipe | None:
        """Return that of a file's record; None if it has none, or one that cannot be."""
        found = record.get(ENTRY)
        if not isinstance(found, Mapping):
            return None
        found = {"dtype": None, **found}  # which files of earlier versions lack
        if set(found) != {f.name for f in fields(cls)}:
            return None
        recipe = cls(**found)
        sound = (
            recipe.quantization in (None, *QUANT_TYPES)
            and recipe.compute_dtype in COMPUTE_DTYPES
            and isinstance(recipe.use_fp16, bool)
            and isinstance(recipe.double_quant, bool)
            and recipe.dtype in (None, *STORED)
        )
        return recipe if sound else None

    def as_record(self) -> dict[str, Any]:
        record = asdict(self)
        if self.dtype is None:
            del record["dtype"]  # so that a file of an earlier version stays as it was
        return record

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
    def storage(self) -> dict[str, Any]:
        """Arguments of `load_base` for which the command line has no flags."""
        return {"dtype": self.dtype, "double_quant": self.double_quant or self.quantization is None}

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
            **self.storage,
        }


def note_dtype(model: PreTrainedModel, dtype: str | None) -> None:
    """Remember the `dtype` that a packed base was loaded with; None: as its checkpoint has it."""
    setattr(model, _DTYPE, dtype)
