"""Packages that only some features need: nothing else asks for them, and what does names the extra
that installs them.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from npt.config import DataConfig, TrainConfig
from npt.data.source import check_source, open_source
from npt.errors import ConfigError
from npt.extras import EXTRAS, require
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
from npt.recorder.picture import write_pictures
from npt.recorder.record import Record, Row

assert "matplotlib" not in sys.modules
numbers = (1, 1.0, 0, 0, 0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0)
write_pictures([Record(1, (Row("a", None, "out", "forward", (1,), "float32", *numbers),))], folder)
line = '{"text": "The quick brown fox jumps over the lazy dog. "}\\n'
(folder / "lines.jsonl").write_text(line * 40)
run = ["--init", "random", "--no_smoke_test"]
run += "--layers 3 --adapter_rank 2 --max_length 32 --max_steps 1 --batch_size 2".split()
tiny = ["pretrain", "--model_name", "tiny", *run]
lines = ["--dataset_name", str(folder / "lines.jsonl")]
output = ["--eval_samples", "2", "--output_dir", str(folder / "run")]
assert main([*tiny, *lines, *output]) == 0
(folder / "run" / "report.html").unlink(missing_ok=True)
assert main(["report", str(folder / "run")]) == 0
for flag in ("--use_wandb", "--use_tensorboard"):
    assert main([*tiny, *lines, flag, "--output_dir", str(folder / "tracked")]) == 2
assert not (folder / "tracked").exists()
assert "matplotlib.pyplot" not in sys.modules
"""


BESIDE = [package for package, extra in EXTRAS.items() if extra != "distill"]

GUARD_ALONE = """
import sys
for name in sys.argv[1:]:
    sys.modules[name] = None

import torch

import npt
from npt.__main__ import main
from npt.guard import Guard

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
guard = Guard(model, torch.optim.AdamW(model.parameters()), loss="mean", trace=1)
for scale in (1.0, 1e38, 1.0):
    with guard.micro_batch() as micro:
        micro.loss = loss = model(torch.full((2, 4), scale)).square().mean()
        loss.backward()
    outcome = guard.step()
    print(outcome.applied, *(refusal.kind for refusal in outcome.refused), *outcome.findings)
try:
    npt.Trainer
except ModuleNotFoundError as error:
    print(error)
sys.exit(main(["pretrain", "--config", "tiny"]))
"""


def test_the_guard_traces_without_the_packages_of_distillation() -> None:
    """And the command line, and names that need them, say which extra installs them."""
    ran = subprocess.run(
        [sys.executable, "-c", GUARD_ALONE, *EXTRAS], cwd=ROOT, capture_output=True, text=True
    )
    extra = "which is not installed: pip install '.[distill]' in a clone of NPT"
    first, refused, *traced, last, unknown = ran.stdout.splitlines()
    assert (first, last) == ("True", "True")
    assert refused.startswith("False loss micro-batch 0: loss is inf"), ran.stderr
    assert traced[0] == "corrupt input: input 0 held 1e+38 before the pass"
    assert "  data: addmm in 0" in traced
    assert unknown == f"npt.Trainer needs rich, {extra}"
    assert ran.stderr.splitlines() == [f"npt: error: the command line needs accelerate, {extra}"]
    assert ran.returncode == 2


def absent(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Hide a package, and of it what another test has imported."""
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)


def test_a_run_and_its_report_need_no_optional_package(tmp_path) -> None:
    """Nor do pictures, for which alone matplotlib is loaded, and pyplot never."""
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(tmp_path), *BESIDE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr
    adapter = "run/checkpoints/step-00000001/adapter/adapter_config.json"
    for name in ("health.html", "health.png", "run/report.html", adapter):
        assert (tmp_path / name).is_file()
    said = ran.stderr.splitlines()
    assert [line for line in said if "error" in line] == [
        f"npt: error: --use_{name} needs {name}, which is not installed: pip install"
        f" '.[{name}]' in a clone of NPT"
        for name in ("wandb", "tensorboard")
    ]


@pytest.mark.parametrize("tracker", ["wandb", "tensorboard"])
def test_a_tracker_that_is_not_installed_is_refused(tracker, monkeypatch, tmp_path) -> None:
    """Accelerate drops it with a line in the log, and the run would be tracked nowhere."""
    absent(monkeypatch, tracker)
    with pytest.raises(
        ConfigError,
        match=(
            rf"^--use_{tracker} needs {tracker}, which is not installed: pip install"
            rf" '\.\[{tracker}\]' in a clone of NPT$"
        ),
    ):
        Trackers(TrainConfig(**{f"use_{tracker}": True}), tmp_path)
    Trackers(TrainConfig(), tmp_path).log({"loss": 1.0}, 1)


def test_hub_data_sets_and_parquet_need_datasets(monkeypatch, tmp_path) -> None:
    absent(monkeypatch, "datasets")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    for name, what in (
        ("somebody/some-text", "the dataset 'somebody/some-text' of the Hub"),
        (str(tmp_path), f"{tmp_path}/rows.parquet"),
    ):
        with pytest.raises(
            ConfigError,
            match=rf"^{re.escape(what)} needs datasets, .*: pip install '\.\[hub\]' in a clone",
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


def a_study(folder: Path) -> None:
    from npt.cli.sweep import sweep

    study = folder / "study.yaml"
    study.write_text("name: own\nparts:\n  one: {settings: {max_steps: 1}}\n")
    sweep({"spec": str(study), "parent": None, "json": True, "dry_run": False})


@pytest.mark.parametrize(
    ("feature", "package", "named"),
    [
        (a_study, "optuna", "a study needs optuna"),
        (lambda _: require("wandb", "this"), "wandb", "this needs wandb"),
    ],
)
def test_a_feature_without_its_package_is_refused_and_names_the_extra(
    monkeypatch, tmp_path, feature, package, named
) -> None:
    absent(monkeypatch, package)
    extra = re.escape(f"pip install '.[{EXTRAS[package]}]' in a clone of NPT")
    with pytest.raises(ConfigError, match=f"{named}, which is not installed: {extra}$"):
        feature(tmp_path)


def test_every_extra_that_a_message_names_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = re.compile(r"[\w-]+")
    imported_as = {"pyyaml": "yaml"}

    def names(requirements: list[str]) -> set[str]:
        found = {named.match(line)[0].replace("-", "_") for line in requirements}
        return {imported_as.get(name, name) for name in found}

    for package, extra in EXTRAS.items():
        assert package in names(extras[extra]), f"{extra} does not install {package}"
        assert package not in names(project["dependencies"]), f"{package} is installed in any case"
    everything = re.search(r"npt-distill\[([\w,-]+)\]", " ".join(extras["all"]))
    assert everything is not None
    assert set(EXTRAS.values()) - {"distill"} <= set(everything[1].split(","))
    for extra in everything[1].split(","):  # a command that needs an extra needs `distill` as well
        assert extra == "gpu" or "npt-distill[distill]" in extras[extra]
