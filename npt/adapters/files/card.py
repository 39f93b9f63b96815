"""The model cards of an adapter and of an exported folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from npt.adapters.files.hub import is_hub_id
from npt.base.recipe import Recipe

_FIGURES = {
    "perplexity": ("perplexity", ".3f", 1, ""),
    "perplexity_ratio": ("ratio to teacher", ".4f", 1, ""),
    "kl": ("KL, nats", ".4f", 1, ""),
    "top1": ("top-1", ".1f", 100, "%"),
    "acceptance": ("acceptance", ".1f", 100, "%"),
}
"""Heading, format, factor and unit of each figure of `fidelity.json` that a card has."""

_LABELS = {
    "floor": "floor: attention dropped",
    "initial": "before training",
    "student": "student",
    "teacher": "teacher",
}


def card(record: Mapping[str, Any], fidelity: Mapping[str, Any] | None = None) -> str:
    """Return the model card of a saved adapter from its `adapter_config.json` and the run's
    `fidelity.json`, with code for its folder.
    """
    name, recipe = record["base_model_name_or_path"], Recipe.of_record(record)
    rows = {"base": name, "base hash": record["base_hash"]}
    for key, value in record["npt"].items():
        rows[key] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
    load = 'model, tokenizer = npt.from_pretrained(".")'
    if recipe is None:
        base = "model, tokenizer = npt.load_base(BASE, quantization=...)"
        load = f'{base}\nnpt.load_adapter(model, ".")'
    return f"""---
{_base_line(str(name))}library_name: npt
tags: [npt, distillation, adapter]
---

# NPT adapter

Per-token modulation of the MLP by attention, distilled from the base model itself.

{_table(("setting", "value"), rows.items())}
{_fidelity(fidelity or {})}
Load it with

```python
import npt

{load}
```
"""


def _base_line(name: str) -> str:
    """Return the entry that a hub reads; a folder's name would be a repository's there."""
    return f"base_model: {name}\n" if is_hub_id(name) and not Path(name).exists() else ""


def _table(headings: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = [list(headings), *rows]
    cells = [[str(v).replace("|", "\\|").replace("\n", " ") for v in line] for line in lines]
    head, *body = (f"| {' | '.join(line)} |" for line in cells)
    return "\n".join([head, "|---" * len(cells[0]) + "|", *body])


def _fidelity(fidelity: Mapping[str, Any]) -> str:
    """Return the known rows of `fidelity.json` under a heading, nothing if there is none."""
    rows = [
        [label, *(_figure(figures, key) for key in _FIGURES)]
        for name, label in _LABELS.items()
        if isinstance(figures := fidelity.get(name), Mapping)
    ]
    headings = ["held-out text", *(heading for heading, *_ in _FIGURES.values())]
    return f"\n## Fidelity to the teacher\n\n{_table(headings, rows)}\n" if rows else ""


def _figure(figures: Mapping[str, Any], key: str) -> str:
    value, error = figures.get(key), figures.get(f"{key}_se")
    _, form, scale, unit = _FIGURES[key]
    if not isinstance(value, int | float):
        return "-"
    tail = f" ± {scale * error:{form}}" if isinstance(error, int | float) else ""
    return f"{scale * value:{form}}{tail}{unit}"


def export_card(settings: Mapping[str, Any], base: str) -> str:
    """Return the card of an exported folder from its `config.json` and its base's name."""
    form, needs, stored = settings["npt"], "torch and transformers", "is not quantised"
    if "quantization_config" in settings:
        needs = "torch, transformers, accelerate and bitsandbytes"
        stored = f"is in 4 bit ({settings['quantization_config']['bnb_4bit_quant_type']})"
    name = base if _base_line(base) else Path(base).name
    return f"""---
{_base_line(base)}library_name: transformers
pipeline_tag: text-generation
tags: [npt, distillation]
---

# NPT student of {name}

In the layers {", ".join(form["ranks"])} attention acts by modulating the MLP of its token:
{", ".join(form["targets"])} (`modeling_npt.py` has the formula). Distilled from the base itself,
whose weights it has unchanged. The base {stored} and computes in {settings["dtype"]},
both as in training; the modulation is in fp32.

It needs {needs}. `trust_remote_code=True` runs the two Python files of this
folder: read them first.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # where this card lies, or USER/NAME on a hub
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer("Once upon a time", return_tensors="pt").to(model.device)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20, do_sample=False)[0]))
```
"""
