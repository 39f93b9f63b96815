"""TRL's Trainers that generate under a guard: a refused slice of a generation leaves no trace."""

import functools
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from fsdp_trainers import FSDP, fsdp_on_cpus
from guarded_loops import assert_equal
from guarded_trainers import state_of
from peft import LoraConfig, get_peft_model
from several import several, values
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from faults.row_faults import plant
from faults.row_generating import Slices, trainer_of
from faults.row_trainers import kinds
from npt.base.source import EMBEDDED_FOLDER
from npt.errors import ConfigError
from npt.guard.generations import Generations
from npt.guard.parallel import is_sharded
from npt.guard.trainer import _refuse_unfit

WINDOW = 4
TIMED = ("step_time", "refused", "epoch")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    pytest.importorskip("trl")
    return AutoTokenizer.from_pretrained(str(EMBEDDED_FOLDER))


def policy(tokenizer: Any, fault: str | None) -> Any:
    """A LoRA that drops out, so that forwards and generations share one stream of numbers."""
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    size |= {"num_attention_heads": 2, "max_position_embeddings": 16, "attention_dropout": 0.2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **size))
    lora = LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    return plant(get_peft_model(model, lora), fault)


def trained(
    tokenizer: Any, name: str, bad: tuple[int, ...], fault: str | None, guarded: bool, **given: Any
) -> Any:
    import trl

    kind = kinds(getattr(trl, f"{name}Trainer"), Slices)[guarded]
    settings = {"gradient_accumulation_steps": WINDOW, "max_steps": 4, "learning_rate": 0.01}
    settings |= {"logging_steps": 1, "max_grad_norm": 0.1, "save_strategy": "no"}
    settings |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True, **given}
    config = getattr(trl, f"{name}Config")
    trainer = trainer_of(kind, config, policy(tokenizer, fault), tokenizer, 8, **settings)
    trainer.bad, trainer.passes = bad, fault is None
    trainer.train()
    return trainer


def logged(trainer: Any) -> list[dict[str, Any]]:
    entries = trainer.state.log_history[:-1]
    return [{name: entry[name] for name in entry if name not in TIMED} for entry in entries]


GENERATIONS = {
    "one-a-step": {},
    "two-steps-of-one": {"steps_per_generation": 2 * WINDOW},
    "each-twice": {"num_iterations": 2},
    "two-within-a-step": {"steps_per_generation": 2},
    "one-a-micro-batch": {"steps_per_generation": 1},
    "one-twice-within-a-step": {"steps_per_generation": 1, "num_iterations": 2},
    "window-of-two": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "loss-of-grpo": {"loss_type": "grpo"},
    "without-kl": {"beta": 0.0},
    "entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_max": 1.0},
}


BAD = (0, 5)
"""The first slice of a generation, and another."""


@pytest.fixture(scope="module")
def stock_of(tokenizer) -> Any:
    """What a training that passed over BAD leaves, by the name of its generations; made once."""

    @functools.cache
    def made(name: str) -> tuple[Any, ...]:
        stock = trained(tokenizer, "GRPO", BAD, None, False, **GENERATIONS[name])
        return state_of(stock), stock._step, logged(stock)

    return made


@pytest.mark.parametrize("fault", ["loss-nan", "raises-backward"])
@pytest.mark.parametrize("name", GENERATIONS)  # outermost, for the cases with one stock training
def test_a_refused_slice_leaves_no_trace(name, fault, tokenizer, stock_of) -> None:
    """The log holds nothing of it."""
    state, step, log = stock_of(name)
    guarded = trained(tokenizer, "GRPO", BAD, fault, True, **GENERATIONS[name])
    assert_equal(state_of(guarded), state, "state")
    assert guarded._step == step
    assert logged(guarded) == log
    assert all(math.isfinite(entry["entropy"]) for entry in logged(guarded))
    assert guarded.guard.counts.refused == len(guarded.refusals) >= 2


@pytest.mark.parametrize("bad", [(5,), (7, 12)])
def test_rloo_passes_over_a_refused_slice(bad, tokenizer) -> None:
    guarded = trained(tokenizer, "RLOO", bad, "tensor-nan", True, num_iterations=2)
    stock = trained(tokenizer, "RLOO", bad, None, False, num_iterations=2)
    assert_equal(state_of(guarded), state_of(stock), "state")
    assert logged(guarded) == logged(stock)


