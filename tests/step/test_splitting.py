"""Passes: a micro-batch in parts is the micro-batch, and one that memory did not do for is begun
again with smaller ones.
"""

import gc
import os
import random
import signal
import weakref
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from process_work import loops
from resumed_runs import RARE, Act, Runs, events, lines, records, with_faults
from several import several, values
from torch import nn

import npt
from npt.adapters.converted import adapter_parameters
from npt.batch import Batch, Sample, collate
from npt.cli.main import main
from npt.config import NPTConfig, TrainConfig
from npt.distill.local import BatchSums
from npt.distill.step import MicroBatchSplitter, forward_backward, oom_message
from npt.distill.strategies import drive
from npt.errors import NoMemoryError, is_out_of_memory
from npt.train.trainer import Trainer

IMPOSSIBLE = 1 << 50
"""Bytes, more than any address space has: asking for them raises torch's error of full memory.
"""


def ask(kind: str) -> None:
    if kind == "cpu":
        torch.empty(IMPOSSIBLE, dtype=torch.uint8)
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1.00 GiB."
    )


# --- parts
# --------------------------------------------------------------------------------------------------

# lengths of its documents
_SAMPLE = st.tuples(st.integers(1, 3), st.integers(1, 6)).map(lambda pair: (pair[1],) * pair[0])


@given(
    st.lists(_SAMPLE, min_size=1, max_size=7), st.integers(1, 8), st.sampled_from(("left", "right"))
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_the_parts_of_a_batch_are_the_batches_of_its_samples(lengths, size, side) -> None:
    source = random.Random(str(lengths))
    samples = [
        Sample(
            str(i),
            tuple(source.randrange(3, 90) for _ in range(sum(own))),
            lengths=own if len(own) > 1 else None,
        )
        for i, own in enumerate(lengths)
    ]
    parts = MicroBatchSplitter(size).parts(collate(samples, 2, side=side))
    starts = range(0, len(samples), size)
    expected = [collate(samples[start : start + size], 2, side=side) for start in starts]
    assert len(parts) == len(expected)
    for part, other in zip(parts, expected, strict=True):
        for name in [*(f.name for f in fields(Batch)), "scored_index"]:
            one, two = getattr(part, name), getattr(other, name)
            assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two, name


@pytest.mark.parametrize("pinned", [False, True])
def test_the_parts_of_a_pinned_batch_are_pinned_as_well(batch, monkeypatch, pinned) -> None:
    """Without a GPU nothing can be pinned; it is asked for, for every tensor of every part."""
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: pinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: asked.append(tensor) or tensor)
    parts = MicroBatchSplitter(2).parts(batch)
    assert (
        {id(part.input_ids) for part in parts} <= {id(tensor) for tensor in asked}
        if pinned
        else asked == []
    )


@pytest.mark.parametrize("strategy", ["local", "propagated", "end_to_end"])
def test_the_sums_of_the_parts_are_those_of_the_whole(
    load_model: Callable[..., nn.Module], batch: Batch, strategy: str
) -> None:
    model = load_model("nf4")
    npt.attach(model, NPTConfig(rank=4, layers="1,3", additive_scale=1.0))
    weight = 0.5 if strategy == "end_to_end" else 0.0
    config = TrainConfig(strategy=strategy, regularization_lambda=0.1, logit_kl_weight=weight)
    parameters = adapter_parameters(model)
    gradients, found = [], []
    for size in (3, 1):
        for parameter in parameters.values():
            parameter.grad = None
        found.append(forward_backward(model, drive, batch, config, MicroBatchSplitter(size)))
        gradients.append({name: parameter.grad.clone() for name, parameter in parameters.items()})
    for name in BatchSums._fields:
        # sums of fp32 in another order
        torch.testing.assert_close(*(torch.as_tensor(getattr(sums, name)) for sums in found))
    for name, gradient in gradients[0].items():
        # likewise
        torch.testing.assert_close(
            gradients[1][name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max())
        )


@pytest.mark.parametrize(
    ("rows", "expected"), [(32, [16, 8, 4, 2, 1]), (5, [3, 2, 1]), (3, [2, 1])]
)
def test_halving_ends_at_one_sample_and_then_says_what_to_lower(rows, expected) -> None:
    full = collate([Sample(str(i), (5, 6, 7)) for i in range(rows)], 2)
    passes = MicroBatchSplitter(64)  # of which the batch has but a few
    seen = []
    for _ in expected:
        passes.shrink(full, "it asked for 2 GiB more")
        seen.append(passes.samples)
    assert seen == expected and passes.shrunk_to == 1
    with pytest.raises(
        NoMemoryError, match=r"one sample of 3 tokens .*2 GiB more.*--max_length"
    ) as caught:
        passes.shrink(full, "it asked for 2 GiB more")
    assert caught.value.exit_status == 2 and "\n" not in str(caught.value)


