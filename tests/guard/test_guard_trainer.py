"""transformers' Trainer under a guard equals, bit for bit, one that never saw the bad rows."""

import itertools
import json
import math
from functools import wraps
from types import MappingProxyType
from typing import Any

import pytest
import torch
from decoders import DECODERS, VOCABULARY
from guarded_loops import assert_equal
from guarded_trainers import InOrder, small_llama, state_of, trainer_of
from peft import LoraConfig, get_peft_model
from several import several, values
from transformers import Trainer, TrainerCallback, TrainingArguments

import npt
from faults.row_faults import plant, row
from npt.errors import ConfigError, DataError
from npt.guard import TrainerMixin, protect
from npt.guard.ids import refuse_bad_ids


class Safe(TrainerMixin, InOrder):
    """As anybody writes it."""


NEW = hasattr(TrainingArguments, "activation_checkpointing")
CHECKPOINTING = "activation_checkpointing" if NEW else "gradient_checkpointing"

ROWS = 8
BAD = 5
"""In the second window of four, the last of an epoch: a Trainer without it has three there."""


def rows(fault: str | None, bad: tuple[int, ...] = (BAD,)) -> list[Any]:
    return [row(i, fault if i in bad else None) for i in range(ROWS)]


def model_with(fault: str | None, dropout: float = 0.2) -> Any:
    return plant(small_llama(dropout), fault)


def trained(kind: Any, data: list[Any], fault: str | None, folder: Any, **arguments: Any) -> Any:
    trainer = trainer_of(kind, data, folder, model_with(fault), **arguments)
    trainer.train()
    return trainer


def without(bad: int) -> list[Any]:
    return [good for i, good in enumerate(rows(None)) if i != bad]


CASES = [("id-large", False), ("loss-nan", False), ("tensor-nan", True), ("recomputation", True)]
"""Faults, and whether activations are checkpointed. tests/faults has the campaign's, and what
they do to a Trainer without a guard.
"""


@pytest.mark.parametrize(("fault", "checkpointing"), CASES)
def test_a_refused_row_leaves_no_trace(fault, checkpointing, tmp_path) -> None:
    window = {"gradient_accumulation_steps": 4, CHECKPOINTING: checkpointing}
    guarded = trained(Safe, rows(fault), fault, tmp_path, **window)
    after = state_of(guarded)
    stock = trained(InOrder, without(BAD), None, tmp_path, **window)
    assert_equal(after, state_of(stock), "state")
    assert guarded.guard.counts.refused == 1
    history = [
        {key: entry[key] for key in ("loss", "grad_norm", "learning_rate") if key in entry}
        for trainer in (guarded, stock)
        for entry in trainer.state.log_history[:-1]
    ]
    assert history[:3] == history[3:]
    assert [entry["refused"] for entry in guarded.state.log_history] == [0, 1, 1, 1]


def test_losses_that_are_means_are_divided_by_the_survivors(tmp_path) -> None:
    """Of a model that is not told the window's tokens; its Trainer divides by micro-batches."""

    def train(kind: Any, data: list[Any], fault: str | None) -> Any:
        model = model_with(fault)
        trainer = trainer_of(kind, data, tmp_path, model, gradient_accumulation_steps=4)
        trainer.model_accepts_loss_kwargs = False
        trainer.train()
        return state_of(trainer)

    guarded = train(Safe, rows("gradient-inf"), "gradient-inf")
    assert_equal(guarded, train(InOrder, without(BAD), None), "state")


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1])
def test_a_window_of_nothing_else_is_left_out(max_grad_norm, tmp_path) -> None:
    """As with an fp16 overflow, `global_step` counts it, the schedule does not."""
    settings = {
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 4,
        "max_grad_norm": max_grad_norm,
    }
    guarded = trained(Safe, rows("loss-nan"), "loss-nan", tmp_path, max_steps=ROWS, **settings)
    after = state_of(guarded)
    stock = trained(InOrder, without(BAD), None, tmp_path, max_steps=ROWS - 1, **settings)
    assert_equal(after, state_of(stock), "state")
    assert (guarded.guard.counts.steps, guarded.state.global_step) == (ROWS - 1, ROWS)


