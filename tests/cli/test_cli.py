"""The program as a user runs it: exit status, one line on standard error, and what is, or is not,
on disk afterwards.
"""

import contextlib
import io
import json
import os
import runpy
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_words import flags
from forked import Program

from npt.base.source import EMBEDDED_FOLDER
from npt.cli.main import main
from npt.cli.pretrain import _check_placing
from npt.config import BaseConfig
from npt.distill.strategies import STRATEGIES
from npt.errors import ConfigError

pytestmark = pytest.mark.usefixtures("short_library")

SCRIPT = Path(__file__).parents[2] / "pretrain_npt_safe.py"

# A run that is over in seconds: a few steps of short samples on the embedded model.
SHORT = flags(
    "--use_quantization --init random --max_length 32 --batch_size 2 --eval_samples 2 --log_steps 1"
)


def run(folder: Path, line: str = "", *more: str) -> int:
    return main(["pretrain", *SHORT, "--output_dir", str(folder), *flags(line), *more])


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def record_of(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


def write_ids(file: Path, rows: list[list[int]]) -> str:
    file.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return str(file)


@dataclass(frozen=True)
class Ended:
    """A run that ended 0: its folder, and what it said. Nobody writes to the folder."""

    folder: Path
    out: str
    err: str


@contextlib.contextmanager
def heard() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        yield out, err


@pytest.fixture(scope="module")
def plain(short_library: None, tmp_path_factory) -> Ended:
    """A run as most are, of the training script."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    line = "--max_steps 2 --share_embeddings --gradient_accumulation_steps 2 --output_dir"
    with heard() as (out, err), pytest.MonkeyPatch.context() as p:
        p.setattr("sys.argv", [SCRIPT.name, *SHORT, *flags(line), str(folder)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(SCRIPT), run_name="__main__")
    assert end.value.code == 0, err.getvalue()
    return Ended(folder, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def special(short_library: None, tmp_path_factory) -> Ended:
    """One whose settings are rare ones, from a file and from flags."""
    place = tmp_path_factory.mktemp("special")
    config = place / "run.yaml"
    config.write_text("max_steps: 5\nadapter_rank: 4\nsafe_mode: true\ntargets: gate\n")
    line = (
        "--use_fp16 --learning_rate 0.01 --max_steps 4 --batch_size 8"
        " --num_samples 8 --num_epochs 4 --no_smoke_test"
    )
    with heard() as (out, err):
        assert run(place / "a[b]c", line, "--config", str(config)) == 0
    return Ended(place / "a[b]c", out.getvalue(), err.getvalue())


def test_a_run_ends_0_with_its_folder_and_its_table(plain: Ended, capsys) -> None:
    for words in (
        "NF4, computes in fp32",
        "share the whole base",
        "smoke test passed",
        "Fidelity on ",
        "floor",
        "before",
    ):
        assert words in plain.out
    folder = plain.folder
    fidelity = json.loads((folder / "fidelity.json").read_text())
    assert {"teacher", "floor", "initial", "student", "layers"} <= set(fidelity)
    assert set(fidelity["layers"]) == {"4", "5", "6", "7"}
    record = record_of(folder)
    assert record["precision"]["compute_dtype"] == {"float32": 58}
    assert record["settings"]["use_quantization"] is True
    assert record["settings"]["matmul_precision"] == "auto"
    assert record["precision"]["matmul_precision"] == "highest"
    assert [line["step"] for line in metrics(folder)] == [1, 2]
    last, final = folder / "checkpoints" / "step-00000002" / "adapter", folder / "adapter"
    one, other = (path / "adapter_model.safetensors" for path in (last, final))
    assert one.read_bytes() == other.read_bytes()
    assert "Fidelity to the teacher" in (final / "README.md").read_text()
    asked = flags("--max_length 32 --eval_samples 2 --json")
    assert main(["evaluate", "--adapter", str(folder), *asked]) == 0
    said = capsys.readouterr()
    assert f"adapter {final}" in said.err.replace("\n", "")
    # The same weights on the same tokens, in the same batches: the same figures to the last digit.
    assert json.loads(said.out)["student"] == fidelity["student"]


def test_rare_settings_are_those_of_the_run(special: Ended) -> None:
    """Flags win over the file, fp16 with quantisation is fp32 and one warning, the original form
    trains in safe mode, and brackets in a path are no markup.
    """
    record, folder = record_of(special.folder), special.folder
    settings = record["settings"]
    assert (settings["max_steps"], settings["rank"], settings["modulation"]) == (4, 4, "additive")
    assert "computes in fp32 on " in special.out
    adapter = folder / "checkpoints" / "step-00000004" / "adapter"
    config = json.loads((adapter / "adapter_config.json").read_text())["npt"]
    assert (config["modulation"], config["targets"]) == ("additive", ["gate"])
    losses = [line["loss"] for line in metrics(folder)]  # of the same samples at every step
    assert len(losses) == 4 and losses[-1] < losses[0]
    (warned,) = [line for line in special.err.splitlines() if "fp16" in line]
    assert "computes in fp32" in warned
    assert record["precision"]["compute_dtype"] == {"float32": 58}
    assert "a[b]c" in special.out


def test_an_unquantised_fp16_base_trains(tmp_path) -> None:
    line = "--no_use_quantization --use_fp16 --max_length 16 --batch_size 1 --max_steps 1"
    assert run(tmp_path / "run", line, "--no_smoke_test") == 0
    record = record_of(tmp_path / "run")["precision"]
    assert set(record["compute_dtype"]) == {"float16"}
    assert set(record["adapter_dtype"]) == {"float32"}
    assert metrics(tmp_path / "run")[-1]["refused_total"] == 0


def test_files_that_cannot_be_trained_on_are_refused_first(tmp_path, capsys) -> None:
    """The models have no weights, so nothing can have been loaded."""
    (tmp_path / "empty.txt").touch()
    stored = {
        **json.loads((EMBEDDED_FOLDER / "config.json").read_text()),
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    }
    for name, config in (("gpt2", {"model_type": "gpt2"}), ("packed", stored)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    for line, words in (
        ("--dataset_name empty.txt", "is empty"),
        ("--model_name gpt2", "gpt2"),
        ("--model_name packed --teacher_precision bf16", "is itself stored in 4 bit"),
    ):
        flag, name, *more = flags(line)
        assert run(tmp_path / "run", "", flag, str(tmp_path / name), *more) == 2
        assert words in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_folder_with_another_run_is_refused_and_left_alone(tmp_path, capsys) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert run(tmp_path, "--max_steps 1") == 2
    assert "holds a run already" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_one_of_several_processes_that_no_launcher_started_is_refused(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    assert run(tmp_path / "run") == 6
    error = capsys.readouterr().err
    assert "RANK expected, but not set; start them with torchrun or accelerate" in error
    assert not (tmp_path / "run").exists()


def test_an_unquantised_teacher_beside_a_sharded_base_is_refused_before_loading() -> None:
    base = BaseConfig(shard_base=True, use_quantization=True, teacher_precision="bf16")
    with pytest.raises(ConfigError, match="--teacher_precision bf16 loads a whole"):
        _check_placing(base, 2)


def test_more_than_one_percent_refusals_are_said_in_the_last_line(tmp_path, capsys) -> None:
    rows = [[3 + i % 90, 4, 5, 6 + i] if i % 10 else [3, 99_999, i, 6] for i in range(6, 13)]
    file = write_ids(tmp_path / "ids.jsonl", rows)
    line = "--batch_size 1 --no_smoke_test --eval_samples 1 --seed 1 --dataset_name"
    assert run(tmp_path / "run", line, file) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("warning: ") and "micro-batches were refused" in last and "data" in last


def test_a_line_that_cannot_be_read_mid_run_loses_no_step(tmp_path, monkeypatch, capsys) -> None:
    # what is read ahead ends before the broken line, and so does the search for held-out samples
    monkeypatch.setattr("npt.data.samples.SHUFFLE_BLOCK", 32)
    file = tmp_path / "data.jsonl"
    write_ids(file, [[3 + i, 4, 5, 6, 7] for i in range(64)])
    file.write_text(file.read_text() + "{broken\n")
    folder, line = tmp_path / "run", "--streaming --eval_samples 1 --batch_size 16 --dataset_name"
    assert run(folder, line, str(file)) == 2
    assert "line 65" in capsys.readouterr().err
    events = events_of(folder)
    assert [e["event"] for e in events[-2:]] == ["error", "save"]
    assert (folder / events[-1]["folder"] / "adapter" / "adapter_model.safetensors").is_file()


def test_packed_prompts_and_replayed_text_are_trained_and_measured(tmp_path, capsys) -> None:
    rows = [f"def f{i}(x):,return x + {i}" for i in range(60)]
    (tmp_path / "data.csv").write_text("\n".join(["question,answer", *rows, "never answered,"]))
    columns = ["--dataset_name", str(tmp_path / "data.csv")]
    columns += flags("--prompt_column question --completion_column answer")
    folder = tmp_path / "run"
    line = (
        "--packing --replay_dataset builtin --replay_ratio 0.5 --num_epochs 2"
        " --max_steps 2 --no_smoke_test --strategy end_to_end --logit_kl_weight 1"
    )
    assert run(folder, line, *columns) == 0
    events = {e.get("source", e["event"]): e for e in events_of(folder)}
    assert events["data"]["skipped"] == {"empty completion": events["data"]["records"] // 61}
    assert events["replay data"]["samples"] > 0
    assert "skipped (empty completion)" in capsys.readouterr().out
    adapter = str(folder / "checkpoints" / "step-00000002" / "adapter")
    asked = flags("--use_quantization --max_length 32 --eval_samples 2 --json --batch_size 2")
    # in the run's batches: the same sums, to the last digit
    assert main(["evaluate", "--adapter", adapter, *asked, *columns]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["student"] == json.loads((folder / "fidelity.json").read_text())["student"]
    assert measured["student"]["tokens"] < 2 * 10  # completions only


def program(folder: Path, line: str, *more: str, **how: Any) -> Program:
    command = ["pretrain", *SHORT, *flags(line), "--output_dir", str(folder), *more]
    return Program(command, folder.with_name("errors"), **how)


def test_a_reader_that_leaves_does_not_end_a_run_on_ones_own_text(tmp_path) -> None:
    folder, text = tmp_path / "run", tmp_path / "own.txt"
    text.write_text("".join(f"def function_{i}(x):\n    return x + {i}\n\n" for i in range(60)))
    line = "--no_smoke_test --max_steps 2 --dataset_name"
    command = program(folder, f"{line} {text}", read=True)
    assert os.read(command.out, 1)
    os.close(command.out)
    assert command.wait() == 0, command.errors.read_text()
    assert json.loads((folder / "fidelity.json").read_text())["heldout"] is True


def test_a_tracker_that_cannot_start_is_one_line_and_leaves_no_folder(
    tmp_path, monkeypatch, capsys
) -> None:
    from accelerate.tracking import WandBTracker

    def refuse(_: object) -> None:
        raise RuntimeError("api_key not configured")

    monkeypatch.setattr(WandBTracker, "start", refuse)
    assert run(tmp_path / "run", "--use_wandb --max_steps 1") == 2
    error = capsys.readouterr().err
    assert "cannot start wandb: api_key not configured" in error and "WANDB_MODE=offline" in error
    assert not (tmp_path / "run").exists()


def test_what_was_trained_on_is_not_called_held_out(tmp_path, capsys) -> None:
    data = ["--dataset_name", write_ids(tmp_path / "small.jsonl", [[5, 6, 7, 8, 9]])]
    folder = tmp_path / "run"
    assert run(folder, "--max_steps 1", *data) == 0
    assert "TRAINING tokens" in capsys.readouterr().out
    asked = flags("--use_quantization --max_length 32 --json")
    assert main(["evaluate", "--adapter", str(folder), *asked, *data]) == 0
    assert json.loads(capsys.readouterr().out)["heldout"] is False
    # nothing of another file was trained on, however small it is
    other = ["--dataset_name", write_ids(tmp_path / "other.jsonl", [[9, 8, 7, 6, 5]])]
    assert main(["evaluate", "--adapter", str(folder), *asked, *other]) == 0
    assert json.loads(capsys.readouterr().out)["heldout"] is True


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_out_of_memory_is_one_line(device: str, tmp_path, monkeypatch, capsys) -> None:
    import torch

    import npt

    def exhausted(*_: object, **__: object) -> None:
        if device == "cpu":
            torch.empty(1 << 50, dtype=torch.uint8)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(npt, "load_base", exhausted)
    assert run(tmp_path / "run") == 2
    assert "lower --batch_size or --max_length" in capsys.readouterr().err


def test_a_failing_smoke_test_ends_4_and_writes_nothing(tmp_path, capsys, monkeypatch) -> None:
    local = STRATEGIES["local"]

    def spoilt(*arguments: Any) -> Any:
        sums = local(*arguments)
        return sums._replace(loss=sums.loss * torch.nan)

    monkeypatch.setitem(STRATEGIES, "local", spoilt)
    assert run(tmp_path / "run") == 4
    assert "nan" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_sigterm_saves_and_ends_143(tmp_path) -> None:
    folder = tmp_path / "run"
    line = "--max_steps 100000 --num_epochs 1000 --num_samples 64 --no_smoke_test"
    command = program(folder, line)
    log = folder / "metrics.jsonl"
    command.wait_for(lambda: log.is_file() and log.stat().st_size > 0)
    command.send_signal(signal.SIGTERM)
    assert command.wait() == 143, command.errors.read_text()
    assert [event["event"] for event in events_of(folder)][-2:] == ["signal", "save"]


def checkpoint_of(folder: Path, step: int) -> dict[str, bytes]:
    """The tensors of a checkpoint, byte by byte."""
    checkpoint = folder / "checkpoints" / f"step-{step:08d}"
    return {
        name: (checkpoint / name).read_bytes()
        for name in ("state.safetensors", "adapter/adapter_model.safetensors")
    }


def test_a_run_is_taken_up_exactly_from_the_command_line(tmp_path, capsys) -> None:
    constant = (
        "--scheduler_type constant --save_steps 1 --learning_rate 1e-3 --num_samples 12"
        " --eval_samples 1 --layers 6-7"
    )
    assert run(tmp_path / "whole", f"{constant} --max_steps 2 --no_smoke_test") == 0
    assert run(tmp_path / "part", f"{constant} --max_steps 1 --no_smoke_test") == 0
    capsys.readouterr()
    assert run(tmp_path / "part", f"{constant} --max_steps 2 --resume auto") == 0
    out = capsys.readouterr().out
    assert "resuming from" in out and "max_steps was 1, is now 2" in out and "smoke test" not in out
    assert checkpoint_of(tmp_path / "part", 2) == checkpoint_of(tmp_path / "whole", 2)
    one, other = ((tmp_path / name / "fidelity.json").read_text() for name in ("whole", "part"))
    assert json.loads(one) == json.loads(other)
    assert [line["step"] for line in metrics(tmp_path / "part")] == [1, 2]


def test_a_bad_checkpoint_is_one_line_and_status_5_before_loading(
    plain: Ended, tmp_path, monkeypatch, capsys
) -> None:
    import npt

    monkeypatch.setattr(npt, "load_base", lambda *_, **__: pytest.fail("the base was loaded"))
    stopped_run = shutil.copytree(plain.folder, tmp_path / "run")
    checkpoint = stopped_run / "checkpoints" / "step-00000002"
    damaged = bytearray((checkpoint / "state.json").read_bytes())
    for line, *named in (
        ("--resume auto --adapter_rank 8", "--adapter_rank 16", "but this run has 8"),
        ("--resume auto --seed 3", "--seed 0", "but this run has 3"),
        ("--resume auto --max_length 64", "--max_length 32", "but this run has 64"),
        ("--resume auto --quant_type fp4", "--quant_type 'nf4'", "but this run has 'fp4'"),
        ("--resume none", "--resume none is neither a checkpoint"),
    ):
        assert run(stopped_run, f"--gradient_accumulation_steps 2 {line}") == 5
        (error,) = capsys.readouterr().err.splitlines()
        assert [word for word in named if word not in error] == []
    damaged[7] ^= 1
    (checkpoint / "state.json").write_bytes(damaged)
    for resume in ("auto", str(checkpoint), str(stopped_run)):
        assert run(stopped_run, "--gradient_accumulation_steps 2 --resume", resume) == 5
        (error,) = capsys.readouterr().err.splitlines()
        assert f"{checkpoint}/state.json is damaged: sha256 " in error and "manifest" in error


SECRETS = {
    "HF_TOKEN": "hf_SecretOfTheHub0123456789",
    "WANDB_API_KEY": "5ec4e7" + "ab" * 17,
    "AWS_SECRET_ACCESS_KEY": "SecretOfTheCloud/0123456789",
    "MY_PASSWORD": "correct horse battery staple",
}


def test_too_many_refusals_exit_3_and_leak_no_environment_secret(
    tmp_path, monkeypatch, capsys
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_MODE", "offline")
    # the stream is read in its order, but for the order within a block
    monkeypatch.setattr("npt.data.samples.SHUFFLE_BLOCK", 32)
    folder = tmp_path / "run"
    rows = [[3 + i, 4, 5, 6] if i < 32 else [3, 99_999, i % 7, 6 + i] for i in range(96)]
    line = (
        "--streaming --max_consecutive_bad 3 --eval_samples 1 --save_steps 2 --use_tensorboard"
        " --use_wandb --eval_steps 2 --max_steps 150 --batch_size 8 --no_smoke_test --dataset_name"
    )
    assert run(folder, line, write_ids(tmp_path / "ids.jsonl", rows)) == 3
    stopped = capsys.readouterr()
    assert "3 refusals in a row" in stopped.err and "99999" in stopped.err
    assert [p.name for p in (folder / "postmortem").iterdir()]
    assert [event["event"] for event in events_of(folder)][-2:] == ["stopped", "save"]
    assert metrics(folder) and all(line["loss"] is not None for line in metrics(folder))

    written = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {"postmortem", "checkpoints", "best", "wandb", "npt"} <= {
        path.relative_to(folder).parts[0] for path in written
    }
    for name, value in SECRETS.items():
        assert value not in stopped.out + stopped.err, name
        assert [path for path, content in written.items() if value.encode() in content] == [], name


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ConfigError):
        main(["pretrain", "--debug", "--learning_rate", "-1"])
