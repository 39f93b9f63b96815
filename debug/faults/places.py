"""The true place of a planted fault, and the marked line of the code that has it."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from faults.transient_faults import Index
from npt.tracer.verdict import Verdict


@functools.cache
def marked_lines() -> dict[str, str]:
    """Return the line of every mark `# planted: ID`, as `file.py:12`. A comment on a line of its
    own marks the next one.
    """
    lines: dict[str, str] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            mark = re.search(r"^(.*) {2}# planted: (.+)$", text)
            if mark is None:
                continue
            for id in mark[2].split(", "):
                assert id not in lines, f"two lines are marked {id}"
                lines[id] = f"{path.name}:{number if mark[1].strip() else number + 1}"
    return lines


@dataclass(frozen=True)
class Truth:
    """The place of a fault. token: (row, token), or None if the tensor belongs to no token."""

    phase: str
    module: str
    operation: str
    index: Index
    cause: str
    token: tuple[int, int] | None = None

    @property
    def layer(self) -> int | None:
        number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", self.module)
        return None if number is None else int(number[1])

    def __str__(self) -> str:
        return sentence(self.phase, self.operation, self.module, self.index)

    def fits(self, verdict: Verdict) -> bool:
        names = ("phase", "layer", "module", "operation", "index", "cause")
        same = all(getattr(verdict, name) == getattr(self, name) for name in names)
        return same and (self.token is None or (verdict.row, verdict.token) == self.token)


def sentence(phase: str, operation: str, module: str, index: Index) -> str:
    return f"{phase}: {operation or 'no operation'} in {module or 'no module'} at {list(index)}"
