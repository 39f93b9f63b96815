"""Cases in four patterns, each judged against the run that never saw the fault:

- `costs_itself`: a micro-batch is refused, and the run equals the one without it;
- `costs_nothing`: no alarm, and the run equals the one without the fault;
- `costs_its_window`: a whole step is refused, and the run equals the one without the window;
- `stops_everything`: state is poisoned for good, so everything is refused and nothing changes any
  more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from faults import runs
from faults.bench import (
    SMALL,
    Act,
    Outcome,
    Place,
    Plant,
    Run,
    Setting,
    clean_run,
    run,
    whole_window,
)
from faults.verdict import Check, Verdict
from npt.diagnostics.guards import Finding

Expected = tuple[int, str, int | None, tuple[str, ...]]
"""A refusal that has to come: window, kind, micro-batch (None: the whole window), and what its
detail has to say.
"""


@dataclass(frozen=True)
class Case:
    """One fault and its ground truth.

    truth: what has to be located or what has to happen, for people. check: judges it in one reading
    mode. modes: those that it runs in. plant: the fault itself, for the comparison with plain
    loops; None where they cannot meet it.
    """

    id: str
    name: str
    truth: str
    check: Check
    modes: tuple[bool, ...] = (False, True)
    plant: Plant | None = None
    setting: Setting = SMALL
    places: tuple[Place, ...] = ((1, 1),)

    @property
    def group(self) -> str:
        return self.id.split("-", 1)[0]


def match(outcome: Outcome, expected: Sequence[Expected]) -> tuple[bool, int]:
    """Whether exactly the expected was refused and said, and how many refusals nobody planted."""
    left = list(expected)
    strangers = 0
    for window, refusal in outcome.refusals:
        fits = [
            e
            for e in left
            if e[:3] == (window, refusal.kind, refusal.micro_batch)
            and all(part in refusal.detail for part in e[3])
            # The samples are those of the planted micro-batch, wherever a refusal is of one.
            and all(name.startswith(f"w{window}-m{e[2]}-") for name in refusal.sample_ids)
        ]
        if fits:
            left.remove(fits[0])
        else:
            strangers += 1
    return not left and not strangers, strangers


def judge(
    outcome: Outcome,
    counterfactual: Outcome,
    expected: Sequence[Expected],
    word: str,
    also: Sequence[str] = (),
) -> Verdict:
    """Compare with the counterfactual and with what had to be said; `also` are complaints of
    further checks.
    """
    found, strangers = match(outcome, expected)
    different = outcome.difference(counterfactual)
    complaints = [*also]
    if different is not None:
        complaints.append(f"differs from the counterfactual in {different}")
    if not found:
        said = (
            "; ".join(f"window {window}, {refusal}" for window, refusal in outcome.refusals)
            or "nothing"
        )
        complaints.append(f"refused: {said}")
    survived = different is None and not also
    return Verdict(word if survived else "harmed", located=found and not also, passed=survived and found, false_alarms=strangers,
                   detail="; ".join(complaints))  # fmt: skip


# --- the patterns
# ----------------------------------------------------------------------------------------------------


def costs_itself(
    id: str,
    name: str,
    plant: Plant,
    kind: str,
    says: Sequence[str],
    setting: Setting = SMALL,
    places: Sequence[Place] = ((1, 1),),
    compare: bool = False,
) -> Case:
    """Every place is refused for `kind`, its detail saying `says`; nothing else is."""

    def check(late: bool) -> Verdict:
        chosen = replace(setting, late=late)
        _, outcome = run(chosen, plants=dict.fromkeys(places, plant))
        expected: list[Expected] = [(window, kind, micro, tuple(says)) for window, micro in places]
        return judge(outcome, clean_run(chosen, frozenset(places)), expected, "survived")

    where = " and ".join(f"micro-batch {micro} of window {window}" for window, micro in places)
    truth = f"{where}: {kind}" + (f", saying {', '.join(says)}" if says else "")
    return Case(
        id,
        name,
        truth,
        check,
        plant=plant if compare else None,
        setting=setting,
        places=tuple(places),
    )


def costs_nothing(
    id: str,
    name: str,
    setting: Setting = SMALL,
    plant: Plant | None = None,
    before: Act | None = None,
    instead: Plant | None = None,
) -> Case:
    """No alarm, and the run equals the clean one, or the one with `instead` planted in its place."""

    def check(late: bool) -> Verdict:
        chosen = replace(setting, late=late)
        _, outcome = run(
            chosen,
            plants={} if plant is None else {(1, 1): plant},
            before={} if before is None else {0: before},
        )
        twin = clean_run(chosen) if instead is None else run(chosen, plants={(1, 1): instead})[1]
        return judge(outcome, twin, [], "unharmed")

    return Case(
        id,
        name,
        "no alarm, and the same run"
        + ("" if instead is None else " as with the clamped value itself"),
        check,
    )


def costs_its_window(
    id: str, name: str, act: Act, kind: str, says: Sequence[str], setting: Setting = SMALL
) -> Case:
    """`act` in front of window 1 makes its step go wrong, once; the run equals the one without the
    window.
    """

    def check(late: bool) -> Verdict:
        chosen = replace(setting, late=late)
        _, outcome = run(chosen, before={1: act})
        return judge(
            outcome,
            clean_run(chosen, whole_window(chosen, 1)),
            [(1, kind, None, tuple(says))],
            "survived",
        )

    return Case(
        id,
        name,
        f"window 1: {kind}, saying {', '.join(says)}; neither schedule nor counters move",
        check,
    )


def stops_everything(
    id: str,
    name: str,
    act: Act,
    kind: str,
    says: Sequence[str],
    guard: Callable[[Run], Finding | None],
    named: str,
    index: tuple[int, ...],
    unsaved: bool = False,
    whole: bool = False,
) -> Case:
    """`act` poisons the state in front of window 1: everything is refused from there on, and
    nothing changes any more.

    Args:
        kind, says: of every refusal.
        guard: the watchdog that has to name `named`, at `index`.
        unsaved: saving is refused too, and leaves no file.
        whole: the windows are refused, not their micro-batches.
    """

    def check(late: bool) -> Verdict:
        chosen = replace(SMALL, late=late)
        kept: list[Outcome] = []

        def poison(made: Run) -> None:
            act(made)
            kept.append(made.outcome())

        made, outcome = run(chosen, before={1: poison})
        expected: list[Expected] = []
        for window in range(1, chosen.windows):
            micros: list[int | None] = [None] if whole else list(range(chosen.size))
            expected += [(window, kind, micro, tuple(says)) for micro in micros]
        complaints = []
        finding = guard(made)
        if finding is None or finding.name != named or finding.index != index:
            complaints.append(f"the guard says {finding}")
        if unsaved:
            complaints += runs.saving_goes_wrong(made, named)
        return judge(outcome, kept[0], expected, "stopped", complaints)

    truth = f"everything refused for {kind}, nothing changes; the guard names {named}{list(index)}"
    return Case(id, name, truth + ("; saving is refused" if unsaved else ""), check)


def found(id: str, name: str, truth: str, look: Callable[[], tuple[str | None, str]]) -> Case:
    """A fault that a watchdog has to find by itself, outside training. `look` gives what was said
    and what it must hold.
    """

    def check(late: bool) -> Verdict:
        said, part = look()
        good = said is not None and part in said
        return Verdict(
            "found" if good else "missed",
            located=good,
            passed=good,
            detail="" if good else f"said: {said}; expected: {part}",
        )

    return Case(id, name, truth, check, modes=(False,))
