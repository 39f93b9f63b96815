"""Model cards, for a saved adapter and for an exported folder."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
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
    name = record["base_model_name_or_path"]
    rows = {"base": name, "base hash": record["base_hash"]}
    for key, value in record["npt"].items():
        rows[key] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
    how = "Load the student, base included:"
    load = 'model, tokenizer = npt.from_pretrained(".")'
    if Recipe.of_record(record) is None:
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


def _table(headings: Collection[str], rows: Iterable[Iterable[Any]]) -> str:
    def line(values: Iterable[Any]) -> str:
        cells = [str(value).replace("|", "\\|").replace("\n", " ") for value in values]
        return f"| {' | '.join(cells)} |"

    rule = "|---" * len(headings) + "|"
    return "\n".join([line(headings), rule, *map(line, rows)])


def _fidelity(fidelity: Mapping[str, Any]) -> str:
    """Return the section on fidelity, or nothing without figures."""
    rows = []
    for name, label in _LABELS.items():
        figures = fidelity.get(name)
        if isinstance(figures, Mapping):
            cells = [_figure(figures, key) for key in FIGURES]
            rows.append([label, *cells])
    if not rows:
        return ""
    headings = ["model", *(figure.short for figure in FIGURES.values())]
    text = "Measured on held-out text against the teacher, ± one standard error."
    return f"\n## Fidelity to the teacher\n\n{text}\n\n{_table(headings, rows)}\n"


def _figure(figures: Mapping[str, Any], key: str) -> str:
    value = figures.get(key)
    if not isinstance(value, int | float):
        return "-"
    error = figures.get(f"{key}_se")
    if not isinstance(error, int | float):
        error = math.nan
    return FIGURES[key].write(value, error)


def export_card(settings: Mapping[str, Any], base: str) -> str:
    """Return an exported folder's card from its `config.json` and the name of its base."""
    form = settings["npt"]
    needs = "torch and transformers"
    stored = "not quantised"
    packing = settings.get("quantization_config")
    if packing is not None:
        needs = "torch, transformers, accelerate and bitsandbytes"
        kind = packing["bnb_4bit_quant_type"]
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
