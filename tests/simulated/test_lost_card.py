"""A card that is lost to a CUDA error: what the host has is written before anybody asks the card
for more, and bitsandbytes, whose C code would end the process, is not called any more.
"""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from simulated_cuda import simulated_cuda
from students import load_student, make_batch, rows

import npt
from npt.device import card_error
from npt.distill.step import MicroBatchSplitter, summed
from npt.distill.strategies import STRATEGIES
from npt.errors import BundleError, CardError
from npt.forensics.bundle import read_postmortem
from npt.forensics.student import replay_student

CUDA = torch.device("cuda")


def run(folder: Path, lose: Any, lost_at: int = 7) -> str:
    """Train until a micro-batch loses the card; return what is said."""
    said, number = io.StringIO(), 0
    original = STRATEGIES["local"]

    def strategy(model: Any, batch: Any, *arguments: Any) -> Any:
        nonlocal number
        number += 1
        if number == lost_at:
            lose()
        return original(model, batch, *arguments)

    config = npt.TrainConfig(
        output_dir=str(folder), max_steps=5, batch_size=2, gradient_accumulation_steps=2,
        log_steps=1, eval_samples=2, smoke_test=False, save_steps=2,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STRATEGIES, "local", strategy)
        trainer = npt.Trainer(
            load_student("cuda"),
            npt.load_base("tiny", device="cpu")[1],
            rows(40),
            config,
            data_config=npt.DataConfig(max_length=16),
            eval_data=rows(2),
            console=Console(file=said, width=10**6),
        )
        with pytest.raises(CardError) as error:
            trainer.train()
    return str(error.value)


def test_what_the_host_holds_is_written_and_what_is_lost_is_said(tmp_path) -> None:
    with simulated_cuda():
        line = run(tmp_path, lambda: torch._assert_async(torch.zeros((), device="cuda")))
    bundle, reason = tmp_path / "postmortem" / "step-00000002", "device-side assert triggered"
    assert "\n" not in line and reason in line and str(bundle) in line
    assert "lost with the device: weights and moments" in line and f"--resume {tmp_path}" in line
    postmortem = read_postmortem(bundle)
    # the fourth window, and the third, whose outcome was on its way
    ids = [name for each in postmortem.micro_batches for name in each.sample_ids]
    assert len(postmortem.micro_batches) == 4 and len(set(ids)) == 8
    assert not postmortem.weights and load_file(bundle / "window.safetensors")
    assert postmortem.record["student"]["settings"]["max_steps"] == 5
    assert "weights and moments" in postmortem.record["reason"]
    events = [json.loads(x) for x in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "stopped" and events[-1]["postmortem"]
    with pytest.raises(BundleError, match="no weights"):
        replay_student(bundle)


def test_an_error_that_stays_is_found_and_told_in_one_line() -> None:
    with simulated_cuda():
        ids = torch.tensor([7], device="cuda")
        assert card_error(CUDA) is None
        with pytest.raises(torch.AcceleratorError):
            torch.ones(2, device="cuda")[ids]
        assert card_error(CUDA) == "CUDA error: device-side assert triggered"
    assert card_error(torch.device("cpu")) is None


def test_an_error_that_passes_is_no_loss(monkeypatch) -> None:
    """A launch reports an error that somebody else has left, and clears it."""
    with simulated_cuda() as card:
        left = [torch.AcceleratorError("CUDA error: invalid argument")]

        def once(**_: Any) -> None:
            if left:
                raise left.pop()

        monkeypatch.setattr(card, "ask", once)
        assert card_error(CUDA) is None


def test_a_guard_neither_refuses_nor_traces_on_a_lost_card() -> None:
    with simulated_cuda() as card:
        model = load_student("cuda")
        trained = [p for p in model.parameters() if p.requires_grad]
        guard = npt.guard.Guard(model, torch.optim.SGD(trained), refuse=(RuntimeError,), trace=1)
        ids = torch.ones(1, 4, dtype=torch.int64, device="cuda")
        for told in (True, False):
            with (
                pytest.raises(RuntimeError, match=r"CUDA error|host"),
                guard.micro_batch() as micro,
            ):
                micro.loss = model(input_ids=ids).logits.sum()
                card.lose_card(told=told)
                raise RuntimeError("an error of the host")
            card.error = None
        with guard.micro_batch():
            model(input_ids=ids)
            raise RuntimeError("is refused")
        card.lose_card(told=False)
        (micro,) = guard.window.refused()
        guard.forensics.trace([micro])
    assert micro.finding.why == "not traced: CUDA error: device-side assert triggered"


def test_a_micro_batch_without_memory_is_not_computed_again_on_a_lost_card() -> None:
    with simulated_cuda() as card:
        model, batch = load_student("cuda"), make_batch("right").pinned()

        def strategy(*_: Any) -> Any:
            card.lose_card(told=False)
            raise torch.OutOfMemoryError("CUDA out of memory")

        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            summed(model, strategy, batch, npt.TrainConfig(), MicroBatchSplitter(2))
