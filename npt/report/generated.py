"""The page of `npt generate --html`: the text token by token, coloured by its modulation."""

from __future__ import annotations

from collections.abc import Sequence

from npt.report.pages import render, template_text
from npt.report.token_view import Passages, palette, token_view

Facts = Sequence[tuple[str, str]]


def page(said: str, facts: Facts, recipe: Facts, passages: Passages) -> str:
    """Return the page, which needs nothing else.

    Args:
        said: a sentence on what was written.
        facts: names and numbers.
        recipe: names and words, of the adapter and the settings.
        passages: the texts, see `token_view`.
    """
    view = token_view(passages)
    return render(
        "generated.html.j2",
        script="tokens.js" if view else "",
        css=template_text("tokens.css") + palette(),
        title="Modulation, token by token",
        sections={"text": "Text and modulation"},
        said=said,
        facts=facts,
        recipe=recipe,
        view=view,
        json=view["json"] if view else "",
    )
