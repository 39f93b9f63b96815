"""The page: how near the student is to its teacher, how it got there, and what happened on the way, in one file that needs nothing else.

It may be mailed and kept, and what stands in a run folder may be anybody's: it loads nothing, every text is escaped, and its policy
lets no script run but its own. The pictures are drawn before and can be read without that script, which only reads off numbers.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from npt.report.buckets import Axis, Bucket, buckets
from npt.report.charts import PALETTE, Mark, Scale, bars, heat_map, lanes, legend, line_chart, step_text
from npt.report.events import Event
from npt.report.fidelity import bars_of, fidelity_section
from npt.report.lines import number as as_number
from npt.report.markup import details, link, number, table, text
from npt.report.modulation import modulation_section
from npt.report.run import RunRecord
from npt.report.summary import status

HEAT_COLUMNS = 120
"""Columns of the heat map."""

SHOWN = 200
"""Refusals, events and checkpoints that are listed one by one, each."""

_REFUSALS = ("data", "loss", "gradient", "norm", "spike", "update")
_SETTINGS_FIRST = ("model_name", "dataset_name", "rank", "layers", "targets", "modulation")


def page(record: RunRecord, place: Path) -> str:
    """The HTML page about a run.

    Args:
        record: what its folder has.
        place: where the page will lie, for its links.
    """
    return _Page(record, place).html()


class _Page:
    def __init__(self, record: RunRecord, place: Path):
        self.record, self.place = record, place
        steps = [event.step for event in record.events.all if event.step and event.kind in ("refusal", "save", "resume", "evaluation")]
        known = [*record.metrics.steps, *steps]
        self.axis = Axis.of(known)
        self.heat_axis = Axis.of(known, HEAT_COLUMNS)
        self.columns = {key: buckets(self.axis, record.metrics.steps, values) for key, values in self._plain().items()}
        self.told: dict[int, list[str]] = {}
        self.worst: dict[int, Bucket] = {}

    def _plain(self) -> dict[str, Sequence[float]]:
        return {key: values for key, values in self.record.metrics.columns.items() if not key.startswith("layers.")}

    def html(self) -> str:
        folder = Path(__file__).parent
        palette = "\n".join(f".c{i} {{ fill: {colour}; background: {colour} }}" for i, colour in enumerate(PALETTE))
        style = (folder / "style.css").read_text(encoding="utf-8") + palette
        script = (folder / "script.js").read_text(encoding="utf-8")
        sections = [
            ("fidelity", "Fidelity", fidelity_section(self.record)),
            ("training", "Training", self.training()),
            ("layers", "Layers", self.layers()),
            ("modulation", "Modulation", modulation_section(self.record)),
            ("saved", "Checkpoints and post-mortems", self.saved()),
            ("events", "Events", self.events()),
            ("configuration", "Configuration", self.configuration()),
            ("environment", "Environment", self.environment()),
        ]
        title = f"{text(self.record.name, 80)}: report of a run"
        policy = f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
        nav = "".join(f'<li><a href="#{name}">{heading}</a>' for name, heading, _ in sections)
        body = "\n".join(
            f'<section aria-labelledby="{name}">\n<h2 id="{name}">{heading}</h2>\n{content}\n</section>'
            for name, heading, content in sections
        )
        return (
            f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n<style>{style}</style>\n</head>\n'
            f'<body>\n<header>\n<h1>{title}</h1>\n{self.head()}\n<nav aria-label="Sections"><ul>{nav}</ul></nav>\n</header>\n'
            f'<main>\n{body}\n</main>\n<script type="application/json" id="data">{self.data()}</script>\n<script>{script}</script>\n'
            "</body>\n</html>\n"
        )

    # --- the head -----------------------------------------------------------------------------------------------------

    def head(self) -> str:
        record = self.record
        kind, words = status(record)
        facts = [("steps", f"{record.step:,}"), ("refusals", f"{sum(record.refused().values()):,}")]
        for name, key in (("tokens", "tokens"), ("last loss", "loss")):
            value = record.metrics.last(key)
            if value is not None:
                facts.append((name, f"{value:,.0f}" if key == "tokens" else number(value)))
        warnings = len(record.events.of("warning"))
        facts += [("warnings", f"{warnings:,}")] if warnings else []
        cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
        missing = "".join(f"<li><code>{text(name)}</code>: {text(why)}" for name, why in sorted({**record.missing, **record.stale}.items()))
        said = f'<div class="missing"><p>Not all of the run is here:</p><ul>{missing}</ul></div>' if missing else ""
        return f'<p class="status {kind}"><strong>{text(words)}</strong></p>\n<dl class="facts">{cells}</dl>\n{said}'

    # --- training -----------------------------------------------------------------------------------------------------

    def training(self) -> str:
        if not self.record.metrics.steps and not self.record.events.of("refusal", None):
            return self.lacking("metrics.jsonl", "no step is on record: nothing to draw")
        parts = [self.readout(), self.loss(), self.refusals()]
        for key, heading, log in (
            ("grad_norm", "Gradient norm, before clipping", None),
            ("lr", "Learning rate", False),
            ("tokens_per_second", "Tokens per second", False),
        ):
            parts.append(self.chart(key, heading, log))
        parts += [self.evaluations(), self.heat(), self.figures_table()]
        return "\n".join(part for part in parts if part)

    def readout(self) -> str:
        shown = f"{len(self.record.metrics.steps):,} logged steps"
        if self.axis.columns < self.axis.last - self.axis.first + 1:
            shown += f", from {self.axis.first:,} to {self.axis.last:,}, on {self.axis.columns} columns, each with its smallest and largest value"
        again = self.record.metrics.again
        if again:
            shown += f"; {again:,} lines of steps that were made again are left out"
        return (
            f'<p class="soft">{shown}.</p>\n<div id="readout" hidden><label>Step <input type="range" id="step" min="0" value="0" step="1">'
            '</label><output id="at" for="step"></output><dl id="values" class="values"></dl></div>'
        )

    def loss(self) -> str:
        found = {key: self.columns[key] for key in ("loss", "loss_nmse") if self.columns.get(key)}
        if not found:
            return self.lacking("metrics.jsonl", "there is no loss to draw")
        same = found.get("loss") == found.get("loss_nmse")
        series = [("second", found["loss_nmse"])] if "loss_nmse" in found and not same else []
        series += [("first", found["loss"])] if "loss" in found else []
        note = "" if len(series) < 2 else '<p class="key"><i class="first"></i> loss <i class="second"></i> its NMSE part (dashed)</p>'
        return self.figure("Loss per valid token", line_chart(self.axis, series, self.words("loss", "Loss")) + self.lanes(), note)

    def chart(self, key: str, heading: str, log: bool | None) -> str:
        found = self.columns.get(key)
        if not found:
            return f"<h3>{heading}</h3>\n" + self.lacking("metrics.jsonl", f"there is no {key} to draw")
        return self.figure(heading, line_chart(self.axis, [("first", found)], self.words(key, heading), log))

    def evaluations(self) -> str:
        """Held-out KL under way, where it was measured."""
        found = []
        for event in self.record.events.of("evaluation"):
            student = event.details.get("student")
            if event.step is not None and isinstance(student, dict):
                kl = as_number(student.get("kl"))
                found.append((event.step, math.inf if kl is None else kl))
        found.sort()
        if not found:
            return ""
        columns = buckets(self.axis, [step for step, _ in found], [kl for _, kl in found])
        label = f"KL between teacher and student on held-out text, measured {len(found)} times under way"
        return self.figure("Held-out KL under way, nats", line_chart(self.axis, [("first", columns)], label))

    def figure(self, heading: str, picture: str, note: str = "") -> str:
        return f"<figure>\n<figcaption><h3>{heading}</h3>{note}</figcaption>\n{picture}\n</figure>"

    def words(self, key: str, name: str) -> str:
        """A picture for readers who do not see it."""
        values = [x for x in self.record.metrics.columns.get(key, ()) if math.isfinite(x)]
        bad = sum(x == math.inf for x in self.record.metrics.columns.get(key, ()))
        if not values:
            return text(f"{name}: no finite value")
        said = (
            f"{name}: {number(values[0])} at first, {number(values[-1])} at last, between {number(min(values))} and {number(max(values))}"
        )
        return text(said + (f", {bad} times not finite" if bad else ""))

    def lanes(self) -> str:
        """Refusals by kind, and what else happened, at their steps."""
        rows: dict[tuple[str, str], dict[int, list[tuple[str, bool]]]] = {}
        names = {"save": ("saved", "square"), "resume": ("resumed", "bar"), "evaluation": ("evaluated", "diamond")}
        for event in self.record.events.all:
            step = event.step
            if step is None or not self.axis.first <= step <= self.axis.last:
                step = self.axis.first if event.kind == "resume" and step is not None and step < self.axis.first else None
            if step is None:
                continue
            if event.kind == "refusal":
                kind = event.details.get("kind")
                row, said = (kind if kind in _REFUSALS else "other", "refusal"), f"step {step:,}, {_refusal(event)}"
            elif event.kind in names:
                row, said = names[event.kind], f"step {step:,}: {names[event.kind][0]}"
            else:
                continue
            said += " (undone when the run was taken up further back)" if event.undone else ""
            rows.setdefault(row, {}).setdefault(self.axis.column(step), []).append((said, event.undone))
        if not rows:
            return ""
        order = {name: i for i, name in enumerate((*_REFUSALS, "other", "evaluated", "saved", "resumed"))}
        made = []
        for (name, shape), found in sorted(rows.items(), key=lambda row: order[row[0][0]]):
            marks = {
                column: Mark(text(_several([said for said, _ in all_]), 600), all(hollow for _, hollow in all_))
                for column, all_ in found.items()
            }
            made.append((name, shape, marks))
            for column, all_ in found.items():
                self.told.setdefault(column, []).append(_several([said for said, _ in all_]))
        counts = ", ".join(
            f"{name} {sum(map(len, found.values()))}" for (name, _), found in sorted(rows.items(), key=lambda r: order[r[0][0]])
        )
        return lanes(self.axis, made, f"Refusals by kind and other events at their steps: {text(counts)}")

    def refusals(self) -> str:
        if "events.jsonl" in self.record.missing:
            return self.lacking("events.jsonl", "what was refused is not known")
        events = self.record.events.of("refusal", None)
        if not events:
            return "<p>Nothing was refused.</p>"
        kept, kinds = sum(not event.undone for event in events), self.record.refused()
        said = ", ".join(f"{count:,} {text(kind)}" for kind, count in sorted(kinds.items()))
        undone = (
            f" {len(events) - kept:,} more were undone when the run was taken up further back (hollow marks)." if kept < len(events) else ""
        )
        rows = [
            (
                f"{event.step:,}" if event.step is not None else "–",
                text(event.details.get("kind", "–"), 30) + (" (undone)" if event.undone else ""),
                _where(event),
                text(event.details.get("detail", "not kept")),
                text(_samples(event), 120),
            )
            for event in _ends(events)
        ]
        cut = f"Refusals, the first and last of {len(events):,}" if len(events) > SHOWN else f"All refusals, {len(events):,}"
        listed = table(("*step", "kind", "where", "~reason", "~samples"), rows, cut)
        return f'<p><span class="alarm">{kept:,} refused</span> and nothing of it kept: {said or "none"}.{undone}</p>\n' + details(
            "Each refusal with its reason", listed, len(events) <= 12
        )

    def heat(self) -> str:
        metrics = self.record.metrics
        layers = metrics.layers
        if not layers:
            return "<h3>NMSE by layer</h3>\n" + self.lacking("metrics.jsonl", "there is no NMSE by layer to draw")
        cells = {i: buckets(self.heat_axis, metrics.steps, metrics.columns[f"layers.{i}.nmse"]) for i in layers}
        last = {i: metrics.last(f"layers.{i}.nmse") for i in layers}
        worst = max((i for i in layers if last[i] is not None), key=lambda i: last[i] or 0.0, default=None)
        label = f"NMSE of {len(layers)} layers over the steps" + (
            f"; at the end layer {worst} is the worst with {number(last[worst])}" if worst is not None else ""
        )
        picture, scale = heat_map(self.heat_axis, layers, cells, text(label))
        many = self.heat_axis.columns < self.heat_axis.last - self.heat_axis.first + 1
        note = "A line for each layer, the first on top" + ("; of a column's steps the largest value." if many else ".")
        steps = _sampled(metrics.steps, 10)
        rows = [(str(i), *(number(_at(metrics.columns[f"layers.{i}.nmse"], metrics.steps, step), 3) for step in steps)) for i in layers]
        listed = table(("*layer", *(f"*{step:,}" for step in steps)), rows, "NMSE by layer at some steps")
        return self.figure("NMSE by layer", picture, f"<p>{note}</p>{legend(scale)}") + "\n" + details("NMSE by layer as a table", listed)

    def figures_table(self) -> str:
        """Every chart's numbers at some steps, those of the extremes among them."""
        metrics = self.record.metrics
        keys = [key for key in self._plain() if key != "step"]
        extremes = {
            step
            for key in ("loss", "grad_norm")
            for pick in (min, max)
            if (found := [(x, s) for x, s in zip(metrics.columns.get(key, ()), metrics.steps, strict=False) if math.isfinite(x)])
            for _, step in [pick(found)]
        }
        steps = sorted({*_sampled(metrics.steps, 40), *extremes})
        rows = [(f"{step:,}", *(number(_at(metrics.columns[key], metrics.steps, step)) for key in keys)) for step in steps]
        listed = table(
            ("*step", *(f"*{text(key)}" for key in keys)), rows, f"Logged figures at {len(steps)} of {len(metrics.steps):,} steps"
        )
        return details("All of these figures as a table", listed) if keys else ""

    # --- layers -------------------------------------------------------------------------------------------------------

    def layers(self) -> str:
        rows = bars_of(self.record.fidelity)
        if not rows:
            return self.lacking("fidelity.json", "the layers' NMSE on held-out text was not measured")
        scale = Scale.of([x for _, values in rows for x in values.values() if x > 0], log=True)
        if scale is None:
            return '<p class="missing">The layers\' NMSE is not finite in any layer.</p>'
        with_student = [(values["student"], name) for name, values in rows if "student" in values]
        said = "NMSE of each layer's output with the teacher's input; logarithmic. " + (
            f"The hardest: layer {text(max(with_student)[1])} with {number(max(with_student)[0])}."
            if with_student
            else "No figures of the student yet."
        )
        label = f"NMSE by layer against floor and start, {len(rows)} layers. " + said
        known = [kind for kind in ("floor", "initial", "student") if any(kind in values for _, values in rows)]
        names = {"floor": "floor", "initial": "before training", "student": "student"}
        listed = table(
            ("*layer", *(f"*{names[kind]}" for kind in known)),
            [(text(name), *(number(values.get(kind), 4) for kind in known)) for name, values in rows],
            "NMSE by layer",
        )
        key = '<p class="key"><i class="bar"></i> student <i class="initial"></i> before training <i class="floor"></i> floor (attention dropped)</p>'
        return f"<p>{said}</p>{key}\n<figure>{bars(rows, scale, text(label))}</figure>\n" + details("As a table", listed)

    # --- what was saved, what happened --------------------------------------------------------------------------------

    def saved(self) -> str:
        record = self.record
        parts = []
        if record.checkpoints:
            rows = []
            for saved in _ends(record.checkpoints):
                verdict = "verified" if saved.verified else "not verified" if saved.verified is None else "broken"
                told = f'<span class="{"alarm" if saved.verified is False else "soft"}">{verdict}</span>'
                rows.append(
                    (
                        f"{saved.step:,}",
                        link(saved.path, self.place, saved.path.name),
                        f"{saved.size / 2**20:,.1f}",
                        told,
                        text(saved.problem),
                    )
                )
            parts.append(table(("*step", "folder", "*MiB", "sums", "~what was found"), rows, f"Checkpoints, {len(record.checkpoints)}"))
            parts.append('<p class="soft">Verified: every file has the sha256 sum that it was written with.</p>')
        else:
            parts.append('<p class="missing">There is no checkpoint.</p>')
        best = record.folder / "best"
        if best.is_dir():
            student = record.best.get("student")
            kl = number(as_number(student.get("kl"))) if isinstance(student, dict) else "not known"
            parts.append(
                f"<p>The best so far: {link(best, self.place, 'best')}, of step {text(record.best.get('step', 'unknown'))}, KL {kl} nats.</p>"
            )
        if (record.folder / "trace" / "trace.html").is_file():
            parts.append(
                f"<p>Tensor health of the recorded steps: {link(record.folder / 'trace' / 'trace.html', self.place, 'trace/trace.html')}.</p>"
            )
        for bundle in record.postmortems[-20:]:
            name = bundle.path.relative_to(record.folder).as_posix()
            reason = (bundle.problem and f"its record cannot be read: {bundle.problem}") or bundle.record.get("reason", "no reason on record")
            verdict = bundle.record.get("verdict")
            found = [f"Stopped: {text(reason)}."]
            found += [f"First bad number: {text(_flat(verdict))}."] if isinstance(verdict, dict) else []
            refused = bundle.record.get("refusals")
            found += [f"Refused in its last window: {len(refused)}."] if isinstance(refused, list) else []
            parts.append(
                f"<h3>Post-mortem {link(bundle.path, self.place, name)}</h3>\n<p>{' '.join(found)}</p>\n<p>Look into it with <code>npt replay {text(name)}</code>.</p>"
            )
        if not record.postmortems:
            parts.append(
                "<p>There is no post-mortem.</p>" if record.state != "stopped" else '<p class="missing">The post-mortem is missing.</p>'
            )
        return "\n".join(parts)

    def events(self) -> str:
        if "events.jsonl" in self.record.missing:
            return self.lacking("events.jsonl", "what happened is not known")
        events = [event for event in self.record.events.all if event.kind != "refusal"]
        if not events:
            return "<p>No event is on record.</p>"
        rows = [
            (
                f"<time>{_clock(event.time)}</time>",
                f"{event.step:,}" if event.step is not None else "",
                f'<span class="{"alarm" if event.kind in ("warning", "error", "stopped", "save_failed") else ""}">{text(event.kind, 30)}</span>',
                text(_told(event)) + (' <span class="soft">(undone)</span>' if event.undone else ""),
            )
            for event in _ends(events)
        ]
        cut = f"Events, the first and last of {len(events):,}" if len(events) > SHOWN else f"All events but the refusals, {len(events):,}"
        return table(("time, UTC", "*step", "event", "~what"), rows, cut)

    # --- what it was made of ------------------------------------------------------------------------------------------

    def configuration(self) -> str:
        settings = self.record.settings
        if not settings:
            return self.lacking("run.json", "the settings are not known")
        changed = {
            name: values
            for event in self.record.events.of("resume")
            for name, values in (event.details.get("changed") or {}).items()
            if isinstance(event.details.get("changed"), dict)
        }
        order = [
            *(name for name in _SETTINGS_FIRST if name in settings),
            *(name for name in sorted(settings) if name not in _SETTINGS_FIRST),
        ]
        rows = [
            (
                text(name, 60),
                text(_flat(settings[name])),
                f"changed when resumed: was {text(_flat(_first(changed[name])))}" if name in changed else "",
            )
            for name in order[:SHOWN]
        ]
        return table(("~setting", "~value", ""), rows, f"Settings, {len(settings)}")

    def environment(self) -> str:
        run = self.record.run
        if not run:
            return self.lacking("run.json", "versions, device and precision are not known")
        rows = []
        for name, value in run.items():
            if name in ("settings", "wandb_run") or len(rows) >= SHOWN:
                continue
            if isinstance(value, dict):
                rows += [(text(f"{name}: {key}", 60), text(_flat(entry))) for key, entry in list(value.items())[:40]]
            else:
                rows.append(
                    (text(name, 60), f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else text(_flat(value)))
                )
        return table(("~what", "~value"), rows, "Environment")

    # --- ----------------------------------------------------------------------------------------------------------------

    def lacking(self, file: str, otherwise: str) -> str:
        """What stands where a part would: which file it would come from, and what is wrong with that."""
        why = self.record.missing.get(file)
        said = f"<code>{text(file)}</code> says nothing: {text(why)}" if why else text(otherwise[:1].upper() + otherwise[1:])
        return f'<p class="missing">{said}.</p>'

    def data(self) -> str:
        """What the script reads off, as JSON that cannot end the element it stands in."""
        names = {"loss": "loss", "grad_norm": "gradient norm", "lr": "learning rate", "tokens_per_second": "tokens per second"}
        series = [
            {
                "name": name,
                "at": list(found),
                "low": [_short(bucket.low) for bucket in found.values()],
                "high": [_short(bucket.high) for bucket in found.values()],
            }
            for key, name in names.items()
            if (found := self.columns.get(key))
        ]
        metrics = self.record.metrics
        layers = metrics.layers
        if layers:
            heights = [(i, buckets(self.axis, metrics.steps, metrics.columns[f"layers.{i}.nmse"])) for i in layers]
            worst: dict[int, tuple[float, int]] = {}
            for i, found in heights:
                for column, bucket in found.items():
                    height = bucket.high if bucket.count and not bucket.bad else math.inf
                    if column not in worst or height > worst[column][0]:
                        worst[column] = (height, i)
            order = sorted(worst)
            series.append(
                {
                    "name": "worst layer's NMSE",
                    "at": order,
                    "low": [_short(worst[c][0]) for c in order],
                    "high": [_short(worst[c][0]) for c in order],
                    "of": [f"layer {worst[c][1]}" for c in order],
                }
            )
        columns = sorted({column for one in series for column in one["at"]} | set(self.told))
        value = {
            "columns": self.axis.columns,
            "known": columns,
            "labels": [step_text(self.axis, column) for column in columns],
            "series": series,
            "told": {str(column): [said[:300] for said in all_[:6]] for column, all_ in self.told.items()},
        }
        return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode('utf-8')).digest()).decode('ascii')}"


