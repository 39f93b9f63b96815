"""Pages that are read as files of the repository too, as pages of the site.

A link to a file that is no page of the site (code, a preset) becomes its text, and a picture from
elsewhere in the repository is copied. One that names no file is a warning, with which a strict
build fails. Comments, which name the sources of figures, are left out.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

LOG = logging.getLogger("mkdocs.hooks")

ROOT = Path(__file__).resolve().parents[1]
PICTURES = (".png", ".svg", ".jpg", ".gif", ".webp")

LINK = re.compile(r"(?P<mark>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<to>[^()\s]+)\)")
"""A link or a picture, of whose text a part may be in brackets."""

BLOCK = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)|^ {4}.*?$", re.M | re.S)
INLINE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.S)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page's text for the site."""
    parts, end = [], 0
    for block in BLOCK.finditer(markdown):
        parts += [of_site(markdown[end : block.start()], page, config, files), block[0]]
        end = block.end()
    return "".join([*parts, of_site(markdown[end:], page, config, files)])


def of_site(text: str, page: Any, config: Any, files: Any) -> str:
    """Return text outside blocks of code, its links and pictures as the site has them."""

    def link(found: re.Match[str]) -> str:
        target, _, _ = found["to"].partition("#")
        if not target or re.match(r"[a-z]+:|/", target):
            return found[0]
        path = posixpath.normpath(posixpath.join("docs", page.file.src_uri, "..", unquote(target)))
        if path.startswith("docs/"):
            return found[0]  # mkdocs looks at it
        if path.startswith("..") or not (ROOT / path).exists():
            LOG.warning("%s links to %s, which is no file", page.file.src_uri, found["to"])
            return found[0]
        if not path.endswith(PICTURES):
            return found["text"]
        from mkdocs.structure.files import File

        copy = f"pictures/{Path(path).name}"
        if files.get_file_from_path(copy) is None:
            files.append(File.generated(config, copy, abs_src_path=str(ROOT / path)))
        return (
            f"![{found['text']}]({posixpath.relpath(copy, posixpath.dirname(page.file.src_uri))})"
        )

    codes: list[str] = []

    def hide(code: re.Match[str]) -> str:
        codes.append(code[0])
        return f"\0{len(codes) - 1}\0"

    hidden = INLINE.sub(hide, re.sub(r"<!--.*?-->", "", text, flags=re.S))
    return re.sub(r"\0(\d+)\0", lambda at: codes[int(at[1])], LINK.sub(link, hidden))
