"""Adapters on disk, in PEFT's file layout: `adapter_config.json`, `adapter_model.safetensors`,
`README.md`.

Loading checks everything before it changes anything: names, shapes, dtypes and finiteness of every
tensor, and that the folder was trained on the base at hand.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from npt.adapters.attach import (
    adapter_parameters,
    adapter_shapes,
    attach,
    attached_config,
    is_attached,
    set_adapters,
)
from npt.adapters.consolidate import check_enabled, consolidate, consolidated
from npt.adapters.files.consolidated_files import (
    HISTORY_NAME,
    OTHER_BASE,
    ROWS_NAME,
    read_consolidated,
    write_consolidated,
)
from npt.adapters.files.hub import adapter_folder, is_hub_id
from npt.base.identity import PARTS, BaseIdentity, base_identity
from npt.base.recipe import ENTRY, Recipe
from npt.config import NPTConfig
from npt.errors import AdapterFileError, ConfigError
from npt.files import new_folder, write_json, write_text
from npt.stored import check_tensors, non_finite, read_headers, read_json, read_tensors, shown

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
CARD_NAME = "README.md"
FILES = (CONFIG_NAME, WEIGHTS_NAME, CARD_NAME, HISTORY_NAME, ROWS_NAME)
_PREFIX = "base_model.model."  # PEFT's prefix of every key
_HERE = ", in this folder,"  # in a card, of the code that loads what lies beside it
# settings that folders of earlier versions do not have
_LATER = {"ranks", "mult_form", "init_a", "init_std_m"}


def save_adapter(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    base_name: str | None = None,
    base: BaseIdentity | None = None,
    fidelity: Mapping[str, Any] | None = None,
) -> Path:
    """Write the attached adapters and the consolidated updates to `folder`, all or nothing.

    Args:
        model: with adapters attached.
        folder: made anew; one that holds an NPT adapter and nothing else is replaced, anything else
            is refused.
        base_name: recorded as PEFT's `base_model_name_or_path`; default the model's own.
        base: `npt.base_identity(model)` if known already, since it reads the whole base; computed
            otherwise.
        fidelity: content of a run's `fidelity.json`, for the model card.

    Returns:
        The folder.

    Raises:
        AdapterFileError: a tensor is not finite (a poisoned adapter is never saved), or the folder
            holds other things.
        ModelError: no adapters are attached.
    """
    attached_config(model)
    folder = Path(folder)
    check_savable(adapter_parameters(model), folder)
    _check_replaceable(folder)
    base = base if base is not None else base_identity(model)
    with new_folder(folder) as temporary:
        write_adapter(model, temporary, base, base_name=base_name, fidelity=fidelity)
    return folder


def check_savable(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Refuse adapters that are not fp32 or not finite.

    Raises:
        AdapterFileError: the first such tensor.
    """
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise AdapterFileError(
                f"{name} is {tensor.dtype}, an adapter is fp32 and no other could be loaded; it is"
                f" not saved to {folder}"
            )
    bad = non_finite(tensors)
    if bad is not None:
        raise AdapterFileError(f"{bad} is not finite; the adapter is not saved to {folder}")


