"""`npt import`, and a GGUF file as --model_name."""

import json

import pytest
from cli_words import flags
from gguf_files import Type, write_gguf

from npt.cli.main import main

RUN = (
    "--init random --no_smoke_test --layers 1 --adapter_rank 2 --max_length 32 --max_steps 1"
    " --batch_size 2 --eval_samples 2 --use_quantization"
)


@pytest.fixture(autouse=True)
def file(tmp_path):
    return write_gguf(tmp_path / "a.gguf", kind=Type.Q8_0)


def test_the_verb_says_what_it_wrote(file, tmp_path, capsys) -> None:
    folder = tmp_path / "out"
    assert main(flags("import", file, folder)) == 0
    wrote, origin = capsys.readouterr().out.splitlines()
    assert wrote.startswith(f"wrote {folder}: 94,528 parameters in fp16, 0.2 MB")
    assert origin == f"{file} is quantised to Q8_0, so the folder holds these rounded weights"
    assert main(flags("import", file, folder)) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert main(flags("import --json", file, tmp_path / "json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["quantization"], found["dtype"], found["size"]) == ("Q8_0", "fp16", 189056)
    assert found["parameters"] == 94528


def test_a_wrong_file_is_one_line(tmp_path, capsys) -> None:
    (tmp_path / "b.gguf").write_text("no")
    assert main(flags("import", tmp_path / "b.gguf", tmp_path / "out")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "not a GGUF file" in line and not (tmp_path / "out").exists()


def test_a_run_on_a_file_names_its_origin_and_resumes(file, tmp_path, capsys) -> None:
    (tmp_path / "lines.txt").write_text("The quick brown fox jumps over the lazy dog. \n" * 40)
    where = flags("--model_name", file, "--dataset_name", tmp_path / "lines.txt")
    run = flags(f"pretrain {RUN} --output_dir", tmp_path / "run", *where)
    assert main(run) == 0
    out = capsys.readouterr().out
    assert "a.gguf was quantised to Q8_0; its weights are loaded, not the" in out
    assert main([*run, "--resume", str(tmp_path / "run"), "--max_steps", "2"]) == 0


def test_a_plan_takes_a_file(file, capsys) -> None:
    line = "doctor --plan --json --layers 1 --max_length 32 --adapter_rank 2 --init random"
    assert main(flags(f"{line} --model_name", file)) == 0
    assert json.loads(capsys.readouterr().out)
