"""Section 7: steps that must be equal bit for bit, and micro-batches from a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.profiler import profile

import npt
from faults.bench import Base, Fill, Setting, Student, add_batch, difference, run
from faults.runs import NoTokenizer
from gpu_sections.models import base_of, full_batch
from gpu_sections.runner import Bench, Findings, Section
from npt.adapters.converted import adapter_parameters
from npt.base.attention import set_deterministic
from npt.batch import Batch
from npt.console import silent_console
from npt.distill.graphed import SIGHTS, STEPS, record
from npt.distill.local import BatchSums, local, takes_graphs
from npt.distill.step import student_guard, summed
from npt.distill.strategies import STRATEGIES

FIRST = 3
"""Smallest token id of a sample; below lie the start, end and padding tokens."""


@contextmanager
def _bad_gradient(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
    """Set an element of one gradient to NaN."""

    def fill() -> BatchSums:
        sums = student.fill(batch)
        gradient = next(p.grad for p in student.parameters.values() if p.grad is not None)
        gradient.view(-1)[0] = float("nan")
        return sums

    yield batch, fill


def check_bits(bench: Bench, findings: Findings) -> None:
    """Compare weights, moments and counts bit for bit: two equal runs; flags read late and at
    once; a micro-batch refused and absent; a run resumed and uninterrupted.
    """
    model = npt.load_base("tiny", quantization="nf4", device=bench.device)[0]
    set_deterministic(model, True)
    place = (1, 2)
    for strategy in STRATEGIES:
        setting = Setting(strategy=strategy, layers="2,5", windows=3, size=3, length=32)
        base = Base(model, npt.NPTConfig(rank=4, layers="2,5"), setting.train_config)
        late = replace(setting, late=True)
        runs = {
            "late": run(late, base, faults={place: _bad_gradient})[1],
            "late, again": run(late, base, faults={place: _bad_gradient})[1],
            "at once": run(setting, base, faults={place: _bad_gradient})[1],
            "without the refused one": run(late, base, absent=[place])[1],
        }
        refused = [(window, refusal.micro_batch) for window, refusal in runs["late"].refusals]
        findings.check(
            f"{strategy}: only the bad micro-batch is refused",
            refused == [place],
            f"refused {refused}",
        )
        for name, outcome in list(runs.items())[1:]:
            apart = runs["late"].difference(outcome)
            findings.check(
                f"{strategy}: {name}", apart is None, "" if apart is None else f"differs in {apart}"
            )
        npt.detach(model)
        apart = _resumed(model, strategy, bench.folder / strategy)
        findings.check(f"{strategy}: resumed run is equal", apart is None, apart or "")
    _graphed(bench, findings)


def _graphed(bench: Bench, findings: Findings) -> None:
    """Compare micro-batches from a CUDA graph with the usual ones, while adapters are trained and
    other memory is used; count launches by the host and time of both; let a capture fail.
    """
    length = bench.pick(32, 2048)
    model = base_of(bench, "llama-3.2-1b", length)
    npt.attach(model, npt.NPTConfig(rank=16, layers="upper_half", additive_scale=1.0), seed=0)
    parameters = adapter_parameters(model).values()
    vocab = model.config.vocab_size
    batches = [full_batch(1, length, vocab, bench.device, seed) for seed in range(SIGHTS + 2)]
    config = npt.TrainConfig()

    def step(batch: Batch, graph: bool) -> list[Tensor]:
        for parameter in parameters:
            parameter.grad = None
        sums = local(model, batch, config, graph=graph)
        return [sums.report, *(p.grad for p in parameters if p.grad is not None)]

    guard = student_guard(model, config, [1e-4])
    same = True
    untouched = True
    for batch in batches:
        others = _fill_free_memory(bench.device)
        from_graph = step(batch, True)
        same &= _equal(from_graph, step(batch, False))
        untouched &= all(bool(other.isnan().all()) for other in others)
        del others, from_graph
        with torch.no_grad():
            for parameter in parameters:
                parameter.grad = None
                parameter.mul_(1.01)
        add_batch(guard, batch, partial(summed, model, local, config=config), vocab)
        guard.step()
    applied = [outcome.applied for outcome in guard.flush()]
    guard.close()
    findings.check("CUDA graph: equal gradients", same)
    findings.check("CUDA graph: memory of others untouched", untouched)
    findings.check("CUDA graph: guarded steps applied", all(applied))
    if not takes_graphs(batches[0].input_ids):
        findings.notes.append("no CUDA graph without CUDA and torch 2.13")
    else:
        findings.check("CUDA graph: in use", STEPS[model].graph is not None)
    for name, graph in (("usual", False), ("CUDA graph", True)):
        act = partial(step, batches[0], graph)
        seconds, launches = bench.seconds(act), _launches_by_host(act)
        findings.figures[name] = {"seconds": seconds, "launches": launches}
        findings.notes.append(f"{name}: {launches:,} launches by the host, {1e3 * seconds:.3g} ms")
    if takes_graphs(batches[0].input_ids):
        usual = step(batches[0], False)
        findings.check("CUDA graph: a wait fails the capture", _fails_to_record(bench.device))
        torch.cuda.empty_cache()
        same = _equal(usual, step(batches[0], False))
        findings.check("CUDA graph: equal gradients after a failed capture", same)


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def _fill_free_memory(device: torch.device) -> list[Tensor]:
    """Return tensors of NaN, in memory that a graph might wrongly read or write."""
    gc.collect()
    torch.cuda.empty_cache()
    sizes = (1 << 8, 1 << 16, 1 << 20, 1 << 24)
    return [torch.full((size,), torch.nan, device=device) for size in sizes for _ in range(4)]


def _fails_to_record(device: torch.device) -> bool:
    """Return whether a capture fails in which the host waits."""
    try:
        record(lambda: torch.ones(1, device=device).tolist())
    except RuntimeError:
        return True
    return False


def _launches_by_host(act: Callable[[], Any]) -> int:
    """Return how many kernels, copies and graphs the host launches in a call; 0 without CUDA."""
    with profile(acc_events=True) as profiler:
        act()
    names = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
    events = profiler.key_averages()
    return sum(event.count for event in events if event.key.startswith(names))


def _resumed(model: Any, strategy: str, folder: Path) -> str | None:
    """Return the first tensor that differs between a run of six steps and one resumed after
    three, with a micro-batch refused in each half.
    """

    def train(name: str, **settings: Any) -> Path:
        npt.attach(model, npt.NPTConfig(rank=4, layers="2,5"), seed=0)
        length = {"batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 6}
        usual = {"save_steps": 3, "log_steps": 1, "learning_rate": 1e-2, "smoke_test": False}
        out: dict[str, Any] = {"output_dir": str(folder / name), **length, **usual, **settings}
        records = [
            {"id": str(i), "input_ids": [FIRST + (7 * i + 11 * j) % 2000 for j in range(9 + i % 7)]}
            for i in range(30)
        ]
        trainer = npt.Trainer(
            model,
            NoTokenizer(),
            records,
            npt.TrainConfig(strategy=strategy, deterministic=True, **out),
            data_config=npt.DataConfig(max_length=16),
            eval_data=[{"input_ids": list(range(5, 15))}],
            console=silent_console(),
        )
        plain = trainer.strategy

        def poisoning(model: Any, batch: Batch, config: Any) -> BatchSums:
            sums = plain(model, batch, config)
            # records 4 and 17, wherever they come
            if {FIRST + 7 * 4, FIRST + 7 * 17} & set(batch.input_ids[:, 0].tolist()):
                gradient = next(
                    p.grad for p in adapter_parameters(model).values() if p.grad is not None
                )
                gradient.view(-1)[0] = float("nan")
            return sums

        trainer.strategy = poisoning
        try:
            result = trainer.train()
        finally:
            npt.detach(model)
        if not result.refused:
            raise AssertionError("no micro-batch was refused")
        return result.folder

    whole = train("whole")
    again = train("again", resume=str(whole / "checkpoints" / "step-00000003"))
    states = []
    for place in (whole, again):
        checkpoint = place / "checkpoints" / "step-00000006"
        states.append(
            load_file(checkpoint / "state.safetensors")
            | load_file(checkpoint / "adapter" / "adapter_model.safetensors")
        )
    apart = difference(states[0], states[1])
    return None if apart is None else f"differs in {apart}"


BITS = Section(7, "bit-exact refusal and resume", check_bits)
