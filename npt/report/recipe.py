"""What a run was made of: the head of its page, every setting, and what it ran on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from npt.report.lines import count
from npt.report.lines import number as as_number
from npt.report.run import RunRecord, mapping
from npt.report.words import SHOWN, clean, flat, number

HASH_LETTERS = 12
"""Of a hash: the whole of it is in the environment."""

ENTRIES = 40
"""Entries that are listed of one part of `run.json`."""

_VERSIONS = ("npt", "torch", "transformers", "bitsandbytes", "python")
_FIRST = ("model_name", "dataset_name", "rank", "layers", "targets", "modulation")
_ELSEWHERE = ("settings", "wandb_run")


def recipe(record: RunRecord) -> list[tuple[str, str]]:
    """Return base, adapters, training, data and versions, a line each; nothing of what `run.json`
    does not say.
    """
    lines = ((name, ", ".join(word for word in words if word)) for name, words in _lines(record))
    return [(name, said) for name, said in lines if said]


def _lines(record: RunRecord) -> Iterator[tuple[str, list[str]]]:
    run, settings = record.run, record.settings

    def say(name: str, form: str = "{}", but: Any = None) -> str:
        value = settings.get(name)
        return "" if but is not None and value == but else _in_words(value, form)

    base_hash, quantization = (
        run.get("base_hash"),
        mapping(run.get("precision")).get("quantization"),
    )
    known = "precision" in run or "use_quantization" in settings
    yield "base", [
        say("model_name"),
        f"hash {base_hash[:HASH_LETTERS]}" if isinstance(base_hash, str) else "",
        (str(quantization).upper() if quantization else "unquantised") if known else "",
        say("compute_dtype", "computes in {}"),
        _in_words(run.get("device"), "on {}"),
    ]  # fmt: skip
    layers, parameters = run.get("layers"), count(run.get("trainable_parameters"))
    yield "adapters", [
        f"layers {_ranges(layers)} ({len(layers)})" if isinstance(layers, list) and layers else "",
        say("rank", "rank {}"),
        say("targets", "targets {}"),
        say("modulation", "modulation {}"),
        f"{parameters:,} parameters" if parameters is not None else "",
    ]  # fmt: skip
    yield "start", [
        say("init"), say("adapter", "from {}"), say("additive_scale", "alpha {}"),
        say("mult_bound", "beta {}"),
    ]  # fmt: skip
    total = record.total_steps
    yield "training", [
        say("strategy"),
        say("loss", "loss {}"),
        say("learning_rate", "rate {}"),
        say("scheduler_type", "schedule {}"),
        say("batch_size", "batch {}")
        + say("gradient_accumulation_steps", " x {}", but=1)
        + say("processes", " x {} processes", but=1),
        f"{record.step:,}{'' if total is None else f' of {total:,}'} steps",
        _in_words(run.get("seed", settings.get("seed")), "seed {}"),
    ]  # fmt: skip
    data = [
        say("dataset_name"), say("dataset_config"), say("num_samples", "{} samples"),
        say("max_length", "up to {} tokens each"),
    ]  # fmt: skip
    yield "data", data if settings.get("dataset_name") is not None else []
    versions = mapping(run.get("versions"))
    yield "versions", [
        f"{name} {versions[name]}" for name in _VERSIONS if isinstance(versions.get(name), str)
    ]  # fmt: skip


def _in_words(value: Any, form: str) -> str:
    """Return a setting in words; what is not set says nothing."""
    if value is None or isinstance(value, dict):
        return ""
    if isinstance(value, list):
        return form.format(" ".join(str(entry) for entry in value[:8]))
    return form.format(number(as_number(value)) if isinstance(value, float) else str(value))


def _ranges(layers: list[Any]) -> str:
    """Return indices as a person writes them: 4-7, 9."""
    indices = sorted({index for entry in layers if (index := count(entry)) is not None})
    parts: list[list[int]] = []
    for index in indices:
        if parts and parts[-1][1] == index - 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in parts)


def configuration(record: RunRecord) -> list[tuple[str, str, str]]:
    """Return every setting, and what it was before a resume changed it."""
    settings, before = record.settings, {}
    for event in record.events.of("resume"):
        for name, values in mapping(event.details.get("changed")).items():
            old = flat(values[0]) if isinstance(values, list) and values else flat(values)
            before[name] = f"was {old} before step {event.step or 0:,}"
    order = [name for name in _FIRST if name in settings] + sorted(set(settings) - set(_FIRST))
    return [(clean(name, 60), flat(settings[name]), before.get(name, "")) for name in order[:SHOWN]]


def environment(record: RunRecord) -> list[tuple[str, str]]:
    """Return versions, device, precision, base, layers and sizes."""
    rows: list[tuple[str, Any]] = []
    for name, value in record.run.items():
        if name not in _ELSEWHERE:
            parts: Mapping[str, Any] = (
                {f"{name}: {key}": entry for key, entry in list(value.items())[:ENTRIES]}
                if isinstance(value, dict)
                else {name: value}
            )
            rows += parts.items()
    return [
        (clean(what, 60), f"{entry:,}" if type(entry) is int else flat(entry))
        for what, entry in rows[:SHOWN]
    ]
