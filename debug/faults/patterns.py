"""Cases in four patterns, each judged against the run that never saw the fault:

- `costs_itself`: a micro-batch is refused, and the run equals the one without it;
- `costs_nothing`: no alarm, and the run equals the one without the fault;
- `costs_its_window`: a whole step is refused, and the run equals the one without the window;
- `stops_everything`: state is spoilt for good, so everything is refused and nothing changes any
  more.
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
"""Judges a case in a setting, which says how the guarded step reads its flags."""

Expected = tuple[int, str, int | None, tuple[str, ...]]
"""A refusal that must come: window, kind, micro-batch (None: the whole window), and parts of its
detail.
"""


@dataclass(frozen=True)
class Case:
    """One fault and its ground truth.

    Attributes:
        truth: what must be located or must happen, for people.
        check: judges it.
        modes: of reading flags, late or not, that it runs in.
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
    """Return whether exactly the expected was refused and said, and how many refusals nobody
    planted.
    """
    left = list(expected)
    strangers = 0
    for window, refusal in outcome.refusals:
        fits = [
            e
            for e in left
            if e[:3] == (window, refusal.kind, refusal.micro_batch)
            and all(part in refusal.detail for part in e[3])
            # The samples are those of the spoilt micro-batch, if a refusal is of one.
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
    """Compare with the counterfactual and with the expected words; `also` are complaints of
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
    """Every place is refused for `kind` (empty: not refused), its detail saying `says`, nothing
    else is, and the run equals the one without the places.
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
    """Every place is refused for `kind`, its detail saying `says`; nothing else is."""
    where = " and ".join(f"micro-batch {micro} of window {window}" for window, micro in places)
    truth = f"{where}: {kind}" + (f", saying {', '.join(says)}" if says else "")
    return Case(id, name, truth, survived(fault, kind, says, places), setting)


def costs_nothing(
    id: str,
    name: str,
    fault: Fault | PersistentFault,
    setting: Setting = SMALL,
    instead: Fault | None = None,
) -> Case:
    """No alarm, and the run equals the clean one, or the one with `instead` for the fault."""

    def check(setting: Setting) -> Verdict:
        if isinstance(fault, PersistentFault):
            _, outcome = run(setting, before={0: fault})
        else:
            _, outcome = run(setting, faults={(1, 1): fault})
        twin = clean_run(setting) if instead is None else run(setting, faults={(1, 1): instead})[1]
        return judge(outcome, twin, [], "unharmed")

    truth = "no alarm, and the same run"
    return Case(
        id, name, truth + (" as with the clamped value itself" if instead else ""), check, setting
    )


def costs_its_window(id: str, name: str, fault: PersistentFault, setting: Setting = SMALL) -> Case:
    """A fault before window 1 makes its step go wrong, once, so the window is refused for what it
    names.
    """

    def check(setting: Setting) -> Verdict:
        _, outcome = run(setting, before={1: fault})
        twin = clean_run(setting, whole_window(setting, 1))
        return judge(outcome, twin, [(1, "update", None, (fault.name,))])

    truth = f"window 1: update, saying {fault.name}; neither schedule nor counters move"
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
    """A fault before window 1 spoils the state: everything is refused, nothing changes any more.

    Args:
        kind, says: of every refusal.
        guard: the watchdog that must name the fault and its index.
        unsaved: saving is refused too, and leaves no file.
        whole: the windows are refused, not their micro-batches.
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
    truth = f"everything refused for {kind}, nothing changes; the guard names {named}"
    return Case(id, name, truth + ("; saving is refused" if unsaved else ""), check)


def found(
    id: str, name: str, truth: str, look: Callable[[Setting], tuple[str | None, str]]
) -> Case:
    """A fault that a watchdog must find by itself, outside training; `look` returns what was said
    and what it must hold.
    """

    def check(setting: Setting) -> Verdict:
        message, part = look(setting)
        good = message is not None and part in message
        detail = "" if good else f"said: {message}; expected: {part}"
        return Verdict("found" if good else "missed", good, good, detail=detail)

    return Case(id, name, truth, check, modes=(False,))
