"""A teacher that reads a context, and a student that does not: losses and figures against passes
of plain transformers, and runs.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_runs import outcome
from students import moved
from torch import Tensor

import npt
from npt.adapters.converted import adapter_parameters
from npt.batch import Sample, collate
from npt.config import DataConfig, NPTConfig, TrainConfig
from npt.console import silent_console
from npt.data.samples import cut
from npt.distill.step import forward_backward
from npt.distill.strategies import drive
from npt.errors import ConfigError, TooManyRefusalsError
from npt.evaluation.evaluate import evaluate
from npt.forensics.replay import replayed
from npt.forensics.student import batch_of, loss_of, read_student

LOGITS_ALONE: dict[str, Any] = {
    "strategy": "end_to_end",
    "logit_kl_weight": 1.0,
    "hidden_weight": 0.0,
}
DATA = DataConfig(context_column="context", max_length=32)
# fp32 sums over some hundred numbers, in another order and with padding
CLOSE: dict[str, Any] = {"rtol": 2e-4, "atol": 1e-6}


def records(count: int = 40) -> list[dict[str, Any]]:
    """Pairs whose context says what letter the answer repeats."""
    return [
        {
            "id": str(i),
            "context": "xyz"[i % 3] * (2 + i % 5) if i % 4 else "",
            "prompt": "abcdefgh"[i % 7 :][: 2 + i % 3],
            "completion": "klmnop"[i % 5 :][: 1 + i % 4],
        }
        for i in range(count)
    ]


@pytest.fixture
def student(load_model) -> Any:
    model = load_model(None)
    npt.attach(model, NPTConfig(rank=4, layers="1-3"))
    return moved(model, 0.1)


def samples_of(tokenizer: Any, count: int = 5) -> list[Sample]:
    return list(cut(records(count), tokenizer, DATA))


def kl_by_hand(model: Any, samples: list[Sample]) -> Tensor:
    """KL(teacher, student) at the targets, one row at a time through the model's own forward."""
    total = torch.zeros(())
    for sample in samples:
        row = sample.taught or sample
        with torch.no_grad(), npt.adapters_disabled(model):
            taught = model(torch.tensor([row.input_ids])).logits[0]
        learnt = model(torch.tensor([sample.input_ids])).logits[0]
        count = sum(label != -100 for label in sample.labels or ())
        log_p = taught[-count - 1 : -1].log_softmax(-1)
        log_q = learnt[-count - 1 : -1].log_softmax(-1)
        total = total + (log_p.exp() * (log_p - log_q)).sum()
    return total


