"""Render templates as self-contained pages.

A page may be mailed and may quote untrusted text. So every value is cleaned and escaped, and the
page's policy allows no script, and no style but its own, by hash.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from npt.report.words import address, clean

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **data: Any) -> str:
    """Return the HTML page of a template that extends `frame.html.j2`."""
    style = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; style-src"
        f" 'sha256-{digest}'"
    )
    page = _environment().get_template(template)
    return page.render(style=Markup(style), policy=Markup(policy), **data)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else clean(value),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    kinds = {"*": Markup(' class="n"'), "~": Markup(' class="name"')}
    made.filters |= {
        "address": address,
        "comma": "{:,}".format,
        "upto": lambda value, limit: Markup(escape(clean(value, limit))),
        "kind": lambda name: kinds.get(name[:1], ""),
    }
    return made
