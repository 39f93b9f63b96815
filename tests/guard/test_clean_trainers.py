"""A guard changes nothing of a Trainer's clean run: whatever its model, batches and losses."""

from typing import Any

import pytest
import torch
from guarded_loops import assert_equal
from guarded_trainers import InOrder, small_llama, state_of, trainer_of
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, TrainerCallback

import npt
from faults.row_faults import VOCABULARY, row
from npt.errors import ConfigError
from npt.guard import protect
from npt.guard.ids import refuse_bad_ids


class Config(PreTrainedConfig):
    model_type = "points"


class Points(PreTrainedModel):
    """A model of no tokens, as of images: `get_input_embeddings` raises."""

    config_class = Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.line = nn.Linear(3, 2)
        self.post_init()

    def forward(self, values: Tensor, labels: Tensor | None = None, **_: Any) -> dict[str, Tensor]:
        scores = self.line(values)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def points() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"values": torch.randn(3, generator=generator), "labels": torch.tensor(i % 2)}
        for i in range(8)
    ]


def both(data: list[Any], folder: Any, model: Any, kind: Any = InOrder, **rest: Any) -> list[Any]:
    """Train plain and guarded; return both trainers."""
    trainers = []
    for prepared in (lambda trainer: trainer, protect):
        torch.manual_seed(0)
        trainer = prepared(trainer_of(kind, data, folder, model(), **rest))
        trainer.train()
        trainers.append(trainer)
    plain, guarded = trainers
    assert_equal(state_of(guarded), state_of(plain), "state")
    assert guarded.guard.counts.refused == 0
    assert guarded.guard.window.gradients.sums == [] and not guarded.model._forward_pre_hooks
    return trainers


def test_a_model_without_a_token_embedding_trains(tmp_path) -> None:
    both(points(), tmp_path, lambda: Points(Config()))


class Tuples(InOrder):
    """Its batches are tuples, as data of one's own may be."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(inputs[0], inputs[1])["loss"]

    def floating_point_ops(self, inputs: Any) -> int:
        return 0


def test_a_batch_that_is_no_mapping_passes_through(tmp_path, monkeypatch) -> None:
    def collate(rows: list[Any]) -> tuple[Tensor, Tensor]:
        return tuple(torch.stack([each[name] for each in rows]) for name in ("values", "labels"))

    monkeypatch.setattr(Tuples, "_get_collator_with_removed_columns", lambda self, c, *_, **__: c)

    def trainer_with(*arguments: Any, **named: Any) -> Any:
        return Tuples(*arguments, **named, data_collator=collate)

    both(points(), tmp_path, lambda: Points(Config()), trainer_with)


class OwnLoss(InOrder):
    """Ignores labels of -1, which the model is not given."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        logits = model(input_ids=inputs["input_ids"]).logits
        labels = inputs["labels"][:, 1:].reshape(-1)
        return nn.functional.cross_entropy(
            logits[:, :-1].reshape(len(labels), -1), labels, ignore_index=-1
        )


def test_labels_of_a_loss_of_ones_own_are_its_own_affair(tmp_path) -> None:
    rows = [row(i) for i in range(8)]
    for each in rows:
        each["labels"] = torch.where(each["labels"] < 0, -1, each["labels"])
        each["labels"][3] = -1
    both(rows, tmp_path, small_llama, OwnLoss)


class Replacing(nn.Module):
    """Replaces placeholders before it looks ids up, as models of images and text do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 2)

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: Tensor) -> Tensor:
        known = (input_ids >= 0) & (input_ids < 8)
        return self.table(torch.where(known, input_ids, 0))


@pytest.mark.parametrize("placeholder", [-200, 9, VOCABULARY])
def test_placeholders_that_are_never_looked_up_are_good(placeholder) -> None:
    model, ids = Replacing(), torch.tensor([[1, placeholder]])
    with refuse_bad_ids({"input_ids": ids}, model):
        model(ids)
    assert not model.table._forward_pre_hooks


def test_a_student_that_no_checkpoint_can_hold_is_refused_at_once(tmp_path) -> None:
    model = small_llama()
    npt.attach(model, npt.NPTConfig(rank=2, layers="all"))
    data = [row(0)] * 8
    with pytest.raises(ConfigError, match="cannot hold an NPT student; pass save_strategy='no'"):
        protect(trainer_of(InOrder, data, tmp_path, model, save_strategy="steps")).train()
    protect(trainer_of(InOrder, data, tmp_path, model)).train()


def logged(trainer: Any, *names: str) -> list[dict[str, Any]]:
    return [{name: entry.get(name) for name in names} for entry in trainer.state.log_history]


class Unfreezing(InOrder):
    """Trains its last layer alone in the first step, as gradual unfreezing does."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.create_optimizer()
        self.freeze(True)
        self.add_callback(Unfreeze(self))

    def freeze(self, frozen: bool) -> None:
        for parameter in self.model.model.parameters():
            parameter.requires_grad_(not frozen)


class Unfreeze(TrainerCallback):
    def __init__(self, trainer: Unfreezing):
        self.trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.freeze(state.global_step < 1)


def test_what_is_unfrozen_on_the_way_is_trained(tmp_path) -> None:
    plain, guarded = both([row(i) for i in range(8)], tmp_path, small_llama, Unfreezing)
    assert logged(plain, "loss", "grad_norm") == logged(guarded, "loss", "grad_norm")
    assert len(guarded.guard.update.names) == len(list(guarded.model.parameters()))


