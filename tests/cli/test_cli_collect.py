"""`npt collect` as a user runs it, and a run on what it wrote."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
from cli_words import flags

import npt
from npt.cli.main import main

NEW = ["--max_length", "40", "--max_new_tokens", "8"]
PROMPTS = 6
pytestmark = pytest.mark.usefixtures("short_library")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """A fresh adapter of the embedded 4-bit model."""
    model, _ = npt.load_base("tiny", quantization="nf4")
    npt.attach(model, npt.NPTConfig(rank=4))
    return npt.save_adapter(model, tmp_path_factory.mktemp("adapters") / "fresh")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"def function_{i}(x):\n"}) + "\n" for i in range(PROMPTS))
    )
    return path


def command(adapter, prompts: Path, output: Path, *arguments: str) -> list[str]:
    named = ["--adapter", str(adapter), "--dataset_name", str(prompts), "--output", str(output)]
    return ["collect", "--use_quantization", *named, *NEW, "--batch_size", "2", *arguments]


@pytest.fixture(scope="module")
def whole(adapter, prompts: Path, tmp_path_factory) -> Path:
    """Return the file of an uninterrupted call, with its output in `printed` next to it."""
    path = tmp_path_factory.mktemp("whole") / "failures.jsonl"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(command(adapter, prompts, path, "--json")) == 0
    path.with_name("printed").write_text(out.getvalue())
    return path


def test_the_disagreements_are_written_and_summed_up(whole: Path) -> None:
    figures = json.loads(whole.with_name("printed").read_text())
    records = [json.loads(line) for line in whole.read_text().splitlines()]
    assert figures["prompts"] == PROMPTS and figures["disagreements"] == len(records) > 0
    assert figures["kl"] > 0 and 0 < figures["acceptance"] < 1 and figures["signal"] is None
    assert all(
        r["completion"] != r["student"] and 0 <= r["position"] < r["tokens"] <= 8 for r in records
    )


def test_a_run_trains_on_what_was_collected(whole: Path, tmp_path, capsys) -> None:
    assert main(["doctor", "--data", str(whole), "--max_length", "40"]) == 0
    assert "⟦<s>def function_" in capsys.readouterr().out
    folder = tmp_path / "run"
    arguments = [
        "--dataset_name",
        str(whole),
        *flags("--max_length 40 --batch_size 2 --eval_samples 2 --log_steps 1"),
    ]
    assert (
        main(
            [
                *flags("pretrain --use_quantization --init random"),
                *arguments,
                "--max_steps",
                "2",
                "--output_dir",
                str(folder),
            ]
        )
        == 0
    )
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2]
    assert all(line["loss"] is not None and line["refused_total"] == 0 for line in metrics)


def test_a_file_that_exists_is_refused_in_one_line(
    adapter: Path, prompts: Path, whole: Path, capsys
) -> None:
    before = whole.read_bytes()
    assert main(command(adapter, prompts, whole)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"npt: error: --output {whole} exists; choose another file, or remove it"
    assert whole.read_bytes() == before


def test_another_base_is_an_adapter_that_does_not_fit(
    adapter, prompts: Path, tmp_path, capsys
) -> None:
    arguments = [
        a
        for a in command(adapter, prompts, tmp_path / "failures.jsonl")
        if a != "--use_quantization"
    ]
    assert main([*arguments, "--no_use_quantization"]) == 5
    assert "was trained on another base" in capsys.readouterr().err
    assert not (tmp_path / "failures.jsonl").exists()
