"""Adapters on disk, in PEFT's layout: `adapter_config.json`, `adapter_model.safetensors`, a card.

Loading first checks the base and every tensor's name, shape, dtype and finiteness.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from npt.adapters.attach import adapter_shapes, attach, set_adapters
from npt.adapters.consolidate import apply_update, consolidated
from npt.adapters.converted import adapter_tensors, attached_config, is_attached
from npt.adapters.files.card import card
from npt.adapters.files.consolidated_files import (
    HISTORY_NAME,
    PATCHES_NAME,
    read_consolidated,
    write_consolidated,
)
from npt.adapters.files.hub import adapter_folder
from npt.base.identity import BaseIdentity, base_identity, byte_chunks
from npt.base.load import load_base
from npt.base.recipe import ENTRY, Recipe
from npt.config import NPTConfig
from npt.errors import AdapterFileError, ConfigError
from npt.files import new_folder, write_json, write_text
from npt.stored import (
    check_tensors,
    non_finite,
    read_headers,
    read_json,
    read_tensors,
    require_file,
    shown,
)

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
CARD_NAME = "README.md"
FILES = (CONFIG_NAME, WEIGHTS_NAME, CARD_NAME, HISTORY_NAME, PATCHES_NAME)
PREFIX = "base_model.model."  # PEFT puts it before every key
# settings that adapters of earlier versions lack
_LATER = {"ranks", "mult_form", "active", "token_rank"}
# settings of a random start, which only adapters of earlier versions have
_RETIRED = {"init_std_a", "init_std_b", "init_a", "init_std_m"}


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
        folder: a new or an empty one, or one that holds only an NPT adapter, which is replaced.
        base_name: recorded as PEFT's `base_model_name_or_path`; default the model's own.
        base: `npt.base_identity(model)`, if known: computing it reads the whole base.
        fidelity: content of a run's `fidelity.json`, for the model card.

    Raises:
        AdapterFileError: a tensor is not fp32 or not finite, or the folder holds other files.
        ModelError: no adapters are attached.
    """
    attached_config(model)
    folder = Path(folder)
    check_savable(adapter_tensors(model), folder)
    check_replaceable(folder)
    base = base or base_identity(model)
    with new_folder(folder) as temporary:
        write_adapter(model, temporary, base, base_name=base_name, fidelity=fidelity)
    return folder


