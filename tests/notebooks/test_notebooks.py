"""The notebooks run from beginning to end, and what is committed of them can be read anywhere."""

from __future__ import annotations

import json
import re
import runpy
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LARGEST = 500_000
MACHINE = re.compile(
    r"/(?:home|root|work|tmp|usr|opt|Users|__w)/|[0-9.]+ ?(?:tokens/s|it/s)|\x1b\["
)
"""Paths of a machine, speeds, and codes for a terminal's colours."""

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def outputs(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [output for cell in notebook["cells"] for output in cell.get("outputs", [])]


def texts(output: dict[str, Any]) -> str:
    """All text of an output; a picture is none."""
    data = {key: value for key, value in output.get("data", {}).items() if "image" not in key}
    return json.dumps([output.get("text", ""), data])


def test_a_notebook_is_committed_with_its_outputs(path) -> None:
    assert path.stat().st_size < LARGEST
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in code]
    assert counts == list(range(1, len(code) + 1)), "run all of it, in one go, and save it"
    pictures = [o for o in outputs(notebook) if "image/png" in o.get("data", {})]
    assert len(pictures) >= 2


def test_its_outputs_are_those_of_any_machine(path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for output in outputs(notebook):
        assert output["output_type"] != "error" and output.get("name") != "stderr", output
        assert not MACHINE.search(texts(output)), texts(output)
    assert {key for cell in notebook["cells"] for key in cell["metadata"]} == set()
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_runs(path, monkeypatch) -> None:
    for name in ("nbclient", "nbformat", "ipykernel"):
        pytest.importorskip(name, reason=f"NO {name}: install the extra test")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = runpy.run_path(str(ROOT / "notebooks" / "execute.py"))["executed"](path, timeout=800)
    before = outputs(json.loads(path.read_text(encoding="utf-8")))
    after = outputs(json.loads(json.dumps(found)))
    # what is printed on end comes in one piece or several
    kinds = [
        [kind for kind, _ in groupby(output["output_type"] for output in each)]
        for each in (before, after)
    ]
    assert kinds[0] == kinds[1]
    assert not [output for output in after if MACHINE.search(texts(output))]
