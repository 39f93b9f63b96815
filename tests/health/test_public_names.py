"""The public names of `npt.diagnostics`: all there, and none of them loaded before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from npt import health


@pytest.mark.parametrize("name", health.__all__)
def test_a_public_name_is_what_its_home_has(name) -> None:
    assert getattr(health, name).__module__ == health._HOME[name] and name in dir(health)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'npt\.health' has no attribute 'nothing'"):
        _ = health.nothing


def test_importing_the_package_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, npt.diagnostics; assert not {'torch', 'transformers'} & set(sys.modules), 'loaded'"
    subprocess.run([sys.executable, "-c", code], check=True)
