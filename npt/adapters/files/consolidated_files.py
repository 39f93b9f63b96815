"""Consolidated updates in an adapter's folder: their tensors, and their history in JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import PreTrainedModel

from npt.adapters.consolidate import Consolidation, Product, check_update, consolidated
from npt.base.identity import BaseIdentity
from npt.config import TARGETS
from npt.errors import AdapterFileError, ConfigError, ModelError
from npt.files import write_json
from npt.stored import check_names, read_headers, read_json, read_tensors, shown

HISTORY_NAME = "consolidated.json"
ROWS_NAME = "consolidated.safetensors"


def write_consolidated(model: PreTrainedModel, folder: Path, base: BaseIdentity) -> None:
    """Write the model's updates to an adapter's folder."""
    history = consolidated(model)
    tensors = {
        name: tensor.contiguous()
        for number, update in enumerate(history)
        for product, rows in update.rows.items()
        for name, tensor in zip(_names(number, product), rows, strict=True)
    }
    save_file(tensors, folder / ROWS_NAME, metadata={"format": "pt"})
    record = {
        "base_model_name_or_path": getattr(model.config, "_name_or_path", "") or "unknown",
        **base.as_record(),
        "updates": [
            {"places": [list(product) for product in update.rows], "record": update.record}
            for update in history
        ],
    }
    write_json(folder / HISTORY_NAME, record)


def read_consolidated(model: PreTrainedModel, folder: Path) -> tuple[Consolidation, ...]:
    """Return the updates saved in `folder`, if any, checked against the model but not applied.

    Raises:
        AdapterFileError: a file is damaged, or an update does not fit the model.
        ModelError: the model has updates already.
    """
    path = folder / HISTORY_NAME
    if not path.exists():
        return ()
    if consolidated(model):
        raise ModelError(
            "the model already has consolidated updates: call npt.unconsolidate(model, None)"
            f" before loading {folder}"
        )
    entries = read_json(path, AdapterFileError).get("updates")
    history = [_entry(path, entry) for entry in (entries if isinstance(entries, list) else [None])]
    names = {
        (number, product): _names(number, product)
        for number, (products, _) in enumerate(history)
        for product in products
    }
    rows_path, wanted = folder / ROWS_NAME, [name for pair in names.values() for name in pair]
    check_names(rows_path, read_headers(rows_path, AdapterFileError), wanted, AdapterFileError)
    tensors = read_tensors(rows_path, wanted, AdapterFileError)
    updates = []
    for number, (products, record) in enumerate(history):
        pairs = {product: names[number, product] for product in products}
        rows = {
            product: (tensors[scale], tensors[bias]) for product, (scale, bias) in pairs.items()
        }
        updates.append(Consolidation(rows, record))
        try:
            check_update(model, updates[-1])
        except (ConfigError, ModelError) as error:
            raise AdapterFileError(f"{folder}: update {number} is invalid: {error}") from error
    return tuple(updates)


def _entry(path: Path, entry: Any) -> tuple[list[Product], dict[str, Any]]:
    """Return the products of one update, which name its tensors, and its record."""
    try:
        record, products = entry["record"], [(index, target) for index, target in entry["places"]]
        fits = isinstance(record, dict) and len(set(products)) == len(products)
        if fits and all(type(i) is int and target in TARGETS for i, target in products):
            return products, record
    except (KeyError, TypeError, ValueError):
        pass
    raise AdapterFileError(
        f"{path}: the update {shown(entry)} lacks a record or distinct places [layer, target];"
        " restore the file from the original"
    )


def _names(number: int, product: Product) -> tuple[str, str]:
    stem = f"updates.{number}.layers.{product[0]}.{product[1]}"
    return f"{stem}.scale", f"{stem}.bias"