@pytest.mark.parametrize("size", [1, 4])
def test_a_scale_that_is_too_high_costs_what_it_costs_a_stock_trainer(size, tmp_path) -> None:
    def train(kind: Any) -> tuple[Any, ...]:
        settings = {"max_steps": 5, "gradient_accumulation_steps": size}
        settings |= {"optim": "adamw_torch", "max_grad_norm": 0.0}
        data = [row for _ in range(4) for row in rows(None)]
        trainer = trainer_of(kind, data, tmp_path, small_llama(0.0), **settings)
        # a real one, on a CPU: gradients in fp32 overflow until its scale has fallen
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
        trainer.accelerator.scaler = scaler
        trainer.train()
        return state_of(trainer), scaler.get_scale(), trainer

    state, scale, guarded = train(Safe)
    stock_state, stock_scale, _ = train(InOrder)
    assert_equal(state, stock_state, "state")
    assert scale == stock_scale < 2.0**127
    assert guarded.guard.counts.refused == 0 and guarded.guard.counts.steps == 4


def test_a_step_that_fails_is_taken_back(tmp_path, caplog) -> None:
    settings = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4}
    guarded = trainer_of(InOrder, rows(None), tmp_path, max_steps=ROWS, **settings)
    calls = []

    class Spoiling(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            super().step()
            if len(calls) == BAD:
                self.param_groups[0]["params"][0].data[0, 0] = math.nan
            calls.append(1)

    guarded.optimizer_cls_and_kwargs = (Spoiling, {"lr": 0.01, "fused": True})
    protect(guarded).train()
    after = state_of(guarded)
    stock = trained(InOrder, without(BAD), None, tmp_path, max_steps=ROWS - 1, **settings)
    assert_equal(after, state_of(stock), "state")
    (said,) = [record.message for record in caplog.records if record.name == "npt.guard"]
    assert said.startswith("refused in step 6: the whole window: model.embed_tokens.weight")


def test_lora_on_a_4_bit_base_leaves_no_trace(load_model, tmp_path) -> None:
    def lora(fault: str | None) -> Any:
        model = load_model()
        torch.manual_seed(0)
        config = LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
        return plant(get_peft_model(model, config), fault)

    window = {"gradient_accumulation_steps": 4, "max_steps": 2, CHECKPOINTING: True}
    guarded = trainer_of(Safe, rows("tensor-nan"), tmp_path, lora("tensor-nan"), **window)
    guarded.train()
    after = state_of(guarded)
    stock = trainer_of(InOrder, without(BAD), tmp_path, lora(None), **window)
    stock.train()
    assert_equal(after, state_of(stock), "state")
    assert guarded.guard.counts.refused == 1


def test_a_state_that_is_not_finite_pushes_no_checkpoint_out(tmp_path) -> None:
    class Breaking(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if state.global_step == 2:
                named["model"].lm_head.weight.data[0, 0] = math.nan

    def folders(kind: Any, folder: Any) -> list[str]:
        saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
        trainer = trainer_of(kind, rows(None), folder, **saving)
        trainer.add_callback(Breaking())
        trainer.train()
        return sorted(path.name for path in folder.glob("checkpoint-*"))

    assert folders(Safe, tmp_path / "guarded") == ["checkpoint-1"]
    assert folders(InOrder, tmp_path / "stock") == ["checkpoint-3"]


def test_a_training_that_an_error_ended_can_begin_again(tmp_path) -> None:
    class Stopping(TrainerCallback):
        stop = True

        def on_substep_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if self.stop and state.global_step == 1:
                raise KeyError("in the second window")

    def train(kind: Any) -> Any:
        trainer = trainer_of(kind, rows(None), tmp_path, gradient_accumulation_steps=4)
        trainer.add_callback(stopping := Stopping())
        with pytest.raises(KeyError):
            trainer.train()
        stopping.stop = False
        trainer.train()
        return trainer

    guarded = train(Safe)
    after = state_of(guarded)
    assert_equal(after, state_of(train(InOrder)), "state")
    assert guarded.guard.counts.windows == 3


def test_memory_that_runs_out_in_a_window_forgets_it(tmp_path) -> None:
    """`auto_find_batch_size` begins again with the same optimizer and smaller batches."""

    def train(kind: Any, good: int) -> Any:
        model = model_with(None)
        forward, calls = model.forward, []

        @wraps(forward)  # its arguments are looked at
        def failing(*arguments: Any, **named: Any) -> Any:
            calls.append(1)
            if len(calls) == good + 1:
                raise RuntimeError("CUDA out of memory.")
            return forward(*arguments, **named)

        model.forward = failing
        arguments = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        trainer = trainer_of(
            kind, rows(None), tmp_path, model, auto_find_batch_size=True, **arguments
        )
        trainer.train()
        return state_of(trainer)

    for good in (0, 1):
        assert_equal(train(Safe, good), train(InOrder, good), "state")


@pytest.mark.parametrize("every", [1, ROWS])
def test_a_window_of_nothing_else_does_not_dilute_the_loss(every, tmp_path) -> None:
    def losses(kind: Any, data: list[Any]) -> tuple[float, float]:
        settings = {"learning_rate": 0.0, "logging_steps": min(every, len(data))}
        model = plant(small_llama(0.0), "loss-nan")
        trainer = trainer_of(kind, data, tmp_path, model, max_steps=len(data), **settings)
        result = trainer.train()
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return result.training_loss, sum(logged) / len(logged)

    # the last three rows; the mean of the others takes their place
    guarded = losses(Safe, rows("loss-nan", tuple(range(5, ROWS))))
    # one division and as many additions more, in fp32
    assert guarded == pytest.approx(losses(InOrder, rows(None)[:5]), rel=1e-5)


def test_ids_are_compared_with_what_the_model_has_rows_for() -> None:
    llama = small_llama()
    tokens = {"target_modules": ["embed_tokens", "q_proj"]}, {"trainable_token_indices": [1]}
    wrapped = [get_peft_model(small_llama(), LoraConfig(r=2, **one)) for one in tokens]
    top = row(0)["input_ids"][None] * 0 + llama.config.vocab_size

    def forward(model: Any, **inputs: Any) -> None:
        with refuse_bad_ids(inputs, model):
            model(**inputs)

    for model in (llama, *wrapped):
        forward(model, input_ids=top - 1, labels=top - 1)
        for name in ("input_ids", "labels"):
            with pytest.raises(DataError, match=f"^{name} has {int(top[0, 0])}, but the model's"):
                forward(model, **{"input_ids": top - 1, "labels": top - 1, name: top})
        assert not model.get_input_embeddings()._forward_pre_hooks
    with refuse_bad_ids({"input_ids": top}, torch.nn.Linear(2, 2)):
        pass
    batch = MappingProxyType({"input_ids": top, "labels": top - 1})
    with pytest.raises(DataError, match=r"^input_ids has"), refuse_bad_ids(batch, llama):
        llama(**batch)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("t5", "input_ids"), *itertools.product(DECODERS, ["labels", "decoder_input_ids"])],
)
def test_targets_of_a_decoder_are_compared_too(kind, name) -> None:
    """Its decoder looks them up: without the check they end in an IndexError, or kill a GPU."""
    make, inputs = DECODERS[kind]
    model = make()
    good = torch.tensor([[5, 6, 7]])
    for bad in (VOCABULARY, -7):
        given = {**inputs(), "labels": good, name: torch.tensor([[5, bad, 7]])}
        refused = pytest.raises(DataError, match=f"^{name} has {bad}, but the model's ids are 0 to")
        with refused, refuse_bad_ids(given, model):
            model(**given)
        verdict = npt.trace(model, given)
        assert (verdict.cause, verdict.phase, verdict.value) == ("token id", "data", bad)
        assert verdict.tensor.startswith(name)
    given = {**inputs(), "labels": good.masked_fill(good == 6, -100)}
    with refuse_bad_ids(given, model):
        assert bool(model(**given).loss.isfinite())
    assert npt.trace(model, given) is None


