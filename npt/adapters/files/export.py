"""A student as a folder of its own, loaded with transformers and without npt."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from npt.adapters.consolidate import product_of
from npt.adapters.converted import attached_config, decoder_layers, npt_layers
from npt.adapters.files.adapter_files import find_adapter, from_pretrained
from npt.adapters.files.card import export_card
from npt.base.families import FAMILIES
from npt.base.linear import dense_weight, quantized_linears
from npt.base.precision import declared_dtype
from npt.base.rows import rows_of
from npt.base.shards import write_shards
from npt.config import BASE_PRECISIONS, TARGETS
from npt.errors import ConfigError, ModelError, first_line
from npt.files import new_folder, write_json, write_text

CODE = Path(__file__).parent / "exported"
CODE_FILES = ("configuration_npt.py", "modeling_npt.py")

_TEXT = (
    "def add(a, b):\n    return a + b\n\nOnce upon a time there was a house by the sea, and whoever"
    " lived there could hear it at night. "
)
_TOKENS = 64

_SHARES = {"fp32": 1e-4, "16 bit": 0.02, "rounded": 0.05}
"""Largest difference of logits from the student's, as a share of the largest logit. By the dtype of
its computation, if nothing was rounded: on a GPU another kernel of attention sums in another order,
on the CPU they are the same to the bit. Weights rounded to 16 bit need more: 0.002 was measured on
the embedded model. A layer without its modulation, or with another's, is off by about 1."""

_LOADER = """
import sys
sys.modules["npt"] = None  # whoever imports it fails
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

folder, inputs, outputs, device = sys.argv[1:]
model, report = AutoModelForCausalLM.from_pretrained(
    folder, trust_remote_code=True, device_map={"": device}, output_loading_info=True,
    local_files_only=True,
)
if any(report.values()):
    sys.exit(f"keys of the weights do not fit: {report}"[:300])
with torch.no_grad():
    logits = model(load_file(inputs)["ids"].to(device)).logits
save_file({"logits": logits.to("cpu", torch.float32).contiguous()}, outputs)
"""


@dataclass(frozen=True)
class Exported:
    """A written folder.

    Attributes:
        folder: its path.
        precision: of the base's weights on disk, 16bit or 4bit.
        files, size: number of files of weights, and their bytes together.
        rounded: whether any weight of the base was rounded.
        tokens, largest: number of tokens compared, and the largest difference of a logit.
    """

    folder: Path
    precision: str
    files: int
    size: int
    rounded: bool
    tokens: int
    largest: float

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return {**vars(self), "folder": str(self.folder)}


def export(
    adapter: str | Path,
    folder: str | Path,
    *,
    precision: str | None = None,
    base_name: str | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
) -> Exported:
    """Write the student of a saved adapter as a folder that
    `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` loads without npt. All or
    nothing: another process without npt reads it back and compares before it gets its name.

    Memory: the student, and on the host one file of weights (4 GiB, or one larger tensor); then the
    student is freed, and the other process has the exported model, in fp32 if it computes so.

    Args:
        adapter: as for `npt.from_pretrained`.
        folder: a new one, or an empty one.
        precision: of the base's weights on disk. `4bit`: packed as they are. `16bit`: dequantised
            and rounded to bf16 if they were packed, so that bitsandbytes is not needed; an
            unquantised base as it is. Default: as the adapter's base was loaded, with nothing
            rounded: weights of an unquantised base that 16 bit cannot hold stay fp32.
        base_name: as for `npt.from_pretrained`.
        device: likewise.
        revision: likewise.

    Raises:
        ConfigError: the folder is not empty or cannot be written, or 4bit is asked of a base that
            was not packed.
        ModelError: what was written does not load, or gives other logits than the student; or as
            `npt.from_pretrained`.
        AdapterFileError, HubError: as `npt.from_pretrained`.
    """
    if precision not in (None, *BASE_PRECISIONS):
        raise ConfigError(
            f"base_precision is {precision!r}; choose from {', '.join(BASE_PRECISIONS)}"
        )
    folder = Path(folder)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ConfigError(f"--output {folder} exists and is not empty; choose another folder")
    stored = find_adapter(adapter, revision)
    model, tokenizer = from_pretrained(stored, base_name=base_name, device=device)
    try:
        with new_folder(folder) as temporary:
            files, size, precision, rounded = write_export(model, tokenizer, temporary, precision)
            length = min(_TOKENS, model.config.max_position_embeddings)
            ids = torch.tensor([tokenizer(_TEXT * 4)["input_ids"][:length]], device=model.device)
            with torch.no_grad():
                expected = model(ids).logits.to("cpu", torch.float32)
            kind = "fp32" if declared_dtype(model) == torch.float32 else "16 bit"
            del model
            gc.collect()
            if ids.is_cuda:
                torch.cuda.empty_cache()
            largest = _check(temporary, ids, expected, _SHARES["rounded" if rounded else kind])
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"--output {folder} cannot be written: {first_line(error)}; nothing is left of it"
        ) from error
    return Exported(folder, precision, files, size, rounded, ids.shape[1], largest)