def _ends(items: Sequence[Any]) -> Sequence[Any]:
    """All, or the first and the last of them."""
    return items if len(items) <= SHOWN else [*items[: SHOWN // 2], *items[-SHOWN // 2 :]]


def _sampled(steps: Sequence[int], count: int) -> list[int]:
    """Some of the steps, evenly, the first and the last among them."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def _at(column: Sequence[float], steps: Sequence[int], step: int) -> float:
    from bisect import bisect_left

    return column[bisect_left(steps, step)]


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _several(said: Sequence[str]) -> str:
    more = f"; and {len(said) - 3:,} more" if len(said) > 3 else ""
    return "; ".join(said[:3]) + more


def _refusal(event: Event) -> str:
    kind, detail = event.details.get("kind", "refused"), event.details.get("detail", "")
    return f"{_where_plain(event)}: {kind}: {detail}"[:300]


def _where_plain(event: Event) -> str:
    index, rank = event.details.get("micro_batch"), event.details.get("rank")
    where = "the whole window" if index is None else f"micro-batch {index}"
    return f"{where} on rank {rank}" if rank else where


def _where(event: Event) -> str:
    return text(_where_plain(event), 60) if event.details else "–"


def _samples(event: Event) -> str:
    samples = event.details.get("sample_ids")
    return ", ".join(map(str, samples[:8])) if isinstance(samples, list) else ""


def _told(event: Event) -> str:
    """An event's details in one line."""
    details_ = event.details
    if isinstance(details_.get("message"), str):
        return (f"{details_['error']}: " if isinstance(details_.get("error"), str) else "") + details_["message"]
    return ", ".join(f"{name} {_flat(value)}" for name, value in details_.items() if value not in (None, {}, []))


def _flat(value: Any, depth: int = 0) -> str:
    """A value of a JSON file on one line."""
    if isinstance(value, dict) and depth < 3:
        return ", ".join(f"{key} {_flat(entry, depth + 1)}" for key, entry in list(value.items())[:30])
    if isinstance(value, list) and depth < 3:
        return ", ".join(_flat(entry, depth + 1) for entry in value[:60]) + (" …" if len(value) > 60 else "")
    if isinstance(value, float):
        return number(value)
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)[:2000]


def _first(values: Any) -> Any:
    return values[0] if isinstance(values, list) and values else values


def _clock(seconds: float | None) -> str:
    try:
        return "–" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "–"