def write_adapter(
    model: PreTrainedModel,
    folder: Path,
    base: BaseIdentity,
    *,
    base_name: str | None = None,
    fidelity: Mapping[str, Any] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write the files of an adapter into a folder that is being made.

    Args:
        tensors: by the name of their parameter, of whatever value; default the model's own.
        model, folder, base, base_name, fidelity: as for `save_adapter`.
    """
    if base_name is None:
        base_name = getattr(model.config, "_name_or_path", "") or "unknown"
    record = {
        "peft_type": "NPT",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        **base.as_record(),
        "npt": asdict(attached_config(model)),
    }
    recipe = Recipe.of(model)
    if recipe is not None:
        record[ENTRY] = recipe.as_record()
    tensors = adapter_parameters(model) if tensors is None else tensors
    save_file(
        {_PREFIX + name: t.detach().to("cpu").contiguous() for name, t in tensors.items()},
        folder / WEIGHTS_NAME,
        metadata={"format": "pt"},
    )
    write_json(folder / CONFIG_NAME, record)
    write_text(folder / CARD_NAME, card(record, fidelity))
    if consolidated(model):
        write_consolidated(model, folder, base)


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter that was found: `name` is what it was asked for by, `folder` where it is, `record`
    what its `adapter_config.json` holds, `config` the form in it. Whoever has one need not look
    again, where a run that goes on may have another by then."""

    name: str
    folder: Path
    config: NPTConfig
    record: Mapping[str, Any]

    def __str__(self) -> str:
        return self.name


Named = str | Path | StoredAdapter
"""An adapter as functions take it: a folder, USER/NAME on the hub, or one that was found already.
"""


def find_adapter(name: Named, revision: str | None = None) -> StoredAdapter:
    """The adapter that a name means, fetched from the model hub where it is USER/NAME there; its
    configuration is read, no tensor is.

    Args:
        name: as for `npt.from_pretrained`.
        revision: branch, tag or commit on the hub.

    Raises:
        AdapterFileError: there is none, or its configuration cannot be read or used.
        HubError: the hub cannot be reached, or has no such repository.
    """
    if isinstance(name, StoredAdapter):
        return name
    folder = adapter_folder(name, FILES, revision)
    return StoredAdapter(str(name), folder, *_read_config(folder))


def load_adapter(
    model: PreTrainedModel,
    folder: Named,
    *,
    base: BaseIdentity | None = None,
    check_base: bool = True,
    revision: str | None = None,
) -> NPTConfig:
    """Attach the adapters saved in `folder`, and consolidate the updates that stand beside them. A
    refused folder leaves the model as it was.

    Args:
        model: the base, without adapters or with adapters of the same configuration, which are
            overwritten.
        folder: as written by `save_adapter`; or USER/NAME on the model hub, where no such folder is
            there; or what `find_adapter` found.
        base: `npt.base_identity(model)` where known already; computed otherwise. Its configuration,
            4-bit codes and unpacked tensors must be the recorded ones; of a folder of an earlier
            version, which does not know them, its `base_hash`.
        check_base: False loads the adapter onto any base that its shapes fit.
        revision: branch, tag or commit on the hub.

    Raises:
        HubError: the hub cannot be reached, or has no such repository.
        AdapterFileError: a file is missing or broken, a tensor is missing, extra, misshapen, not
            fp32 or not finite, or the base differs.
        ModelError: the folder holds updates, and the model has some already or has them switched
            off.
    """
    stored = find_adapter(folder, revision)  # before the whole base is read
    if base is None and check_base:
        base = base_identity(model)
    config, tensors = read_adapter(model, stored, base=base, check_base=check_base)
    with_updates = (stored.folder / HISTORY_NAME).exists()
    updates = (
        read_consolidated(model, stored.folder, base=base, check_base=check_base)
        if with_updates
        else ()
    )
    if updates:
        check_enabled(model)  # before anything is attached
    if not is_attached(model):
        attach(model, config)
    set_adapters(model, config, tensors)
    for update in updates:
        consolidate(model, update)
    return config


def read_adapter(
    model: PreTrainedModel,
    folder: Named,
    *,
    base: BaseIdentity | None = None,
    check_base: bool = True,
    finite: bool = True,
) -> tuple[NPTConfig, dict[str, torch.Tensor]]:
    """Return the configuration and tensors saved in `folder`, once all is found to fit the model,
    which is not changed.

    No tensor is read before every name, shape and dtype is the expected one.

    Args:
        model, folder, base, check_base: as for `load_adapter`.
        finite: refuse numbers that are not finite.

    Returns:
        The tensors by the name of their parameter, on the host.

    Raises:
        AdapterFileError: as `load_adapter`.
    """
    stored = find_adapter(folder)
    folder, config, record = stored.folder, stored.config, stored.record
    found = (
        (base if base is not None else base_identity(model)).mismatch(record)
        if check_base
        else None
    )
    if found is not None:
        name = (
            f" ({shown(record['base_model_name_or_path'])})"
            if record.get("base_model_name_or_path")
            else ""
        )
        raise AdapterFileError(f"{folder} was trained on another base{name}: {found}; {OTHER_BASE}")
    if is_attached(model) and attached_config(model) != config:
        raise AdapterFileError(
            f"{folder} holds {config}, but the model has {attached_config(model)}; call"
            " npt.detach(model) first"
        )
    try:
        shapes = adapter_shapes(model, config)
    except ConfigError as error:
        raise AdapterFileError(f"{folder} does not fit the model: {error}") from error
    return config, _read_tensors(folder / WEIGHTS_NAME, shapes, finite)


def base_mismatch(folder: Named, base: BaseIdentity) -> str | None:
    """Return in what a saved adapter, or the updates saved with it, belongs to another base than
    this one; None if it does not.

    Raises:
        AdapterFileError, HubError: as `find_adapter`.
    """
    stored = find_adapter(folder)
    found = base.mismatch(stored.record)
    if found is None and (stored.folder / HISTORY_NAME).exists():
        found = base.mismatch(read_json(stored.folder / HISTORY_NAME, AdapterFileError))
    return found


def adapter_hash(model: PreTrainedModel) -> str:
    """sha256 over the attached adapters' tensors and configuration and over consolidated updates:
    two students of one base with the same hash are the same.

    Raises:
        ModelError: no adapters are attached.
    """
    digest = hashlib.sha256(json.dumps(asdict(attached_config(model)), sort_keys=True).encode())
    for name, parameter in adapter_parameters(model).items():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)};".encode())
        digest.update(
            parameter.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    for update in consolidated(model):
        for place, rows in update.rows.items():
            digest.update(f"{place};".encode())
            for part in rows:
                digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _check_replaceable(folder: Path) -> None:
    """Refuse to save over anything but an NPT adapter alone in its folder."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    other = (
        sorted(p.name for p in folder.iterdir() if p.name not in FILES) if folder.is_dir() else []
    )
    try:
        _read_config(folder)
    except AdapterFileError:
        other = other or [folder.name]
    if other:
        raise AdapterFileError(
            f"{folder} holds something other than an NPT adapter ({other[0]}); choose another"
            " folder"
        )


def _read_config(folder: Path) -> tuple[NPTConfig, dict[str, Any]]:
    """A saved adapter's configuration, and the record it stands in.

    Raises:
        AdapterFileError: there is none, or it cannot be read or used.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise AdapterFileError(
            f"{folder} holds no {CONFIG_NAME}; name a folder that npt.save_adapter wrote"
        )
    record = read_json(path, AdapterFileError)
    settings = record.get("npt")
    if not isinstance(settings, dict):
        raise AdapterFileError(
            f"{path} has no entry 'npt'; it is not an NPT adapter's configuration"
        )
    known = {f.name for f in fields(NPTConfig)}
    if set(settings) | _LATER != known:
        odd = sorted((set(settings) | _LATER) ^ known)
        raise AdapterFileError(
            f"{path} has unknown or missing settings: {', '.join(map(shown, odd[:5]))}"
        )
    try:
        return NPTConfig(**settings), record
    except (ConfigError, TypeError) as error:
        raise AdapterFileError(f"{path} has a setting that cannot work: {error}") from error


def _read_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], finite: bool
) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise AdapterFileError(f"{path.parent} holds no {WEIGHTS_NAME}; the adapter is incomplete")
    wanted = {_PREFIX + name: shape for name, shape in shapes.items()}
    check_tensors(path, read_headers(path, AdapterFileError), wanted, AdapterFileError)
    stored = read_tensors(path, wanted, AdapterFileError)
    tensors = {name: stored[_PREFIX + name] for name in shapes}
    bad = non_finite(tensors) if finite else None
    if bad is not None:
        raise AdapterFileError(f"{path}: {bad} holds a non-finite value; the adapter is refused")
    return tensors


