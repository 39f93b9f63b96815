"""Packages that only some features need: nothing else asks for them, and what does names the extra
that installs them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from npt.config import DataConfig, TrainConfig
from npt.data.source import check_source, open_source
from npt.errors import ConfigError
from npt.extras import EXTRAS, installed, require
from npt.runs.trackers import Trackers

ROOT = Path(__file__).parents[1]

WITHOUT = """
import sys
from pathlib import Path
for name in sys.argv[2:]:
    sys.modules[name] = None  # to importlib.util.find_spec() as well a missing package

import npt
from npt.cli.main import VERBS, main

for verb in VERBS:
    try:
        main([verb, "--help"])
    except SystemExit as end:
        assert end.code == 0

folder = Path(sys.argv[1])
line = '{"text": "The quick brown fox jumps over the lazy dog. "}\\n'
(folder / "lines.jsonl").write_text(line * 40)
run = ["--init", "random", "--no_smoke_test"]
run += "--layers 3 --adapter_rank 2 --max_length 32 --max_steps 1 --batch_size 2".split()
run += ["--trace_steps", "1"]
tiny = ["pretrain", "--model_name", "tiny", *run]
lines = ["--dataset_name", str(folder / "lines.jsonl")]
output = ["--eval_samples", "2", "--output_dir", str(folder / "run")]
assert main([*tiny, *lines, *output]) == 0
(folder / "run" / "report.html").unlink(missing_ok=True)
assert main(["report", str(folder / "run")]) == 0
for flag in ("--use_wandb", "--use_tensorboard"):
    assert main([*tiny, *lines, flag, "--output_dir", str(folder / "tracked")]) == 2
assert not (folder / "tracked").exists()
"""


def absent(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Hide a package, and of it what another test has imported."""
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)


def test_a_run_and_its_report_need_no_optional_package(tmp_path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(tmp_path), *EXTRAS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr
    assert (
        tmp_path / "run" / "checkpoints" / "step-00000001" / "adapter" / "adapter_config.json"
    ).is_file()
    assert (tmp_path / "run" / "report.html").is_file()
    assert (tmp_path / "run" / "trace" / "health.html").is_file()
    assert (tmp_path / "run" / "trace" / "health.png").is_file()
    said = ran.stderr.splitlines()
    assert [line for line in said if "error" in line] == [
        (
            "npt: error: --use_wandb needs wandb, which is not installed; pip install"
            " 'npt-distill[wandb]'"
        ),
        (
            "npt: error: --use_tensorboard needs tensorboard, which is not installed; pip install"
            " 'npt-distill[tensorboard]'"
        ),
    ]


@pytest.mark.parametrize("tracker", ["wandb", "tensorboard"])
def test_a_tracker_that_is_not_installed_is_refused(tracker, monkeypatch, tmp_path) -> None:
    """Accelerate drops it with a line in the log, and the run would be tracked nowhere."""
    absent(monkeypatch, tracker)
    with pytest.raises(
        ConfigError,
        match=(
            rf"^--use_{tracker} needs {tracker}, which is not installed; pip install"
            rf" 'npt-distill\[{tracker}\]'$"
        ),
    ):
        Trackers(TrainConfig(**{f"use_{tracker}": True}), tmp_path)
    Trackers(TrainConfig(), tmp_path).log({"loss": 1.0}, 1)


def test_hub_data_sets_and_parquet_need_datasets(monkeypatch, tmp_path) -> None:
    absent(monkeypatch, "datasets")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    for name, what in (
        ("somebody/some-text", "the data set 'somebody/some-text' of the hub"),
        (str(tmp_path), f"{tmp_path}/rows.parquet"),
    ):
        with pytest.raises(
            ConfigError,
            match=rf"^{re.escape(what)} needs datasets, .*; pip install 'npt-distill\[hub\]'$",
        ):
            check_source(DataConfig(dataset_name=name))


@pytest.mark.parametrize("name", ["lines.jsonl", "lines.csv", "lines.txt", "lines.json"])
@pytest.mark.parametrize("streaming", [False, True])
def test_other_local_files_need_no_package(name, streaming, monkeypatch, tmp_path) -> None:
    for package in ("datasets", "pyarrow", "pandas"):
        absent(monkeypatch, package)
    content = {
        "lines.jsonl": '{"text": "one"}\n',
        "lines.csv": "text\none\n",
        "lines.txt": "one",
        "lines.json": '[{"text": "one"}]',
    }
    (tmp_path / name).write_text(content[name])
    (record,) = open_source(DataConfig(dataset_name=str(tmp_path / name), streaming=streaming))
    assert record["text"] == "one"


def test_a_page_about_a_study_names_the_package_that_it_needs(
    monkeypatch, tmp_path, capsys
) -> None:
    from npt.cli.main import main

    absent(monkeypatch, "optuna")
    (tmp_path / "study.json").write_text("{}")
    assert main(["report", str(tmp_path)]) == 2
    said = (
        "the page about a study needs optuna, which is not installed; pip install"
        " 'npt-distill[sweep]'"
    )
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_study_is_refused_before_it_runs_without_its_packages(monkeypatch, tmp_path) -> None:
    from npt.tools.sweep.storage import Storage

    absent(monkeypatch, "optuna")
    with pytest.raises(
        ConfigError,
        match=(
            r"^a study needs optuna, which is not installed; pip install"
            r" 'npt-distill\[sweep\]'$"
        ),
    ):
        Storage(f"sqlite:///{tmp_path}/study.db", "study")


def test_lm_eval_tasks_need_the_harness(monkeypatch) -> None:
    from npt.evaluation.harness import find_tasks

    absent(monkeypatch, "lm_eval")
    with pytest.raises(ConfigError, match=r"--lm_eval needs .*pip install 'npt-distill\[eval\]'$"):
        find_tasks(["task"])


def test_peft_is_asked_for_by_its_extra(monkeypatch) -> None:
    from npt.adapters.files.peft_shim import register_peft

    absent(monkeypatch, "peft")
    with pytest.raises(ConfigError, match=r"pip install 'npt-distill\[peft\]'$"):
        register_peft()


def test_every_extra_that_a_message_names_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = re.compile(r"[\w-]+")

    def names(requirements: list[str]) -> set[str]:
        return {named.match(line)[0].replace("-", "_") for line in requirements}

    for package, extra in EXTRAS.items():
        assert package in names(extras[extra]), f"{extra} does not install {package}"
        assert package not in names(project["dependencies"]), f"{package} is installed in any case"
    everything = re.search(r"npt-distill\[([\w,-]+)\]", " ".join(extras["all"]))
    assert everything is not None and set(EXTRAS.values()) <= set(everything[1].split(","))


def test_a_package_is_asked_for_by_name(monkeypatch) -> None:
    absent(monkeypatch, "wandb")
    assert installed("torch") and not installed("no_such_package_at_all")
    require("torch", "this")
    with pytest.raises(
        ConfigError,
        match=r"^this needs wandb, which is not installed; pip install 'npt-distill\[wandb\]'$",
    ):
        require("wandb", "this")
