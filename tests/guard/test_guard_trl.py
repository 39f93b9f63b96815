"""TRL's trainers under a guard, as `test_guard_trainer.py`; skipped if TRL is not installed."""

from typing import Any

import pytest
import torch
from guarded_loops import assert_equal
from guarded_trainers import ARGUMENTS, RowsInOrder, small_llama, state_of
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from faults.row_faults import plant, row
from npt.base.source import EMBEDDED_FOLDER
from npt.errors import ConfigError, TooManyRefusalsError
from npt.guard import TrainerMixin, protect, replay

BAD = 5
FAULT = "raises-forward"
METRICS = ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy", "num_tokens")
METRICS += ("objective/kl", "objective/scores", "beta", "rewards/margins", "rewards/accuracies")
METRICS += ("logps/chosen", "logits/chosen")


def trained(kind: Any, arguments: Any, rows: list[Any], model: Any, **rest: Any) -> Any:
    class InOrder(RowsInOrder, kind):
        pass

    class Safe(TrainerMixin, InOrder):
        pass

    trainer = (Safe if len(rows) > 7 else InOrder)(
        model=model,
        args=arguments,
        train_dataset=pytest.importorskip("datasets").Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(str(EMBEDDED_FOLDER)),
        **rest,
    )
    trainer.train()
    logged = [
        {name: entry[name] for name in entry if name in METRICS}
        for entry in trainer.state.log_history[:-1]
    ]
    return {**state_of(trainer), "logged": logged}


def test_sft_of_a_refused_row_leaves_no_trace(tmp_path) -> None:
    trl = pytest.importorskip("trl")  # not before: importing it takes seconds
    given = {**ARGUMENTS, "gradient_accumulation_steps": 4, "bf16": False, "max_length": None}

    def rows(bad: int | None) -> list[Any]:
        made = [row(i, FAULT if i == bad else None) for i in range(8) if i == bad or i != BAD]
        return [{name: ids.tolist() for name, ids in one.items()} for one in made]

    config = trl.SFTConfig(str(tmp_path), **given)
    guarded = trained(trl.SFTTrainer, config, rows(BAD), plant(small_llama(), FAULT))
    stock = trained(trl.SFTTrainer, config, rows(None), small_llama())
    assert_equal(guarded, stock, "state")


def pairs(*words: str) -> list[Any]:
    return [
        {"prompt": f"say {word}: ", "chosen": word, "rejected": word[::-1] + "."} for word in words
    ]


def small_policy(tokenizer: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads))


def test_dpo_of_a_refused_pair_leaves_no_trace(tmp_path) -> None:
    trl = pytest.importorskip("trl")  # not before: importing it takes seconds
    given = {**ARGUMENTS, "gradient_accumulation_steps": 4, "bf16": False}
    tokenizer = AutoTokenizer.from_pretrained(str(EMBEDDED_FOLDER))
    (mark,) = tokenizer(" #", add_special_tokens=False)["input_ids"]
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "#", "eta", "theta"]
    good = [word for word in words if word != "#"]
    config = trl.DPOConfig(str(tmp_path), **given)
    policy = plant(small_policy(tokenizer), "tensor-nan", mark)
    reference = small_policy(tokenizer)
    guarded = trained(trl.DPOTrainer, config, pairs(*words), policy, ref_model=reference)
    plain = small_policy(tokenizer)
    stock = trained(trl.DPOTrainer, config, pairs(*good), plain, ref_model=reference)
    assert_equal(guarded, stock, "state")


@pytest.mark.parametrize("size", [4, 1])
def test_online_dpo_of_a_refused_prompt_leaves_no_trace(size, tmp_path) -> None:
    """size: of a window. A window of which nothing is left has no metrics, and logs none."""
    pytest.importorskip("trl")
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(str(EMBEDDED_FOLDER))
    (mark,) = tokenizer(" #", add_special_tokens=False)["input_ids"]
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "#", "eta", "theta"]
    states = []
    for fault in (FAULT, None):
        rows = [{"prompt": f"say {word}: "} for word in words if fault or word != "#"]
        policy = small_policy(tokenizer)
        given = {**ARGUMENTS, "gradient_accumulation_steps": size, "bf16": False}
        given["max_steps"] = -(-len(rows) // size)
        given["lr_scheduler_type"] = "constant"
        states.append(
            trained(
                OnlineDPOTrainer,
                OnlineDPOConfig(str(tmp_path), **given, max_new_tokens=4, max_length=48),
                rows,
                policy if fault is None else plant(policy, fault, mark),
                reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
            )
        )
    assert_equal(*states, "state")


def test_a_stopped_dpo_run_is_replayed_with_the_loss_of_its_trainer(tmp_path) -> None:
    trl = pytest.importorskip("trl")
    tokenizer = AutoTokenizer.from_pretrained(str(EMBEDDED_FOLDER))
    (mark,) = tokenizer(" #", add_special_tokens=False)["input_ids"]
    policy = plant(small_policy(tokenizer), "tensor-nan", mark)
    trainer = trl.DPOTrainer(
        model=policy,
        ref_model=small_policy(tokenizer),
        args=trl.DPOConfig(str(tmp_path), **ARGUMENTS, bf16=False),
        train_dataset=pytest.importorskip("datasets").Dataset.from_list(pairs("#", "#")),
        processing_class=tokenizer,
    )
    with pytest.raises(TooManyRefusalsError):
        protect(trainer, max_refused=2, trace=0).train()
    folder = tmp_path / "postmortem" / "step-00000000"
    with pytest.raises(ConfigError, match=r"returns no loss: .* loss=trainer\.compute_loss"):
        replay(folder, policy)
    found = replay(folder, policy, loss=trainer.compute_loss)
    assert found.reproduced and found.verdict is not None


def test_the_text_of_a_refused_row_is_logged(tmp_path, caplog) -> None:
    """Of rows that TRL drops and reorders, so that their numbers are not the file's."""
    trl = pytest.importorskip("trl")
    tokenizer = AutoTokenizer.from_pretrained(str(EMBEDDED_FOLDER))
    (mark,) = tokenizer(" #", add_special_tokens=False)["input_ids"]
    texts = ["", "alpha is", "it holds # and\nmore" + " of it" * 20, "beta is"]
    arguments = {**ARGUMENTS, "per_device_train_batch_size": 3, "max_steps": 1}
    trainer = trl.SFTTrainer(
        model=plant(small_policy(tokenizer), "loss-nan", mark),
        args=trl.SFTConfig(str(tmp_path), **arguments, bf16=False),
        train_dataset=pytest.importorskip("datasets").Dataset.from_list(
            [{"text": text} for text in texts]
        ),
        processing_class=tokenizer,
    )
    protect(trainer, trace=0).train()
    (said,) = [r.message for r in caplog.records if r.message.startswith("refused in step 1")]
    row = texts[2][:60]
    assert f"{row!r}" in said.partition("; text: ")[2], said