def test_settings_and_bases_that_cannot_be_are_said_at_once(tmp_path) -> None:
    trainer = trainer_of(InOrder, rows(None), tmp_path)
    for setting in ("max_grad_norm", "loss"):
        with pytest.raises(ConfigError, match=f"^a Trainer's guard has no setting '{setting}'"):
            protect(trainer, **{setting: 1.0})
    with pytest.raises(ConfigError, match=r"^max_refused is 0"):
        protect(trainer, max_refused=0)
    with pytest.raises(ConfigError, match=r"^Late has a Trainer before TrainerMixin"):
        type("Late", (InOrder, TrainerMixin), {})
    with pytest.raises(TypeError, match="argument 'spikes'"):
        type("Odd", (TrainerMixin, InOrder), {"guard_settings": {"spikes": 1}})
    assert type(trainer) is InOrder


def test_what_a_callback_sets_when_training_begins_counts(tmp_path) -> None:
    """Settings until the first step, `on_refused` at any time."""
    model = model_with("loss-nan")
    trainer: Any = trainer_of(Safe, rows("loss-nan"), tmp_path, model, max_steps=ROWS)
    told: list[Any] = []

    class Late(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            trainer.guard_settings = {"trace": 0}
            trainer.on_refused = told.append

    trainer.add_callback(Late())
    trainer.train()
    assert trainer.guard.settings.trace == 0
    assert len(told) == 1


def test_a_trainer_keeps_its_own_names(tmp_path) -> None:
    """Beside what it overrides, the guard adds three public names and one that is mangled."""
    added = {"guard", "guard_settings", "on_refused", "_TrainerMixin__window"}
    assert {name for name in vars(TrainerMixin) if not hasattr(Trainer, name)} == added
    trainer = trainer_of(InOrder, rows(None)[:4], tmp_path)
    protect(trainer).train()
    trained = trainer_of(InOrder, rows(None)[:4], tmp_path)
    trained.train()
    assert set(vars(trainer)) - set(vars(trained)) == added - {"on_refused"}


def test_a_trainer_whose_inputs_depend_on_its_calls_is_refused(tmp_path) -> None:
    """As GRPO's of TRL; computed again, a micro-batch would be another one."""
    trainer = protect(trainer_of(InOrder, rows(None), tmp_path))
    trainer._buffered_inputs = None
    with pytest.raises(ConfigError, match=r"^GuardedInOrder makes the inputs of several"):
        trainer.train()


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 2), (2, 1)])
def test_two_processes_refuse_alike(accumulate, steps, tmp_path) -> None:
    """Their sum is that of one Trainer with three micro-batches, in the order of the processes."""
    given = {"gradient_accumulation_steps": accumulate, "max_steps": steps}
    ended = values(several(2, two_processes, rows("loss-nan", (3,))[:4], tmp_path, given))
    assert ended[0] == ended[1]
    order = [0, 1, 2] if accumulate == 1 else [0, 2, 1]
    good = rows(None)
    model = model_with(None, dropout=0.0)
    window = {"gradient_accumulation_steps": 2 if accumulate == 1 else 3, "max_steps": steps}
    stock = trainer_of(InOrder, [good[i] for i in order], tmp_path, model, **window)
    stock.train()
    assert ended[0] == json.dumps(weights_and_moments(stock), default=torch.Tensor.tolist)


