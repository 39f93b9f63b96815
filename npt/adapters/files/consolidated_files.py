"""Consolidated updates in an adapter's folder: their tensors, and their history in JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import PreTrainedModel

from npt.adapters.consolidate import Consolidation, Probes, check_update, consolidated
from npt.base.identity import BaseIdentity
from npt.errors import AdapterFileError, ConfigError, ModelError
from npt.files import write_json
from npt.stored import check_names, read_headers, read_json, read_tensors, shown

HISTORY_NAME = "consolidated.json"
PATCHES_NAME = "consolidated.safetensors"


def write_consolidated(model: PreTrainedModel, folder: Path, base: BaseIdentity) -> None:
    """Write the model's updates to an adapter's folder."""
    tensors = {}
    updates = []
    history = consolidated(model)
    for number, update in enumerate(history):
        for index, patch in update.patches.items():
            for name, part in zip(_names(number, index), patch, strict=True):
                tensors[name] = part.contiguous()
        updates.append(
            {"layers": list(update.patches), "record": update.record, "probes": update.probes}
        )
    save_file(tensors, folder / PATCHES_NAME, metadata={"format": "pt"})
    base_name = getattr(model.config, "_name_or_path", "")
    record = {
        "base_model_name_or_path": base_name or "unknown",
        **base.as_record(),
        "updates": updates,
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
    history = _history(path)
    wanted: list[str] = []
    for number, (layers, _, _) in enumerate(history):
        for index in layers:
            wanted += _names(number, index)
    patches_path = folder / PATCHES_NAME
    headers = read_headers(patches_path, AdapterFileError)
    check_names(patches_path, headers, wanted, AdapterFileError)
    tensors = read_tensors(patches_path, wanted, AdapterFileError)
    # a header says nothing of the model: whether the patches fit it is checked here
    updates = []
    for number, (layers, record, probes) in enumerate(history):
        patches = {}
        for index in layers:
            outer, inner = (tensors[name] for name in _names(number, index))
            # before `check_update`, which reads both sizes
            if outer.ndim != 2 or inner.ndim != 2:
                raise AdapterFileError(
                    f"{folder}: update {number} is invalid: layer {index} has shapes"
                    f" {list(outer.shape)} and {list(inner.shape)}, not two matrices"
                )
            patches[index] = (outer, inner)
        if any(max(ids) >= model.config.vocab_size for ids, _ in probes):
            raise AdapterFileError(
                f"{folder}: update {number} is invalid: a probe has an id outside the vocabulary of"
                f" {model.config.vocab_size}"
            )
        update = Consolidation(patches, record, probes)
        try:
            check_update(model, update)
        except (ConfigError, ModelError) as error:
            raise AdapterFileError(f"{folder}: update {number} is invalid: {error}") from error
        updates.append(update)
    return tuple(updates)


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the updates saved in `folder`; raise like `read_consolidated`."""
    path = folder / HISTORY_NAME
    return [record for _, record, _ in _history(path)] if path.exists() else []


def _history(path: Path) -> list[tuple[list[int], dict[str, Any], Probes]]:
    entries = read_json(path, AdapterFileError).get("updates")
    if not isinstance(entries, list):
        entries = [None]  # which `_entry` refuses
    return [_entry(path, entry) for entry in entries]


def _entry(path: Path, entry: Any) -> tuple[list[int], dict[str, Any], Probes]:
    """Return the layers of one update, which name its tensors, its record and its probes."""
    if isinstance(entry, dict) and "places" in entry:
        raise AdapterFileError(
            f"{path} holds updates of an earlier version, which changed every token alike and are"
            " no longer applied: delete the two consolidated.* files and write the texts again"
            " with npt consolidate"
        )
    try:
        layers = entry["layers"]
        record = entry["record"]
        probes = tuple((tuple(ids), count) for ids, count in entry["probes"])
        numbers = [*layers]
        for ids, count in probes:
            numbers += [*ids, count]
        fits = len(set(layers)) == len(layers) and _is_record(record)
        # True is an int, but no index
        fits &= all(type(number) is int and number >= 0 for number in numbers)
        if fits and all(0 < count < len(ids) for ids, count in probes):
            return layers, record, probes
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    raise AdapterFileError(
        f"{path}: the update {shown(entry)} lacks a record, probes or distinct layers; restore the"
        " file from the original"
    )


def _is_record(record: Any) -> bool:
    """Return whether what is printed of a record has the types that it is printed by."""
    texts = record.get("texts", [])
    return (
        isinstance(texts, list)
        and all(isinstance(text, str) for text in (*texts, record.get("context", "")))
        and all(isinstance(record.get(name, 0.0), int | float) for name in ("gain", "kl"))
    )


def _names(number: int, index: int) -> tuple[str, str]:
    stem = f"updates.{number}.layers.{index}"
    return f"{stem}.outer", f"{stem}.inner"