def card(
    record: Mapping[str, Any], fidelity: Mapping[str, Any] | None = None, repo_id: str | None = None
) -> str:
    """The model card of a saved adapter: where it belongs, what it is, and how near it comes to its
    teacher where that is known.

    Args:
        record: content of `adapter_config.json`.
        fidelity: content of a run's `fidelity.json`.
        repo_id: USER/NAME, where it is going to lie on a hub; else its code is for the folder that
            the card lies in.
    """
    name = record["base_model_name_or_path"]
    parts = record.get("base_parts")
    rows = [("base", name), ("base hash", record["base_hash"])]
    rows += (
        [(f"base's {what}", parts.get(part)) for part, what in PARTS.items()]
        if isinstance(parts, Mapping)
        else []
    )
    rows += [
        (key, ", ".join(map(str, value)) if isinstance(value, list | tuple) else value)
        for key, value in record["npt"].items()
    ]
    settings = "\n".join(f"| {_cell(key)} | {_cell(value)} |" for key, value in rows)
    # A hub takes the base's name for a repository of its own: that of a folder on somebody's disk
    # has no place there.
    base = f"base_model: {name}\n" if is_hub_id(str(name)) and not Path(str(name)).exists() else ""
    return f"""---
{base}library_name: npt
tags: [npt, distillation, adapter]
---

# NPT adapter

Per-token modulation of the MLP by attention, distilled from the base model itself.

| setting | value |
|---|---|
{settings}
{_fidelity_table(fidelity)}
{_loading(record, repo_id)}"""


