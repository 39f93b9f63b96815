"""The scripts that shtab writes from the parser, as docs/start/install.md says."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from npt.cli.main import VERBS, make_parser


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_has_verbs_flags_and_choices_and_its_shell_reads_it(shell, tmp_path) -> None:
    shtab = pytest.importorskip("shtab")
    text = shtab.complete(make_parser(), shell)
    for word in (*VERBS, "learning_rate", "end_to_end"):
        assert word in text, word
    assert "no_smoke_test" not in text  # negations are there to be typed
    (tmp_path / "script").write_text(text)
    program = shutil.which(shell)
    if program is not None:
        ran = subprocess.run(
            [program, "-n", str(tmp_path / "script")], capture_output=True, text=True, timeout=60
        )
        assert (ran.returncode, ran.stderr) == (0, "")
