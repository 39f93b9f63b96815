"""Run folders as runs leave them, made of plain files, and a reader of the pages about them."""

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VOID = {"meta", "input", "br", "hr", "img", "link"}
UNCLOSED = {"tr", "td", "th", "thead", "tbody"}
"""Elements whose end HTML lets one leave out, and the tables do."""


def figures(kl: float | None, **more: Any) -> dict[str, Any]:
    share = 0.0 if kl is None else kl
    values = {"perplexity": 10 + share, "perplexity_ratio": math.exp(share), "kl": kl}
    values |= {"top1": 1 - share / 3, "acceptance": 1 - share / 4}
    return {"tokens": 16095, **values, **{f"{key}_se": 0.001 for key in values}, **more}


def fidelity(student: float | None = 0.02, layers: int = 3) -> dict[str, Any]:
    kls = {"teacher": 0.0, "floor": 1.2, "initial": 1.1, "student": student}
    nmse = {"nmse_floor": 0.1, "nmse_initial": 0.09}
    by_layer = {str(i): {**nmse, "nmse_student": 0.01 * (i + 1)} for i in range(layers)}
    return {**{name: figures(kl) for name, kl in kls.items()}, "layers": by_layer, "heldout": True}


def metrics(step: int, layers: int = 3, **changed: Any) -> dict[str, Any]:
    plain = {"loss": 0.1 / step, "loss_nmse": 0.09 / step, "loss_reg": 0.5, "grad_norm": 0.3}
    rest = {"lr": 1e-3, "tokens": 64 * step, "tokens_per_second": 900.0 + step, "refused_total": 0}
    nmse = {f"layers.{i}.nmse": 0.1 * (i + 1) / step for i in range(layers)}
    return {"step": step, **plain, **rest, **nmse, **changed}


def event(kind: str, /, **details: Any) -> dict[str, Any]:
    return {"event": kind, "time": 1790000000.5, **details}


def refusal(
    step: int, kind: str = "loss", detail: str = "loss is nan", **details: Any
) -> dict[str, Any]:
    place = {"epoch": 0, "micro_batch": 0, "sample_ids": ["a.txt@0", "b.txt@64"], "rank": 0}
    return event("refusal", step=step, kind=kind, detail=detail, **{**place, **details})


def write_lines(path: Path, lines: list[dict[str, Any]], tail: str = "") -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail, encoding="utf-8")


def make_run(folder: Path, steps: int = 12, **changed: Any) -> Path:
    """A finished run.

    Args:
        folder: made.
        steps: logged, one line each.
        changed: by the name of a file without its ending, its content instead; None for no such
            file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    start = event("start", device="cpu", total_steps=steps, processes=1)
    done = event("done", steps=steps, tokens=64 * steps, refused=0)
    settings = {"model_name": "tiny", "rank": 16, "targets": ["gate", "up", "down"]}
    settings |= {"run_name": None, "learning_rate": 0.01}
    about = {"layers": [0, 1, 2], "seed": 0, "base_hash": "ab" * 32, "device": "cpu"}
    run = {"settings": settings, **about, "versions": {"torch": "2.13.0"}}
    content = {
        "run.json": run,
        "fidelity.json": fidelity(),
        "metrics.jsonl": [metrics(step) for step in range(1, steps + 1)],
        "events.jsonl": [start, done],
    }
    for name, value in content.items():
        value = changed.get(name.partition(".")[0], value)
        if isinstance(value, list):
            write_lines(folder / name, value)
        elif value is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            (folder / name).write_text(text, encoding="utf-8")
    return folder


class Reader(HTMLParser):
    """A page as a browser reads it; every element must be closed.

    Attributes:
        elements: in order, each a name and attributes.
        text: all that is shown.
        sections: the text by the id of its heading.
        charts: the words of each chart.
    """

    def __init__(self, page: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.sections = "", dict[str, str]()
        self._open: list[str] = []
        self._section = ""
        self._code = False
        self.feed(page)
        self.close()
        assert self._open == [], f"never closed: {self._open}"
        self.charts = [found["alt"] or "" for found in self.of("img", class_="chart")]

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        assert len(found) == len(attributes), f"an attribute twice: {name} {attributes}"
        self.elements.append((name, found))
        if name == "h2":
            self._section = found.get("id") or ""
        self._code = name in ("script", "style")
        if name not in VOID | UNCLOSED:
            self._open.append(name)

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))

    def handle_endtag(self, name: str) -> None:
        self._code = False
        if name not in UNCLOSED:
            assert self._open and self._open[-1] == name, f"</{name}> closes {self._open[-1:]}"
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._code:
            return
        self.text += data
        self.sections[self._section] = self.sections.get(self._section, "") + data

    def of(self, name: str, **attributes: str) -> list[dict[str, str | None]]:
        """The attributes of every element of this name that has these; `class_` names one of its
        classes.
        """
        kind = attributes.pop("class_", None)
        return [
            found
            for tag, found in self.elements
            if tag == name
            and all(found.get(key) == value for key, value in attributes.items())
            and (kind is None or kind in (found.get("class") or "").split())
        ]
