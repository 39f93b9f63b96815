"""Recall against forgetting, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from npt.adapters.attach import format_layers
from npt.tools.editing.edit_metrics import Choice, Retention

_BEST = 8
"""How many of the choices that a search tried are shown."""


def print_retention(
    retention: Retention, console: Console, text: str = "held-out", tried: Sequence[Choice] = ()
) -> None:
    """Print what a search tried, the fact's log-probability and the divergence on other text,
    before and after, of each stream. text: what the other text is.
    """
    if tried:
        _print(
            console,
            f"Tried at the same cost: the best {min(_BEST, len(tried))} of {len(tried)}",
            ("*token", "targets", "layers", "*alpha", "*gain, nats"),
            (
                (str(c.token), ", ".join(c.targets), format_layers(c.layers), f"{c.alpha:.3f}",
                 f"{c.gain:+.3f}")
                for c in tried[:_BEST]
            ),
        )  # fmt: skip
    tokens = next(iter(retention.recall.values())).tokens
    _print(
        console,
        f"Recall: log-probability of the fact without its context, {tokens} tokens, nats",
        ("model", "*before", "*after", "*gain", "*in context"),
        (
            (stream, f"{r.before:.3f}", f"{r.after:.3f}", f"{r.gain:+.3f}", f"{r.in_context:.3f}")
            for stream, r in retention.recall.items()
        ),
    )
    count = next(iter(retention.forgetting.values())).tokens
    _print(
        console,
        f"Forgetting: change on {count:,} {text} tokens (± standard error)",
        ("model", "*perplexity before", "*after", "*ratio", "*KL, nats"),
        (
            (stream, f"{f.perplexity / f.perplexity_ratio:.3f}", f"{f.perplexity:.3f}",
             f"{f.perplexity_ratio:.4f} ± {f.perplexity_ratio_se:.4f}",
             f"{f.kl:.4f} ± {f.kl_se:.4f}")
            for stream, f in retention.forgetting.items()
        ),
    )  # fmt: skip


def _print(
    console: Console, title: str, heads: Iterable[str], rows: Iterable[tuple[str, ...]]
) -> None:
    """Print a table; a star before a heading makes its column one of numbers."""
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head.lstrip("*"), justify="right" if head[0] == "*" else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
