"""Pages from templates: each one file that needs nothing else.

A page may be mailed and kept, and its texts may be anybody's: every value is cleaned and escaped,
and the page's policy allows nothing but its own style and script, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from npt.evaluation.formatting import FIGURES, percent
from npt.report.words import address, clean, number

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, *, script: str = "", css: str = "", **data: Any) -> str:
    """Return a whole HTML page of a template that extends `frame.html.j2`. script: name of the
    page's script, which reads `json` from the data. css: style that only this page has. data: what
    the template shows.
    """
    sheet, code = template_text("style.css") + css, template_text(script) if script else ""
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; style-src"
        f" '{_hash(sheet)}'"
    )
    policy += f"; script-src '{_hash(code)}'" if code else ""
    page = _environment().get_template(template)
    return page.render(style=Markup(sheet), code=Markup(code), policy=Markup(policy), **data)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else clean(value),
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= {
        "address": address, "number": number, "percent": percent, "comma": "{:,}".format,
        "upto": lambda value, limit: Markup(escape(clean(value, limit))),
        "kl": lambda value: number(value) if value is None else FIGURES["kl"].write(value),
        "kind": lambda name: Markup({"*": ' class="n"', "~": ' class="name"'}.get(name[:1], "")),
    }  # fmt: skip
    return made


@cache
def template_text(name: str) -> str:
    """Return a file of the templates: a style sheet or a script."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
