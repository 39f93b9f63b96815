"""The part on `behaviour.json`: answers side by side, agreement, positions, needles."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from npt.evaluation.formatting import FIGURES, percent
from npt.report.charts import INK, LINE, Marks, rows_chart
from npt.report.logs import as_count, as_mapping, as_number
from npt.report.run import RunRecord
from npt.report.words import clean, figure, number, plus_minus

ANSWERS, LINES = 20, 40
"""Answers that are shown, and lines of each."""

_TEACHER, _STUDENT = ("teacher", ("D", INK, True)), ("student", ("o", LINE, False))

Items = Sequence[Mapping[str, Any]]


def behaviour(record: RunRecord) -> dict[str, Any] | None:
    """Return the part; None if nothing was measured."""
    measured = record.behaviour
    if not any(as_mapping(measured.get(name)) for name in _PARTS):
        return None
    found = {name: make(as_mapping(measured.get(name))) for name, make in _PARTS.items()}
    notes = measured.get("notes")
    return {
        **found,
        "text": clean(measured.get("text", "held-out text"), 60),
        "notes": [clean(note) for note in notes[:20]] if isinstance(notes, list) else [],
    }


def _items(values: Mapping[str, Any], key: str) -> Items:
    found = values.get(key)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _answers(values: Mapping[str, Any]) -> dict[str, Any] | None:
    found = _items(values, "answers")[:ANSWERS]
    if not found:
        return None
    shown = []
    for answer in found:
        parting = as_mapping(answer.get("parting"))
        shared = answer.get("shared", "")
        shown.append(
            {
                "kind": clean(answer.get("kind"), 40),
                "prompt": clean(answer.get("prompt")),
                "kl": number(as_number(answer.get("kl"))),
                "tokens": as_count(answer.get("teacher_tokens")),
                "teacher": _text(shared, answer.get("teacher", "")),
                "student": _text(shared, answer.get("student", "")),
                "parting": _parting(parting) if parting else None,
            }
        )
    return {
        "answers": shown,
        "chat": values.get("chat") is True,
        "limit": as_count(values.get("max_new_tokens")),
        "same": as_count(values.get("same")),
        "kl": figure(values, "kl"),
    }


def _text(shared: Any, rest: Any) -> Markup:
    """Return an answer with its line ends, the part that only this model wrote marked."""
    same, own = (_lines(part if isinstance(part, str) else "") for part in (shared, rest))
    return Markup("{}<mark>{}</mark>").format(same, own) if own else same


def _lines(text: str) -> Markup:
    """Return a text with its line ends; many in a row, as a student that was hardly trained writes
    them to the limit, are counted.
    """
    found: list[Any] = []
    for part in re.split(r"(\n(?:[ \t]*\n){3,})", text):
        if part.startswith("\n") and not part.strip():
            count = part.count("\n")
            found.append(Markup('<span class="soft">[{} line ends]</span>').format(count))
        else:
            found += [clean(line, 500) for line in part.split("\n")]
    more = ["…"] if len(found) > LINES else []
    return Markup("<br>").join([*found[:LINES], *more])


def _parting(parting: Mapping[str, Any]) -> dict[str, Any]:
    choices = [as_mapping(parting.get(name)) for name in ("teacher", "student")]
    return {
        "position": as_count(parting.get("position")),
        "kl": number(as_number(parting.get("kl"))),
        "tokens": [clean(repr(choice.get("token")), 60) for choice in choices],
        "shares": [
            [_share(as_number(choice.get(f"{model}_probability"))) for choice in choices]
            for model in ("teacher", "student")
        ],
    }


def _share(value: float | None) -> str:
    return "–" if value is None else percent(value)


def _agreement(values: Mapping[str, Any]) -> dict[str, Any] | None:
    equal = _items(values, "equal")
    if not equal:
        return None
    d = as_mapping(values.get("divergence"))
    shares = [_scaled(one, "share", 100.0) for one in equal]
    names = [f"{as_count(one.get('tokens'))}" for one in equal]
    marks = [Marks.around("", _STUDENT[1], *zip(*shares, strict=True))]
    said = ", ".join(f"{name}: {number(v)}%" for name, (v, _) in zip(names, shares, strict=True))
    picture = rows_chart(
        names, marks, "texts still the same after n tokens, %",
        f"Share of greedy texts that are still the same after n tokens. {said}.",
        log=False, reach=(0, 100),
    )  # fmt: skip
    return {
        "picture": picture,
        "prompts": as_count(d.get("prompts")),
        "limit": as_count(d.get("max_new_tokens")),
        "censored": as_count(d.get("censored")) or 0,
        "agreed": plus_minus(as_number(d.get("agreed")), as_number(d.get("agreed_se"))),
    }


def _scaled(values: Mapping[str, Any], key: str, scale: float = 1.0) -> tuple[float | None, float]:
    """Return a figure and its error, for a mark."""
    value, error = as_number(values.get(key)), as_number(values.get(f"{key}_se"))
    known = error is not None and math.isfinite(error)
    return None if value is None else scale * value, scale * error if known and error else 0.0


def _positions(values: Mapping[str, Any]) -> dict[str, Any] | None:
    octaves = _items(values, "octaves")
    if not octaves:
        return None
    names = [f"to {number(as_number(o.get('last')))}" for o in octaves]
    both = [
        Marks.around(name, look, *zip(*(_scaled(o, name) for o in octaves), strict=True))
        for name, look in (_TEACHER, _STUDENT)
    ]
    kl = [Marks.around("", _STUDENT[1], *zip(*(_scaled(o, "kl") for o in octaves), strict=True))]
    heads = ["*position", "*teacher", "*student", "*student − teacher", "*KL", "*tokens"]
    rows = [
        [
            f"{number(as_number(o.get('first')))}–{number(as_number(o.get('last')))}",
            *(figure(o, name) for name in ("teacher", "student", "excess")),
            FIGURES["kl"].write(*_finite(o, "kl")),
            number(as_number(o.get("tokens")), 6),
        ]
        for o in octaves
    ]
    return {
        "loss": rows_chart(
            names, both, "cross-entropy by position, nats per token",
            f"Cross-entropy of teacher and student in {len(octaves)} octaves of position.",
            log=False,
        ),
        "kl": rows_chart(
            names, kl, "KL(teacher, student) by position, nats per token",
            f"KL in {len(octaves)} octaves of position.", log=False, reach=(0,),
        ),
        "table": (heads, rows),
        "rows": as_count(values.get("rows")),
        "whole": as_count(values.get("whole")),
        "length": number(as_number(values.get("context_length"))),
    }  # fmt: skip


def _finite(values: Mapping[str, Any], key: str) -> tuple[float, float]:
    value, error = as_number(values.get(key)), as_number(values.get(f"{key}_se"))
    return math.nan if value is None else value, math.nan if error is None else error


def _needles(values: Mapping[str, Any]) -> dict[str, Any] | None:
    depths = _items(values, "by_depth")
    if not depths:
        return None
    total = as_mapping(values.get("total"))
    names = [_whole(found, "back") for found in depths]
    marks = [
        Marks.around(
            name, look, *zip(*(_scaled(f, f"{name}_log_prob") for f in depths), strict=True)
        )
        for name, look in (_TEACHER, _STUDENT)
    ]
    heads = [
        "*tokens back",
        "*needles",
        "*teacher",
        "*student",
        "*teacher has it",
        "*student has it",
    ]
    rows = [
        [
            "all" if found is total else _whole(found, "back"),
            number(as_number(found.get("needles"))),
            *(figure(found, f"{name}_log_prob") for name in ("teacher", "student")),
            *(_retrieved(found, name) for name in ("teacher", "student")),
        ]
        for found in (*depths, *([total] if total else []))
    ]
    return {
        "picture": rows_chart(
            names, marks, "log-probability of the right code, nats; rows: tokens back",
            f"Log-probability of codes at {len(depths)} distances.", log=False, reach=(0,),
        ),
        "table": (heads, rows),
        "chance": number(as_number(values.get("chance")), 3),
        "count": as_count(total.get("needles")),
        "has": {name: _retrieved(total, name) for name in ("teacher", "student")},
    }  # fmt: skip


def _whole(values: Mapping[str, Any], key: str) -> str:
    value = as_number(values.get(key))
    return number(value) if value is None or not math.isfinite(value) else f"{value:,.0f}"


def _retrieved(found: Mapping[str, Any], model: str) -> str:
    value, error = _finite(found, f"{model}_retrieved")
    if not math.isfinite(value):
        return "–"
    return f"{100 * value:.0f}{f' ± {100 * error:.0f}' if error > 0 else ''}%"


_PARTS = {
    "answers": _answers,
    "agreement": _agreement,
    "positions": _positions,
    "needles": _needles,
}
