"""Four patterns of cases, each compared with the run that never saw the fault:

- `costs_itself`: a micro-batch is refused, and the run equals the one without it;
- `costs_nothing`: no alarm, and the run equals the one without the fault;
- `costs_its_window`: a whole step is refused, and the run equals the one without the window;
- `stops_everything`: the state is damaged, so everything is refused and nothing changes any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from faults import runs
from faults.bench import SMALL, Fault, Outcome, Place, Run, Setting, clean_run, run, whole_window
from faults.persistent_faults import PersistentFault
from faults.verdict import Verdict
from npt.tracer.watchdogs import BadNumber

Check = Callable[[Setting], Verdict]
"""Judges a case in a setting."""

Expected = tuple[int, str, int | None, tuple[str, ...]]
"""An expected refusal: window, kind, micro-batch (None: the whole window), parts of its detail."""


@dataclass(frozen=True)
class Case:
    """A fault and its ground truth.

    Attributes:
        truth: what must be located or must happen, in words.
        check: judges the case.
        modes: whether flags are read late, for each run of the case.
    """

    id: str
    name: str
    truth: str
    check: Check
    setting: Setting = SMALL
    modes: tuple[bool, ...] = (False, True)

    @property
    def group(self) -> str:
        return self.id.split("-", 1)[0]


def match(outcome: Outcome, expected: Sequence[Expected]) -> tuple[bool, int]:
    """Return whether exactly the expected refusals came, and the number of others."""
    left = list(expected)
    strangers = 0
    for window, refusal in outcome.refusals:
        fits = [
            e
            for e in left
            if e[:3] == (window, refusal.kind, refusal.micro_batch)
            and all(part in refusal.detail for part in e[3])
            # the samples of a refusal are those of its micro-batch
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
    word: str = "survived",
    also: Sequence[str] = (),
) -> Verdict:
    """Compare an outcome with the counterfactual and the expected refusals. also: complaints of
    further checks.
    """
    found, strangers = match(outcome, expected)
    different = outcome.difference(counterfactual)
    complaints = [*also]
    if different is not None:
        complaints.append(f"differs from the counterfactual in {different}")
    if not found:
        refused = [f"window {window}, {refusal}" for window, refusal in outcome.refusals]
        complaints.append(f"refused: {'; '.join(refused) or 'nothing'}")
    survived = different is None and not also
    return Verdict(
        word if survived else "harmed",
        located=found and not also,
        passed=survived and found,
        false_alarms=strangers,
        detail="; ".join(complaints),
    )


def survived(
    fault: Fault, kind: str, says: Sequence[str] = (), places: Sequence[Place] = ((1, 1),)
) -> Check:
    """Check that exactly `places` are refused as `kind` (empty: not refused) with `says` in the
    detail, and that the run equals the one without them.
    """

    def check(setting: Setting) -> Verdict:
        _, outcome = run(setting, faults=dict.fromkeys(places, fault))
        expected = [(window, kind, micro, tuple(says)) for window, micro in places if kind]
        return judge(outcome, clean_run(setting, places), expected)

    return check


# --- the patterns


def costs_itself(
    id: str,
    name: str,
    fault: Fault,
    kind: str,
    *says: str,
    setting: Setting = SMALL,
    places: Sequence[Place] = ((1, 1),),
) -> Case:
    """Return a case in which exactly `places` are refused as `kind`, with `says` in the detail."""
    where = ", ".join(f"micro-batch {micro} of window {window}" for window, micro in places)
    truth = f"{where}: refused as {kind}" + (f", with {'; '.join(says)}" if says else "")
    return Case(id, name, truth, survived(fault, kind, says, places), setting)


def costs_nothing(
    id: str,
    name: str,
    fault: Fault | PersistentFault,
    setting: Setting = SMALL,
    instead: Fault | None = None,
) -> Case:
    """Return a case without an alarm, whose run equals the clean one, or the one with `instead`."""

    def check(setting: Setting) -> Verdict:
        if isinstance(fault, PersistentFault):
            _, outcome = run(setting, before={0: fault})
        else:
            _, outcome = run(setting, faults={(1, 1): fault})
        twin = clean_run(setting) if instead is None else run(setting, faults={(1, 1): instead})[1]
        return judge(outcome, twin, [], "unharmed")

    truth = "no alarm; the run is unchanged"
    return Case(
        id, name, truth + (" as with the clamped value itself" if instead else ""), check, setting
    )


def costs_its_window(id: str, name: str, fault: PersistentFault, setting: Setting = SMALL) -> Case:
    """Return a case in which a fault before window 1 spoils that step once. The window is refused
    and its refusal names the fault.
    """

    def check(setting: Setting) -> Verdict:
        _, outcome = run(setting, before={1: fault})
        twin = clean_run(setting, whole_window(setting, 1))
        return judge(outcome, twin, [(1, "update", None, (fault.name,))])

    truth = f"window 1: refused as update, with {fault.name}; schedule and counters do not move"
    return Case(id, name, truth, check, setting)


def stops_everything(
    id: str,
    name: str,
    fault: PersistentFault,
    kind: str,
    says: str,
    guard: Callable[[Run], BadNumber | None],
    *,
    unsaved: bool = False,
    whole: bool = False,
) -> Case:
    """Return a case in which a fault before window 1 damages the state, so that everything is
    refused and nothing changes any more.

    Args:
        kind: of every refusal.
        says: part of the detail of every refusal.
        guard: the watchdog that must name the fault and its index.
        unsaved: saving must be refused and leave no file.
        whole: whole windows are refused, not their micro-batches.
    """

    def check(setting: Setting) -> Verdict:
        kept: list[Outcome] = []

        def spoil(made: Run) -> None:
            fault(made)
            kept.append(made.outcome())

        made, outcome = run(setting, before={1: spoil})
        micros: list[int | None] = [None] if whole else [*range(setting.size)]
        windows = range(1, setting.windows)
        expected: list[Expected] = [(w, kind, micro, (says,)) for w in windows for micro in micros]
        complaints = []
        finding = guard(made)
        if finding is None or (finding.name, finding.index) != (fault.name, fault.index):
            complaints.append(f"the guard says {finding}")
        if unsaved:
            complaints += runs.saving_goes_wrong(made, fault.name)
        return judge(outcome, kept[0], expected, "stopped", complaints)

    named = f"{fault.name}{list(fault.index)}"
    truth = f"everything is refused as {kind}, nothing changes; the guard names {named}"
    return Case(id, name, truth + ("; saving is refused" if unsaved else ""), check)


def found(
    id: str, name: str, truth: str, look: Callable[[Setting], tuple[str | None, str]]
) -> Case:
    """Return a case that a watchdog must find outside training. `look` returns its message and the
    part that the message must contain.
    """

    def check(setting: Setting) -> Verdict:
        message, part = look(setting)
        good = message is not None and part in message
        detail = "" if good else f"message: {message}; expected: {part}"
        return Verdict("found" if good else "missed", good, good, detail=detail)

    return Case(id, name, truth, check, modes=(False,))
