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

_HERE = ", in this folder,"  # before code for the folder of the card
_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters["cell"] = lambda value: str(value).replace("|", "\\|").replace("\n", " ")


def card(
    record: Mapping[str, Any], fidelity: Mapping[str, Any] | None = None, repo_id: str | None = None
) -> str:
    """Return the model card of a saved adapter from its `adapter_config.json` and the run's
    `fidelity.json`, with code for its folder or for USER/NAME on a hub.
    """
    name, parts = record["base_model_name_or_path"], record.get("base_parts")
    rows = [("base", name), ("base hash", record["base_hash"])]
    if isinstance(parts, Mapping):
        rows += [(f"base's {what}", parts.get(part)) for part, what in PARTS.items()]
    origin = record.get(ORIGIN_ENTRY)
    if isinstance(origin, Mapping):
        named = (str(origin.get(key)) for key in ("file", "quantization"))
        rows.append(("base read from", " in ".join(named)))
    for key, value in record["npt"].items():
        listed = isinstance(value, list | tuple)
        rows.append((key, ", ".join(map(str, value)) if listed else value))
    recipe, loaded = Recipe.of_record(record), "BASE, quantization=..."
    if recipe is not None:
        loaded = ", ".join([repr(name), *(f"{k}={v!r}" for k, v in recipe.changed.items())])
    return _TEMPLATES.get_template("adapter_card.md.j2").render(
        # a hub takes it for a repository of its own: never the name of a folder on somebody's disk
        base=name if is_hub_id(str(name)) and not Path(str(name)).exists() else None,
        rows=rows,
        figures=_fidelity(fidelity or {}),
        knows_base=recipe is not None,
        loaded=loaded,
        adapter="." if repo_id is None else repo_id,
        where=_HERE if repo_id is None else "",
    )


def for_hub(card: str, repo_id: str) -> str:
    """Return a card with code for a repository of the hub, not for its folder."""
    return card.replace('"."', f'"{repo_id}"').replace(_HERE, "")


def _fidelity(fidelity: Mapping[str, Any]) -> list[list[str]]:
    """Return the known rows of `fidelity.json`."""
    labels = {"floor": "floor: attention dropped", "initial": "before training"}
    return [
        [
            labels.get(name, name),
            _figure(figures, "perplexity", ".3f"),
            _figure(figures, "perplexity_ratio", ".4f"),
            _figure(figures, "kl", ".4f"),
            _figure(figures, "top1", ".1f", 100, "%"),
            _figure(figures, "acceptance", ".1f", 100, "%"),
        ]
        for name in ("floor", "initial", "student", "teacher")
        if isinstance(figures := fidelity.get(name), Mapping)
    ]


def _figure(
    figures: Mapping[str, Any], key: str, form: str, scale: float = 1, unit: str = ""
) -> str:
    value, error = figures.get(key), figures.get(f"{key}_se")
    if not isinstance(value, int | float):
        return "-"
    tail = f" ± {scale * error:{form}}" if isinstance(error, int | float) else ""
    return f"{scale * value:{form}}{tail}{unit}"


def export_card(settings: Mapping[str, Any], base: str, precision: str, rounded: bool) -> str:
    """Return the card of an exported folder from its `config.json`, and its base's name and
    precision.
    """
    form, needs = settings["npt"], "torch and transformers"
    stored = "rounded to 16 bit" if rounded else "unquantised, as in training"
    if precision == "4bit":
        needs = "torch, transformers, accelerate and bitsandbytes"
        code = settings["quantization_config"]["bnb_4bit_quant_type"]
        stored = f"4 bit ({code} of bitsandbytes), as in training"
    local = not is_hub_id(base) or Path(base).exists()
    base = Path(base).name if local else base
    layers, ranks = form["ranks"], sorted(set(form["ranks"].values()))
    kept = "yes" if form["keep_residual"] else "no"
    rows = {
        "base": base,
        "layers in NPT form": (
            f"{len(layers)} of {settings['num_hidden_layers']}: {', '.join(layers)}"
        ),
        "rank": str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}",
        "targets": ", ".join(form["targets"]),
        "terms": ", ".join(term for term in ("multiplicative", "additive") if form[term]),
        "attention in the residual stream of these layers": kept,
        "layers with consolidated rows": ", ".join(form["rows"]) or "none",
        "base on disk": stored,
        "computes in": settings["dtype"],
    }
    return _TEMPLATES.get_template("export_card.md.j2").render(
        local=local, base=base, rows=rows.items(), needs=needs, dtype=settings["dtype"]
    )
