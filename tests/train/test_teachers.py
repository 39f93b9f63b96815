"""Runs with a teacher of its own, and bases that are not trained on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_runs import Runs, lines, records
from updates import random_update

import npt
from npt.adapters.consolidate import apply_update, unconsolidate
from npt.adapters.converted import adapter_parameters
from npt.base.attention import attention_name
from npt.base.load import load_teacher
from npt.errors import CheckpointError, ConfigError, TooManyRefusalsError
from npt.forensics.student import read_student
from npt.forensics.student import replay_student as replay
from npt.stored import read_json
from npt.train.trainer import Trainer


@pytest.fixture
def here(load_model: Any, tmp_path: Path) -> Runs:
    settings = {"batch_size": 2, "eval_samples": 2}
    return Runs(
        load_model("nf4"), tmp_path, lambda: records(16), eval_data=records(4, 7), settings=settings
    )


def taught(here: Runs, folder: str, precision: str, source: Any, **changed: Any) -> Trainer:
    return here.trainer(
        folder, teacher=load_teacher(str(source), precision, device="cpu"), **changed
    )


def test_a_kept_residual_learns_from_the_unquantised_base(here, llama_folder) -> None:
    adapter = {"rank": 8, "residual": "keep", "layers": "all"}
    result = taught(
        here, "run", "bf16", llama_folder, adapter=adapter, max_steps=24, num_epochs=20
    ).train()
    metrics = [line["loss_nmse"] for line in lines(result.folder, "metrics")]
    assert sum(metrics[-8:]) < 0.9 * sum(metrics[:8])  # means of an epoch each
    assert result.diverged == ()  # although its KL to the 4-bit base rises from 0
    settings = read_json(result.folder / "run.json", ConfigError)["settings"]
    assert settings["teacher_precision"] == "bf16" and len(settings["teacher"]) == 64


def test_another_teacher_is_refused_on_resume_and_none_as_well(here, llama_folder) -> None:
    adapter = {"rank": 2, "residual": "keep", "layers": "all"}
    taught(here, "run", "fp32", llama_folder, adapter=adapter, max_steps=2).train()
    hashes = r"--teacher \(its hash\) '[0-9a-f]{64}', but this run has '[0-9a-f]{64}'"
    with pytest.raises(CheckpointError, match=hashes):
        taught(here, "run", "bf16", llama_folder, adapter=adapter, max_steps=4, resume="auto")
    taught(here, "other", "fp32", llama_folder, max_steps=2).train()
    with pytest.raises(
        CheckpointError, match=r"--teacher \(its hash\) '[0-9a-f]{64}', but this run has None"
    ):
        here.trainer("other", max_steps=4, resume="auto")


def test_a_teacher_of_other_shapes_is_refused_with_both_values(here) -> None:
    with pytest.raises(
        ConfigError, match="the teacher has num_hidden_layers 8, the student's base 4"
    ):
        taught(here, "run", "fp32", "tiny", max_steps=1)


def test_a_run_that_stops_is_replayed_with_its_strategy_and_its_teacher(
    here, llama_folder, monkeypatch
) -> None:
    settings = {"strategy": "propagated", "max_steps": 4, "max_consecutive_bad": 1}
    trainer = taught(here, "run", "fp32", llama_folder, adapter={"rank": 4}, **settings)
    strategy, calls = trainer.strategy, iter(range(100))

    def broken(*arguments: Any) -> Any:
        if next(calls) == 3:
            with torch.no_grad():
                next(iter(adapter_parameters(here.model).values()))[0, 0] = float("nan")
        return strategy(*arguments)

    trainer.strategy = broken
    with pytest.raises(TooManyRefusalsError):
        trainer.train()
    (bundle,) = (here.place / "run" / "postmortem").iterdir()
    result = replay(str(bundle), model_name=str(llama_folder))
    assert "propagated" in (bundle / "postmortem.json").read_text(encoding="utf-8")
    assert "state" in str(result)


def test_a_replay_loads_the_teacher_with_the_attention_that_it_had(here, llama_folder) -> None:
    data = [*records(3), {"id": "outside", "input_ids": [5, 999, 7]}]
    teacher = load_teacher(str(llama_folder), "fp32", device="cpu", attn_implementation="eager")
    trainer = here.trainer(
        "run", data=lambda: data, teacher=teacher, max_steps=4, max_consecutive_bad=1, batch_size=1
    )
    with pytest.raises(TooManyRefusalsError):
        trainer.train()
    (bundle,) = (here.place / "run" / "postmortem").iterdir()
    student = read_student(bundle)
    assert student.entry["settings"]["teacher_attention"] == "eager"
    model, found = student.load(str(llama_folder))
    assert attention_name(model) == "sdpa" and attention_name(found) == "eager"


def test_a_teacher_with_adapters_or_of_another_precision_is_refused(here, load_model) -> None:
    adapted = load_model(None)
    npt.attach(adapted, npt.NPTConfig(rank=2))
    for teacher, said in (
        (adapted, "the teacher has adapters attached"),
        (load_model(None, use_fp16=True), "the teacher is stored in float16"),
    ):
        with pytest.raises(ConfigError, match=said):
            here.trainer("run", teacher=teacher)


def test_a_base_with_consolidated_updates_is_not_trained_on(here) -> None:
    trainer = here.trainer("run")
    apply_update(here.model, random_update(here.model, layers=(3,)))
    try:
        with pytest.raises(ConfigError, match=r"npt\.unconsolidate"):
            setup = trainer.setup
            Trainer(here.model, setup.tokenizer, records(16), setup.config)
    finally:
        unconsolidate(here.model)
