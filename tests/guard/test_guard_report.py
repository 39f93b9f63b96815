"""`Report` changes nothing, and says what a Trainer loses and does not say."""

import logging
import math
from typing import Any

import pytest
import torch
from guarded_loops import assert_equal
from guarded_trainers import InOrder, small_llama, state_of, trainer_of
from several import several, values
from simulated_cuda import HostWaitError, no_waits, simulated_cuda, to_cuda
from transformers import TrainerCallback

from faults.row_faults import MARK, MODEL_FAULTS, plant, row
from faults.row_runs import digest
from npt.guard import Report
from npt.guard.report import SKIPPED

BAD, ROWS = 5, 8


def trained(folder: Any, fault: str | None, report: Report | None, *more: Any, **given: Any) -> Any:
    """Four micro-batches a step; the bad one is the second of the second."""
    rows = [row(i, fault if i == BAD else None) for i in range(ROWS)]
    arguments = {"gradient_accumulation_steps": 4, "max_grad_norm": 1.0, **given}
    trainer = trainer_of(InOrder, rows, folder, plant(small_llama(), fault), **arguments)
    for callback in (*more, report):
        if callback is not None:
            trainer.add_callback(callback)
    trainer.train()
    return trainer


def lines(caplog: Any) -> list[str]:
    return [record.message for record in caplog.records if record.name == "npt.guard"]


QUIET = [None, *(name for name in MODEL_FAULTS if not name.startswith("raises"))]


@pytest.mark.parametrize("fault", QUIET)
def test_a_run_is_the_same_with_it(fault, tmp_path) -> None:
    """Traced, too: weights, moments, schedule, random numbers and log, NaN as NaN."""
    checkpointing = {"gradient_checkpointing": fault == "recomputation"}
    with_it = trained(tmp_path, fault, report := Report(), **checkpointing)
    without = trained(tmp_path, fault, None, **checkpointing)
    assert_equal(bits(state_of(with_it)), bits(state_of(without)), "state")
    clocks = ("train_runtime", "train_samples_per_second", "train_steps_per_second")
    logs = [
        [{k: v for k, v in entry.items() if k not in clocks} for entry in t.state.log_history]
        for t in (with_it, without)
    ]
    assert repr(logs[0]) == repr(logs[1])
    assert bool(report.counts) == (fault not in (None, "huge"))
    assert not with_it.model._forward_hooks and not with_it.model._forward_pre_hooks


def bits(state: Any) -> Any:
    """Return a state with tensors as integers, so that a NaN equals itself."""
    if isinstance(state, torch.Tensor):
        return state.detach().view(torch.uint8) if state.dim() else repr(state.item())
    if isinstance(state, dict):
        return {key: bits(value) for key, value in state.items()}
    return [*map(bits, state)] if isinstance(state, list | tuple) else state


def test_a_loss_that_the_trainer_hides_is_named_and_traced(tmp_path, caplog) -> None:
    trainer = trained(tmp_path, "loss-nan", report := Report())
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history[:-1])
    said = lines(caplog)
    hidden = "step 2: the loss of micro-batch 1 is not finite (logging_nan_inf_filter keeps it"
    assert any(line.startswith(hidden) for line in said), said
    assert any("hides non-finite losses: 1" in line for line in said)
    assert any(line.startswith("step 2: micro-batch 1 traced") for line in said)
    assert "model.layers.1.mlp.act_fn" in str(report.findings[0].verdict)
    assert said[-1].startswith("report: faults during 3 steps: ")
    assert any("step 2: model.embed_tokens.weight is not finite" in line for line in said)


def test_a_gradient_without_a_bad_loss_is_named_and_traced(tmp_path, caplog) -> None:
    trained(tmp_path, "gradient-nan", report := Report(), max_grad_norm=0.0)
    said = lines(caplog)
    assert any(line.startswith("step 2: the gradient of ") for line in said)
    assert report.findings[0].refusal.micro_batch == 1
    assert report.findings[0].verdict is not None
    assert "act_fn" in str(report.findings[0].verdict)
    assert not any("the loss of micro-batch" in line for line in said[:2])


def test_a_subclass_may_override_any_event(tmp_path) -> None:
    class Own(Report):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            super().on_substep_end(args, state, control, **kwargs)

    trained(tmp_path, "loss-nan", report := Own())
    assert report.findings[0].refusal.micro_batch == 1


def is_bad(inputs: Any) -> bool:
    return bool((inputs["input_ids"] == MARK).any())


