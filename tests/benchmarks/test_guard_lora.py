"""The cost of the guard is measured on loops that do the same."""

from __future__ import annotations

import torch

import guard_lora


def test_both_loops_make_the_same_steps(monkeypatch) -> None:
    """Two micro-batches: a half is exact, so the guarded step is the plain one, bit for bit."""
    made = []

    def remembered(*arguments, make=guard_lora.lora):
        made.append(make(*arguments))
        return made[-1]

    monkeypatch.setattr(guard_lora, "lora", remembered)
    ids = torch.arange(16).view(2, 8)
    plain, (guarded, guard) = guard_lora.plain(ids), guard_lora.guarded(ids)
    for _ in range(2):
        plain()
        guarded()
    (one, _), (other, _) = made
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert guard.counts.steps == 2