class LastLayer(InOrder):
    """Its optimizer has one layer; the others get gradients that nobody steps."""

    def create_optimizer(self, *_: Any) -> torch.optim.Optimizer:
        if self.optimizer is None:
            last = list(self.model.lm_head.parameters())
            self.optimizer = torch.optim.AdamW(last, lr=self.args.learning_rate)
        return self.optimizer


@pytest.mark.parametrize("size", [1, 2], ids=["alone", "accumulated"])
def test_the_norm_is_the_models_whatever_the_optimizer_has(size, tmp_path) -> None:
    settings = {"gradient_accumulation_steps": size, "max_grad_norm": 0.1}
    data = [row(i) for i in range(8)]
    plain, guarded = both(data, tmp_path, small_llama, LastLayer, **settings)
    assert logged(plain, "loss", "grad_norm") == logged(guarded, "loss", "grad_norm")
    assert guarded.guard.update.names == ("lm_head.weight",)
    assert plain.state.log_history[0]["grad_norm"] > 0.1  # so it was clipped


class LateInTheNorm(LastLayer):
    """A layer that nobody steps requires a gradient from the second step on."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.freeze(True)
        self.add_callback(Unfreeze(self))

    def freeze(self, frozen: bool) -> None:
        self.model.model.layers[0].requires_grad_(not frozen)


def test_what_nobody_steps_joins_the_norm_on_the_way(tmp_path) -> None:
    data = [row(i) for i in range(8)]
    plain, guarded = both(data, tmp_path, small_llama, LateInTheNorm, max_grad_norm=0.1)
    assert logged(plain, "loss", "grad_norm") == logged(guarded, "loss", "grad_norm")


class InTurn(Unfreezing):
    """Trains its last norm, then a layer, then the norm again."""

    def freeze(self, _frozen: bool) -> None:
        turn = ("model.norm", "model.layers.1.", "model.norm")[min(self.state.global_step, 2)]
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name.startswith(("lm_head", turn)))


def test_what_is_frozen_for_a_while_is_clipped_again(tmp_path) -> None:
    plain, guarded = both(
        [row(i) for i in range(8)], tmp_path, small_llama, InTurn, max_grad_norm=0.1
    )
    assert logged(plain, "loss", "grad_norm") == logged(guarded, "loss", "grad_norm")


class Scaled(InOrder):
    """Its loss has a parameter, which is not of the model."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.scale = nn.Parameter(torch.ones(()))

    def create_optimizer(self, *arguments: Any) -> torch.optim.Optimizer:
        if self.optimizer is None:
            super().create_optimizer(*arguments)
            self.optimizer.add_param_group({"params": [self.scale]})
        return self.optimizer

    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        return super().compute_loss(*arguments, **named) * self.scale

    def get_batch_samples(self, *arguments: Any, **named: Any) -> Any:
        self.scale.grad = None  # a Trainer zeroes the gradients of its model alone
        return super().get_batch_samples(*arguments, **named)


def test_parameters_of_a_loss_are_trained_too(tmp_path) -> None:
    plain, guarded = both([row(i) for i in range(8)], tmp_path, small_llama, Scaled)
    assert plain.scale.item() == guarded.scale.item() != 1.0
    assert logged(plain, "grad_norm") == logged(guarded, "grad_norm")


class ScaledAlone(Scaled):
    """The optimizer has no other parameter; the model stays as it is."""

    def create_optimizer(self, *_: Any) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW([self.scale], lr=0.1)
        return self.optimizer


@pytest.mark.parametrize("frozen", [False, True])
def test_a_loss_may_be_all_that_is_trained(frozen, tmp_path) -> None:
    plain, guarded = both(
        [row(i) for i in range(8)],
        tmp_path,
        lambda: small_llama().requires_grad_(not frozen),
        ScaledAlone,
    )
    assert plain.scale.item() == guarded.scale.item() != 1.0
    assert logged(plain, "grad_norm") == logged(guarded, "grad_norm")


def test_a_trainer_is_a_plain_one_before_and_after_training(tmp_path) -> None:
    """Its training_step called alone, a loop of one's own with its optimizer, its checkpoint."""
    seen = []
    for prepared in (lambda trainer: trainer, protect):
        torch.manual_seed(0)
        trainer = prepared(trainer_of(InOrder, points(), tmp_path, Points(Config())))
        inputs = {name: value[None] for name, value in points()[0].items()}
        trainer.current_gradient_accumulation_steps = 1  # which a loop sets
        found = [trainer.training_step(trainer.model, dict(inputs))]
        trainer.train()
        found += [
            trainer.training_step(trainer.model, dict(inputs)),
            trainer.model.line.weight.grad,
        ]
        trainer.optimizer.param_groups[0]["lr"] = 0.1
        trainer.optimizer.step()
        seen.append([*found, trainer.model.line.weight.detach().clone()])
        trainer._save_checkpoint(trainer.model, None)
    assert all(map(torch.equal, *seen))


class Failing(InOrder):
    """Its third step ends in an error."""

    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        if self.state.global_step == 2:
            raise RuntimeError("no memory")
        return super().compute_loss(*arguments, **named)


def test_an_optimizer_is_its_own_again_after_an_error(tmp_path) -> None:
    trainer = protect(trainer_of(Failing, points(), tmp_path, Points(Config())))
    with pytest.raises(RuntimeError, match="no memory"):
        trainer.train()
    before = trainer.model.line.weight.detach().clone()
    trainer.model.line.weight.grad = torch.ones_like(before)
    trainer.optimizer.step()
    assert not torch.equal(trainer.model.line.weight, before)
