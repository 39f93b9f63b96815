"""The program as a user runs it: exit status, one line on standard error, and what is, or is not,
on disk afterwards.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from forked import Program

from npt.base.load import EMBEDDED_FOLDER
from npt.cli.main import main
from npt.cli.pretrain import _check_placing
from npt.config import BaseConfig
from npt.errors import ConfigError

pytestmark = pytest.mark.usefixtures("short_library")

SCRIPT = Path(__file__).parents[2] / "pretrain_npt_safe.py"

# A run that is over in seconds: a few steps of short samples on the embedded model.
SHORT = [
    "--use_quantization",
    "--init",
    "random",
    "--max_length",
    "32",
    "--batch_size",
    "2",
    "--eval_samples",
    "2",
    "--log_steps",
    "1",
]


def run(folder: Path, *arguments: str) -> int:
    return main(["pretrain", *SHORT, "--output_dir", str(folder), *arguments])


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@dataclass(frozen=True)
class Ended:
    """A run that ended 0: its folder, and what it said."""

    folder: Path
    out: str
    err: str


def ended(folder: Path, *arguments: str) -> Ended:
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        assert run(folder, *arguments) == 0
    return Ended(folder, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def plain(short_library: None, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run as most are, of the training script. Nobody writes to its folder."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    own = [
        "--max_steps",
        "2",
        "--share_embeddings",
        "--gradient_accumulation_steps",
        "2",
        "--output_dir",
        str(folder),
    ]
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
        pytest.MonkeyPatch.context() as p,
    ):
        p.setattr("sys.argv", [SCRIPT.name, *SHORT, *own])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(SCRIPT), run_name="__main__")
    assert end.value.code == 0, err.getvalue()
    return Ended(folder, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def special(short_library: None, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """One whose settings are rare ones, from a file and from flags. Nobody writes to its folder."""
    place = tmp_path_factory.mktemp("special")
    (place / "run.yaml").write_text(
        "max_steps: 5\nadapter_rank: 4\nsafe_mode: true\ntargets: gate\n", encoding="utf-8"
    )
    own = [
        "--config",
        str(place / "run.yaml"),
        "--use_fp16",
        "--device_map",
        "auto",
        "--learning_rate",
        "0.01",
    ]
    return ended(
        place / "a[b]c",
        *own,
        "--max_steps",
        "4",
        "--batch_size",
        "8",
        "--num_samples",
        "8",
        "--num_epochs",
        "4",
    )


def test_a_run_ends_0_with_its_folder_and_its_table(
    plain: Ended, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "NF4, computes in fp32" in plain.out
    assert "share the whole base" in plain.out
    assert "smoke test passed" in plain.out
    for row in (
        "floor (attention dropped)",
        "student before training",
        "student after training",
        "teacher (the base)",
    ):
        assert row in plain.out
    folder = plain.folder
    fidelity = json.loads((folder / "fidelity.json").read_text())
    assert {"teacher", "floor", "initial", "student", "layers"} <= set(fidelity)
    assert set(fidelity["layers"]) == {"4", "5", "6", "7"}
    record = json.loads((folder / "run.json").read_text())
    assert record["precision"]["compute_dtype"] == {"float32": 58}
    assert record["settings"]["use_quantization"] is True
    assert [line["step"] for line in metrics(folder)] == [1, 2]

    last, final = folder / "checkpoints" / "step-00000002" / "adapter", folder / "adapter"
    assert (final / "adapter_model.safetensors").read_bytes() == (
        last / "adapter_model.safetensors"
    ).read_bytes()
    assert "Fidelity to the teacher" in (final / "README.md").read_text()
    assert (
        main(
            [
                "evaluate",
                "--adapter",
                str(folder),
                "--max_length",
                "32",
                "--eval_samples",
                "2",
                "--json",
            ]
        )
        == 0
    )
    said = capsys.readouterr()
    measured = json.loads(said.out)
    assert f"adapter {final}" in said.err.replace("\n", "")
    # The same weights on the same tokens, in the same batches: the same figures to the last digit.
    assert measured["student"] == fidelity["student"]


def test_flags_win_over_the_yaml_file(special: Ended) -> None:
    settings = json.loads((special.folder / "run.json").read_text())["settings"]
    assert (settings["max_steps"], settings["rank"], settings["modulation"]) == (4, 4, "additive")


def test_the_original_form_trains_in_safe_mode(special: Ended) -> None:
    config = json.loads(
        (
            special.folder / "checkpoints" / "step-00000004" / "adapter" / "adapter_config.json"
        ).read_text()
    )
    assert config["npt"]["modulation"] == "additive"
    assert config["npt"]["targets"] == ["gate"]
    losses = [line["loss"] for line in metrics(special.folder)]  # of the same samples at every step
    assert len(losses) == 4 and losses[-1] < losses[0]


def test_fp16_with_quantisation_is_fp32_and_one_warning(special: Ended) -> None:
    warned = [line for line in special.err.splitlines() if "fp16" in line]
    assert len(warned) == 1 and "computes in fp32" in warned[0]
    assert json.loads((special.folder / "run.json").read_text())["precision"]["compute_dtype"] == {
        "float32": 58
    }


def test_a_base_spread_over_what_there_is_trains(special: Ended) -> None:
    assert "computes in fp32 on " in special.out
    assert json.loads((special.folder / "run.json").read_text())["settings"]["device_map"] == "auto"


def test_brackets_in_a_path_are_no_markup(special: Ended) -> None:
    assert "a[b]c" in special.out


def test_an_unquantised_fp16_base_trains(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = [
        "--use_fp16",
        "--init",
        "random",
        "--max_length",
        "16",
        "--batch_size",
        "1",
        "--eval_samples",
        "1",
        "--max_steps",
        "1",
    ]
    assert main(["pretrain", *arguments, "--no_smoke_test", "--output_dir", str(folder)]) == 0
    record = json.loads((folder / "run.json").read_text())["precision"]
    assert set(record["compute_dtype"]) == {"float16"} and set(record["adapter_dtype"]) == {
        "float32"
    }
    assert metrics(folder)[-1]["refused_total"] == 0


BAD = {
    "negative learning rate": (["--learning_rate", "-1"], ["learning_rate", "-1"]),
    "rank 0": (["--adapter_rank", "0"], ["adapter_rank", "0"]),
    "rank beyond D": (["--adapter_rank", "193"], ["adapter_rank", "193", "192"]),
    "layers out of range": (["--layers", "6-9"], ["layers", "9", "7"]),
    "layers unreadable": (["--layers", "upper"], ["layers", "upper", "upper_half"]),
    "unknown target": (["--targets", "gate,mlp"], ["targets", "mlp"]),
    "unknown model path": (["--model_name", "./no/such/model"], ["./no/such/model", "model_name"]),
    "missing text file": (["--dataset_name", "none.txt"], ["none.txt", "dataset_name"]),
    "bound of 1": (["--mult_bound", "1"], ["mult_bound", "1"]),
    "safe mode with a multiplicative term": (
        ["--safe_mode", "--modulation", "both"],
        ["safe_mode", "both"],
    ),
    "stages that do not sum to 1": (
        ["--stages", "local:0.7,end_to_end:0.7"],
        ["stages", "1.4", "sum to 1"],
    ),
    "a stage without a step": (
        ["--stages", "local:0.9,propagated:0.1", "--max_steps", "2"],
        ["stages", "propagated", "none of 2 steps"],
    ),
    "a stage that is none": (
        ["--stages", "global:1"],
        ["stages", "'global'", "local, propagated, end_to_end"],
    ),
    "stages and a strategy": (
        ["--stages", "local:1", "--strategy", "end_to_end"],
        ["--stages is local:1", "--strategy"],
    ),
    "a teacher of the base's own precision": (
        ["--teacher_precision", "fp32", "--no_use_quantization"],
        ["teacher_precision"],
    ),
    "calibration tokens without a calibrated start": (
        ["--calibration_tokens", "700", "--init", "random"],
        ["calibration_tokens", "700", "--init calibrated"],
    ),
    "a budget without a calibrated start": (
        ["--rank_budget", "40"],
        ["rank_budget", "40", "--init calibrated"],
    ),
    "a budget that starves a layer": (
        ["--init", "calibrated", "--rank_budget", "3"],
        ["rank_budget", "3", "4 converted layers"],
    ),
    "ranks of other layers": (["--ranks", "4,5"], ["--ranks has 2 ranks (4,5)", "4 layers"]),
    "ranks that are none": (["--ranks", "4,x"], ["ranks", "4,x"]),
    "a rank of its own beyond D": (["--ranks", "4,4,4,193"], ["ranks", "193", "192"]),
    "steps that are none": (["--trace_steps", "3-1"], ["trace_steps", "3-1", "1-5"]),
    "a ratio of nothing to replay": (
        ["--replay_ratio", "0.3"],
        ["replay_ratio", "0.3", "replay_dataset"],
    ),
    "a missing file to replay": (["--replay_dataset", "none.txt"], ["none.txt"]),
    "shares of a base for one process": (
        ["--shard_base"],
        ["shard_base", "torchrun", "device_map"],
    ),
    "two ways to place a base": (
        ["--shard_base", "--device_map", "auto"],
        ["shard_base", "device_map auto"],
    ),
    "completions without prompts": (
        ["--completion_column", "a"],
        ["completion_column", "prompt_column"],
    ),
    "prompts of text that has none": (
        ["--prompt_column", "q", "--completion_column", "a"],
        ["'q'", "prompt_column"],
    ),
    "kept residual": (["--residual", "keep"], ["residual", "keep", "--teacher_precision"]),
    "samples longer than the model": (["--max_length", "2000"], ["max_length", "2000", "1024"]),
    "training on the held-out files": (
        ["--dataset_split", "heldout"],
        ["dataset_split", "heldout"],
    ),
    "a split that is none": (["--dataset_split", "foo"], ["foo", "train, heldout"]),
    "a configuration of the built-in text": (["--dataset_config", "x"], ["dataset_config", "x"]),
    "a seed beyond 31 bits": (["--seed", "99999999999999999999"], ["seed", "99999999999999999999"]),
    "a share beyond 1": (["--max_refused_share", "2"], ["max_refused_share", "2"]),
    "weights for other layers": (
        ["--layer_weights", "1,2,3"],
        ["layer_weights", "1,2,3", "4 layers"],
    ),
    "a temperature without logits": (
        ["--logit_temperature", "2"],
        ["logit_temperature", "logit_kl_weight"],
    ),
    "logit KL without logits": (["--logit_kl_weight", "1"], ["logit_kl_weight", "end_to_end"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_status_2_and_no_folder(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, named = BAD[case]
    folder = tmp_path / "run"
    assert run(folder, *arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("npt: error: ")
    assert [word for word in named if word not in lines[0]] == []
    assert not folder.exists()


def test_an_empty_text_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "empty.txt"
    file.touch()
    assert run(tmp_path / "run", "--dataset_name", str(file)) == 2
    assert "is empty" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_no_llama_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "gpt2"}')
    assert run(tmp_path / "run", "--model_name", str(model)) == 2
    assert "gpt2" in capsys.readouterr().err


def test_a_teacher_stored_in_4_bit_is_refused_by_its_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder has no weights, so nothing can have been loaded."""
    model = tmp_path / "model"
    model.mkdir()
    stored = {
        **json.loads((EMBEDDED_FOLDER / "config.json").read_text()),
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    }
    (model / "config.json").write_text(json.dumps(stored))
    assert run(tmp_path / "run", "--model_name", str(model), "--teacher_precision", "bf16") == 2
    assert "is itself stored in 4 bit" in capsys.readouterr().err


