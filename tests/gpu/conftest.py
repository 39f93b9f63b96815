"""What lies in this folder needs a GPU, and of Python packages only those of a bare GPU machine:
see tests/test_suite.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, before what this machine is not for is deselected."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
