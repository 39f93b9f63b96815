"""Settings of the frozen base."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from npt.config.field import Need, SettingsGroup, setting
from npt.errors import ConfigError

QUANT_TYPES = ("nf4", "fp4")
COMPUTE_DTYPES = ("fp32", "bf16")
ATTENTIONS = ("sdpa", "eager")

_base = partial(setting, group="base")
_QUANTISED = Need(lambda c: c.use_quantization, "--use_quantization")


def check_attention(name: str) -> None:
    """Raise ConfigError for an attention that a base cannot be trained with."""
    if name not in ATTENTIONS:
        raise ConfigError(
            f"--attn_implementation is {name!r}; choose from {', '.join(ATTENTIONS)} (flash kernels"
            " take no fp32, in which a base computes; under --use_fp16 sdpa reaches torch's own)"
        )


@dataclass(frozen=True, kw_only=True)
class BaseConfig(SettingsGroup):
    """The frozen model, and how it is stored and computed."""

    model_name: str = _base("tiny", "'tiny' (embedded), a folder, a GGUF file, or a hub id")
    use_quantization: bool = _base(
        False,
        "load the base in 4 bit; all then computes in fp32, unless compute_dtype says otherwise",
    )
    quant_type: str = _base("nf4", "4-bit code", choices=QUANT_TYPES, need=_QUANTISED)
    use_fp16: bool = _base(
        False, "compute the unquantised base in fp16; ignored, with a warning, under quantisation"
    )
    compute_dtype: str = _base(
        "fp32",
        "products of 4-bit weights: fp32, or bf16 (all else stays in fp32)",
        choices=COMPUTE_DTYPES,
        need=_QUANTISED,
    )
    matmul_precision: str = _base(
        "auto",
        "fp32 products: highest (fp32), high (TF32 on CUDA) or auto, high on a GPU if errors allow",
        choices=("auto", "highest", "high"),
    )
    attn_implementation: str = _base(
        "sdpa", "attention: sdpa (memory-efficient kernel on CUDA), or eager (keeps every score)"
    )
    teacher_precision: str | None = _base(
        None,
        "learn from the unquantised model, stored so, instead of the 4-bit base",
        choices=("bf16", "fp32"),
        need=_QUANTISED,
    )
    shard_base: bool = _base(False, "share the base among all processes (FSDP2)")
    share_embeddings: bool = _base(False, "accepted: teacher and student share the whole base")

    def check(self) -> None:
        """Refuse an attention that nothing trains with."""
        check_attention(self.attn_implementation)

    @property
    def quantization(self) -> str | None:
        return self.quant_type if self.use_quantization else None
