"""Export: write a student to a folder that transformers loads without npt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from npt.adapters.consolidate import patched_module
from npt.adapters.converted import attached_config, decoder_layers, npt_layers
from npt.adapters.files.adapter_files import from_pretrained
from npt.adapters.files.card import export_card
from npt.base.families import FAMILIES
from npt.base.linear import Patch, patch_of, short_name
from npt.base.precision import declared_dtype
from npt.base.shards import write_shards
from npt.errors import ConfigError, ModelError, first_line
from npt.files import check_folder, new_folder, write_json, write_text
from npt.packed import quantized_linears

CODE = Path(__file__).parent / "exported"
CODE_FILES = ("configuration_npt.py", "modeling_npt.py")
_FORM = (
    "multiplicative", "additive", "mult_form", "mult_bound", "additive_scale",
    "token_part", "token_rank", "active",
)  # fmt: skip


@dataclass(frozen=True)
class Exported:
    """An exported folder.

    Attributes:
        folder: its path.
        packed: whether the base is quantised to 4 bits.
        files: number of weight files.
        size: bytes of the weight files.
    """

    folder: Path
    packed: bool
    files: int
    size: int


def export(
    adapter: str | Path,
    folder: str | Path,
    *,
    base_name: str | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
) -> Exported:
    """Write the student of a saved adapter to a folder, all or nothing. Load it without npt by
    `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`.

    Nothing is rounded: a 4-bit base stays packed, and other weights are stored in 16 bits only if
    that is exact. The host needs memory for one weight file (4 GiB) besides the student.

    Args:
        adapter: as for `npt.from_pretrained`.
        folder: a new or an empty folder.
        base_name: as for `npt.from_pretrained`.
        device: as for `npt.from_pretrained`.
        revision: as for `npt.from_pretrained`.

    Raises:
        ConfigError: the folder is not empty or cannot be written.
        ModelError: a layer that is not converted has a consolidated update, or as
            `npt.from_pretrained`.
        AdapterFileError, HubError: as `npt.from_pretrained`.
    """
    folder = Path(folder)
    check_folder(folder, "--output", empty=True)
    model, tokenizer = from_pretrained(
        adapter, base_name=base_name, device=device, revision=revision
    )
    _check_patches(model, str(adapter))
    try:
        with new_folder(folder) as temporary:
            files, size = write_export(model, tokenizer, temporary)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"--output {folder} cannot be written, and nothing was kept: {first_line(error)}"
        ) from error
    return Exported(folder, bool(quantized_linears(model)), files, size)


def write_export(model: Any, tokenizer: Any, folder: Path) -> tuple[int, int]:
    """Write all files of the folder; return the number of weight files and their bytes."""
    files, size = write_shards(_stored(model), folder)
    settings = export_config(model)
    write_json(folder / "config.json", settings)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    kind = model.config.model_type
    prefix = FAMILIES[kind].prefix
    for name in CODE_FILES:  # written for a Llama; other families differ only in names
        code = (CODE / name).read_text(encoding="utf-8")
        code = code.replace("Llama", prefix)
        code = code.replace("llama", kind)
        write_text(folder / name, code)
    base = str(model.config._name_or_path)
    readme = export_card(settings, base)
    write_text(folder / "README.md", readme)
    return files, size


def export_config(model: PreTrainedModel) -> dict[str, Any]:
    """Return the content of `config.json`: the base's, with classes and form of the modulation."""
    config = attached_config(model)
    family = FAMILIES[model.config.model_type].prefix
    left_out = ("quantization_config", "torch_dtype")
    entries = model.config.to_dict().items()
    settings = {k: v for k, v in entries if not k.startswith("_") and k not in left_out}
    packed = {id(module) for _, module in quantized_linears(model)}
    # next to 4-bit weights, the rest of the base computes in fp32
    dtype = torch.float32 if packed else declared_dtype(model)
    # JSON has no keys but strings
    ranks = {str(index): layer.npt.config.rank for index, layer in npt_layers(model)}
    patches = {str(index): len(inner) for index, (_, inner) in _patches(model).items()}
    settings |= {
        "model_type": f"npt_{model.config.model_type}",
        "architectures": [f"NPT{family}ForCausalLM"],
        "auto_map": {
            "AutoConfig": f"configuration_npt.NPT{family}Config",
            "AutoModel": f"modeling_npt.NPT{family}Model",
            "AutoModelForCausalLM": f"modeling_npt.NPT{family}ForCausalLM",
        },
        "dtype": short_name(dtype),
        "npt": {
            "ranks": ranks,
            "targets": list(config.targets),
            "keep_residual": config.residual == "keep",
            "patches": patches,
            **{name: getattr(config, name) for name in _FORM},
        },
    }
    if packed:
        packing = model.config.quantization_config
        if not isinstance(packing, dict):
            packing = packing.to_dict()
        # transformers would quantise every linear layer that is not named here
        plain = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and id(module) not in packed
        ]
        settings["quantization_config"] = {
            **packing,
            "bnb_4bit_compute_dtype": short_name(declared_dtype(model)),
            "llm_int8_skip_modules": plain,
        }
    return settings


def _stored(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor to store, with its name."""
    tensors = model.state_dict()
    if model.lm_head.weight is model.model.embed_tokens.weight:
        del tensors["lm_head.weight"]
    for name, tensor in tensors.items():
        if name.endswith(".npt.log_tau"):
            tensor = tensor.clone()  # layers share it, but a file may not
        # adapters stay in fp32, and statistics of 4-bit weights as they are
        of_adapter = ".npt." in name
        is_statistic = ".weight." in name
        if not of_adapter and not is_statistic:
            tensor = _smallest(tensor)
        yield name, tensor
    for index, (outer, inner) in _patches(model).items():
        adapter = f"model.layers.{index}.npt"
        yield f"{adapter}.outer", outer.contiguous()
        yield f"{adapter}.inner", inner.contiguous()


def _patches(model: PreTrainedModel) -> dict[int, Patch]:
    """Return the patches of consolidated updates by layer."""
    return {
        index: patch
        for index, layer in enumerate(decoder_layers(model))
        if (patch := patch_of(patched_module(layer))) is not None
    }


def _check_patches(model: PreTrainedModel, adapter: str) -> None:
    """Refuse a patch where the exported code has no adapter to hold it."""
    converted = dict(npt_layers(model))
    for index in _patches(model):
        if index not in converted:
            raise ModelError(
                f"{adapter} has consolidated updates in layer {index}, which is not converted, and"
                " export supports none there: undo them with npt consolidate --undo all"
            )


def _smallest(tensor: Tensor) -> Tensor:
    """Return the tensor in 16 bits if that is exact, else as it is."""
    if tensor.dtype == torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            half = tensor.to(dtype)
            if torch.equal(half.to(torch.float32), tensor):
                return half
    return tensor
