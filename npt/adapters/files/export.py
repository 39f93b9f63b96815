"""A student as a folder of its own, loaded with transformers and without npt."""

from __future__ import annotations

import gc
import os
import shutil
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
from npt.config import BASE_PRECISIONS, TARGETS
from npt.errors import ConfigError, ModelError, NPTError
from npt.files import new_folder, write_json, write_text

CODE = Path(__file__).parent / "exported"
CODE_FILES = ("configuration_npt.py", "modeling_npt.py")
_LOADER = Path(__file__).parent / "load_exported.py"

SHARD_BYTES = 4 << 30
"""Of a file of weights, unless one tensor is larger: what the host holds as it is written."""

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


@dataclass(frozen=True)
class Exported:
    """A written folder: `files` of weights of `size` bytes together, of a base in `precision`
    (16bit or 4bit); whether any weight of the base was `rounded`; and the `largest` difference of a
    logit to the student's, over `tokens` tokens."""

    folder: Path
    precision: str
    files: int
    size: int
    rounded: bool
    tokens: int
    largest: float

    def as_dict(self) -> dict[str, Any]:
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
    try:
        with new_folder(folder) as temporary:
            model, tokenizer = from_pretrained(stored, base_name=base_name, device=device)
            files, size, precision, rounded = write_export(model, tokenizer, temporary, precision)
            ids = _ids(model, tokenizer)
            with torch.no_grad():
                expected = model(ids).logits.to("cpu", torch.float32)
            kind = "fp32" if declared_dtype(model) == torch.float32 else "16 bit"
            share = _SHARES["rounded" if rounded else kind]
            del model
            gc.collect()
            if ids.is_cuda:
                torch.cuda.empty_cache()
            largest = _check(temporary, ids, expected, share)
    except NPTError:
        raise
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ConfigError(
            f"--output {folder} cannot be written: {reason}; nothing is left of it"
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
    weights = _stored(model, chosen, precision is not None, rounded)
    files, size = _write_shards(weights, folder)
    settings = export_config(model, chosen)
    write_json(folder / "config.json", settings)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name in CODE_FILES:
        shutil.copyfile(CODE / name, folder / name)
    card = export_card(settings, str(model.config._name_or_path), chosen, bool(rounded))
    write_text(folder / "README.md", card)
    return files, size, chosen, bool(rounded)


def export_config(model: PreTrainedModel, precision: str) -> dict[str, Any]:
    """Return the content of `config.json`: the base's, the form of the modulation, the classes."""
    config, family = attached_config(model), FAMILIES[model.config.model_type].prefix
    code = (CODE / "modeling_npt.py").read_text(encoding="utf-8")
    if f"class NPT{family}ForCausalLM" not in code:
        raise ModelError(
            f"there is no code to export {model.config.model_type} models with; add its classes to"
            f" {CODE / 'modeling_npt.py'}"
        )
    found = {
        name: value
        for name, value in model.config.to_dict().items()
        if not name.startswith("_") and name not in ("quantization_config", "torch_dtype")
    }
    rows = {
        str(index): [t for t in TARGETS if rows_of(product_of(layer, t))]
        for index, layer in enumerate(decoder_layers(model))
    }
    dtype = torch.float32 if quantized_linears(model) else declared_dtype(model)
    found |= {
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
        given = model.config.quantization_config
        found["quantization_config"] = {
            **(given if isinstance(given, dict) else given.to_dict()),
            "bnb_4bit_compute_dtype": str(declared_dtype(model)).removeprefix("torch."),
            "llm_int8_skip_modules": [
                name
                for name, module in model.named_modules()
                if isinstance(module, nn.Linear) and not quantized_linears(module)
            ],
        }
    return found


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
        weight = f"{name.partition('.weight')[0]}.weight"
        if tied and name == "lm_head.weight":
            continue
        if weight in packed and precision == "4bit":
            yield name, tensor
        elif weight in packed:
            # its statistics are in the dense weight; updated rows are stored on their own
            if name == weight:
                yield name, in_16_bit(name, dense_weight(packed[weight]).to(torch.float32))
        else:
            yield name, tensor if ".npt." in name else in_16_bit(name, tensor)
    for index, layer in enumerate(decoder_layers(model)):
        for target in TARGETS:
            rows = rows_of(product_of(layer, target))
            for part, values in zip(("scale", "bias"), rows or (), strict=False):
                yield f"model.layers.{index}.npt.row_{part}.{target}", values


def _write_shards(tensors: Iterator[tuple[str, Tensor]], folder: Path) -> tuple[int, int]:
    """Write weights as transformers names them, one file at a time on the host; return the number
    of files, and bytes.
    """
    written: list[tuple[Path, list[str]]] = []
    held: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal size
        part = folder / f"part-{len(written)}.safetensors"
        save_file(held, part, metadata={"format": "pt"})
        written.append((part, list(held)))
        held.clear()
        size = 0

    for name, tensor in tensors:
        if held and size + tensor.nbytes > SHARD_BYTES:
            flush()
        held[name] = tensor.detach().to("cpu").contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    if len(written) == 1:
        written[0][0].rename(folder / "model.safetensors")
        return 1, total
    where: dict[str, str] = {}
    for number, (part, names) in enumerate(written, start=1):
        file = f"model-{number:05d}-of-{len(written):05d}.safetensors"
        part.rename(folder / file)
        where |= dict.fromkeys(names, file)
    write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": where},
    )
    return len(written), total


def _ids(model: Any, tokenizer: Any) -> Tensor:
    """Return a short text, [1, T]."""
    length = min(_TOKENS, model.config.max_position_embeddings)
    ids = list(tokenizer(_TEXT * 4)["input_ids"])[:length]
    return torch.tensor([ids], device=next(model.parameters()).device)


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
        paths = [str(path) for path in (_LOADER, folder, inputs, outputs)]
        command = [sys.executable, "-P", *paths, str(ids.device)]
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
        )
        if done.returncode or not outputs.exists():
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            reason = lines[-1] if lines else f"status {done.returncode}"
            raise ModelError(
                f"the exported folder does not load without npt: {reason[:300]}; nothing is left of"
                " it"
            )
        found = load_file(outputs)["logits"]
    if found.shape != expected.shape:
        raise ModelError(
            f"the exported folder gives logits of {list(found.shape)}, the student"
            f" {list(expected.shape)}; nothing is left"
        )
    largest, limit = float((found - expected).abs().max()), share * float(expected.abs().max())
    if not largest <= limit:  # NaN is none
        raise ModelError(
            f"the exported folder gives other logits than the student: {largest:.3g} apart, more"
            f" than the {limit:.3g} that rounding explains; nothing is left of it"
        )
    return largest
