"""Consolidated updates on disk, alone or with an adapter: tensors and their history in JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from npt.adapters.consolidate import (
    Place,
    Update,
    check_update,
    consolidate,
    consolidated,
    product_of,
)
from npt.adapters.converted import decoder_layers
from npt.base.identity import BaseIdentity, base_identity
from npt.base.rows import Rows
from npt.config import TARGETS
from npt.errors import AdapterFileError, ConfigError, ModelError
from npt.files import new_folder, write_json
from npt.stored import (
    check_entries,
    check_tensors,
    read_headers,
    read_json,
    read_tensors,
    require_file,
    shown,
)

HISTORY_NAME = "consolidated.json"
ROWS_NAME = "consolidated.safetensors"
_PARTS = ("scale", "bias")

OTHER_BASE = (
    "load the same model with the same quantisation, or pass --any_base (check_base=False) to use"
    " it on this one all the same"
)
"""Remedy for files of another base."""


def save_consolidated(
    model: PreTrainedModel, folder: str | Path, *, base: BaseIdentity | None = None
) -> Path:
    """Write the model's updates and nothing else to `folder`, all or nothing. `npt.save_adapter`
    writes them with the adapter.

    The folder is made anew; one that holds updates alone is replaced. base:
    `npt.base_identity(model)` if known already.

    Raises:
        AdapterFileError: the folder holds other things.
        ModelError: the model has no updates.
    """
    folder = Path(folder)
    if folder.exists() and not (
        folder.is_dir() and {item.name for item in folder.iterdir()} <= {HISTORY_NAME, ROWS_NAME}
    ):
        raise AdapterFileError(
            f"{folder} holds something other than consolidated updates; choose another folder"
        )
    if not consolidated(model):
        raise ModelError("the model has no consolidated updates; make one with npt.consolidate")
    base = base if base is not None else base_identity(model)
    with new_folder(folder) as temporary:
        write_consolidated(model, temporary, base)
    return folder


def write_consolidated(model: PreTrainedModel, folder: Path, base: BaseIdentity) -> None:
    """Add the model's updates to a folder that is being made."""
    history = consolidated(model)
    tensors = {
        _name(number, place, part): tensor.contiguous()
        for number, update in enumerate(history)
        for place, rows in update.rows.items()
        for part, tensor in zip(_PARTS, rows, strict=True)
    }
    save_file(tensors, folder / ROWS_NAME, metadata={"format": "pt"})
    record = {
        "base_model_name_or_path": getattr(model.config, "_name_or_path", "") or "unknown",
        **base.as_record(),
        "updates": [
            {"places": [list(place) for place in update.rows], "record": update.record}
            for update in history
        ],
    }
    write_json(folder / HISTORY_NAME, record)


def load_consolidated(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    base: BaseIdentity | None = None,
    check_base: bool = True,
) -> tuple[Update, ...]:
    """Consolidate the updates saved in `folder` into the model. A refused folder leaves it as it
    was.

    Args:
        model: the base that they were made on, without updates of its own.
        folder: of `save_consolidated`, or of `save_adapter` on a model with updates.
        base: as for `npt.load_adapter`.
        check_base: likewise.

    Raises:
        AdapterFileError: as for `npt.load_adapter`.
        ModelError: the model has updates already.
    """
    updates = read_consolidated(model, folder, base=base, check_base=check_base)
    for update in updates:
        consolidate(model, update)
    return updates


def read_consolidated(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    base: BaseIdentity | None = None,
    check_base: bool = True,
) -> tuple[Update, ...]:
    """Return the updates saved in `folder`, once all are found to fit the model, which is not
    changed. Arguments and errors as of `load_consolidated`.
    """
    folder = Path(folder)
    if consolidated(model):
        raise ModelError(
            "the model has consolidated updates already; call npt.unconsolidate(model, None)"
            f" before {folder} is loaded"
        )
    path = folder / HISTORY_NAME
    require_file(path, "name a folder that npt consolidate wrote", AdapterFileError)
    record = read_json(path, AdapterFileError)
    check_entries(
        path, "", record, {"base_hash": (str,), "updates": (list,)}, AdapterFileError, exact=False
    )
    if check_base:
        found = (base if base is not None else base_identity(model)).mismatch(record)
        if found is not None:
            raise AdapterFileError(
                f"{folder} was consolidated on another base: {found}; {OTHER_BASE}"
            )
    places = [_places(path, number, entry) for number, entry in enumerate(record["updates"])]
    tensors = _read_rows(model, folder / ROWS_NAME, places)
    updates = []
    for number, (where, entry) in enumerate(zip(places, record["updates"], strict=True)):
        rows: dict[Place, Rows] = {}
        for place in where:
            scale, bias = (tensors[_name(number, place, part)] for part in _PARTS)
            rows[place] = (scale, bias)
        updates.append(Update(rows, entry["record"]))
        try:
            check_update(model, updates[-1])
        except (ConfigError, ModelError) as error:
            raise AdapterFileError(f"{folder}: update {number} cannot be used: {error}") from error
    return tuple(updates)


def _places(path: Path, number: int, entry: Any) -> list[Place]:
    """Return the places of one update, checked one by one: they become names of tensors."""
    if (
        not isinstance(entry, dict)
        or not isinstance(entry.get("record"), dict)
        or not isinstance(entry.get("places"), list)
    ):
        raise AdapterFileError(
            f"{path}: update {number} is {shown(entry)}, expected its places and record; copy it"
            " again"
        )
    places: list[Place] = []
    for place in entry["places"]:
        fits = (
            isinstance(place, list)
            and len(place) == 2
            and type(place[0]) is int
            and place[1] in TARGETS
        )
        if not fits or (place[0], place[1]) in places:
            raise AdapterFileError(
                f"{path}: update {number} has the place {shown(place)}; expected a layer and a"
                " target, each once"
            )
        places.append((place[0], place[1]))
    return places


def _read_rows(
    model: PreTrainedModel, path: Path, places: list[list[Place]]
) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise AdapterFileError(f"{path.parent} holds no {ROWS_NAME}; the updates are incomplete")
    layers = decoder_layers(model)
    shapes: dict[str, tuple[int, ...]] = {}
    for number, where in enumerate(places):
        for index, target in where:
            if not 0 <= index < len(layers):
                raise AdapterFileError(
                    f"{path.parent}: update {number} is of layer {index}, the model has layers 0 to"
                    f" {len(layers) - 1}"
                )
            width = product_of(layers[index], target).out_features
            shapes |= {_name(number, (index, target), part): (width,) for part in _PARTS}
    check_tensors(path, read_headers(path, AdapterFileError), shapes, AdapterFileError)
    return read_tensors(path, shapes, AdapterFileError)


def _name(number: int, place: Place, part: str) -> str:
    return f"updates.{number}.layers.{place[0]}.{place[1]}.{part}"
