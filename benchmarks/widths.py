"""Which learning rate still trains, by the width of the model: the embedded model, made wider
without changing what it computes.

    python benchmarks/widths.py [--widths 1,2,4,8] [--output FOLDER] [--workers INT]

A model k times as wide has k copies of every coordinate of the stream and of the MLP, and weights
divided by k before they are summed. Logits, attention outputs and the loss of a layer are those
of the embedded model whatever k is; only the adapters have more to sum over and more to write to.
So what changes between two widths is not the task, the text or the teacher. Attention keeps its
heads.

A study like any other is written to the folder, run with `npt sweep` and continued if it
exists: `npt report FOLDER/study` draws it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from npt.base.load import EMBEDDED_FOLDER
from npt.cli.main import main as npt_main
from npt.config import PRODUCTS, TARGETS
from npt.tools.sweep.table import read_table
from tables import widths as table_of_widths

RATED = 4
"""Width up to which more than one limit is sought, and every rate of a grid is run; wider models
take minutes a run.
"""

SETTINGS: dict[str, Any] = {
    "use_quantization": True, "layers": "upper_half", "adapter_rank": 16, "batch_size": 2,
    "max_length": 128, "num_samples": 512, "eval_samples": 4, "max_steps": 40,
    "max_consecutive_bad": 4, "additive_scale": 0.1, "targets": list(PRODUCTS),
}  # fmt: skip
CALIBRATED = {"targets": list(TARGETS), "init": "calibrated", "calibration_tokens": 4096}
RATES = [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1]


def widened(model: LlamaForCausalLM, k: int) -> LlamaForCausalLM:
    """A model with k times the D and F of this one that computes the same logits. k: a power of
    two, by which bf16 divides exactly.
    """
    before = model.config.to_dict()
    sizes = {name: k * before[name] for name in ("hidden_size", "intermediate_size")}
    # the output sums over D, the embedding does not
    config = LlamaConfig(**{**before, **sizes, "tie_word_embeddings": False})
    wide = LlamaForCausalLM(config).to(torch.bfloat16)
    weights = {**model.state_dict(), "lm_head.weight": model.lm_head.weight}
    wide.load_state_dict(
        {
            name: _tiled(name, weights[name], place.shape)
            for name, place in wide.state_dict().items()
        }
    )
    return wide


def _tiled(name: str, weight: Tensor, shape: torch.Size) -> Tensor:
    """The weight repeated to a shape, and divided by the copies that it sums over. Whole copies
    follow one another, so that the blocks of a 4-bit format hold the same numbers."""
    times = [new // old for new, old in zip(shape, weight.shape, strict=True)]
    summed = times[1] if weight.ndim == 2 and "embed_tokens" not in name else 1
    return weight.repeat(*times) / summed


def write_bases(folder: Path, widths: Sequence[int]) -> dict[int, Path]:
    """Return a folder of each width, made if it is missing."""
    model = LlamaForCausalLM.from_pretrained(EMBEDDED_FOLDER, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_FOLDER)
    found = {k: folder / f"{k * model.config.hidden_size}" for k in widths}
    for k, place in found.items():
        if not (place / "tokenizer.json").is_file():  # written last
            widened(model, k).save_pretrained(place)
            tokenizer.save_pretrained(place)
    return found


def specification(bases: dict[int, Path]) -> dict[str, Any]:
    """The study."""
    arms = {f"D {place.name}": {"model_name": str(place)} for place in bases.values()}
    rated = {
        f"D {place.name}": {"model_name": str(place)} for k, place in bases.items() if k <= RATED
    }
    parts: dict[str, Any] = {
        "limit": {"arms": arms, "bisect": {"low": 1e-3, "high": 1.0, "rounds": 4}},
        "limit, alpha 1": {
            "arms": rated,
            "settings": {"additive_scale": 1.0},
            "bisect": {"low": 1e-3, "high": 1.0, "rounds": 4},
        },
        "limit, calibrated": {
            "arms": rated,
            "settings": CALIBRATED,
            "bisect": {"low": 1e-4, "high": 1e-1, "rounds": 4},
        },
        "rates": {"arms": rated, "grid": {"learning_rate": RATES}},
    }
    return {"name": "widths", "settings": SETTINGS, "parts": parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--widths",
        default="1,2,4,8",
        help="how many times as wide as the embedded model, powers of two",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("outputs/widths"),
        help="folder of the bases and of the study",
    )
    parser.add_argument("--workers", type=int, default=2, help="processes that share the study")
    args = parser.parse_args()
    widths = [int(k) for k in args.widths.split(",")]
    if any(k < 1 or k & (k - 1) for k in widths):
        raise SystemExit(
            f"--widths {args.widths}: each must be a power of two, by which bf16 divides exactly"
        )
    bases = write_bases(args.output / "bases", widths)
    spec = args.output / "widths.yaml"
    spec.write_text(yaml.safe_dump(specification(bases), sort_keys=False))
    status = npt_main(
        ["sweep", str(spec), "--study", str(args.output / "study"), "--workers", str(args.workers)]
    )
    if status:
        raise SystemExit(status)
    print(table_of_widths(read_table(args.output / "study")))


if __name__ == "__main__":
    main()
