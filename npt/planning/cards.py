"""Cards that a run can be planned for on a machine without them: memory and speed as their makers'
data sheets give them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from npt.config.texts import parse_bytes
from npt.errors import ConfigError

UTILISATION = 0.4
"""Share of a card's speed that matrix products of training are assumed to reach: nothing is
measured on a card that is absent."""

CUDA_CONTEXT = 600 * 2**20
"""Bytes of a card that CUDA and its libraries take before the first tensor."""


class Card(NamedTuple):
    """gib: memory. tflops: of dense products of fp32 numbers, in TF32 where the card has it."""

    name: str
    gib: int
    tflops: float

    @property
    def bytes(self) -> int:
        """Of memory that a run can have."""
        return self.gib * 2**30 - CUDA_CONTEXT


CARDS = (
    Card("t4", 16, 8.1),
    Card("v100-32gb", 32, 15.7),
    Card("rtx-3060", 12, 12.7),
    Card("rtx-3090", 24, 35.6),
    Card("rtx-4090", 24, 82.6),
    Card("rtx-5090", 32, 104.8),
    Card("a10", 24, 62.5),
    Card("l4", 24, 60.0),
    Card("a6000", 48, 77.4),
    Card("l40s", 48, 183.0),
    Card("a100-40gb", 40, 156.0),
    Card("a100-80gb", 80, 156.0),
    Card("h100", 80, 494.0),
    Card("h200", 141, 494.0),
)


def find_card(text: str) -> Card:
    """Return the card of a name (`RTX 4090`), or of a size (`24GB`) the slowest that has as much.

    Raises:
        ConfigError: neither a size nor a known name.
    """
    wanted = re.sub(r"[\W_]+|nvidia|geforce|tesla", "", text.lower())
    named = [card for card in CARDS if card.name.replace("-", "") == wanted]
    if named:
        return named[0]
    names = ", ".join(card.name for card in CARDS)
    try:
        size = parse_bytes(text, "--gpu")
    except ConfigError:
        raise ConfigError(f"--gpu is {text!r}; write a size like 24GB, or one of {names}") from None
    # cards are sold in GB of 1024^3 bytes
    unit = 2**30 if not re.search(r"gb?\s*$", text, re.IGNORECASE) else 10**9
    gib = size // unit
    slowest = min((c for c in CARDS if c.gib >= gib), key=lambda c: (c.gib, c.tflops), default=None)
    if gib < 1 or slowest is None:
        raise ConfigError(f"--gpu is {text!r}; cards have 1GB to 141GB, or write one of {names}")
    return Card(slowest.name, gib, slowest.tflops)
