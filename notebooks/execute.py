"""Runs the notebooks from beginning to end, and keeps their outputs in them.

    python notebooks/execute.py [NOTEBOOK ...]

Nothing of the machine is kept: no times, no paths. It takes nbclient and ipykernel, of the extra
`test`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def executed(path: Path, timeout: int = 600) -> Any:
    """Return a notebook, run in an empty folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised an error.
        ValueError: it left files in the folder.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(
            notebook,
            timeout=timeout,
            kernel_name="python3",
            record_timing=False,
            resources=resources,
        ).execute()
        left = [each.name for each in Path(folder).iterdir()]
    if left:
        raise ValueError(f"{path.name} leaves files where it runs: {', '.join(left)}")
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("notebooks", nargs="*", type=Path, metavar="NOTEBOOK")
    args = parser.parse_args(argv)
    import nbformat

    for path in args.notebooks or sorted(HERE.glob("*.ipynb")):
        nbformat.write(executed(path), path)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
