"""Settings of the base."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from npt.config.field import Condition, SettingsGroup, setting
from npt.errors import ConfigError

QUANT_TYPES = ("nf4", "fp4")
COMPUTE_DTYPES = ("fp32", "bf16")
ATTENTIONS = ("sdpa", "eager")

_base = partial(setting, group="base")
_QUANTISED = Condition(lambda c: c.use_quantization, "--use_quantization")


def check_attention(name: str) -> None:
    """Raise ConfigError for an attention implementation that training does not support."""
    if name not in ATTENTIONS:
        raise ConfigError(
            f"--attn_implementation is {name!r}; choose from {', '.join(ATTENTIONS)} (flash"
            " attention does not support fp32; with --use_fp16, sdpa uses torch's flash kernel)"
        )


@dataclass(frozen=True, kw_only=True)
class BaseConfig(SettingsGroup):
    """The frozen base model, how it is stored and how it computes."""

    model_name: str = _base("tiny", "tiny (comes with NPT), a folder, a GGUF file, or a Hub id")
    use_quantization: bool = _base(False, "load the base in 4 bits")
    quant_type: str = _base("nf4", "4-bit format of the base", choices=QUANT_TYPES, need=_QUANTISED)
    use_fp16: bool = _base(False, "compute in fp16; ignored with --use_quantization")
    compute_dtype: str = _base(
        "fp32",
        "dtype of matrix products with 4-bit weights; everything else computes in fp32",
        choices=COMPUTE_DTYPES,
        need=_QUANTISED,
    )
    matmul_precision: str = _base(
        "auto",
        "precision of fp32 matrix products: highest (fp32), high (TF32), or auto (TF32 where it is"
        " accurate enough)",
        choices=("auto", "highest", "high"),
    )
    attn_implementation: str = _base("sdpa", "sdpa, or eager (stores the full attention matrix)")
    teacher_precision: str | None = _base(
        None,
        "use the unquantised model, in this dtype, as the teacher, instead of the 4-bit base",
        choices=("bf16", "fp32"),
        need=_QUANTISED,
    )
    shard_base: bool = _base(False, "shard the base over all processes with FSDP2")
    share_embeddings: bool = _base(False, "no effect; accepted because old commands contain it")

    def check(self) -> None:
        """Refuse an attention implementation that training does not support."""
        check_attention(self.attn_implementation)

    @property
    def loading(self) -> dict[str, Any]:
        """The arguments of `npt.load_base`."""
        return {
            "name": self.model_name,
            "quantization": self.quantization,
            "use_fp16": self.use_fp16,
            "compute_dtype": self.compute_dtype,
            "attn_implementation": self.attn_implementation,
        }

    @property
    def quantization(self) -> str | None:
        return self.quant_type if self.use_quantization else None
