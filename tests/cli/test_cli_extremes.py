"""Numbers and names that no counter, no tensor and no disk takes: one line each, no traceback."""

from __future__ import annotations

import pytest

import npt
from npt.cli.main import main

NUMBER, NAME = "9" * 20, "x" * 300

pytestmark = pytest.mark.usefixtures("short_library")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> str:
    model, _ = npt.load_base("tiny")
    npt.attach(model, npt.NPTConfig(rank=2, layers="7"))
    return str(npt.save_adapter(model, tmp_path_factory.mktemp("extremes") / "adapter"))


def line_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on standard error that these arguments end with."""
    capsys.readouterr()
    try:
        status = main(list(arguments))
    except SystemExit as ended:
        status = ended.code
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert status in (2, 5) and len(lines) == 1, (status, lines)
    return lines[0]


@pytest.mark.parametrize("value", ["1e-320", "1e-46", "nan", "inf", "-1"])
def test_a_temperature_that_gives_no_probabilities(adapter, capsys, value) -> None:
    asked = ["--prompt", "def", "--max_new_tokens", "2", "--temperature", value]
    line = line_of(capsys, "generate", "--adapter", adapter, *asked)
    assert f"--temperature is {float(value)}; it must be 0 (the most likely token) or" in line


def test_the_least_temperature_draws_the_most_likely_token(adapter, capsys) -> None:
    texts = []
    for temperature in ("0", "1e-6"):
        asked = ["--prompt", "def f(", "--max_new_tokens", "4", "--temperature", temperature]
        assert main(["generate", "--adapter", adapter, *asked]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and len(texts[0]) > len("def f(")


@pytest.mark.parametrize(
    ("verb", "flag"),
    [
        ("pretrain", "num_samples"),
        ("pretrain", "eval_samples"),
        ("pretrain", "max_steps"),
        ("evaluate", "eval_samples"),
        ("evaluate", "batch_size"),
        ("trace", "batches"),
        ("generate", "max_new_tokens"),
        ("generate", "seed"),
        ("collect", "seed"),
        ("transplant", "top"),
        ("doctor", "max_records"),
        ("doctor", "batch_size"),
    ],
)
def test_a_number_of_twenty_digits(adapter, capsys, verb, flag) -> None:
    needed = {
        "pretrain": ["--init", "random"],
        "generate": ["--adapter", adapter, "--prompt", "x"],
        "transplant": ["--adapter", adapter, "--text_from", "a", "--text_to", "b"],
        "collect": ["--adapter", adapter, "--output", "x.jsonl"],
        "doctor": ["--plan"] if flag == "batch_size" else ["--data", "builtin"],
    }.get(verb, ["--adapter", adapter])
    line = line_of(capsys, verb, *needed, f"--{flag}", NUMBER)
    assert f"--{flag}" in line and NUMBER in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["pretrain", "--output_dir", NAME],
        ["pretrain", "--resume", NAME],
        ["pretrain", "--adapter", NAME],
        ["pretrain", "--config", NAME],
        ["pretrain", "--model_name", f"./{NAME}"],
        ["pretrain", "--dataset_name", f"{NAME}.jsonl"],
        ["evaluate", "--adapter", NAME],
        ["trace", "--adapter", NAME],
        ["replay", NAME],
        ["report", NAME],
        ["sweep", NAME],
        ["export", "--adapter", NAME, "--output", "x"],
        ["push", "--adapter", NAME, "--repo_id", "a/b"],
        ["doctor", "--data", f"{NAME}.jsonl"],
    ],
    ids=lambda arguments: " ".join(arguments).replace(NAME, "NAME"),
)
def test_a_name_of_three_hundred_letters(capsys, arguments) -> None:
    assert NAME in line_of(capsys, *arguments)