def check_savable(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Raise AdapterFileError for tensors that are not fp32 or not finite."""
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise AdapterFileError(
                f"{name} is {tensor.dtype}, but adapters are fp32; the adapter is not saved to"
                f" {folder}"
            )
    if bad := non_finite(tensors):
        raise AdapterFileError(f"{bad} is not finite; the adapter is not saved to {folder}")


def write_adapter(
    model: PreTrainedModel,
    folder: Path,
    base: BaseIdentity,
    *,
    base_name: str | None = None,
    fidelity: Mapping[str, Any] | None = None,
) -> None:
    """Write the files of an adapter to a temporary folder, unchecked; args as in `save_adapter`."""
    base_name = base_name or model.config._name_or_path or "unknown"
    settings = asdict(attached_config(model))
    record = {
        "peft_type": "NPT",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        **base.as_record(),
        "npt": settings,
    }
    recipe = Recipe.of(model)
    if recipe is not None:
        record[ENTRY] = asdict(recipe)
    stored = {}
    for name, tensor in adapter_tensors(model).items():
        stored[PREFIX + name] = tensor.detach().cpu().contiguous()
    save_file(stored, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    write_json(folder / CONFIG_NAME, record)
    write_text(folder / CARD_NAME, card(record, fidelity))
    if consolidated(model):
        write_consolidated(model, folder, base)


@dataclass(frozen=True)
class StoredAdapter:
    """A saved adapter. It is looked up only once, since a run may save a newer one meanwhile.

    Attributes:
        name: as passed by the user.
        folder: that holds its files.
        config: form and size.
        record: content of `adapter_config.json`.
    """

    name: str
    folder: Path
    config: NPTConfig
    record: Mapping[str, Any]

    def __str__(self) -> str:
        return self.name

    @property
    def recipe(self) -> Recipe | None:
        """The arguments that the base was loaded with; None if the record lacks them."""
        return Recipe.of_record(self.record)


Named = str | Path | StoredAdapter
"""A folder, USER/NAME on the Hub, or the result of `find_adapter`."""


def find_adapter(name: Named, revision: str | None = None) -> StoredAdapter:
    """Find an adapter by its name (see `npt.from_pretrained`), without reading its tensors."""
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
    """Attach the adapters saved in `folder`, and consolidate the updates saved with them.

    If a check fails, the model is unchanged.

    Args:
        model: the base. Adapters that it has must have the same configuration; they are replaced.
        folder: as for `npt.from_pretrained`, or the result of `find_adapter`.
        base: `npt.base_identity(model)`, if known.
        check_base: False accepts any base with matching shapes.
        revision: branch, tag or commit on the Hub.

    Raises:
        AdapterFileError: a file is missing or damaged, or the adapter does not fit the base.
        HubError: the Hub cannot be reached or has no such repository.
        ModelError: the model has consolidated updates already.
    """
    stored = find_adapter(folder, revision)  # fails before base_identity reads the whole base
    config, tensors = read_adapter(model, stored, base=base, check_base=check_base)
    updates = read_consolidated(model, stored.folder)
    if not is_attached(model):
        attach(model, config)
    set_adapters(model, config, tensors)
    for update in updates:
        apply_update(model, update)
    return config


def from_pretrained(
    adapter: Named,
    *,
    base_name: str | None = None,
    device: str | torch.device | None = None,
    attn_implementation: str = "sdpa",
    revision: str | None = None,
    check_base: bool = True,
) -> tuple[Any, Any]:
    """Load a saved adapter and its base, with the quantisation and precision of training.

    Args:
        adapter: a folder written by `npt.save_adapter`, a run folder (its best student, else its
            last), a checkpoint, or USER/NAME on the Hub.
        base_name: name or path of the base, if not the one recorded with the adapter.
        device: as for `npt.load_base`.
        attn_implementation: as for `npt.load_base`.
        revision: the adapter's branch, tag or commit on the Hub.
        check_base: False accepts any base with matching shapes.

    Returns:
        (model, tokenizer): the student in evaluation mode. Inside `npt.adapters_disabled(model)` it
        computes as its teacher.

    Raises:
        AdapterFileError, HubError: as `npt.load_adapter`, or the adapter does not record how its
            base was loaded.
        ModelError: as `npt.load_base`.
    """
    stored = find_adapter(adapter, revision)
    recipe = stored.recipe
    name = base_name or stored.record.get("base_model_name_or_path")
    if recipe is None or not isinstance(name, str):
        raise AdapterFileError(
            f"{stored.folder} does not record how its base was loaded: load the base as in training"
            f" and call npt.load_adapter(model, {str(stored.folder)!r})"
        )
    model, tokenizer = load_base(
        name, device=device, attn_implementation=attn_implementation, **recipe.arguments
    )
    load_adapter(model, stored, check_base=check_base)
    return model, tokenizer


def read_adapter(
    model: PreTrainedModel,
    folder: Named,
    *,
    base: BaseIdentity | None = None,
    check_base: bool = True,
) -> tuple[NPTConfig, dict[str, torch.Tensor]]:
    """Check an adapter against a model without changing the model. Args as for `load_adapter`.

    Returns:
        The configuration, and the tensors on the host by their name in the model.
    """
    stored = find_adapter(folder)
    folder = stored.folder
    config = stored.config
    if check_base:
        _check_base(stored, base or base_identity(model))
    if is_attached(model) and attached_config(model) != config:
        raise AdapterFileError(
            f"{folder} holds {config}, but the model has {attached_config(model)}; call"
            " npt.detach(model) first"
        )
    try:
        shapes = adapter_shapes(model, config)
    except ConfigError as error:
        raise AdapterFileError(f"{folder} does not fit the model: {error}") from error
    path = folder / WEIGHTS_NAME
    wanted = {PREFIX + name: shape for name, shape in shapes.items()}
    # by the header alone, before anything large is read
    check_tensors(path, read_headers(path, AdapterFileError), wanted, AdapterFileError)
    on_disk = read_tensors(path, wanted, AdapterFileError)
    tensors = {name: on_disk[PREFIX + name] for name in shapes}
    if bad := non_finite(tensors):
        raise AdapterFileError(f"{path}: {bad} has a non-finite value; load another checkpoint")
    for name, tensor in tensors.items():
        # the forward divides by it
        if name.endswith(".scale") and not (tensor > 0).all():
            raise AdapterFileError(
                f"{path}: {name} has a factor that is not above 0; restore the file from the"
                " original"
            )
    return config, tensors


def _check_base(stored: StoredAdapter, base: BaseIdentity) -> None:
    if difference := base.mismatch(stored.record):
        name = shown(stored.record.get("base_model_name_or_path"))
        raise AdapterFileError(
            f"{stored.folder} was trained on another base ({name}): {difference}; load that base"
            " with the same quantisation, or add --any_base (check_base=False) to use the adapter"
            " on this one"
        )


def adapter_hash(model: PreTrainedModel) -> str:
    """Return a sha256 of the adapters and consolidated updates: equal for equal students."""
    settings = json.dumps(asdict(attached_config(model)), sort_keys=True)
    digest = hashlib.sha256(settings.encode())

    def add(name: str, *tensors: torch.Tensor) -> None:
        digest.update(f"{name};".encode())
        for chunk in chain(*map(byte_chunks, tensors)):
            digest.update(chunk)

    for name, tensor in adapter_tensors(model).items():
        add(f"{name} {tensor.dtype} {tuple(tensor.shape)}", tensor)
    for update in consolidated(model):
        for index, patch in update.patches.items():
            add(str(index), *patch)
    return digest.hexdigest()


def check_replaceable(folder: Path) -> None:
    """Raise AdapterFileError if a folder holds anything but an NPT adapter."""
    if not folder.exists():
        return
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
    if other := sorted(names - set(FILES)):
        raise AdapterFileError(
            f"{folder} contains other files than an NPT adapter ({other[0]}): choose another folder"
        )
    if names:
        _read_config(folder)  # refuses another library's adapter


def _read_config(folder: Path) -> tuple[NPTConfig, dict[str, Any]]:
    path = folder / CONFIG_NAME
    require_file(path, "pass a run folder or an adapter folder", AdapterFileError)
    record = read_json(path, AdapterFileError)
    settings = record.get("npt")
    if not isinstance(settings, dict):
        raise AdapterFileError(
            f"{path} has no entry 'npt', so the folder has no NPT adapter: pass one that"
            " npt.save_adapter wrote"
        )
    # what an earlier version wrote is still an adapter: it may have the retired ones, or lack later
    settings = {name: value for name, value in settings.items() if name not in _RETIRED}
    known = {field.name for field in fields(NPTConfig)}
    odd = sorted(known ^ (_LATER | settings.keys()))
    if odd:
        raise AdapterFileError(
            f"{path} has unknown or missing settings: {', '.join(map(shown, odd[:5]))}; load it"
            " with the version of npt that saved it"
        )
    try:
        return NPTConfig(**settings), record
    except (ConfigError, TypeError) as error:
        raise AdapterFileError(f"{path} has an invalid setting: {error}") from error
