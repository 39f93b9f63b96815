"""Stages: which strategy drives the student at which step, and that a run of several is the runs of
each in turn.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from resumed_runs import Runs, at, lines, records

import npt
from npt.adapters.consolidate import Update, consolidate, unconsolidate
from npt.adapters.converted import adapter_parameters
from npt.base.attention import attention_name
from npt.base.load import load_teacher
from npt.config import STRATEGIES, TrainConfig
from npt.distill import strategies as strategies_module
from npt.distill.stages import stage_at, stages_of
from npt.distill.step import student_guard
from npt.errors import CheckpointError, ConfigError, TooManyRefusalsError
from npt.postmortem.bundle import read_bundle
from npt.postmortem.replay import replay
from npt.postmortem.restore import restored
from npt.stored import read_json
from npt.train.trainer import Trainer


def staged(*shares: float, **more: Any) -> TrainConfig:
    names = [STRATEGIES[i % len(STRATEGIES)] for i in range(len(shares))]
    return TrainConfig(
        stages=",".join(f"{name}:{share}" for name, share in zip(names, shares, strict=True)),
        **more,
    )


@given(parts=st.lists(st.integers(1, 50), min_size=2, max_size=6), total=st.integers(0, 5000))
def test_stages_share_out_every_step_in_their_order(parts, total) -> None:
    shares = [part / sum(parts) for part in parts]
    config = staged(*shares)
    try:
        stages = stages_of(config, total)
    except ConfigError as error:
        assert f"none of {total} steps" in str(error)
        # only a stage of about a step or less may lose it to rounding
        assert any(round(share * total) <= 1 for share in shares)
        return
    assert stages[0].start == 0 and [stage.config.strategy for stage in stages] == [
        name for name, _ in config.stage_shares
    ]
    ends = [*(stage.start for stage in stages[1:]), total]
    for stage, end, share in zip(stages, ends, shares, strict=True):
        assert abs(end - stage.start - share * total) <= 1 + 1e-6  # both ends are rounded to a step
    for step in {0, total // 3, total // 2, max(0, total - 1)}:
        found = stages.index(stage_at(stages, step))
        assert stages[found].start <= step and (
            found + 1 == len(stages) or step < stages[found + 1].start or total == 0
        )


def test_without_stages_there_is_one_of_the_settings_as_they_are() -> None:
    config = TrainConfig(strategy="end_to_end", logit_kl_weight=0.5)
    (stage,) = stages_of(config, None)
    assert stage.start == 0 and stage.config is config


def test_a_loss_on_the_logits_is_of_the_stages_that_have_logits() -> None:
    config = staged(
        0.5,
        0.25,
        0.25,
        logit_kl_weight=0.5,
        logit_loss="jsd",
        jsd_weight=0.3,
        logit_temperature=2.0,
    )
    weights = [
        (stage.config.strategy, stage.config.logit_kl_weight, stage.config.jsd_weight)
        for stage in stages_of(config, 8)
    ]
    assert weights == [("local", 0.0, 0.5), ("propagated", 0.0, 0.5), ("end_to_end", 0.5, 0.3)]


def test_shares_of_an_unknown_number_of_steps_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--stages .* length of the stream is unknown; give --max_steps"
    ):
        stages_of(staged(0.5, 0.5), None)


# --- runs
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def here(load_model: Any, tmp_path: Path) -> Runs:
    return Runs(
        load_model("nf4"),
        tmp_path,
        data=lambda: records(16),
        settings={"batch_size": 2, "eval_samples": 2},
    )


def test_each_step_is_of_its_stage_and_the_next_is_announced(here, monkeypatch) -> None:
    driven: list[str] = []
    for name, strategy in list(strategies_module.STRATEGIES.items()):

        def noted(*arguments: Any, name: str = name, strategy: Any = strategy) -> Any:
            driven.append(name)
            return strategy(*arguments)

        monkeypatch.setitem(strategies_module.STRATEGIES, name, noted)
    result = here.run(
        "run",
        stages="local:0.5,propagated:0.25,end_to_end:0.25",
        max_steps=8,
        num_epochs=2,
        logit_kl_weight=1.0,
    )
    assert driven == ["local"] * 4 + ["propagated"] * 2 + ["end_to_end"] * 2
    told = [
        (e["step"], e["strategy"]) for e in lines(result.folder, "events") if e["event"] == "stage"
    ]
    assert told == [(4, "propagated"), (6, "end_to_end")]
    metrics = lines(result.folder, "metrics")
    assert [line["stage"] for line in metrics] == [0] * 4 + [1] * 2 + [2] * 2
    assert ["loss_kl" in line for line in metrics] == [False] * 6 + [True] * 2


def test_results_that_come_late_begin_a_stage_at_the_same_step(here, monkeypatch) -> None:
    outcomes = []
    for late in (False, True):
        monkeypatch.setattr(
            "npt.train.trainer.student_guard", functools.partial(student_guard, late=late)
        )
        here.run(f"run-{late}", stages="local:0.5,end_to_end:0.5", max_steps=6)
        outcomes.append(
            {name: p.detach().clone() for name, p in adapter_parameters(here.model).items()}
        )
    for name, value in outcomes[0].items():
        assert torch.equal(value, outcomes[1][name]), name


def test_the_smoke_test_tries_every_strategy_once(here) -> None:
    here.run("run", stages="local:0.4,end_to_end:0.3,local:0.3", max_steps=8, smoke_test=True)
    assert here.said.getvalue().count("smoke test passed") == 2


# --- a teacher of its own
# ----------------------------------------------------------------------------------------------


def taught(here: Runs, folder: str, precision: str, source: Any, **changed: Any) -> Trainer:
    return here.trainer(
        folder, teacher=load_teacher(str(source), precision, device="cpu"), **changed
    )


@pytest.mark.parametrize("precision", ["bf16"])
def test_a_kept_residual_learns_from_the_unquantised_base(here, llama_folder, precision) -> None:
    adapter = {"rank": 8, "residual": "keep", "layers": "all"}
    result = taught(
        here, "run", precision, llama_folder, adapter=adapter, max_steps=40, num_epochs=20
    ).train()
    metrics = [line["loss_nmse"] for line in lines(result.folder, "metrics")]
    assert sum(metrics[-8:]) < 0.9 * sum(metrics[:8])  # means of an epoch each
    settings = read_json(result.folder / "run.json", ConfigError)["settings"]
    assert settings["teacher_precision"] == precision and len(settings["teacher"]) == 64


def test_another_teacher_is_refused_on_resume_and_none_as_well(here, llama_folder) -> None:
    adapter = {"rank": 2, "residual": "keep", "layers": "all"}
    taught(here, "run", "fp32", llama_folder, adapter=adapter, max_steps=2).train()
    with pytest.raises(
        CheckpointError,
        match=r"--teacher \(its hash\) [0-9a-f]{64}, this run asks for [0-9a-f]{64}",
    ):
        taught(here, "run", "bf16", llama_folder, adapter=adapter, max_steps=4, resume="auto")
    taught(here, "other", "fp32", llama_folder, max_steps=2).train()
    with pytest.raises(
        CheckpointError, match=r"--teacher \(its hash\) [0-9a-f]{64}, this run asks for None"
    ):
        here.trainer("other", max_steps=4, resume="auto")


def test_a_teacher_of_other_shapes_is_refused_with_both_values(here) -> None:
    with pytest.raises(
        ConfigError, match="the teacher has num_hidden_layers 8, the student's base 4"
    ):
        taught(here, "run", "fp32", "tiny", max_steps=1)


def test_a_run_that_stops_is_replayed_with_its_stage_and_its_teacher(
    here, llama_folder, monkeypatch
) -> None:
    trainer = taught(
        here,
        "run",
        "fp32",
        llama_folder,
        stages="local:0.5,propagated:0.5",
        max_steps=4,
        max_consecutive_bad=1,
        adapter={"rank": 4},
    )
    strategy, calls = trainer.setup.strategy, iter(range(100))

    def broken(*arguments: Any) -> Any:
        if next(calls) == 3:
            with torch.no_grad():
                next(iter(adapter_parameters(here.model).values()))[0, 0] = float("nan")
        return strategy(*arguments)

    trainer.setup.strategy = broken
    with pytest.raises(TooManyRefusalsError):
        trainer.train()
    (bundle,) = (here.place / "run" / "postmortem").iterdir()
    result = replay(str(bundle), model_name=str(llama_folder))
    assert "propagated" in (bundle / "postmortem.json").read_text(encoding="utf-8")
    assert "state" in str(result)


@pytest.mark.parametrize("own", ["eager", "sdpa"])
def test_a_replay_loads_the_teacher_with_the_attention_that_it_had(here, llama_folder, own) -> None:
    data = [*records(3), {"id": "outside", "input_ids": [5, 999, 7]}]
    teacher = load_teacher(str(llama_folder), "fp32", device="cpu", attn_implementation=own)
    trainer = here.trainer(
        "run", data=lambda: data, teacher=teacher, max_steps=4, max_consecutive_bad=1, batch_size=1
    )
    with pytest.raises(TooManyRefusalsError):
        trainer.train()
    (bundle,) = (here.place / "run" / "postmortem").iterdir()
    assert (
        read_json(bundle / "postmortem.json", ConfigError)["settings"]["teacher_attention"] == own
    )
    with restored(read_bundle(bundle), model_name=str(llama_folder)) as found:
        assert attention_name(found.model) == "sdpa" and attention_name(found.teacher) == own


# --- where the pieces meet
# -----------------------------------------------------------------------------------------------


def test_a_boundary_moved_on_resume_begins_with_fresh_limits(here, monkeypatch) -> None:
    """Saved in `local`; with fewer steps in all the next one is `end_to_end`, whose loss the limits
    of `local` would refuse.
    """
    monkeypatch.setattr("npt.guard.spikes.MINIMUM", 4)
    settings = {
        "stages": "local:0.5,end_to_end:0.5",
        "logit_kl_weight": 20.0,
        "skip_spikes": True,
        "num_epochs": 20,
        "save_steps": 12,
    }
    here.run("run", at(13), max_steps=40, **settings)
    checkpoint = str(here.place / "run" / "checkpoints" / "step-00000012")
    result = here.run("new", max_steps=20, resume=checkpoint, **settings)
    assert [
        (e["step"], e["strategy"]) for e in lines(result.folder, "events") if e["event"] == "stage"
    ] == [(12, "end_to_end")]
    assert result.steps == 20 and result.refused == 0


def test_a_post_mortem_at_a_boundary_is_of_its_windows_stage(here) -> None:
    """The window after step 1 is applied but for one bad micro-batch, which ends the run: `local`
    drove it, and the next stage is due.
    """
    data = records(16)
    data[3]["input_ids"][1] = 999
    trainer = here.trainer(
        "run",
        data=lambda: data,
        stages="local:0.5,end_to_end:0.5",
        max_steps=2,
        batch_size=1,
        gradient_accumulation_steps=16,
        max_consecutive_bad=1,
        num_epochs=4,
    )
    with pytest.raises(TooManyRefusalsError):
        trainer.train()
    (bundle,) = (here.place / "run" / "postmortem").iterdir()
    state = read_json(bundle / "state.json", ConfigError)
    assert (state["step"], state["counters"]["steps"]) == (0, 1)
    assert read_json(bundle / "postmortem.json", ConfigError)["settings"]["strategy"] == "local"


def test_a_teacher_with_adapters_or_of_another_precision_is_refused(here, load_model) -> None:
    adapted = load_model(None)
    npt.attach(adapted, npt.NPTConfig(rank=2))
    for teacher, said in (
        (adapted, "the teacher has adapters of its own"),
        (load_model(None, use_fp16=True), "the teacher is stored in float16"),
    ):
        with pytest.raises(ConfigError, match=said):
            here.trainer("run", teacher=teacher)


def test_a_base_with_consolidated_updates_is_not_trained_on(here) -> None:
    trainer = here.trainer("run")
    update = Update({(3, "down"): (torch.full((64,), 1.5), torch.full((64,), 0.3))}, {})
    consolidate(here.model, update)
    try:
        with pytest.raises(ConfigError, match=r"npt\.unconsolidate"):
            Trainer(
                here.model,
                trainer.setup.tokenizer,
                records(16),
                trainer.setup.config,
                data_config=trainer.setup.data_config,
                console=trainer.setup.console,
            )
    finally:
        unconsolidate(here.model)