def gradients(model: Any) -> list[Tensor]:
    found = [p.grad.clone() for p in adapter_parameters(model).values() if p.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize("recomputes", [False, True])
def test_loss_and_gradients_are_those_computed_by_hand(student, tokenizer, recomputes) -> None:
    samples = samples_of(tokenizer)
    config = TrainConfig(**LOGITS_ALONE, gradient_checkpointing=recomputes)
    sums = forward_backward(student, drive, collate(samples), config)
    found = gradients(student)
    expected = kl_by_hand(student, samples)
    expected.backward()
    torch.testing.assert_close(sums.loss, expected.detach(), **CLOSE)
    for one, other in zip(found, gradients(student), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    assert sums.scored == sum(label != -100 for s in samples for label in s.labels or ())


def test_a_separate_teacher_reads_the_context(student, load_model, tokenizer) -> None:
    batch, config = collate(samples_of(tokenizer)), TrainConfig(**LOGITS_ALONE)
    own = forward_backward(student, drive, batch, config)
    separate = drive(student, batch, config, load_model(None))
    torch.testing.assert_close(separate.loss, own.loss, **CLOSE)


def test_an_evaluation_gives_the_context_to_the_teacher_alone(student, tokenizer) -> None:
    samples = samples_of(tokenizer, 9)
    fidelity = evaluate(student, tokenizer, records(9), data_config=DATA, batch_size=4)
    with torch.no_grad():
        expected = kl_by_hand(student, samples)
    assert fidelity.student.kl * fidelity.student.tokens == pytest.approx(float(expected), rel=1e-3)
    assert fidelity.teacher.kl == pytest.approx(0, abs=1e-6) and not fidelity.layers
    plain = [replace(sample, taught=None) for sample in samples]
    assert evaluate(student, tokenizer, plain).student.kl != pytest.approx(fidelity.student.kl)
    with pytest.raises(ConfigError, match="--divergence_prompts 2 does not support data with"):
        evaluate(student, tokenizer, samples, divergence_prompts=2)


def test_an_unquantised_base_reads_the_context_too(student, load_model, tokenizer) -> None:
    samples = samples_of(tokenizer, 9)
    fidelity = evaluate(student, tokenizer, samples, unquantized=load_model(None))
    assert fidelity.attribution["unquantized_to_npt"].kl == pytest.approx(fidelity.student.kl)


def write(folder: Path, content: list[dict[str, Any]] | None = None) -> DataConfig:
    file = folder / "data.jsonl"
    lines = (json.dumps(record) + "\n" for record in content or records())
    file.write_text("".join(lines))
    return replace(DATA, dataset_name=str(file))


def make_trainer(
    base: tuple[Any, Any], data: DataConfig, folder: Path, **settings: Any
) -> npt.Trainer:
    model, tokenizer = base
    npt.detach(model)
    npt.attach(model, NPTConfig(rank=4, layers="2-3"))
    usual: dict[str, Any] = {"output_dir": str(folder), "batch_size": 3, "learning_rate": 1e-2}
    usual |= {"smoke_test": False, "eval_samples": 8, "log_steps": 1, **LOGITS_ALONE}
    config = TrainConfig(**{**usual, **settings})
    return npt.Trainer(
        model, tokenizer, None, config, data_config=data, console=silent_console(), report=False
    )


def test_a_run_lowers_the_kl_to_a_teacher_with_contexts(load_model, tokenizer, tmp_path) -> None:
    """One context for all, which the student can learn."""
    data = write(tmp_path, [{**record, "context": "zzzz"} for record in records(300)])
    settings = {"max_steps": 40, "smoke_test": True, "batch_size": 8}
    result = make_trainer((load_model(None), tokenizer), data, tmp_path / "run", **settings).train()
    fidelity = result.fidelity
    assert result.heldout and result.refused == 0
    assert fidelity is not None and fidelity.initial is not None
    assert fidelity.student.kl < 0.7 * fidelity.initial.kl


def test_a_resumed_run_has_the_same_bits(load_model, tokenizer, tmp_path) -> None:
    base, data = (load_model(None), tokenizer), write(tmp_path)
    settings = {"max_steps": 6, "save_steps": 3}
    make_trainer(base, data, tmp_path / "whole", **settings).train()
    make_trainer(base, data, tmp_path / "parts", **settings).train()
    early = tmp_path / "parts" / "checkpoints" / "step-00000003"
    make_trainer(base, data, tmp_path / "again", resume=str(early), **settings).train()
    one, other = (outcome(tmp_path / name) for name in ("whole", "again"))
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())
    assert one.fidelity == other.fidelity


def test_an_objective_that_reads_more_of_the_teacher_is_refused(load_model, tokenizer, tmp_path):
    base, data = (load_model(None), tokenizer), write(tmp_path)
    with pytest.raises(ConfigError, match="so only their logits can be compared"):
        make_trainer(base, data, tmp_path / "run", hidden_weight=1.0)


RARE = "`"
BAD = {"id": "bad", "context": RARE, "prompt": "ab", "completion": "cd"}


@pytest.fixture
def overflowing(load_model, tokenizer, tmp_path) -> Any:
    """`overflowing(**settings)`: a trainer on records of which the teacher reads NaN in one."""
    model = load_model(None)
    (rare,) = tokenizer(RARE, add_special_tokens=False)["input_ids"]

    def spoil(_: Any, given: tuple[Tensor], states: Tensor) -> Tensor:
        return states.masked_fill((given[0] == rare).unsqueeze(-1), float("nan"))

    model.model.embed_tokens.register_forward_hook(spoil)
    data = write(tmp_path, [*records(12), BAD])
    return partial(make_trainer, (model, tokenizer), data, tmp_path / "run", batch_size=1)


def test_a_nan_of_a_context_is_refused(overflowing) -> None:
    trainer = overflowing()
    result = trainer.train()
    assert result.refused_by_kind == {"loss": 1} and result.steps == result.micro_batches - 1
    parameters = adapter_parameters(trainer.setup.model).values()
    assert all(bool(parameter.isfinite().all()) for parameter in parameters)


def test_a_post_mortem_replays_what_the_teacher_read(overflowing, tokenizer, tmp_path) -> None:
    trainer = overflowing(max_consecutive_bad=1)
    with pytest.raises(TooManyRefusalsError):
        trainer.train()
    (bundle,) = (tmp_path / "run" / "postmortem").iterdir()
    student = read_student(bundle)
    (stored,) = student.postmortem.micro_batches
    (taught,) = (sample.taught for sample in cut([BAD], tokenizer, DATA))
    assert taught is not None
    assert batch_of(stored.inputs).taught.input_ids.tolist() == [list(taught.input_ids)]
    assert replayed(student.postmortem, trainer.setup.model, loss_of(student)).reproduced
