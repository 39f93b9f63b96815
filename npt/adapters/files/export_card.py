"""The model card of an exported folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from npt.adapters.files.hub import is_hub_id

_OTHERS = """## Elsewhere

- vLLM: not tried. The code meets the written requirements of its transformers backend: `AutoModel`
  in `auto_map`, the change in the base model, attention through transformers' interface. Two things
  may prevent it: vLLM fuses gate_proj and up_proj if it can, and these layers call them one by one;
  and tensor parallelism must leave the MLPs whole, as the plan here does. vLLM computes in 16 bit
  by default.
- llama.cpp, and what is built on it (GGUF): no. Its converter goes by the names of architectures
  and does not know this one, and it has no graph for the modulation. The modulation depends on the
  token, so it can be neither merged into the weights nor written as a LoRA."""


def export_card(settings: Mapping[str, Any], base: str, precision: str, rounded: bool) -> str:
    """Return a card: the model, its loading, its use elsewhere.

    Args:
        settings: content of `config.json`.
        base: the base's name.
        precision, rounded: of its weights on disk.
    """
    form = settings["npt"]
    local = not is_hub_id(base) or Path(base).exists()
    base = Path(base).name if local else base
    ranks = sorted(set(form["ranks"].values()))
    layers = f"{len(form['ranks'])} of {settings['num_hidden_layers']}: {', '.join(form['ranks'])}"
    kept = "yes" if form["keep_residual"] else "no"
    rows = [
        ("base", base),
        ("layers in NPT form", layers),
        ("rank", str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"),
        ("targets", ", ".join(form["targets"])),
        ("terms", ", ".join(term for term in ("multiplicative", "additive") if form[term])),
        ("attention in the residual stream of these layers", kept),
        ("layers with consolidated rows", ", ".join(form["rows"]) or "none"),
        ("base on disk", _stored(settings, precision, rounded)),
        ("computes in", settings["dtype"]),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    needs = "torch and transformers"
    if precision == "4bit":
        needs = "torch, transformers, accelerate and bitsandbytes"
    memory = (
        f"It computes in {settings['dtype']}, as it was trained. `dtype=torch.bfloat16` takes less"
        " memory and rounds; the modulation stays in fp32 either way."
    )
    head = "" if local else f"base_model: {base}\n"
    return f"""---
{head}library_name: transformers
pipeline_tag: text-generation
tags: [npt, distillation]
---

# NPT student of {base}

In its converted layers attention acts by modulating the MLP of its token: factors and summands on
the products of gate, up and down, from a low-rank code of the attention output. Distilled from the
base itself, whose weights it has unchanged. `modeling_npt.py` has the formula.

| | |
|---|---|
{table}

## Loading

It needs {needs}. `trust_remote_code=True` runs `modeling_npt.py` and `configuration_npt.py` of this
folder: read them first.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # where this card lies, or USER/NAME on a hub
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer("Once upon a time", return_tensors="pt").to(model.device)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20, do_sample=False)[0]))
```

{memory}

{_OTHERS}
"""


def _stored(settings: Mapping[str, Any], precision: str, rounded: bool) -> str:
    if precision == "4bit":
        code = settings["quantization_config"]["bnb_4bit_quant_type"]
        return f"4 bit ({code} of bitsandbytes), as it was trained with"
    return "rounded to 16 bit" if rounded else "as it was trained with, unquantised"