# --- what lack of memory is
# ------------------------------------------------------------------------------------------


def test_other_errors_are_no_lack_of_memory() -> None:
    quoting = NoMemoryError(
        "out of memory with one sample of 9 tokens at once (CUDA error: out of memory)"
    )
    for error in (RuntimeError("size mismatch"), ValueError("CUDA error: out of memory"), quoting):
        assert not is_out_of_memory(error) and oom_message(error) is None
    assert is_out_of_memory(MemoryError())


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        (
            "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some"
            " other API call"
        ),
        (
            "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate"
            " memory: you tried to allocate 8 bytes."
        ),
    ],
)
def test_a_library_without_room_for_itself_lacks_memory(said, monkeypatch, capsys) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(said)

    assert oom_message(RuntimeError(said)) is not None
    monkeypatch.setattr("npt.cli.doctor.resolve", fail)
    assert main(["doctor", "--plan"]) == 2
    err = capsys.readouterr().err
    assert "error: out of memory" in err and len(err.splitlines()) == 1


# --- runs
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(poisoned_folder: Path) -> nn.Module:
    return npt.load_base(str(poisoned_folder), quantization="nf4", device="cpu")[0]


@pytest.fixture
def runs(base: nn.Module, tmp_path: Path) -> Callable[..., Runs]:
    """Runs of 16 records, four windows of two micro-batches of two samples; a constant rate, so
    that a part of a run is its beginning.
    """

    def make(model: nn.Module | None = None, **more: Any) -> Runs:
        fixed = {
            "batch_size": 2,
            "gradient_accumulation_steps": 2,
            "scheduler_type": "constant",
            "save_steps": 1,
        }
        plain: dict[str, Any] = {
            "data": lambda: records(16),
            "settings": fixed | more.pop("settings", {}),
        }
        return Runs(base if model is None else model, tmp_path, **{**plain, **more})

    return make


def lacking(*calls: int, kind: str = "cuda", more_than: int = 1) -> Act:
    """Let memory run out in these calls of the strategy, if they have more than so many samples."""

    def act(number: int, batch: Batch) -> None:
        if number in calls and len(batch.input_ids) > more_than:
            ask(kind)

    return act


def in_backward(trainer: Trainer, call: int) -> Trainer:
    """Memory runs out in the middle of one call's backward, when some gradients are there
    already.
    """
    strategy, numbers = trainer.strategy, iter(range(10**6))
    parameter = next(iter(adapter_parameters(trainer.setup.model).values()))

    def failing(model: Any, batch: Batch, config: TrainConfig) -> BatchSums:
        if next(numbers) != call:
            return strategy(model, batch, config)
        handle = parameter.register_hook(lambda gradient: ask("cuda"))
        try:
            return strategy(model, batch, config)
        finally:
            handle.remove()

    trainer.strategy = failing
    return trainer


def in_parts(trainer: Trainer, samples: int) -> Trainer:
    trainer.setup.splitter.samples = samples
    return trainer


def test_lack_of_memory_in_the_first_micro_batch_is_a_run_in_parts(runs) -> None:
    here = runs(data=lambda: records(8), settings={"strategy": "propagated"})
    here.run("lacking", lacking(0, kind="cpu"))
    in_parts(here.trainer("parts"), 1).train()
    here.outcome("lacking").assert_equal_but_passes(here.outcome("parts"))
    (event,) = events(here.place / "lacking", "out_of_memory")
    assert (event["step"], event["samples"], event["samples_at_once"]) == (1, 2, 1)
    assert "step 1: out of memory with 2 samples at once" in here.said.getvalue()
    assert events(here.place / "parts", "out_of_memory") == []


@pytest.mark.parametrize("strategy", ["local", "end_to_end"])
def test_memory_that_runs_out_in_backward_leaves_no_gradient(runs, strategy) -> None:
    here = runs(data=lambda: records(8))
    in_backward(here.trainer("lacking", strategy=strategy), 0).train()
    in_parts(here.trainer("parts", strategy=strategy), 1).train()
    here.outcome("lacking").assert_equal_but_passes(here.outcome("parts"))
    assert len(events(here.place / "lacking", "out_of_memory")) == 1


def test_a_run_killed_after_halving_resumes_with_the_halved_size(runs) -> None:
    here = runs(data=lambda: records(12))
    here.run("whole", lacking(2))
    assert (
        here.killed("parts", lambda number, batch: [lacking(2)(number, batch), at_kill(number, 9)])
        == -signal.SIGKILL
    )
    here.run("parts", resume="auto")
    assert events(here.place / "parts", "resume")[0]["step"] > 1
    here.outcome("parts").assert_equal(here.outcome("whole"))
    assert here.outcome("whole").state["samples_at_once"] == [1]