def write_export(
    model: Any, tokenizer: Any, folder: Path, precision: str | None = None
) -> tuple[int, int, str, bool]:
    """Write weights, configurations, tokenizer, code and card; return the number of files of
    weights, their bytes, the base's precision, and whether any of its weights was rounded.
    """
    packed = bool(quantized_linears(model))
    if precision == "4bit" and not packed:
        raise ConfigError(
            "--base_precision 4bit: the adapter was trained on a base that is not packed, and on a"
            " packed one it would be another student; train one with --use_quantization, or drop"
            " the flag"
        )
    chosen = precision or ("4bit" if packed else "16bit")
    rounded: list[str] = []
    files, size = write_shards(_stored(model, chosen, precision is not None, rounded), folder)
    settings = export_config(model, chosen)
    write_json(folder / "config.json", settings)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    kind = model.config.model_type
    for name in CODE_FILES:  # written for a Llama; families differ in their names alone
        code = (CODE / name).read_text(encoding="utf-8").replace("Llama", FAMILIES[kind].prefix)
        write_text(folder / name, code.replace("llama", kind))
    card = export_card(settings, str(model.config._name_or_path), chosen, bool(rounded))
    write_text(folder / "README.md", card)
    return files, size, chosen, bool(rounded)


def export_config(model: PreTrainedModel, precision: str) -> dict[str, Any]:
    """Return the content of `config.json`: the base's, the form of the modulation, the classes."""
    config, family = attached_config(model), FAMILIES[model.config.model_type].prefix
    settings = {
        name: value
        for name, value in model.config.to_dict().items()
        if not name.startswith("_") and name not in ("quantization_config", "torch_dtype")
    }
    rows = {
        str(index): [t for t in TARGETS if rows_of(product_of(layer, t))]
        for index, layer in enumerate(decoder_layers(model))
    }
    dtype = torch.float32 if quantized_linears(model) else declared_dtype(model)
    settings |= {
        "model_type": f"npt_{model.config.model_type}",
        "architectures": [f"NPT{family}ForCausalLM"],
        "auto_map": {
            "AutoConfig": f"configuration_npt.NPT{family}Config",
            "AutoModel": f"modeling_npt.NPT{family}Model",
            "AutoModelForCausalLM": f"modeling_npt.NPT{family}ForCausalLM",
        },
        "dtype": str(dtype).removeprefix("torch."),
        "npt": {
            "ranks": {str(index): layer.npt.config.rank for index, layer in npt_layers(model)},
            "rows": {index: targets for index, targets in rows.items() if targets},
            "targets": list(config.targets),
            "multiplicative": config.multiplicative,
            "additive": config.additive,
            "keep_residual": config.residual == "keep",
            "mult_form": config.mult_form,
            "mult_bound": config.mult_bound,
            "additive_scale": config.additive_scale,
        },
    }
    if precision == "4bit":
        packing = model.config.quantization_config
        settings["quantization_config"] = {
            **(packing if isinstance(packing, dict) else packing.to_dict()),
            "bnb_4bit_compute_dtype": str(declared_dtype(model)).removeprefix("torch."),
            "llm_int8_skip_modules": [
                name
                for name, module in model.named_modules()
                if isinstance(module, nn.Linear) and not quantized_linears(module)
            ],
        }
    return settings


def _stored(
    model: PreTrainedModel, precision: str, may_round: bool, rounded: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all that is stored, one at a time; names of rounded ones are added to
    `rounded`.
    """

    def in_16_bit(name: str, tensor: Tensor) -> Tensor:
        """Return the tensor in 16 bit if nothing is lost, or if it may be rounded."""
        if tensor.dtype != torch.float32:
            return tensor
        for dtype in (torch.bfloat16, torch.float16):
            half = tensor.to(dtype)
            if torch.equal(half.to(torch.float32), tensor):
                return half
        if not may_round:
            return tensor
        rounded.append(name)
        return tensor.to(torch.bfloat16)

    packed = {f"{name}.weight": module for name, module in quantized_linears(model)}
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    for name, tensor in model.state_dict().items():
        module = packed.get(f"{name.partition('.weight')[0]}.weight")
        if tied and name == "lm_head.weight":
            continue
        if ".npt." in name or (module is not None and precision == "4bit"):
            yield name, tensor
        elif module is None:
            yield name, in_16_bit(name, tensor)
        elif packed.get(name) is module:  # its statistics are in the dense weight
            yield name, in_16_bit(name, dense_weight(module).to(torch.float32))
    for index, layer in enumerate(decoder_layers(model)):
        for target in TARGETS:
            rows = rows_of(product_of(layer, target))
            for part, values in zip(("scale", "bias"), rows or (), strict=False):
                yield f"model.layers.{index}.npt.row_{part}.{target}", values


def _check(folder: Path, ids: Tensor, expected: Tensor, share: float) -> float:
    """Load the folder by its own code in a process without npt; return the largest difference of a
    logit, which must not be more than this share of the largest logit.
    """
    with tempfile.TemporaryDirectory(prefix="npt-export-") as scratch:
        inputs, outputs = Path(scratch, "inputs.safetensors"), Path(scratch, "outputs.safetensors")
        save_file({"ids": ids.cpu().contiguous()}, inputs)
        # As many threads as here, since sums depend on it; a cache of its own for the folder's
        # code.
        environment = os.environ | {
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
            "HF_MODULES_CACHE": str(Path(scratch, "modules")),
        }
        paths = [str(path) for path in (folder, inputs, outputs)]
        done = subprocess.run(
            [sys.executable, "-P", "-c", _LOADER, *paths, str(ids.device)],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
        )
        if done.returncode or not outputs.exists():
            reason = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
            raise ModelError(
                f"the exported folder does not load without npt: {reason[:300]}; nothing is left of"
                " it"
            )
        logits = load_file(outputs)["logits"]
    assert logits.shape == expected.shape
    largest, limit = float((logits - expected).abs().max()), share * float(expected.abs().max())
    if not largest <= limit:  # NaN is none
        raise ModelError(
            f"the exported folder gives other logits than the student: {largest:.3g} apart, more"
            f" than the {limit:.3g} that rounding explains; nothing is left of it"
        )
    return largest
