"""Greedy decoding as it is defined, which every faster way is compared with."""

from collections.abc import Sequence
from typing import Any

import torch


def alone(model: Any, prompt: Sequence[int], limit: int, ends: Sequence[int] = ()) -> list[int]:
    """The slow way to greedy tokens: the whole row anew for every token, without cache and
    padding.
    """
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + limit and not (len(ids) > len(prompt) and ids[-1] in ends):
            ids.append(
                int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            )
    return ids[len(prompt) :]