def test_a_folder_with_another_run_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    assert run(folder, "--max_steps", "1") == 2
    assert "holds another run" in capsys.readouterr().err
    assert [p.name for p in folder.iterdir()] == ["run.json"]


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A name too long for the file system stops root as well, whom a read-only folder would not.
    assert run(tmp_path / ("x" * 300), "--max_steps", "1", "--no_smoke_test") == 2
    assert "output_dir" in capsys.readouterr().err


def test_one_of_several_processes_that_no_launcher_started_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(tmp_path / "run") == 2
    assert (
        "WORLD_SIZE is 2, but RANK is not set; start the processes with torchrun or accelerate"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("base", "strategy", "init", "said"),
    [
        (
            BaseConfig(device_map="auto"),
            "local",
            "random",
            (
                "--device_map auto gives all GPUs to one process, but 2 were started; take"
                " --shard_base"
            ),
        ),
        (
            BaseConfig(shard_base=True),
            "local",
            "calibrated",
            "--init calibrated needs the whole base in one process",
        ),
        (
            BaseConfig(shard_base=True, use_quantization=True, teacher_precision="bf16"),
            "local",
            "random",
            "--teacher_precision bf16 loads",
        ),
        (
            BaseConfig(shard_base=True),
            "end_to_end",
            "random",
            "--strategy end_to_end does not go with --shard_base",
        ),
    ],
)
def test_bad_placing_for_several_processes_is_refused_before_loading(
    base: BaseConfig, strategy: str, init: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        _check_placing(base, [strategy], 2, init)


def test_more_than_one_percent_refusals_are_said_in_the_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ids.jsonl"
    rows = [[3 + i % 90, 4, 5, 6 + i] if i % 10 else [3, 99_999, i, 6] for i in range(6, 13)]
    file.write_text(
        "".join(json.dumps({"input_ids": row}) + "\n" for row in rows), encoding="utf-8"
    )
    arguments = [
        "--dataset_name",
        str(file),
        "--batch_size",
        "1",
        "--no_smoke_test",
        "--eval_samples",
        "1",
        "--seed",
        "1",
    ]
    assert run(tmp_path / "run", *arguments) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("warning: ") and "micro-batches were refused" in last and "data" in last


def test_a_line_that_cannot_be_read_mid_run_loses_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # what is read ahead ends before the broken line
    monkeypatch.setattr("npt.data.samples.SHUFFLE_BLOCK", 32)
    file = tmp_path / "data.jsonl"
    lines = [json.dumps({"input_ids": [3 + i, 4, 5, 6, 7]}) for i in range(64)]
    file.write_text("\n".join([*lines, "{broken"]) + "\n", encoding="utf-8")
    folder = tmp_path / "run"
    # Held-out samples are looked for first, so few are asked for: the search must end before the
    # broken line.
    assert (
        run(
            folder,
            "--dataset_name",
            str(file),
            "--streaming",
            "--eval_samples",
            "1",
            "--batch_size",
            "16",
        )
        == 2
    )
    assert "line 65" in capsys.readouterr().err
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events[-2:]] == ["error", "save"]
    assert (folder / events[-1]["folder"] / "adapter" / "adapter_model.safetensors").is_file()


