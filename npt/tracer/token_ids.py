"""Entries of a batch that hold token ids."""

from __future__ import annotations

from typing import Any

LOOKED_UP = ("input_ids", "decoder_input_ids")
"""Entries whose ids enter an embedding."""


def reads_labels(model: Any) -> bool:
    """Return whether the model's decoder reads the labels, shifted by one, as T5's does."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
