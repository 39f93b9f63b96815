"""The notebooks run from beginning to end, and what is committed of them can be read anywhere."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from forked import Forked

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


SHORTER = {
    "tokens=16384": "tokens=1024",
    "max_samples=64": "max_samples=2",
    "max_samples=32": "max_samples=2",
    "PROMPT, PIECE, PIECES = 64, 16, 24": "PROMPT, PIECE, PIECES = 64, 16, 4",
    "texts[1:60:3]": "texts[1:16:3]",
    "(32, 16, 8, 4, 2, 1)": "(32, 1)",
    "STEPS, MICRO_BATCHES, BATCH, LENGTH = 30,": "STEPS, MICRO_BATCHES, BATCH, LENGTH = 14,",
}
"""Sizes of a notebook's runs, and those of the test."""


@pytest.mark.slow
def test_its_code_runs_and_leaves_no_file(path, tmp_path) -> None:
    """In small sizes, by a plain Python: notebooks/execute.py is what keeps the outputs."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    assert any(size in code for size in SHORTER)
    for size, shorter in SHORTER.items():
        code = code.replace(size, shorter)
    work, log = tmp_path / "work", tmp_path / "log"
    work.mkdir()

    def run() -> None:
        os.chdir(work)
        exec(compile(code, path.name, "exec"), {"__name__": "__main__"})

    assert Forked(run, log, {"MPLBACKEND": "agg"}).wait() == 0, log.read_text()
    assert not list(work.iterdir())