def for_hub(card: str, repo_id: str) -> str:
    """A card whose code is for the folder that it lies in, with code for a repository of the hub."""
    return card.replace('"."', f'"{repo_id}"').replace(_HERE, "")


def _loading(record: Mapping[str, Any], repo_id: str | None) -> str:
    """Code that loads the adapter, as it stands."""
    recipe, base = Recipe.of_record(record), record["base_model_name_or_path"]
    adapter, where = (repo_id, "") if repo_id is not None else (".", _HERE)
    loaded = (
        "BASE, quantization=..."
        if recipe is None
        else ", ".join([repr(base), *(f"{k}={v!r}" for k, v in recipe.changed.items())])
    )
    student = f"""Load base and adapter{where} with

```python
import npt

model, tokenizer = npt.from_pretrained("{adapter}")
```

or the adapter onto a base that is there"""
    return f"""{student if recipe is not None else f"Load it{where}"} with

```python
import npt

model, tokenizer = npt.load_base({loaded})
npt.load_adapter(model, "{adapter}")
```

or, where PEFT is what is spoken, with

```python
import npt
import peft

npt.register_peft()
model, tokenizer = npt.load_base({loaded})
model = peft.PeftModel.from_pretrained(model, "{adapter}")
```
"""


def _fidelity_table(fidelity: Mapping[str, Any] | None) -> str:
    """Rows of `fidelity.json`, as far as they are known."""
    lines = []
    for name, label in (
        ("floor", "floor: attention dropped"),
        ("initial", "before training"),
        ("student", "student"),
        ("teacher", "teacher"),
    ):
        figures = (fidelity or {}).get(name)
        if isinstance(figures, Mapping):
            shares = [
                _figure(figures, "top1", 100, ".1f", "%"),
                _figure(figures, "acceptance", 100, ".1f", "%"),
            ]
            cells = [
                _figure(figures, "perplexity", 1, ".3f"),
                _figure(figures, "perplexity_ratio", 1, ".4f"),
                _figure(figures, "kl", 1, ".4f"),
            ]
            lines.append(f"| {label} | {' | '.join([*cells, *shares])} |")
    if not lines:
        return ""
    head = (
        "| held-out text | perplexity | ratio to teacher | KL, nats | top-1 | acceptance"
        " |\n|---|---|---|---|---|---|"
    )
    return "\n".join(["\n## Fidelity to the teacher\n", head, *lines, ""])


def _figure(figures: Mapping[str, Any], key: str, scale: float, form: str, unit: str = "") -> str:
    value, error = figures.get(key), figures.get(f"{key}_se")
    if not isinstance(value, int | float):
        return "-"
    tail = f" ± {scale * error:{form}}" if isinstance(error, int | float) else ""
    return f"{scale * value:{form}}{tail}{unit}"


def _cell(value: Any) -> str:
    """A value inside a table of Markdown."""
    return str(value).replace("|", "\\|").replace("\n", " ")
