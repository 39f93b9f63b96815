"""Recall against forgetting, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.table import Table

from npt.adapters.fit import format_layers
from npt.tools.editing.edit_metrics import Choice, Retention

_BEST = 8
"""How many of the choices that a search tried are shown."""


def retention_tables(
    retention: Retention, text: str = "held-out", tried: Sequence[Choice] = ()
) -> list[RenderableType]:
    """The fact's log-probability and the divergence on other text, before and after, of each
    stream; `text` says what that text is.
    """
    tokens = next(iter(retention.recall.values())).tokens
    recall = Table(
        title=f"Recall: log-probability of the fact without its context, {tokens} tokens, nats",
        title_justify="left",
    )
    recall.add_column("model")
    for heading in ("before", "after", "gain", "in context"):
        recall.add_column(heading, justify="right")
    for stream, r in retention.recall.items():
        recall.add_row(
            stream, f"{r.before:.3f}", f"{r.after:.3f}", f"{r.gain:+.3f}", f"{r.in_context:.3f}"
        )
    count = next(iter(retention.forgetting.values())).tokens
    forgetting = Table(
        title=f"Forgetting: change on {count:,} {text} tokens (± standard error)",
        title_justify="left",
    )
    forgetting.add_column("model")
    for heading in ("perplexity before", "after", "ratio", "KL, nats"):
        forgetting.add_column(heading, justify="right")
    for stream, f in retention.forgetting.items():
        forgetting.add_row(
            stream,
            f"{f.perplexity / f.perplexity_ratio:.3f}",
            f"{f.perplexity:.3f}",
            f"{f.perplexity_ratio:.4f} ± {f.perplexity_ratio_se:.4f}",
            f"{f.kl:.4f} ± {f.kl_se:.4f}",
        )
    return [*([_tried(tried)] if tried else []), recall, forgetting]


def print_retention(
    retention: Retention, console: Console, text: str = "held-out", tried: Sequence[Choice] = ()
) -> None:
    for table in retention_tables(retention, text, tried):
        console.print(table)


def _tried(tried: Sequence[Choice]) -> Table:
    table = Table(
        title=f"Tried at the same cost: the best {min(_BEST, len(tried))} of {len(tried)}",
        title_justify="left",
    )
    for heading in ("token", "targets", "layers", "alpha", "gain, nats"):
        table.add_column(heading, justify="left" if heading in ("targets", "layers") else "right")
    for c in tried[:_BEST]:
        table.add_row(
            str(c.token),
            ", ".join(c.targets),
            format_layers(c.layers),
            f"{c.alpha:.3f}",
            f"{c.gain:+.3f}",
        )
    return table
