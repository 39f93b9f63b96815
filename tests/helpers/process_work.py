"""What the processes of a test do: loops over planted micro-batches, and whole runs. Everything
goes in and comes out as plain values.
"""

import functools
import io
import itertools
import math
import os
import signal
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from resumed_runs import lines, without_report
from rich.console import Console
from windows import add_filled, window_over

import npt
from faults.runs import NoTokenizer
from npt.adapters.converted import adapter_parameters
from npt.base.identity import BaseIdentity
from npt.batch import Batch, Sample, batch_from_tensors, collate
from npt.config import DataConfig, NPTConfig, TrainConfig
from npt.data.samples import Window
from npt.distill.local import BatchSums
from npt.distill.step import MicroBatchSplitter, student_guard
from npt.distill.strategies import STRATEGIES
from npt.distributed.processes import ProcessGroup
from npt.guard.outcome import MicroBatch as Sums
from npt.guard.schedule import rate_table
from npt.runs.resume import RunOrigin
from npt.runs.run_folder import NullRunFolder, RunFolder
from npt.runs.signals import StopOnSignal
from npt.runs.trackers import Trackers
from npt.train.journal import Journal
from npt.train.loop import Loop
from npt.train.setup import RunSetup
from npt.train.trainer import Trainer

ADAPTERS = NPTConfig(rank=4, layers="1,3", additive_scale=1.0)
USUAL = {"batch_size": 2, "log_steps": 1, "learning_rate": 1e-2}

Windows = Sequence[Sequence[str]]
"""The micro-batches of each window, by name: what its first word plants, then what its numbers are
drawn from.
"""


@functools.cache
def loaded(base: str) -> Any:
    return npt.load_base(base, quantization="nf4", device="cpu")[0]


def student(base: str) -> Any:
    """The base with fresh adapters."""
    model = loaded(base)
    npt.detach(model)
    npt.attach(model, ADAPTERS)
    return model


