"""Contexts for the teacher alone, in the verbs that read data."""

import json
from pathlib import Path
from typing import Any

import pytest

from npt.cli.main import main
from npt.tools.sweep.run import Bases, run
from npt.train.resolve import resolve

SHORT = {"init": "random", "adapter_rank": 2, "max_steps": 2, "max_length": 48, "eval_samples": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "told.jsonl"
    lines = [
        {"context": "# in capitals\n", "prompt": f"name_{i} = ", "completion": f"NAME_{i}\n"}
        for i in range(60)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def command(verb: str, settings: dict[str, Any]) -> list[str]:
    return [verb, *(word for name, value in settings.items() for word in (f"--{name}", str(value)))]


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    base = {"model_name": "tiny", "dataset_name": data, "context_column": "context"}
    settings = {**base, **SHORT, "batch_size": 2, "layers": "6-7", "output_dir": folder}
    assert main(command("pretrain", settings)) == 0
    return folder


def test_an_evaluation_reads_the_contexts_of_the_run(trained, data, capsys) -> None:
    assert main(["evaluate", "--adapter", str(trained), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    written = json.loads((trained / "fidelity.json").read_text())
    assert found["layers"] == written["layers"] == {}
    # batches of other sizes are rounded otherwise
    assert found["student"]["kl"] == pytest.approx(written["student"]["kl"], rel=1e-4)
    other = ["evaluate", "--adapter", str(trained), "--json", "--dataset_name", str(data)]
    assert main(other) == 0
    without = json.loads(capsys.readouterr().out)
    assert without["student"]["kl"] != pytest.approx(found["student"]["kl"], rel=1e-2)
    assert without["layers"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trace --strategy local", "so only their logits can be compared"),
        ("collect --output {}/c.jsonl", "--context_column context has no effect on prompts"),
        ("evaluate --divergence_prompts 1", "does not support data with contexts"),
    ],
)
def test_what_cannot_read_contexts_says_so(trained, tmp_path, words, message, capsys) -> None:
    verb, *rest = words.format(tmp_path).split()
    assert main([verb, "--adapter", str(trained), *rest]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_training_step_with_contexts_is_traced(trained, capsys) -> None:
    assert main(["trace", "--adapter", str(trained)]) == 0
    assert "no fault in 1 batch (training step, end_to_end)" in capsys.readouterr().out


def test_a_trial_of_a_study_has_no_nmse(data) -> None:
    settings = {**SHORT, "dataset_name": str(data), "context_column": "context", "layers": "7"}
    row = run(Bases("cpu"), resolve({"model_name": "tiny", **settings}, of_study=True))
    assert row["nmse"] is None and row["kl"] > 0 and row["outcome"] == "stable"
