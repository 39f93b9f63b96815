"""Model cards, for a saved adapter and for an exported folder."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from npt.adapters.files.hub import is_hub_id
from npt.base.recipe import Recipe
from npt.figures import FIGURES

_LABELS = {
    "floor": "floor (without context)",
    "initial": "student before training",
    "student": "student",
    "teacher": "teacher",
}


def card(record: Mapping[str, Any], fidelity: Mapping[str, Any] | None = None) -> str:
    """Return a saved adapter's model card from `adapter_config.json` and `fidelity.json`."""
    name, recipe = record["base_model_name_or_path"], Recipe.of_record(record)
    rows = {"base": name, "base hash": record["base_hash"]}
    for key, value in record["npt"].items():
        rows[key] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
    load, how = 'model, tokenizer = npt.from_pretrained(".")', "Load the student, base included:"
    if recipe is None:
        how = "Load the base as it was loaded for training, then the adapter:"
        base = "model, tokenizer = npt.load_base(BASE, quantization=...)"
        load = f'{base}\nnpt.load_adapter(model, ".")'
    return f"""---
{_base_line(str(name))}library_name: npt
tags: [npt, distillation, adapter]
---

# NPT adapter

In the layers below, a low-rank code of each token's attention output modulates that token's MLP.
The adapter was distilled from its base, whose weights stay frozen.

## Use

{how}

```python
import npt

{load}
```
{_fidelity(fidelity or {})}
## Settings

{_table(("setting", "value"), rows.items())}
"""


def _base_line(name: str) -> str:
    """Return the `base_model` entry, or nothing for a folder, which is no name on the Hub."""
    return f"base_model: {name}\n" if is_hub_id(name) and not Path(name).exists() else ""


def _table(headings: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = [list(headings), *rows]
    cells = [[str(v).replace("|", "\\|").replace("\n", " ") for v in line] for line in lines]
    head, *body = (f"| {' | '.join(line)} |" for line in cells)
    return "\n".join([head, "|---" * len(cells[0]) + "|", *body])


def _fidelity(fidelity: Mapping[str, Any]) -> str:
    """Return the section on fidelity, or nothing without figures."""
    rows = [
        [label, *(_figure(figures, key) for key in FIGURES)]
        for name, label in _LABELS.items()
        if isinstance(figures := fidelity.get(name), Mapping)
    ]
    headings = ["model", *(figure.short for figure in FIGURES.values())]
    text = "Measured on held-out text against the teacher, ± one standard error."
    table = _table(headings, rows)
    return f"\n## Fidelity to the teacher\n\n{text}\n\n{table}\n" if rows else ""


def _figure(figures: Mapping[str, Any], key: str) -> str:
    value, error = figures.get(key), figures.get(f"{key}_se")
    if not isinstance(value, int | float):
        return "-"
    return FIGURES[key].write(value, error if isinstance(error, int | float) else math.nan)


def export_card(settings: Mapping[str, Any], base: str) -> str:
    """Return an exported folder's card from its `config.json` and the name of its base."""
    form, needs, stored = settings["npt"], "torch and transformers", "not quantised"
    if "quantization_config" in settings:
        needs = "torch, transformers, accelerate and bitsandbytes"
        kind = settings["quantization_config"]["bnb_4bit_quant_type"]
        stored = f"quantised to 4 bits ({kind})"
    name = base if _base_line(base) else Path(base).name
    return f"""---
{_base_line(base)}library_name: transformers
pipeline_tag: text-generation
tags: [npt, distillation]
---

# NPT student of {name}

This model was distilled from {name}, whose weights it keeps unchanged. In layers
{", ".join(form["ranks"])}, a low-rank code of each token's attention output modulates that token's
MLP. The targets of the modulation are {", ".join(form["targets"])}; `modeling_npt.py` states the
formula.

As in training, the base is {stored} and computes in {settings["dtype"]}. The modulation computes
in float32.

## Use

Install {needs}. `trust_remote_code=True` runs the two Python files in
this folder: read them first.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this card's folder, or USER/NAME on the Hub
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer("Once upon a time", return_tensors="pt").to(model.device)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20, do_sample=False)[0]))
```
"""
