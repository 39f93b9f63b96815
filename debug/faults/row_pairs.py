"""Cases of two processes, connected by gloo, which this process starts."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from faults.row_cases import RowCase
from faults.row_runs import Compared, compared, line_of
from faults.verdict import Line, Verdict

TIMEOUT = 60.0
"""Seconds that a process waits for the other."""


def judged_by_processes(cases: Sequence[RowCase], trainer: str) -> Iterator[Line]:
    """Yield a line for each case of several processes. After a case that raises, all later ones
    count as crashed, because the processes are out of step.
    """
    if not cases:
        return
    (size,) = {case.processes for case in cases}
    context = multiprocessing.get_context("spawn")  # a fork after OpenMP hangs
    with tempfile.TemporaryDirectory() as folder:
        pipes, started = [], []
        for process in range(size):
            here, there = context.Pipe()
            arguments = (there, process, size, folder, list(cases), trainer)
            one = context.Process(target=_process, args=arguments, daemon=True)
            one.start()
            there.close()
            pipes.append(here)
            started.append(one)
        try:
            error = ""
            for case in cases:
                begun = time.perf_counter()
                results = [] if error else [_received(pipe) for pipe in pipes]
                error = error or next((each for each in results if isinstance(each, str)), "")
                seconds = time.perf_counter() - begun
                if error:
                    yield Line(case, Verdict("crashed", False, False, detail=error), seconds, "")
                else:
                    yield line_of(case, [c for c in results if isinstance(c, Compared)], seconds)
        finally:
            for one in started:
                one.join(5.0)
                one.kill()


def _received(pipe: Connection) -> Compared | str:
    try:
        return pipe.recv()
    except EOFError:
        return "a process ended"


def _process(
    pipe: Connection, process: int, size: int, folder: str, cases: list[RowCase], trainer: str
) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers' own, in each run
    # for accelerate, which uses the existing group
    os.environ |= {"RANK": f"{process}", "LOCAL_RANK": f"{process}", "WORLD_SIZE": f"{size}"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    store, wait = f"file://{Path(folder, 'store').absolute()}", timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store, rank=process, world_size=size, timeout=wait)
    for case in cases:
        try:
            pipe.send(compared(case, trainer))
        except Exception as error:
            pipe.send(f"process {process}: {type(error).__name__}: {error}")
            break
    pipe.close()
    dist.destroy_process_group()