def loops(
    processes: ProcessGroup, base: str, plans: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """One loop after the other, in the same processes; none of them may lose a process."""
    return [looped(processes, base, **plan) for plan in plans]


def micro_batch(name: str) -> Batch:
    """Two rows of four to nine tokens, the same for the same name; `data` has an id outside the
    vocabulary, `masked` no valid token.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    lengths = [4 + (7 * i + len(name)) % 6 for i in (0, 1)]
    drawn = [torch.randint(3, 128, (n,), generator=generator).tolist() for n in lengths]
    if name.startswith("data"):
        drawn[1] = [5, 999, 7]
    batch = collate([Sample(name, tuple(ids)) for ids in drawn], 2)
    if not name.startswith("masked"):
        return batch
    return batch_from_tensors(batch.input_ids, torch.zeros_like(batch.input_ids), batch.sample_ids)


SIGNALS = {"term": signal.SIGTERM, "kill": signal.SIGKILL, "usr1": signal.SIGUSR1}


def planting(model: Any, batch: Batch, config: TrainConfig) -> BatchSums:
    """The local strategy, and what the micro-batch's name says."""
    what = batch.sample_ids[0].split()[0]
    if what != "weight":
        planted(what, model)
    if what == "lack" and len(batch.input_ids) > 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if what == "sleep":
        time.sleep(1.5)
    sums = STRATEGIES["local"](model, batch, config)
    parameter = next(iter(adapter_parameters(model).values()))
    if what == "nan":
        parameter.grad[0, 0] = math.nan
    if what == "inf":
        return sums._replace(loss=sums.loss * math.inf)
    if what == "weight":  # as if a bit had turned in this process's memory
        parameter.data[0, 0] += 0.25
    if what == "moment":
        MOMENTS[0].guard.update.optimizer.state[parameter]["exp_avg_sq"][0, 0] = math.nan
    return sums


def planted(what: str, model: Any) -> None:
    """Meet an error, a signal, a lack of memory, or another weight."""
    if what == "no memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if what == "raise":
        raise KeyError("a planted error")
    if what in SIGNALS:
        os.kill(os.getpid(), SIGNALS[what])
    if what == "weight":
        next(iter(adapter_parameters(model).values())).data[0, 0] += 1e-6


MOMENTS: list[Loop] = []
"""The loop that runs, for what is planted in its optimizer."""


def state_of(loop: Loop) -> dict[str, np.ndarray]:
    """Every bit of weights and moments."""
    held = {}
    for name, parameter in adapter_parameters(loop.setup.model).items():
        held[name] = parameter.detach().numpy().copy()
        held |= {
            f"{key} of {name}": value.numpy().copy()
            for key, value in loop.guard.update.optimizer.state[parameter].items()
        }
    return held


def looped(
    processes: ProcessGroup,
    base: str,
    out: str,
    windows: Windows | dict[int, Windows],
    late: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Train on these windows in the loop itself; what it comes to. A dict gives every process
    windows of its own.
    """
    windows = windows[processes.index] if isinstance(windows, dict) else windows
    config = TrainConfig(**{**USUAL, "eval_samples": 1, **settings})
    folder = RunFolder(out) if processes.main else NullRunFolder(out)
    stop = StopOnSignal()
    saved: list[int] = []
    model, rates = student(base), rate_table(1e-2, "linear", 0, 20)
    guard = student_guard(model, config, rates, processes=processes, late=late, trace=1)
    console, splitter = Console(file=io.StringIO()), MicroBatchSplitter(config.batch_size)
    origin = RunOrigin(folder.path)
    of_run = (model, NoTokenizer(), None, config, DataConfig(), processes, console, origin)
    setup = RunSetup(*of_run, splitter=splitter, stop=stop)
    identity = BaseIdentity(*[""] * 4).as_record()
    record = {"settings": {}, **identity, "versions": {}, "device": "cpu"}
    trackers = Trackers(config, folder.path)
    data, nothing = SimpleNamespace(total_steps=len(windows)), None
    journal = Journal(setup, data, folder, trackers, record, nothing, nothing, nothing)
    journal.save = lambda guard, last=False: saved.append(journal.progress.step) is None
    loop = Loop(journal, guard, planting)
    MOMENTS[:] = [loop]
    error = None
    with stop:
        try:
            loop.train(Window([micro_batch(name) for name in window]) for window in windows)
        except Exception as raised:
            error = raised
            if not processes.met_by_all(raised):
                processes.leave()
    folder.close()
    return {
        "steps": loop.progress.step,
        "tokens": loop.progress.tokens,
        "micro_batches": loop.progress.micro_batches,
        "refused": dict(loop.progress.refused_by_kind),
        "state": state_of(loop),
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "status": getattr(error, "exit_status", None),
        "stop": stop.number,
        "halts": loop.halts,
        "saved": saved,
        "metrics": lines(folder.path, "metrics") if processes.main else [],
        "events": lines(folder.path, "events") if processes.main else [],
    }


def records(count: int) -> list[dict[str, Any]]:
    """Records of six to nine token ids, all different."""
    return [
        {"id": f"r{i}", "input_ids": [3 + (11 * i + 7 * j) % 90 for j in range(6 + i % 4)]}
        for i in range(count)
    ]


def trained(
    processes: ProcessGroup,
    base: str,
    out: str,
    count: int = 40,
    plant: str = "",
    own: dict[int, dict[str, Any]] | None = None,
    **config: Any,
):
    """A whole run; `plant` is done on process 1 before its micro-batch number `at`, `own` are
    settings of one process alone.
    """
    at = config.pop("at", 0)
    said = io.StringIO()
    settings = {**USUAL, "eval_samples": 2, "smoke_test": False, "output_dir": out, **config}
    trainer = Trainer(
        student(base),
        NoTokenizer(),
        records(count),
        TrainConfig(**(settings | (own or {}).get(processes.index, {}))),
        data_config=DataConfig(max_length=16),
        eval_data=records(3),
        console=Console(file=said, width=200),
        processes=processes,
    )
    seen: list[str] = []
    calls = itertools.count()

    def watching(model: Any, batch: Batch, config: TrainConfig) -> BatchSums:
        seen.extend(batch.sample_ids)
        if next(calls) == at and processes.index == processes.size - 1:
            planted(plant, model)
        return STRATEGIES[config.strategy](model, batch, config)

    trainer.strategy = watching
    with mock.patch("npt.train.journal.write_checkpoint", failing_at(plant)):
        result = without_report(trainer).train()
    folder = Path(out)
    return {
        "steps": result.steps,
        "tokens": result.tokens,
        "status": result.exit_status,
        "refused": result.refused_by_kind,
        "seen": seen,
        "said": said.getvalue(),
        "weights": {
            name: p.detach().numpy().copy()
            for name, p in adapter_parameters(trainer.setup.model).items()
        },
        "fidelity": None if result.fidelity is None else result.fidelity.student.as_dict(),
        "metrics": lines(folder, "metrics"),
        "events": lines(folder, "events"),
    }


def failing_at(plant: str) -> Any:
    """`write_checkpoint`, which finds the disk full: at its second call, or at its first."""
    from npt.runs.checkpoint import write_checkpoint

    calls = itertools.count()
    full = {"first save": 0, "second save": 1}.get(plant)

    def write(*arguments: Any) -> None:
        if next(calls) == full:
            raise OSError(28, "No space left on device")
        write_checkpoint(*arguments)

    return write


def drawn_by_name(processes: ProcessGroup) -> dict[str, list[float]]:
    """Return each micro-batch's draws, by its name, in windows that a process may have less of than
    another.
    """
    found: dict[str, list[float]] = {}
    torch.manual_seed(100 + processes.index)  # whatever the process's own state is
    parameters = {"p": torch.nn.Parameter(torch.zeros(2))}
    transaction = window_over(
        parameters,
        torch.optim.AdamW(parameters.values(), fused=True),
        1.0,
        [0.1],
        late=True,
        processes=processes,
    )
    for window in range(2):
        for number in range(3):
            name = f"{window}-{number}"
            if number % processes.size != processes.index:
                transaction.place += 1
                continue

            def fill(name: str = name) -> Any:
                found[name] = torch.rand(3).tolist()
                return Sums(torch.tensor(math.nan if name == "0-0" else 1.0), 1)

            add_filled(transaction, fill, (name,), seed=7)
        transaction.commit()
    transaction.flush()
    return found