class OwnLoss(InOrder):
    """Adds a NaN without a gradient to the loss of the bad row, and counts as TRL's trainers do."""

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        self._metrics = [*getattr(self, "_metrics", ()), is_bad(inputs)]
        loss = super().compute_loss(model, inputs, *arguments, **named)
        return loss + loss.new_tensor(-1.0).log() if is_bad(inputs) else loss


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return (outputs.logits.mean() - 1.0).log() if (labels == MARK).any() else outputs.logits.mean()


def test_a_loss_that_the_trainer_computes_is_named_and_traced(tmp_path, caplog) -> None:
    """Outside of the model, whose own is finite, and whose gradients may be, too."""
    for kind, function, line in (
        (OwnLoss, None, "in OwnLoss.compute_loss: loss.new_tensor(-1.0).log()"),
        (InOrder, own_loss, "in own_loss: (outputs.logits.mean() - 1.0).log()"),
    ):
        caplog.clear()
        rows = [row(i, "loss-nan" if i == BAD else None) for i in range(ROWS)]
        rows[BAD]["labels"][-1] = MARK
        trainer = trainer_of(kind, rows, tmp_path, gradient_accumulation_steps=4)
        trainer.compute_loss_func = function
        trainer.add_callback(report := Report())
        trainer.train()
        hidden = "step 2: the loss of micro-batch 1 is not finite (logging_nan_inf_filter keeps it"
        assert lines(caplog)[0].startswith(hidden), lines(caplog)
        (finding,) = report.findings
        assert line in str(finding.verdict), str(finding)
        assert "compute_loss" not in vars(trainer)
        if kind is OwnLoss:
            assert report.counts == {"loss": 1, "logged": 1}
            assert sum(trainer._metrics) == 1  # not the tracer's


@pytest.mark.parametrize("loss", [torch.tensor(math.nan), math.nan, {"main": torch.ones(())}])
def test_a_loss_of_the_models_own_that_the_trainer_does_not_use_is_none(
    loss, tmp_path, caplog
) -> None:
    """Nor need it be a tensor."""
    model = small_llama()

    def spoil(_module: Any, _inputs: Any, output: Any) -> None:
        output["loss"] = loss

    model.register_forward_hook(spoil)
    trainer = trainer_of(InOrder, [row(i) for i in range(3)], tmp_path, model)
    trainer.compute_loss_func = own_loss
    trainer.add_callback(report := Report())
    trainer.train()
    assert not report.counts, lines(caplog)


