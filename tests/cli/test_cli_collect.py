"""`npt collect` as a user runs it, and a run on what it wrote."""

import contextlib
import io
import json
import signal
from pathlib import Path

import pytest
from cli_words import flags, saved_adapter
from forked import Program

from npt.cli.main import main

PROMPTS = 6
pytestmark = pytest.mark.usefixtures("short_library")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    return saved_adapter(tmp_path_factory.mktemp("adapters") / "fresh", rank=4)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"def function_{i}(x):\n"}) for i in range(PROMPTS)]
    path.write_text("\n".join(lines))
    return path


def call(adapter, prompts: Path, output: Path, line: str = "--use_quantization") -> int:
    size = flags("collect --max_length 40 --max_new_tokens 8 --batch_size 2 --output", output)
    return main([*size, *flags(f"{line} --adapter", adapter), *flags("--dataset_name", prompts)])


@pytest.fixture(scope="module")
def whole(adapter, prompts: Path, tmp_path_factory) -> Path:
    """Return the file of a call, with its output in `printed` next to it."""
    path = tmp_path_factory.mktemp("whole") / "failures.jsonl"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert call(adapter, prompts, path, "--use_quantization --json") == 0
    path.with_name("printed").write_text(out.getvalue())
    return path


def test_the_disagreements_are_written_and_summed_up(whole: Path) -> None:
    figures = json.loads(whole.with_name("printed").read_text())
    records = [json.loads(line) for line in whole.read_text().splitlines()]
    assert figures["prompts"] == PROMPTS and figures["disagreements"] == len(records) > 0
    assert all(record["completion"] != record["student"] for record in records)
    assert figures["kl"] > 0 and 0 < figures["acceptance"] < 1 and figures["signal"] is None
    for record in records:
        assert record["teacher_token"] != record["student_token"]
        assert 0 <= record["position"] < record["tokens"] <= 8


def test_a_run_trains_on_what_was_collected(whole: Path, tmp_path, capsys) -> None:
    assert main(flags("doctor --max_length 40 --data", whole)) == 0
    assert "⟦<s>def function_" in capsys.readouterr().out
    line = (
        "pretrain --use_quantization --init random --max_length 40 --batch_size 2 --eval_samples 2"
        " --log_steps 1 --max_steps 2 --no_smoke_test --output_dir"
    )
    assert main(flags(line, tmp_path / "run", "--dataset_name", whole)) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert [line["step"] for line in metrics] == [1, 2]
    assert all(line["loss"] is not None and line["refused_total"] == 0 for line in metrics)


def test_a_file_that_exists_is_refused_in_one_line(adapter, prompts, whole, capsys) -> None:
    before = whole.read_bytes()
    assert call(adapter, prompts, whole) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"npt: error: --output {whole} exists; choose another file or remove it"
    assert whole.read_bytes() == before


def test_a_killed_call_is_taken_up_and_ends_in_the_same_bytes(
    adapter, prompts, whole, tmp_path, capsys
) -> None:
    path = tmp_path / "failures.jsonl"
    line = "collect --max_length 40 --max_new_tokens 8 --batch_size 2 --use_quantization --adapter"
    command = flags(line, adapter, "--dataset_name", prompts, "--output", path)
    program = Program(command, tmp_path / "errors")
    program.wait_for(lambda: path.exists() and path.stat().st_size > 0)
    program.send_signal(signal.SIGTERM)
    assert program.wait() == 143, (tmp_path / "errors").read_text()
    assert call(adapter, prompts, path) == 0
    assert "compared earlier)" in capsys.readouterr().out
    assert path.read_bytes() == whole.read_bytes()


def test_prompts_of_the_command_line_are_compared(adapter, tmp_path, capsys) -> None:
    path = tmp_path / "found.jsonl"
    line = "collect --use_quantization --max_length 40 --max_new_tokens 4 --adapter"
    command = flags(line, adapter, "--output", path, "--prompt", "import os", "--prompt", "def f(")
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompts"] == 2
    found = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
    assert found and set(found) <= {"import os", "def f("}
    path.unlink()
    for more, told in (
        (["--dataset_name", "x.jsonl"], "--dataset_name x.jsonl has no effect with --prompt"),
        (["--prompt", " "], "--prompt is empty"),
    ):
        assert main([*command, *more]) == 2
        assert told in capsys.readouterr().err
    assert not path.exists()


def test_an_adapter_of_another_base_is_refused(adapter, prompts, tmp_path, capsys) -> None:
    assert call(adapter, prompts, tmp_path / "failures.jsonl", "--no_use_quantization") == 5
    assert "was trained on another base" in capsys.readouterr().err
    assert not (tmp_path / "failures.jsonl").exists()
