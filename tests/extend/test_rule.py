"""A rule of one's own for the tracer, as docs/extend/rule.md prints it, in a copy of npt."""

import sys
from pathlib import Path

import torch
from forked import Forked
from page_changes import ROOT, changed_package

PAGE = ROOT / "docs" / "extend" / "rule.md"


class VonMises(torch.nn.Module):
    def forward(self, concentration: torch.Tensor) -> torch.Tensor:
        return torch.special.i0(concentration).log().sum()


def trace_in(folder: Path) -> None:
    """Import the package below a folder, and trace the operation that its new rule is for."""
    for name in [name for name in sys.modules if name.split(".")[0] == "npt"]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    import npt

    assert Path(npt.__file__).is_relative_to(folder)
    verdict = npt.trace(VonMises(), torch.full((2, 3), 1000.0))
    assert verdict is not None and (verdict.cause, verdict.operation) == ("Bessel overflow", "i0")
    assert "i0e" in str(verdict) and npt.trace(VonMises(), torch.ones(2, 3)) is None


def test_a_rule_of_ones_own_takes_two_files_and_names_the_cause(tmp_path: Path) -> None:
    changed = changed_package(PAGE, tmp_path)
    assert changed == ["npt/tracer/verdict.py", "npt/tracer/rules.py", "npt/tracer/rules.py"]
    log = tmp_path / "log"
    status = Forked(lambda: trace_in(tmp_path), log).wait()
    assert status == 0, log.read_text()
