"""Which tests are fast and which slow: `python -m pytest` runs the fast ones, `--slow` everything.

Slow is what carries the marker, what slow.txt lists, and of a test with many cases all but a few.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

SLOW = Path(__file__).with_name("slow.txt")

CASES = 3
"""Cases of one parametrised test in the fast tier: the first, the last and the middle one."""


def listed() -> list[str]:
    """Return the entries of slow.txt: files, classes or functions by their node ids, without
    parameters.
    """
    lines = (
        line.partition("#")[0].strip() for line in SLOW.read_text(encoding="utf-8").splitlines()
    )
    return [line for line in lines if line]


def slow(ids: Sequence[str], entries: Iterable[str]) -> set[str]:
    """Return the node ids of `ids`, in the order of collection, that are no part of the
    fast tier.
    """
    entries = set(entries)
    cases: dict[str, list[str]] = defaultdict(list)
    for each in ids:
        cases[each.partition("[")[0]].append(each)
    found: set[str] = set()
    for test, own in cases.items():
        parts = test.split("::")
        if any("::".join(parts[:n]) in entries for n in range(1, len(parts) + 1)):
            found.update(own)
        elif len(own) > CASES:
            found.update(set(own) - {own[0], own[len(own) // 2], own[-1]})
    return found
