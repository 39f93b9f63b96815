"""What the adapters do to the tokens: histograms of the multipliers, how many are at their bounds,
how large the additive terms are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from npt.evaluation.formatting import percent
from npt.report.charts import histogram
from npt.report.lines import count
from npt.report.lines import number as as_number
from npt.report.markup import lacking, number, table, text
from npt.report.run import RunRecord

LAYERS, BINS = 512, 200

WORTH_SAYING = 0.05
"""Share of multipliers at their bounds from which it is said: these have next to no gradient left.
"""

Layer = tuple[str, Mapping[str, Any]]
"""Its index as text, and what was measured."""

_ALARM = '<span class="alarm">{}</span>'

_TARGETS = ("gate", "up", "down")


def modulation_section(record: RunRecord) -> str:
    """A table of the layers, a histogram in each cell that has one."""
    measured = record.modulation
    layers = measured.get("layers")
    if not isinstance(layers, dict) or not layers:
        return lacking(record.missing, "modulation.json", "it holds no layer")
    found: list[Layer] = [
        (str(name), layer)
        for name, layer in list(layers.items())[:LAYERS]
        if isinstance(layer, dict)
    ]
    targets = [
        target for target in _TARGETS if any(target in _of(layer, "targets") for _, layer in found)
    ]
    stale = record.stale.get("modulation.json")
    said = [f'<p class="missing"><code>modulation.json</code>: {text(stale)}.</p>'] if stale else []
    said.append(f"<p>{_summary(found, targets)}</p>")
    heads: list[str] = []
    for target in targets:
        heads += [f"{target}: m", "*at bounds", "*s / product"] + ["*s / stream"] * (
            target == "down"
        )
    rows = []
    for name, layer in found:
        stream = layer.get("stream_rms", math.nan)
        cells = [
            text(name, 12),
            _ALARM.format("not finite") if stream is None else number(as_number(stream), 3),
        ]
        for target in targets:
            measured_ = _of(_of(layer, "targets"), target)
            cells += _cells(measured_, name, target)
            cells += [_size(measured_.get("add_rms"), layer, "stream_rms")] * (target == "down")
        rows.append(cells)
    bound = as_number(measured.get("mult_bound"))
    range_ = f"({number(1 - bound)}, {number(1 + bound)})" if bound is not None else "its range"
    said.append(
        f'<p class="soft">m: how the multipliers lie in {range_}, 1 at the line, heights by the'
        " root of their share. At bounds: the share within a hundredth of the way of a bound. s /"
        " product: RMS of the additive term over that of the product that it is added to; of down"
        f" also over that of the residual stream. {_tokens(measured)}</p>"
    )
    return "\n".join(
        [*said, table(("*layer", "*stream RMS", *heads), rows, "Modulation by layer and target")]
    )


def _of(values: Any, key: str) -> Mapping[str, Any]:
    found = values.get(key) if isinstance(values, dict) else None
    return found if isinstance(found, dict) else {}


def _tokens(measured: Mapping[str, Any]) -> str:
    tokens, step = count(measured.get("tokens")), count(measured.get("step"))
    kind = "held-out" if measured.get("heldout") is not False else "training"
    return f"Over {tokens or 0:,} {kind} tokens" + (
        f" after step {step:,}." if step is not None else "."
    )


def _quotient(one: Any, other: Any) -> float | None:
    one, other = as_number(one), as_number(other)
    return one / other if one is not None and other else None


def _ratio(target: Mapping[str, Any]) -> float | None:
    """The size of the additive term beside that of the product which it is added to."""
    return _quotient(target.get("add_rms"), target.get("product_rms"))


def _cells(target: Mapping[str, Any], layer: str, name: str) -> list[str]:
    counts = target.get("counts")
    numbers = (
        [n for x in counts[:BINS] if (n := count(x)) is not None]
        if isinstance(counts, list)
        else []
    )
    saturated, bad = as_number(target.get("saturated")), as_number(target.get("bad"))
    mean, std = as_number(target.get("mean")), as_number(target.get("std"))
    label = text(
        f"layer {layer}, {name}: multipliers have mean {number(mean)} and standard deviation"
        f" {number(std)}"
    )
    picture = histogram(numbers, label) if any(numbers) else '<span class="soft">none</span>'
    if bad is not None and bad >= 1:
        return [
            _ALARM.format("none finite"),
            _ALARM.format("not finite"),
            _ALARM.format("not finite"),
        ]
    share = "–" if saturated is None else text(percent(saturated, 2))
    share = _ALARM.format(share) if saturated is not None and saturated >= WORTH_SAYING else share
    share += " " + _ALARM.format(f"and {text(percent(bad))} not finite") if bad else ""
    return [picture, share, _size(target.get("add_rms"), target, "product_rms")]


def _size(added: Any, of: Mapping[str, Any], key: str) -> str:
    """The size of an additive term over another. None stands in a file for a term that a form
    lacks, and for one that is not finite; what it is divided by is always there."""
    if key in of and of[key] is None:
        return _ALARM.format("not finite")
    return number(_quotient(added, of.get(key)), 3)


def _summary(found: list[Layer], targets: list[str]) -> str:
    cells = [
        (name, target, _of(_of(layer, "targets"), target))
        for name, layer in found
        for target in targets
    ]
    bad = [
        (share, name, target)
        for name, target, cell in cells
        if (share := as_number(cell.get("bad")))
    ]
    none = {(name, target) for share, name, target in bad if share >= 1}
    measured = [(name, target, cell) for name, target, cell in cells if (name, target) not in none]
    saturated = [
        (share, name, target)
        for name, target, cell in measured
        if (share := as_number(cell.get("saturated"))) is not None
    ]
    ratios = [
        (ratio, name, target) for name, target, cell in cells if (ratio := _ratio(cell)) is not None
    ]
    parts = []
    if bad:
        share, name, target = max(bad)
        worst = f"the most {text(percent(share))} of them (layer {text(name)}, {target})"
        parts.append(
            _ALARM.format(
                f"Multipliers are not finite in {len(bad)} of {len(cells)} places: {worst}."
            )
        )
    if saturated:
        share, name, target = max(saturated)
        worth = share >= WORTH_SAYING
        parts.append(
            "At their bounds are at most <strong"
            f' class="{"alarm" if worth else ""}">{text(percent(share, 2))}</strong> of the'
            f" multipliers (layer {text(name)}, {target})"
            + ("; these have next to no gradient left." if worth else ".")
        )
    elif not none:
        parts.append("There are no multipliers: the modulation is additive only.")
    if ratios:
        ratio, name, target = max(ratios)
        parts.append(
            f"The largest additive term is {number(ratio, 3)} times the product that it is added to"
            f" (layer {text(name)}, {target})."
        )
    return " ".join(parts)