def sharded(_processes: Any, name: str, fault: str, out: str) -> list[tuple[int, str, int]]:
    """A refused slice takes the other process's slice with it: backward has summed both."""
    tokenizer = AutoTokenizer.from_pretrained(str(EMBEDDED_FOLDER))
    given = {"output_dir": out, **FSDP}
    with fsdp_on_cpus():
        guarded = trained(tokenizer, name, (0, 5), fault, True, **given)
    # gradients are summed in each backward, and not once in a window, which has other bits
    apart = mock.patch.object(Accelerator, "no_sync", lambda *_, **__: nullcontext())
    with fsdp_on_cpus(), apart:
        stock = trained(tokenizer, name, (0, 1, 4, 5), None, False, **given)
    assert is_sharded(next(guarded.model.parameters()))
    assert_equal(state_of(guarded), state_of(stock), "state")
    losses = [[entry["loss"] for entry in logged(each)] for each in (guarded, stock)]
    assert losses[0] == losses[1]
    return [(r.process, r.kind, r.micro_batch) for r in guarded.refusals[:2]]


@pytest.mark.parametrize(("name", "fault"), [("GRPO", "gradient-nan"), ("RLOO", "loss-nan")])
def test_a_refused_slice_leaves_no_trace_in_sharded_layers(name, fault, tmp_path) -> None:
    first, second = values(several(2, sharded, name, fault, str(tmp_path)))
    kind = fault.removesuffix("-nan")
    assert first == second == [(0, kind, 0), (1, kind, 5)]


def test_a_window_of_bad_slices_is_left_out(tokenizer) -> None:
    """Its generation stands; optimizer and schedule wait."""
    bad = (4, 5, 6, 7)
    guarded = trained(tokenizer, "GRPO", bad, "gradient-nan", True)
    stock = trained(tokenizer, "GRPO", bad, None, False)
    assert_equal(state_of(guarded), state_of(stock), "state")
    assert (guarded.guard.counts.steps, guarded.state.global_step, guarded._step) == (2, 4, 16)


def test_a_refused_slice_is_traced_and_named_by_the_rows_of_its_generation(tokenizer) -> None:
    guarded = trained(tokenizer, "GRPO", (5,), "loss-nan", True)
    assert [r.micro_batch for r in guarded.refusals] == [1, 1]
    assert set(guarded.refusals[0].sample_ids) == {"4", "5", "6", "7"}
    (finding,) = guarded.guard.findings
    assert "mlp.act_fn" in str(finding), str(finding)


def infinite(completions: Any, **_: Any) -> list[float]:
    return [math.inf, *(float(i) for i in range(1, len(completions)))]


def test_an_infinite_reward_is_traced_to_the_advantages(tokenizer, monkeypatch) -> None:
    """RLOO makes -3.4e38 of it, which is no mask."""
    monkeypatch.setattr("faults.row_generating.reward", infinite)
    guarded = trained(tokenizer, "RLOO", (), None, True, max_steps=1)
    said = str(guarded.guard.findings[0].verdict)
    assert said.startswith("corrupt input: advantages h"), said  # holds, or held before the pass
    assert "3.40282e+38" in said.partition(";")[0] and "the reward function" in said


def unscorable(completions: Any, **_: Any) -> list[float | None]:
    return [None, *infinite(completions)[1:]]


@pytest.mark.parametrize(("reward", "told"), [(infinite, 2), (unscorable, 0)])
def test_an_infinite_reward_that_grpo_hides_is_told_once_a_generation(
    reward, told, tokenizer, monkeypatch, caplog
) -> None:
    """Its group gets the advantage 0, as a completion does for which the function returns None."""
    monkeypatch.setattr("faults.row_generating.reward", reward)
    guarded = trained(tokenizer, "GRPO", (), None, True, max_steps=4, num_iterations=2)
    assert guarded.guard.counts.refused == 0
    said = [record.message for record in caplog.records if record.name == "npt.guard"]
    assert len(said) == told, said
    assert all(line.startswith("reward function infinite returned an inf") for line in said)


def test_a_generation_is_drawn_once(tokenizer, monkeypatch) -> None:
    """As if it were the micro-batch's own, which is computed again: then the runs differ."""
    monkeypatch.setattr(Generations, "rewind_to", lambda *_: None)
    given = {"steps_per_generation": 2}
    guarded = trained(tokenizer, "GRPO", (5,), "loss-nan", True, **given)
    stock = trained(tokenizer, "GRPO", (5,), None, False, **given)
    with pytest.raises(AssertionError):
        assert_equal(state_of(guarded), state_of(stock), "state")


def test_what_a_forward_asks_of_other_processes_is_refused(tokenizer, monkeypatch) -> None:
    monkeypatch.setattr("accelerate.Accelerator.num_processes", 2)
    with pytest.raises(ConfigError, match=r"^use_adaptive_entropy, .*npt.guard.Report"):
        trained(tokenizer, "GRPO", (), None, True, **GENERATIONS["entropy"])


def test_kto_on_several_processes_is_refused_whose_loss_asks_all_of_them() -> None:
    accelerator = SimpleNamespace(num_processes=2)
    with pytest.raises(ConfigError, match="KTO's KL communicate"):
        _refuse_unfit(SimpleNamespace(accelerator=accelerator, calculate_KL=True))
