"""The public names of `npt.diagnostics`: all there, and none of them loaded before it is used."""

import subprocess
import sys

import pytest

from npt import diagnostics


@pytest.mark.parametrize("name", diagnostics.__all__)
def test_a_public_name_is_what_its_home_has(name) -> None:
    home = diagnostics._NAMES.homes[name]
    assert getattr(diagnostics, name).__module__ == home and name in dir(diagnostics)


def test_importing_the_package_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, npt.diagnostics; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
