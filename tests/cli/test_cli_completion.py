"""Completion: the scripts as the shells read them, and bash's own answers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from npt.cli.completion import SHELLS
from npt.cli.main import VERBS, main
from npt.config import TRACKERS
from npt.presets import presets, studies


def written(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def test_without_shtab_the_message_names_the_extra(capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert (
        capsys.readouterr().err
        == "npt: error: npt completion needs shtab, which is not installed; pip install"
        " 'npt-distill[completion]'\n"
    )


def test_an_unknown_shell_is_one_line(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", "csh"])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and "'csh'" in line and "fish" in line


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_has_verbs_flags_and_presets_and_its_shell_reads_it(
    shell, capsys, tmp_path
) -> None:
    text = written(shell, capsys)
    for word in (*VERBS, "learning_rate", "end_to_end", "swanlab", *presets()):
        assert word in text, word
    assert "no_smoke_test" not in text  # negations are there to be typed
    (tmp_path / "script").write_text(text)
    program = shutil.which(shell)
    if program is not None:
        ran = subprocess.run(
            [program, "-n", str(tmp_path / "script")], capture_output=True, text=True, timeout=60
        )
        assert (ran.returncode, ran.stderr) == (0, "")


ASK = """
source "$1"
shift
for asked in "$@"; do
    read -r -a COMP_WORDS <<< "$asked"
    [[ $asked == *' ' ]] && COMP_WORDS+=('')
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE=$asked COMP_POINT=${#asked} COMPREPLY=()
    _shtab_npt npt "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
    echo "$asked=${COMPREPLY[*]}"
done
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_verbs_flags_choices_presets_and_files(capsys, tmp_path) -> None:
    (tmp_path / "script").write_text(written("bash", capsys))
    (tmp_path / "own.yaml").write_text("")
    (tmp_path / "other.txt").write_text("")
    (tmp_path / "model.gguf").write_text("")
    (tmp_path / "runs").mkdir()
    expected = {
        "npt pre": {"pretrain"},
        "npt pretrain --learning": {"--learning_rate"},
        "npt pretrain --strategy ": {"local", "propagated", "end_to_end"},
        "npt pretrain --strategy e": {"end_to_end"},
        "npt pretrain --config ": {*presets(), "own.yaml", "runs"},
        "npt pretrain --report_to t": {name for name in TRACKERS if name.startswith("t")},
        "npt pretrain --output_dir ": {"runs"},
        "npt pretrain --dataset_name ot": {"other.txt"},
        "npt generate --adapter ru": {"runs"},
        "npt pretrain --model_name ": {"tiny", "model.gguf", "runs"},
        "npt import mo": {"model.gguf"},
        "npt sweep ow": {"own.yaml"},
        "npt sweep stability": {*studies()},
        "npt replay ": {"runs"},
        "npt completion z": {"zsh"},
    }
    ran = subprocess.run(
        ["bash", "-c", ASK, "bash", "./script", *expected],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = dict(line.split("=", 1) for line in ran.stdout.splitlines())
    assert {line: set(words.split()) for line, words in found.items()} == expected, ran.stderr


def test_a_script_is_written_without_torch(tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    code = (
        "import sys, json; from npt.cli.main import main; main(['completion', 'bash']);"
        " print(json.dumps('torch' in sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert json.loads(ran.stdout.splitlines()[-1]) is False
