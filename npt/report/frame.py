"""What every page of this package stands in: one file that needs nothing else, and lets nothing run
or load but its own.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path


def frame(
    title: str,
    head: str,
    sections: Sequence[tuple[str, str, str]],
    *,
    style: str = "",
    script: str = "",
    data: str = "",
) -> str:
    """A whole HTML page.

    Args:
        title: escaped.
        head: HTML under the title, in front of the links to the sections.
        sections: name, heading and HTML of each.
        style: CSS behind that of all pages.
        script: the page's own, if it has one.
        data: JSON that the script reads, escaped for its place.
    """
    style = (Path(__file__).parent / "style.css").read_text(encoding="utf-8") + style
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; style-src"
        f" '{_hash(style)}'"
    )
    if script:
        policy += f"; script-src '{_hash(script)}'"
    links = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, heading, _ in sections)
    body = "\n".join(
        f'<section aria-labelledby="{name}">\n<h2 id="{name}">{heading}</h2>\n{content}\n</section>'
        for name, heading, content in sections
    )
    scripts = (
        f'<script type="application/json" id="data">{data}</script>\n<script>{script}</script>\n'
        if script
        else ""
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
{head}
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main>
{body}
</main>
{scripts}</body>
</html>
"""


def _hash(content: str) -> str:
    """What the page's policy knows its own style or script by."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode('utf-8')).digest()).decode('ascii')}"
