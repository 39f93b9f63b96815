"""The model card of an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from npt.adapters.files.hub import is_hub_id
from npt.base.identity import PARTS
from npt.base.recipe import Recipe

_HERE = ", in this folder,"  # before code for the folder of the card


def card(
    record: Mapping[str, Any], fidelity: Mapping[str, Any] | None = None, repo_id: str | None = None
) -> str:
    """Return the model card of a saved adapter: base, settings, fidelity if known, code to load it.

    Args:
        record: content of `adapter_config.json`.
        fidelity: content of a run's `fidelity.json`.
        repo_id: USER/NAME, its place on a hub; else its code is for the folder of the card.
    """
    name, parts = record["base_model_name_or_path"], record.get("base_parts")
    rows = [("base", name), ("base hash", record["base_hash"])]
    if isinstance(parts, Mapping):
        rows += [(f"base's {what}", parts.get(part)) for part, what in PARTS.items()]
    rows += [
        (key, ", ".join(map(str, value)) if isinstance(value, list | tuple) else value)
        for key, value in record["npt"].items()
    ]
    settings = "\n".join(f"| {_cell(key)} | {_cell(value)} |" for key, value in rows)
    # a hub takes the name for a repository of its own: never that of a folder on somebody's disk
    base = f"base_model: {name}\n" if is_hub_id(str(name)) and not Path(str(name)).exists() else ""
    return f"""---
{base}library_name: npt
tags: [npt, distillation, adapter]
---

# NPT adapter

Per-token modulation of the MLP by attention, distilled from the base model itself.

| setting | value |
|---|---|
{settings}
{_fidelity_table(fidelity)}
{_loading(record, repo_id)}"""


def for_hub(card: str, repo_id: str) -> str:
    """Return a card with code for a repository of the hub, not for its folder."""
    return card.replace('"."', f'"{repo_id}"').replace(_HERE, "")


def _loading(record: Mapping[str, Any], repo_id: str | None) -> str:
    """Return code that loads the adapter as written."""
    recipe, base = Recipe.of_record(record), record["base_model_name_or_path"]
    adapter, where = (repo_id, "") if repo_id is not None else (".", _HERE)
    loaded = "BASE, quantization=..."
    if recipe is not None:
        loaded = ", ".join([repr(base), *(f"{k}={v!r}" for k, v in recipe.changed.items())])
    student = f"""Load base and adapter{where} with

```python
import npt

model, tokenizer = npt.from_pretrained("{adapter}")
```

or the adapter onto a base that is loaded already"""
    return f"""{student if recipe is not None else f"Load it{where}"} with

```python
import npt

model, tokenizer = npt.load_base({loaded})
npt.load_adapter(model, "{adapter}")
```

or, in code that uses PEFT, with

```python
import npt
import peft

npt.register_peft()
model, tokenizer = npt.load_base({loaded})
model = peft.PeftModel.from_pretrained(model, "{adapter}")
```
"""


def _fidelity_table(fidelity: Mapping[str, Any] | None) -> str:
    """Return the rows of `fidelity.json` that are known."""
    lines = []
    for name, label in (
        ("floor", "floor: attention dropped"),
        ("initial", "before training"),
        ("student", "student"),
        ("teacher", "teacher"),
    ):
        figures = (fidelity or {}).get(name)
        if isinstance(figures, Mapping):
            cells = (
                _figure(figures, "perplexity", ".3f"),
                _figure(figures, "perplexity_ratio", ".4f"),
                _figure(figures, "kl", ".4f"),
                _figure(figures, "top1", ".1f", 100, "%"),
                _figure(figures, "acceptance", ".1f", 100, "%"),
            )
            lines.append(f"| {label} | {' | '.join(cells)} |")
    if not lines:
        return ""
    head = (
        "| held-out text | perplexity | ratio to teacher | KL, nats | top-1 | acceptance"
        " |\n|---|---|---|---|---|---|"
    )
    return "\n".join(["\n## Fidelity to the teacher\n", head, *lines, ""])


def _figure(
    figures: Mapping[str, Any], key: str, form: str, scale: float = 1, unit: str = ""
) -> str:
    value, error = figures.get(key), figures.get(f"{key}_se")
    if not isinstance(value, int | float):
        return "-"
    tail = f" ± {scale * error:{form}}" if isinstance(error, int | float) else ""
    return f"{scale * value:{form}}{tail}{unit}"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
