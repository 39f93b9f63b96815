"""The cost of the guard is measured on loops that do the same."""

import torch

import guards


def test_both_lora_loops_make_the_same_steps(monkeypatch) -> None:
    """Two micro-batches: a half is exact, so the guarded step is the plain one, bit for bit."""
    made = []

    def remembered(bench, make=guards.LoraBench.adapted):
        made.append(make(bench))
        return made[-1]

    monkeypatch.setattr(guards.LoraBench, "adapted", remembered)
    figures = guards.measure(guards.LoraBench(2, 8, accumulation=2), pairs=2)
    assert figures["ratio"] > 0 and figures["added_synchronisations"] is None
    (one, _), (other, optimizer) = made
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert {state["step"].item() for state in optimizer.state.values()} == {3.0}


def test_both_loops_over_layers_make_the_same_steps(monkeypatch) -> None:
    made = []

    def remembered(bench, make=guards.LayersBench.made):
        made.append(make(bench))
        return made[-1]

    monkeypatch.setattr(guards.LayersBench, "made", remembered)
    figures = guards.measure_layers(guards.layers()["small"], pairs=2)
    assert figures["calls"] > figures["plain_calls"] > 0
    (one, *_), (other, optimizer, _) = made
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert {state["step"].item() for state in optimizer.state.values()} == {8.0}