def at_kill(number: int, call: int) -> None:
    if number == call:
        os.kill(os.getpid(), signal.SIGKILL)


def test_refusals_are_counted_once_if_a_micro_batch_begins_again(runs) -> None:
    """Windows of three, with a refusal before the call in which memory runs out."""
    here = runs(
        data=lambda: with_faults(records(24)),
        settings={"batch_size": 2, "gradient_accumulation_steps": 3},
    )
    whole: list[Any] = []
    for name, act in (("whole", None), ("lacking", lacking(*range(2, 40), more_than=1))):
        here.run(name, act)
        found = [
            (e["step"], e["micro_batch"], e["kind"], e["sample_ids"])
            for e in events(here.place / name, "refusal")
        ]
        whole.append(
            (
                found,
                {
                    k: here.outcome(name).state[k]
                    for k in ("micro_batches", "refused_by_kind", "in_a_row", "position")
                },
            )
        )
    assert whole[0] == whole[1] and len(whole[0][0]) > 3
    assert len(events(here.place / "lacking", "out_of_memory")) == 1
    assert any(RARE in record["input_ids"] for record in with_faults(records(24)))


def test_out_of_memory_at_batch_size_one_saves_and_exits(runs) -> None:
    here = runs()
    with pytest.raises(NoMemoryError, match="one sample of") as caught:
        here.run("run", lambda number, batch: ask("cpu") if number >= 5 else None)
    assert caught.value.exit_status == 2 and "\n" not in str(caught.value)
    assert [e["samples_at_once"] for e in events(here.place / "run", "out_of_memory")] == [1]
    assert here.outcome("run").state["step"] == 2
    assert events(here.place / "run", "error")[0]["error"] == "NoMemoryError"


# --- outside the loop
# -------------------------------------------------------------------------------------------------


def test_the_smoke_test_and_evaluations_are_halved_as_well(runs, monkeypatch) -> None:
    from npt.evaluation import evaluate as module

    evaluate, sizes = module.evaluate, []

    def small_only(*arguments: Any, batch_size: int, **more: Any) -> Any:
        sizes.append(batch_size)
        if batch_size > 1:
            ask("cuda")
        return evaluate(*arguments, batch_size=batch_size, **more)

    monkeypatch.setattr(module, "evaluate", small_only)
    here = runs(
        settings={"smoke_test": True, "batch_size": 4, "gradient_accumulation_steps": 1},
        eval_data=records(3, seed=7),
    )
    here.run("run", lacking(0, more_than=2))
    said = here.said.getvalue()
    for act, samples in (("the smoke test", 4), ("an evaluation", 2)):
        assert f"{act}: out of memory with {samples} samples at once" in said
        assert f"; retrying with {samples // 2}" in said
    assert sizes[:2] == [2, 1] and set(sizes[1:]) == {1}  # never tried again
    assert len(lines(here.place / "run", "metrics")) == 4


def test_one_of_two_processes_halves_and_both_hold_the_same_bits(
    tiny_folder: Path, tmp_path: Path
) -> None:
    windows = [["good a", "lack b", "good c", "lack d"], ["good e", "lack f", "good g", "good h"]]

    def run(size: int) -> list[Any]:
        plan = {"out": str(tmp_path / f"of-{size}"), "windows": windows, "late": True}
        return [found for (found,) in values(several(size, loops, str(tiny_folder), [plan]))]

    one, other = run(2)
    (single,) = run(1)
    assert [e["event"] for e in single["events"]] == ["out_of_memory"]
    for name, value in one["state"].items():
        assert np.array_equal(value, other["state"][name]), name
        difference = np.abs(value - single["state"][name])  # another order of summing, as above
        assert np.median(difference) < 1e-6 and difference.max() < 2e-3, name
    assert one["tokens"] == other["tokens"] == single["tokens"]
    assert one["refused"] == single["refused"] == {}


def test_nothing_of_a_failed_micro_batch_is_alive_when_it_is_begun_again(runs) -> None:
    """The graph of the call that failed would be the very memory that is lacking."""
    here = runs()
    trainer = here.trainer("run")
    strategy, alive, seen = trainer.strategy, [], []

    def failing(model: Any, batch: Batch, config: TrainConfig) -> BatchSums:
        if not alive:
            graph = (torch.ones(8, requires_grad=True) * 2).square()
            alive.append(weakref.ref(graph))
            ask("cpu")
        gc.disable()
        seen.append(alive[0]())
        gc.enable()
        return strategy(model, batch, config)

    trainer.strategy = failing
    trainer.train()
    assert seen and seen[0] is None