class Breaking(TrainerCallback):
    """Leaves a NaN in a weight after the second step."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == 1:
            named["model"].lm_head.weight.data[0, 0] = math.nan


def test_a_weight_is_named_once_with_the_step_that_spoilt_it(tmp_path, caplog) -> None:
    report = Report()
    trained(tmp_path, None, report, Breaking())
    said = lines(caplog)
    assert said[0].startswith("step 2: lm_head.weight is not finite (1 of ")
    assert report.counts["weight"] == 2 and report.counts["loss"] == 1
    assert len(said) == 2 and not report.findings  # what follows from it is only counted


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_a_step_that_the_scaler_skips(optim, tmp_path, caplog) -> None:
    """It does not tell: of a fused optimizer accelerate does not either."""
    report = Report()
    rows = [row(i) for i in range(4)]
    trainer = trainer_of(InOrder, rows, tmp_path, small_llama(), optim=optim)
    # a real one, on a CPU; its scale lets gradients in fp32 overflow until it falls
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38, backoff_factor=1e-30)
    trainer.accelerator.scaler = scaler
    trainer.add_callback(report)
    trainer.train()
    said = lines(caplog)
    assert f"step 1: {SKIPPED}" in said
    assert report.counts["skipped"] == 1 and not report.counts["weight"]
    assert not report.findings


ARGUMENTS = type("Arguments", (), {"logging_nan_inf_filter": True})()


class DeepSpeedOptimizerWrapper:
    """DeepSpeed's as accelerate wraps it: the engine has stepped before `step` is called."""

    def __init__(self, optimizer: Any):
        self.optimizer = optimizer

    def step(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def test_a_step_that_deepspeed_skips(tmp_path, caplog) -> None:
    """By the interface of its engine, in the order of its calls; it is not run."""
    model, report = plant(small_llama(), "loss-nan"), Report()
    optimizer = DeepSpeedOptimizerWrapper(torch.optim.AdamW(model.parameters(), lr=0.1))
    given = ARGUMENTS
    state = type("State", (), {"global_step": 0})()
    named = {"model": model, "optimizer": optimizer}
    report.on_train_begin(given, state, None, **named)
    for bad in (None, "loss-nan", None):
        report.on_step_begin(given, state, None, **named)
        inputs = {name: value[None] for name, value in row(1, bad).items()}
        model(**inputs).loss.backward()
        if not bad:  # the engine, in `backward`
            optimizer.optimizer.step()
        model.zero_grad()
        report.on_pre_optimizer_step(given, state, None, **named)
        optimizer.step()
        state.global_step += 1
        report.on_step_end(given, state, None, **named)
        report.on_log(given, state, None, logs={"loss": 0.0}, **named)
    report.on_train_end(given, state, None, **named)
    said = lines(caplog)
    assert f"step 2: {SKIPPED}" in said
    assert report.counts == {"loss": 1, "skipped": 1, "logged": 1}
    assert all(p.grad is None for p in model.parameters())  # its hooks would have summed them
    assert "act_fn" in str(report.findings[0].verdict)


def test_a_step_that_changes_nothing_is_told_but_not_one_of_rate_0(tmp_path, caplog) -> None:
    class Idle(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    report = Report()
    trainer = trainer_of(InOrder, [row(i) for i in range(4)], tmp_path, small_llama())
    trainer.optimizer_cls_and_kwargs = (Idle, {"lr": 0.01})
    trainer.add_callback(report)
    trainer.train()
    assert lines(caplog)[0] == f"step 1: {SKIPPED}"
    caplog.clear()
    warm = {"warmup_steps": 2, "lr_scheduler_type": "constant_with_warmup"}
    trained(tmp_path, None, report := Report(), **warm)
    assert not report.counts and not lines(caplog)


def test_a_clean_run_says_so(tmp_path, caplog) -> None:
    with caplog.at_level(logging.INFO, logger="npt.guard"):
        trained(tmp_path, None, Report())
    assert lines(caplog) == ["report: nothing was lost"]


def test_the_host_waits_once_a_step_alone_for_it() -> None:
    """On a simulated GPU: no micro-batch waits, and nothing after the step."""
    model, report = torch.nn.Linear(3, 1), Report()
    state, given = type("State", (), {"global_step": 0})(), ARGUMENTS
    with simulated_cuda():
        to_cuda(model)
        model.register_forward_hook(lambda _module, _inputs, output: {"loss": output.mean()})
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        named = {"model": model, "optimizer": optimizer}
        report.on_train_begin(given, state, None, **named)
        inputs = torch.ones(2, 3, device="cuda")
        for _ in range(2):
            with no_waits():
                report.on_step_begin(given, state, None, **named)
                model(inputs)["loss"].backward()
                report.on_substep_end(given, state, None, **named)
                model(inputs)["loss"].backward()
            with pytest.raises(HostWaitError), no_waits():
                report.on_pre_optimizer_step(given, state, None, **named)
            with no_waits():
                state.global_step += 1
                report.on_step_end(given, state, None, **named)


def test_two_processes_tell_of_their_own_and_stay_the_same(tmp_path) -> None:
    """One gradient of theirs is not finite for both; only one has a bad loss, and traces it."""
    (plain, _), (other, _) = values(several(2, two_processes, tmp_path, False))
    (with_it, bad), (same, good) = values(several(2, two_processes, tmp_path, True))
    assert plain == with_it == other == same
    one, two = sorted((bad, good), key=lambda said: "loss of micro-batch" not in "".join(said))
    assert any("traced: written constant" in line for line in one), one
    assert any("this process's batches are finite" in line for line in two), two


def two_processes(_processes: Any, folder: Any, reported: bool) -> tuple[str, list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("npt.guard").addHandler(handler)
    rows = [row(i, "loss-nan" if i == BAD else None) for i in range(ROWS)]
    model = plant(small_llama(0.0), "loss-nan")
    trainer = trainer_of(InOrder, rows, folder, model, gradient_accumulation_steps=2)
    if reported:
        trainer.add_callback(Report())
    trainer.train()
    assert trainer.args.world_size == 2
    return repr(digest(bits(state_of(trainer)["weights"]))), said


def test_what_one_process_cannot_compute_alone_is_not_traced(tmp_path, caplog) -> None:
    model, report = plant(small_llama(), "loss-nan"), Report()
    model.lm_head.weight.ds_id = 0  # of ZeRO 3
    rows = [row(i, "loss-nan" if i == 0 else None) for i in range(2)]
    trainer = trainer_of(InOrder, rows, tmp_path, model, max_steps=1)
    trainer.add_callback(report)
    trainer.train()
    assert not report.findings
    reason = "its parameters are sharded over processes"
    assert f"step 1: the batch is not traced: {reason}" in lines(caplog)