@pytest.mark.parametrize("fault", ["loss-nan", "id-large"])
def test_metrics_that_are_gathered_wait_for_nobody(fault, tmp_path) -> None:
    values(several(2, gathering, rows(fault, (3,))[:4], fault, tmp_path))


def gathering(_processes: Any, data: list[Any], fault: str, folder: Any) -> None:
    class Gathering(Safe):
        """As TRL's trainers do."""

        def compute_loss(self, *arguments: Any, **named: Any) -> Any:
            loss = super().compute_loss(*arguments, **named)
            self.accelerator.gather_for_metrics(loss.detach())
            return loss

    trainer = trainer_of(Gathering, data, folder, model_with(fault, dropout=0.0), max_steps=2)
    trainer.train()
    assert trainer.guard.counts.refused == 1
    assert "gather_for_metrics" not in vars(trainer.accelerator)


def two_processes(processes: Any, data: list[Any], folder: Any, given: dict[str, Any]) -> str:
    model = model_with("loss-nan", dropout=0.0)  # a process draws numbers of its own
    trainer = trainer_of(Safe, data, folder, model, **given)
    trainer.train()
    assert trainer.args.world_size == 2 and trainer.guard.counts.refused == 1
    return json.dumps(weights_and_moments(trainer), default=torch.Tensor.tolist)


def weights_and_moments(trainer: Any) -> dict[str, Any]:
    state = state_of(trainer)
    return {key: state[key] for key in ("weights", "optimizer", "scheduler")}
