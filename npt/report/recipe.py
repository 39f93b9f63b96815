"""What a run was made of: the head of its page, every setting, and what it ran on."""

from __future__ import annotations

from typing import Any

from npt.report.logs import as_count, as_mapping, as_number
from npt.report.run import RunRecord
from npt.report.words import SHOWN, clean, flat, number

HASH_LETTERS = 12  # of a hash: the environment has the whole of it
ENTRIES = 40  # entries that are listed of one part of `run.json`

_VERSIONS = ("npt", "torch", "transformers", "bitsandbytes", "python")
_FIRST = ("model_name", "dataset_name", "rank", "layers", "targets", "modulation")
_ELSEWHERE = ("settings", "wandb_run")


def recipe(record: RunRecord) -> list[tuple[str, str]]:
    """Return base, adapters, training, data and versions, a line each; nothing that `run.json` does
    not say.
    """
    run, settings = record.run, record.settings

    def say(name: str, form: str = "{}", but: Any = None) -> str:
        value = settings.get(name)
        return "" if value == but else _in_words(value, form)

    base_hash, layers, total = run.get("base_hash"), run.get("layers"), record.total_steps
    quantization = as_mapping(run.get("precision")).get("quantization")
    known = "precision" in run or "use_quantization" in settings
    parameters = as_count(run.get("trainable_parameters"))
    versions = as_mapping(run.get("versions"))
    shown = f"layers {_ranges(layers)} ({len(layers)})" if isinstance(layers, list) else ""
    lines = {
        "base": [
            say("model_name"),
            _in_words(as_mapping(run.get("base_origin")).get("quantization"), "a GGUF in {}"),
            f"hash {base_hash[:HASH_LETTERS]}" if isinstance(base_hash, str) else "",
            (str(quantization).upper() if quantization else "unquantised") if known else "",
            say("compute_dtype", "computes in {}"),
            _in_words(run.get("device"), "on {}"),
        ],
        "adapters": [
            shown if layers else "",
            say("rank", "rank {}"), say("targets", "targets {}"),
            say("modulation", "modulation {}"),
            f"{parameters:,} parameters" if parameters is not None else "",
        ],
        "start": [
            say("init"), say("adapter", "from {}"),
            say("additive_scale", "alpha {}"), say("mult_bound", "beta {}"),
        ],
        "training": [
            say("strategy"), say("loss", "loss {}"),
            say("learning_rate", "rate {}"), say("scheduler_type", "schedule {}"),
            say("batch_size", "batch {}")
            + say("gradient_accumulation_steps", " x {}", but=1)
            + say("processes", " x {} processes", but=1),
            f"{record.step:,}{'' if total is None else f' of {total:,}'} steps",
            _in_words(run.get("seed", settings.get("seed")), "seed {}"),
        ],
        "data": [
            say("dataset_name"), say("dataset_config"),
            say("num_samples", "{} samples"), say("max_length", "up to {} tokens each"),
        ]
        if settings.get("dataset_name") is not None
        else [],
        "versions": [
            f"{name} {versions[name]}" for name in _VERSIONS if isinstance(versions.get(name), str)
        ],
    }  # fmt: skip
    return [(name, ", ".join(filter(None, words))) for name, words in lines.items() if any(words)]


def _in_words(value: Any, form: str) -> str:
    """Return a setting in words; what is not set says nothing."""
    if value is None or isinstance(value, dict):
        return ""
    if isinstance(value, list):
        return form.format(" ".join(str(entry) for entry in value[:8]))
    return form.format(number(as_number(value)) if isinstance(value, float) else str(value))


def _ranges(layers: list[Any]) -> str:
    """Return indices as a person writes them: 4-7, 9."""
    parts: list[list[int]] = []
    for index in sorted({i for entry in layers if (i := as_count(entry)) is not None}):
        if parts and parts[-1][1] == index - 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in parts)


def configuration(record: RunRecord) -> list[tuple[str, str, str]]:
    """Return every setting, and what it was before a resume changed it."""
    settings, before = record.settings, {}
    for event in record.events.of("resume"):
        for name, values in as_mapping(event.details.get("changed")).items():
            old = flat(values[0]) if isinstance(values, list) and values else flat(values)
            before[name] = f"was {old} before step {event.step or 0:,}"
    order = [name for name in _FIRST if name in settings] + sorted(set(settings) - set(_FIRST))
    return [(clean(name, 60), flat(settings[name]), before.get(name, "")) for name in order[:SHOWN]]


def environment(record: RunRecord) -> list[tuple[str, str]]:
    """Return versions, device, precision, base, layers and sizes."""
    rows: list[tuple[str, Any]] = []
    for name, value in record.run.items():
        if isinstance(value, dict) and name not in _ELSEWHERE:
            rows += [(f"{name}: {key}", entry) for key, entry in list(value.items())[:ENTRIES]]
        elif name not in _ELSEWHERE:
            rows.append((name, value))
    return [
        (clean(what, 60), f"{entry:,}" if type(entry) is int else flat(entry))
        for what, entry in rows[:SHOWN]
    ]
