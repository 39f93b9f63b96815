"""The model cards of an adapter and of an exported folder, from their templates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from npt.adapters.files.hub import is_hub_id
from npt.base.gguf.configuration import ORIGIN_ENTRY
from npt.base.identity import PARTS
from npt.base.recipe import Recipe

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters["cell"] = lambda value: str(value).replace("|", "\\|").replace("\n", " ")


def card(record: Mapping[str, Any], fidelity: Mapping[str, Any] | None = None) -> str:
    """Return the model card of a saved adapter from its `adapter_config.json` and the run's
    `fidelity.json`, with code for its folder.
    """
    name, recipe, origin = (
        record["base_model_name_or_path"],
        Recipe.of_record(record),
        record.get(ORIGIN_ENTRY),
    )
    rows = {"base": name, "base hash": record["base_hash"]}
    for part, what in PARTS.items():
        if isinstance(parts := record.get("base_parts"), Mapping):
            rows[f"base's {what}"] = parts.get(part)
    if isinstance(origin, Mapping):
        rows["base read from"] = f"{origin.get('file')} in {origin.get('quantization')}"
    for key, value in record["npt"].items():
        rows[key] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
    loaded = "BASE, quantization=..."
    if recipe is not None:
        loaded = ", ".join([repr(name), *(f"{k}={v!r}" for k, v in recipe.changed.items())])
    return _TEMPLATES.get_template("adapter_card.md.j2").render(
        # a hub takes it for a repository of its own: never the name of a folder on somebody's disk
        base=name if _on_hub(str(name)) else None,
        rows=rows.items(),
        figures=_fidelity(fidelity or {}),
        knows_base=recipe is not None,
        loaded=loaded,
    )


def _on_hub(name: str) -> bool:
    return is_hub_id(name) and not Path(name).exists()


def _fidelity(fidelity: Mapping[str, Any]) -> list[list[str]]:
    """Return the known rows of `fidelity.json`."""
    labels = {"floor": "floor: attention dropped", "initial": "before training"}
    columns = [
        ("perplexity", ".3f", 1, ""),
        ("perplexity_ratio", ".4f", 1, ""),
        ("kl", ".4f", 1, ""),
        ("top1", ".1f", 100, "%"),
        ("acceptance", ".1f", 100, "%"),
    ]
    return [
        [labels.get(name, name), *(_figure(figures, *column) for column in columns)]
        for name in ("floor", "initial", "student", "teacher")
        if isinstance(figures := fidelity.get(name), Mapping)
    ]


def _figure(figures: Mapping[str, Any], key: str, form: str, scale: float, unit: str) -> str:
    value, error = figures.get(key), figures.get(f"{key}_se")
    if not isinstance(value, int | float):
        return "-"
    tail = f" ± {scale * error:{form}}" if isinstance(error, int | float) else ""
    return f"{scale * value:{form}}{tail}{unit}"


def export_card(settings: Mapping[str, Any], base: str) -> str:
    """Return the card of an exported folder from its `config.json` and its base's name."""
    form, needs, stored = settings["npt"], "torch and transformers", "unquantised"
    if "quantization_config" in settings:
        needs = "torch, transformers, accelerate and bitsandbytes"
        stored = f"4 bit ({settings['quantization_config']['bnb_4bit_quant_type']})"
    local = not _on_hub(base)
    base = Path(base).name if local else base
    rows = {
        "base": base,
        "layers in NPT form": (
            f"{len(form['ranks'])} of {settings['num_hidden_layers']}: {', '.join(form['ranks'])}"
        ),
        "targets": ", ".join(form["targets"]),
        "base on disk": f"{stored}, as in training",
        "computes in": settings["dtype"],
    }
    return _TEMPLATES.get_template("export_card.md.j2").render(
        local=local, base=base, rows=rows.items(), needs=needs, dtype=settings["dtype"]
    )
