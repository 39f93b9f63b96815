"""The head of a run's page: which base, what was converted, what it was trained on and how, so that
the page explains itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from npt.report.lines import count
from npt.report.lines import number as as_number
from npt.report.markup import number, text
from npt.report.run import RunRecord

HASH_LETTERS = 12
"""Of a hash: the whole of it stands in the environment."""

_VERSIONS = ("npt", "torch", "transformers", "bitsandbytes", "python")


def recipe(record: RunRecord) -> str:
    """Base, adapters, training, data and versions, a line each; nothing of what `run.json` does not
    say.
    """
    lines = [
        (name, said)
        for name, words in _lines(record)
        if (said := ", ".join(word for word in words if word))
    ]
    return recipe_list(lines)


def recipe_list(lines: Iterable[tuple[str, str]]) -> str:
    """What each line is of, and what it says, as HTML; nothing of none."""
    cells = "".join(f"<div><dt>{name}</dt><dd>{text(said)}</dd></div>" for name, said in lines)
    return f'<dl class="recipe">{cells}</dl>' if cells else ""


def _lines(record: RunRecord) -> Iterator[tuple[str, list[str]]]:
    run, settings = record.run, record.settings
    say = _Words(settings)
    base_hash, quantization = run.get("base_hash"), _of(run.get("precision")).get("quantization")
    shown_hash = f"hash {base_hash[:HASH_LETTERS]}" if isinstance(base_hash, str) else ""
    known = "precision" in run or "use_quantization" in settings
    stored = (str(quantization).upper() if quantization else "unquantised") if known else ""
    yield (
        "base",
        [
            say("model_name"),
            shown_hash,
            stored,
            say("compute_dtype", "computes in {}"),
            say.of(run.get("device"), "on {}"),
        ],
    )
    layers = run.get("layers")
    converted = (
        f"layers {_ranges(layers)} ({len(layers)})" if isinstance(layers, list) and layers else ""
    )
    parameters = count(run.get("trainable_parameters"))
    sizes = f"{parameters:,} parameters" if parameters is not None else ""
    yield (
        "adapters",
        [
            converted,
            say("rank", "rank {}"),
            say("targets", "targets {}"),
            say("modulation", "modulation {}"),
            sizes,
        ],
    )
    yield (
        "start",
        [
            say("init"),
            say("adapter", "from {}"),
            say("additive_scale", "alpha {}"),
            say("mult_bound", "beta {}"),
        ],
    )
    batch = (
        say("batch_size", "batch {}")
        + say("gradient_accumulation_steps", " x {}", but=1)
        + say("processes", " x {} processes", but=1)
    )
    total = record.total_steps
    steps = f"{record.step:,} of {total:,} steps" if total is not None else f"{record.step:,} steps"
    training = [
        say("strategy"),
        say("loss", "loss {}"),
        say("learning_rate", "rate {}"),
        say("scheduler_type", "schedule {}"),
        batch,
        steps,
    ]
    yield "training", [*training, say.of(run.get("seed", settings.get("seed")), "seed {}")]
    data = [
        say("dataset_name"),
        say("dataset_config"),
        say("num_samples", "{} samples"),
        say("max_length", "up to {} tokens each"),
    ]
    yield "data", data if settings.get("dataset_name") is not None else []
    versions = _of(run.get("versions"))
    yield (
        "versions",
        [f"{name} {versions[name]}" for name in _VERSIONS if isinstance(versions.get(name), str)],
    )


class _Words:
    """Settings in words; what is not set says nothing."""

    def __init__(self, settings: Mapping[str, Any]):
        self._settings = settings

    def __call__(self, name: str, form: str = "{}", but: Any = None) -> str:
        value = self._settings.get(name)
        return "" if but is not None and value == but else self.of(value, form)

    def of(self, value: Any, form: str) -> str:
        if value is None or isinstance(value, dict):
            return ""
        if isinstance(value, list):
            return form.format(" ".join(str(entry) for entry in value[:8]))
        shown = number(as_number(value)) if isinstance(value, float) else str(value)
        return form.format(shown)


def _of(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _ranges(layers: list[Any]) -> str:
    """4-7, 9: indices as a person writes them."""
    indices = sorted({index for entry in layers if (index := count(entry)) is not None})
    parts: list[list[int]] = []
    for index in indices:
        if parts and parts[-1][1] == index - 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in parts)
