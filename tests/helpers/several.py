"""Real processes that train together on this machine: process 1 is as real as process 0, and can be
killed.

They are forked from the test's own process, which has imported everything and computes in one
thread, so that a start takes a few milliseconds, and find the models there that it has loaded. On
GPUs they are spawned: CUDA does not survive a fork, and importing bitsandbytes already starts it.
The key-value store lies in the test's own process, as it lies in the launcher's: it outlives a
process that dies.
"""

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState

from npt.distributed.join import join_processes
from npt.distributed.processes import ProcessGroup

DEADLINE = 60.0
"""Seconds after which a process counts as hanging: many times what any of these takes on a busy
machine.
"""

TIMEOUT = 20.0
"""Seconds that the processes wait for one another."""


@dataclass
class Ended:
    """The end of a process: its function's value, or the error it met, and the exit status."""

    value: Any = None
    error: str | None = None
    kind: str | None = None
    status: int | None = None
    seconds: float = 0.0
    trace: str = ""


class Several:
    """Processes that were started and not yet waited for."""

    def __init__(
        self, size: int, act: Callable[..., Any], arguments: tuple[Any, ...], timeout: float
    ):
        device = os.environ.get("NPT_DEVICE", "")
        context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
        self.processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._stacks = tempfile.TemporaryDirectory()
        for process in range(size):
            here, there = context.Pipe()
            stack = self._stack(process)
            started = (there, stack, process, size, timeout, act, arguments, device)
            process = context.Process(target=_process, args=started, daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self._pipes.append(here)
        # only now: it serves in a thread, and a fork has the locks that another thread held
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for pipe in self._pipes:
            pipe.send(self._store.port)

    def _stack(self, process: int) -> str:
        return os.path.join(self._stacks.name, str(process))

    def wait(self) -> list[Ended]:
        """Wait until all have ended. A process that was killed has no status of its own but the
        signal's, negative.
        """
        until = time.monotonic() + DEADLINE
        found = []
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            ended = Ended()
            try:
                if pipe.poll(max(0.0, until - time.monotonic())):
                    ended = pipe.recv()
            except EOFError:
                pass
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR2)
                process.join(1.0)  # until it has written
                process.kill()
                stack = Path(self._stack(len(found))).read_text()
                own, _, _ = stack.partition(" in _process\n")  # the rest is the test's own process
                raise AssertionError(f"process {len(found)} hangs:\n{own}")
            ended.status = ended.status if ended.status is not None else process.exitcode
            found.append(ended)
        return found


def several(
    size: int, act: Callable[..., Any], *arguments: Any, timeout: float = TIMEOUT, **settings: Any
) -> list[Ended]:
    """Run `act(processes, *arguments)` as each of `size` processes; how they ended, by process."""
    return Several(size, partial(act, **settings), arguments, timeout).wait()


def values(ended: list[Ended]) -> list[Any]:
    """Return what the processes returned; none of them may have met an error."""
    for process, one in enumerate(ended):
        assert one.error is None and one.status == 0, (
            f"process {process} ended with {one.status}: {one.trace}"
        )
    return [one.value for one in ended]


def _process(
    pipe: Connection,
    stack: str,
    process: int,
    size: int,
    timeout: float,
    act: Callable[..., Any],
    arguments: tuple[Any, ...],
    device: str,
) -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR2, os.open(stack, os.O_CREAT | os.O_WRONLY))
    os.environ |= {"NPT_DEVICE": device, "RANK": f"{process}", "LOCAL_RANK": f"{process}"}
    os.environ |= {"WORLD_SIZE": f"{size}", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": f"{pipe.recv()}", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    # that of the test's own process, which may have trained alone
    AcceleratorState._reset_state(reset_partial_state=True)
    started = time.monotonic()
    ended = Ended(status=0)
    processes = ProcessGroup()
    try:
        processes = join_processes(timeout)
        with processes.member():
            ended.value = act(processes, *arguments)
    except BaseException as error:
        ended = Ended(None, str(error), type(error).__name__, getattr(error, "exit_status", 1))
        ended.trace = traceback.format_exc()
    finally:
        processes.close()
    ended.seconds = time.monotonic() - started
    pipe.send(ended)
    pipe.close()