def test_packed_prompts_and_replayed_text_are_trained_and_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        "question,answer",
        *(f"def f{i}(x):,return x + {i}" for i in range(60)),
        "never answered,",
    ]
    (tmp_path / "data.csv").write_text("\n".join(rows), encoding="utf-8")
    columns = [
        "--dataset_name",
        str(tmp_path / "data.csv"),
        "--prompt_column",
        "question",
        "--completion_column",
        "answer",
    ]
    folder = tmp_path / "run"
    mixed = [
        "--packing",
        "--padding_side",
        "left",
        "--replay_dataset",
        "builtin",
        "--replay_ratio",
        "0.5",
        "--num_epochs",
        "2",
    ]
    assert (
        run(
            folder,
            *columns,
            *mixed,
            "--max_steps",
            "2",
            "--no_smoke_test",
            "--strategy",
            "end_to_end",
            "--logit_kl_weight",
            "1",
        )
        == 0
    )
    events = {
        e.get("source", e["event"]): e
        for e in map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    }
    assert events["data"]["skipped"] == {"empty completion": events["data"]["records"] // 61}
    assert events["replay data"]["samples"] > 0
    assert "skipped (empty completion)" in capsys.readouterr().out
    adapter = folder / "checkpoints" / "step-00000002" / "adapter"
    arguments = [
        "--adapter",
        str(adapter),
        "--use_quantization",
        "--max_length",
        "32",
        "--eval_samples",
        "2",
        "--json",
    ]
    # in the run's batches: the same sums, to the last digit
    assert main(["evaluate", *arguments, "--batch_size", "2", *columns]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["student"] == json.loads((folder / "fidelity.json").read_text())["student"]
    assert measured["student"]["tokens"] < 2 * 10  # completions only


def test_a_reader_that_leaves_does_not_end_a_run_on_ones_own_text(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (tmp_path / "own.txt").write_text(
        "".join(f"def function_{i}(x):\n    return x + {i}\n\n" for i in range(60)),
        encoding="utf-8",
    )
    quick = ["--dataset_name", str(tmp_path / "own.txt"), "--no_smoke_test", "--max_steps", "2"]
    program = Program(
        ["pretrain", *SHORT, *quick, "--output_dir", str(folder)], tmp_path / "errors", read=True
    )
    assert os.read(program.out, 1)
    os.close(program.out)
    assert program.wait() == 0, program.errors.read_text()
    assert json.loads((folder / "fidelity.json").read_text())["heldout"] is True


def test_a_tracker_that_cannot_start_is_one_line_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from accelerate.tracking import WandBTracker

    def refuse(_: object) -> None:
        raise RuntimeError("api_key not configured")

    monkeypatch.setattr(WandBTracker, "start", refuse)
    monkeypatch.setattr("npt.cli.pretrain.load", lambda *_: pytest.fail("the base was loaded"))
    assert run(tmp_path / "run", "--use_wandb", "--max_steps", "1") == 2
    error = capsys.readouterr().err
    assert (
        "wandb cannot be started: api_key not configured" in error and "WANDB_MODE=offline" in error
    )
    assert not (tmp_path / "run").exists()


def test_what_was_trained_on_is_not_called_held_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small.jsonl"
    file.write_text(json.dumps({"input_ids": [5, 6, 7, 8, 9]}) + "\n", encoding="utf-8")
    folder = tmp_path / "run"
    assert run(folder, "--dataset_name", str(file), "--max_steps", "1") == 0
    assert "TRAINING tokens" in capsys.readouterr().out
    adapter = folder / "checkpoints" / "step-00000001" / "adapter"
    arguments = [
        "--adapter",
        str(adapter),
        "--use_quantization",
        "--dataset_name",
        str(file),
        "--max_length",
        "32",
        "--json",
    ]
    assert main(["evaluate", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["heldout"] is False


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_out_of_memory_is_one_line(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    import npt

    def exhausted(*_: object, **__: object) -> None:
        if device == "cpu":
            torch.empty(1 << 50, dtype=torch.uint8)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(npt, "load_base", exhausted)
    assert run(tmp_path / "run") == 2
    assert "lower --batch_size or --max_length" in capsys.readouterr().err


def test_a_failing_smoke_test_ends_4_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text(
        "".join(json.dumps({"input_ids": [5, 99_999, i]}) + "\n" for i in range(40)),
        encoding="utf-8",
    )
    # The held-out rows are evaluated after the smoke test, so it is the one to speak.
    assert run(tmp_path / "run", "--dataset_name", str(file)) == 4
    assert "outside the vocabulary" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_sigterm_saves_and_ends_143(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    endless = [
        "--max_steps",
        "100000",
        "--num_epochs",
        "1000",
        "--num_samples",
        "64",
        "--no_smoke_test",
    ]
    program = Program(
        ["pretrain", *SHORT, *endless, "--output_dir", str(folder)], tmp_path / "errors"
    )
    program.wait_for(
        lambda: (
            (folder / "metrics.jsonl").is_file() and (folder / "metrics.jsonl").stat().st_size > 0
        )
    )
    program.send(signal.SIGTERM)
    assert program.wait() == 143, program.errors.read_text()
    events = [
        json.loads(line)["event"] for line in (folder / "events.jsonl").read_text().splitlines()
    ]
    assert events[-2:] == ["signal", "save"]


def checkpoint_of(folder: Path, step: int) -> dict[str, bytes]:
    """The tensors of a checkpoint, byte by byte."""
    checkpoint = folder / "checkpoints" / f"step-{step:08d}"
    return {
        name: (checkpoint / name).read_bytes()
        for name in ("state.safetensors", "adapter/adapter_model.safetensors")
    }


def test_a_run_is_taken_up_exactly_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    constant = [
        "--scheduler_type",
        "constant",
        "--save_steps",
        "1",
        "--learning_rate",
        "1e-3",
        "--num_samples",
        "12",
    ]
    constant += ["--eval_samples", "1", "--layers", "6-7"]
    assert run(tmp_path / "whole", *constant, "--max_steps", "2", "--no_smoke_test") == 0
    assert run(tmp_path / "part", *constant, "--max_steps", "1", "--no_smoke_test") == 0
    capsys.readouterr()
    assert run(tmp_path / "part", *constant, "--max_steps", "2", "--resume", "auto") == 0
    out = capsys.readouterr().out
    assert "continuing from" in out and "max_steps was 1, is 2" in out and "smoke test" not in out
    assert checkpoint_of(tmp_path / "part", 2) == checkpoint_of(tmp_path / "whole", 2)
    read = [
        json.loads((tmp_path / name / "fidelity.json").read_text()) for name in ("whole", "part")
    ]
    assert read[0] == read[1]
    assert [line["step"] for line in metrics(tmp_path / "part")] == [1, 2]


def test_a_bad_checkpoint_is_one_line_and_status_5_before_loading(
    plain: Ended,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import npt

    monkeypatch.setattr(npt, "load_base", lambda *_, **__: pytest.fail("the base was loaded"))
    stopped_run = shutil.copytree(plain.folder, tmp_path / "run")
    checkpoint = stopped_run / "checkpoints" / "step-00000002"
    cases = [
        (["--resume", "auto", "--adapter_rank", "8"], 5, ["--adapter_rank 16", "asks for 8"]),
        (["--resume", "auto", "--seed", "3"], 5, ["--seed 0", "asks for 3"]),
        (["--resume", "auto", "--max_length", "64"], 5, ["--max_length 32", "asks for 64"]),
        (["--resume", "auto", "--quant_type", "fp4"], 5, ["--quant_type nf4", "asks for fp4"]),
        (["--resume", "none"], 5, ["no checkpoint or run folder none"]),
    ]
    accumulated = ["--gradient_accumulation_steps", "2"]
    damaged = bytearray((checkpoint / "state.json").read_bytes())
    for arguments, status, named in cases:
        assert run(stopped_run, *accumulated, *arguments) == status
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and [word for word in named if word not in lines[0]] == []
    damaged[7] ^= 1
    (checkpoint / "state.json").write_bytes(damaged)
    for resume in ("auto", str(checkpoint), str(stopped_run)):
        assert run(stopped_run, *accumulated, "--resume", resume) == 5
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{checkpoint}/state.json: sha256 " in line and "the manifest says" in line
    assert main(["pretrain", *SHORT, "--resume", "auto"]) == 2
    assert "--output_dir" in capsys.readouterr().err


SECRETS = {
    "HF_TOKEN": "hf_SecretOfTheHub0123456789",
    "WANDB_API_KEY": "5ec4e7" + "ab" * 17,
    "AWS_SECRET_ACCESS_KEY": "SecretOfTheCloud/0123456789",
    "MY_PASSWORD": "correct horse battery staple",
}


def test_too_many_refusals_exit_3_and_leak_no_environment_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_MODE", "offline")
    # the stream is read in its order, but for the order within a block
    monkeypatch.setattr("npt.data.samples.SHUFFLE_BLOCK", 32)
    file, folder = tmp_path / "ids.jsonl", tmp_path / "run"
    rows = [[3 + i, 4, 5, 6] if i < 32 else [3, 99_999, i % 7, 6 + i] for i in range(96)]
    file.write_text(
        "".join(json.dumps({"input_ids": row}) + "\n" for row in rows), encoding="utf-8"
    )
    arguments = [
        "--dataset_name",
        str(file),
        "--streaming",
        "--max_consecutive_bad",
        "3",
        "--eval_samples",
        "1",
        "--save_steps",
        "2",
    ]
    arguments += [
        "--use_tensorboard",
        "--use_wandb",
        "--eval_steps",
        "2",
        "--max_steps",
        "150",
        "--batch_size",
        "8",
        "--no_smoke_test",
    ]
    assert run(folder, *arguments) == 3
    stopped = capsys.readouterr()
    assert "3 refusals in a row" in stopped.err and "99999" in stopped.err
    assert [p.name for p in (folder / "postmortem").iterdir()]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events[-2:]] == ["stopped", "save"]
    assert metrics(folder) and all(line["loss"] is not None for line in metrics(folder))

    written = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {"postmortem", "checkpoints", "best", "wandb", "npt"} <= {
        path.relative_to(folder).parts[0] for path in written
    }
    for name, value in SECRETS.items():
        assert value not in stopped.out + stopped.err, name
        assert [path for path, content in written.items() if value.encode() in content] == [], name


def test_debug_shows_the_traceback() -> None:
    from npt.errors import ConfigError

    with pytest.raises(ConfigError):
        main(["pretrain", "--debug", "--learning_rate", "-1"])
