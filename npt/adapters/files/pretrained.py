"""`npt.from_pretrained`: a student from its adapter alone, which knows its base."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from npt.adapters.files.adapter_files import Named, find_adapter, load_adapter
from npt.base.load import load_base
from npt.base.recipe import Recipe
from npt.errors import AdapterFileError


def from_pretrained(
    adapter: Named,
    *,
    base_name: str | None = None,
    device: str | torch.device | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    attn_implementation: str = "sdpa",
    revision: str | None = None,
    check_base: bool = True,
) -> tuple[Any, Any]:
    """Load a saved adapter with the base that it was trained on: quantised as it was, computing in
    what it computed in.

    Args:
        adapter: a folder of `npt.save_adapter`, a run's folder (its best student, else its last), a
            checkpoint, or USER/NAME on the hub.
        base_name: of the base, where it is not to be found under the name that the adapter knows.
        device, device_map, attn_implementation: as for `npt.load_base`.
        revision: of the adapter on the hub.
        check_base: False takes any base that the adapter's shapes fit.

    Returns:
        (model, tokenizer): the student in evaluation mode; `npt.adapters_disabled(model)` makes it
        its teacher.

    Raises:
        AdapterFileError: as `npt.load_adapter`, or the adapter does not say how its base was
            loaded.
        ModelError: as `npt.load_base`.
        HubError: the hub cannot be reached, or has no such repository.
    """
    stored = find_adapter(adapter, revision)
    recipe, name = (
        Recipe.of_record(stored.record),
        base_name or stored.record.get("base_model_name_or_path"),
    )
    if recipe is None or not isinstance(name, str):
        raise AdapterFileError(
            f"{stored.folder} does not say how its base was loaded, as folders of earlier versions"
            " do not; load it with npt.load_base and give it to npt.load_adapter (npt.save_adapter"
            " then writes down how)"
        )
    model, tokenizer = load_base(
        name,
        device=device,
        device_map=device_map,
        attn_implementation=attn_implementation,
        **recipe.arguments,
    )
    load_adapter(model, stored, check_base=check_base)
    return model, tokenizer
