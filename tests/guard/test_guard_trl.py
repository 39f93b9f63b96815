"""TRL's trainers under a guard, as `test_guard_trainer.py`; skipped if TRL is not installed."""

from typing import Any

import pytest
import torch
from guarded_loops import assert_equal
from guarded_trainers import ARGUMENTS, RowsInOrder, small_llama, state_of
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from faults.row_faults import plant, row
from npt.base.load import EMBEDDED_FOLDER
from npt.guard import TrainerMixin

BAD = 5
METRICS = ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy", "num_tokens")
METRICS += ("rewards/margins", "rewards/accuracies", "logps/chosen", "logits/chosen")


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


@pytest.mark.parametrize("fault", ["raises-forward"])
def test_sft_of_a_refused_row_leaves_no_trace(fault, tmp_path) -> None:
    trl = pytest.importorskip("trl")  # not before: importing it takes seconds
    given = {**ARGUMENTS, "gradient_accumulation_steps": 4, "bf16": False, "max_length": None}

    def rows(bad: int | None) -> list[Any]:
        made = [row(i, fault if i == bad else None) for i in range(8) if i == bad or i != BAD]
        return [{name: ids.tolist() for name, ids in one.items()} for one in made]

    config = trl.SFTConfig(str(tmp_path), **given)
    guarded = trained(trl.SFTTrainer, config, rows(BAD), plant(small_llama(), fault))
    stock = trained(trl.SFTTrainer, config, rows(None), small_llama())
    assert_equal(guarded, stock, "state")


def test_dpo_of_a_refused_pair_leaves_no_trace(tmp_path) -> None:
    trl = pytest.importorskip("trl")  # not before: importing it takes seconds
    given = {**ARGUMENTS, "gradient_accumulation_steps": 4, "bf16": False}
    tokenizer = AutoTokenizer.from_pretrained(str(EMBEDDED_FOLDER))
    (mark,) = tokenizer(" #", add_special_tokens=False)["input_ids"]

    def pairs(bad: bool) -> list[Any]:
        words = ["alpha", "beta", "gamma", "delta", "epsilon", "#", "eta", "theta"]
        return [
            {"prompt": f"say {word}: ", "chosen": word, "rejected": word[::-1] + "."}
            for word in words
            if bad or word != "#"
        ]

    def model() -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 64}
        heads = {"num_hidden_layers": 2, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads))

    config = trl.DPOConfig(str(tmp_path), **given)
    policy = plant(model(), "tensor-nan", mark)
    guarded = trained(trl.DPOTrainer, config, pairs(True), policy, ref_model=model())
    stock = trained(trl.DPOTrainer, config, pairs(False), model(), ref_model=model())
    assert_equal(guarded, stock, "state")
