"""The processes of one run: what they sum, what they tell one another, and how one that fails ends
the others.

A run is one process, or several that a launcher started (`accelerate launch`, `torchrun`), called
processes. All hold the same adapters and take the same decisions, because they decide on the same
sums. What goes between them are sums of numbers and JSON; a pickle is never read.

A process that fails can do so where all expect it (the training loop carries a flag for it in its
sums), or anywhere else. There it leaves: it writes its reason into the launcher's key-value store
and closes its connections. Whoever waits for it is woken by that, looks the reason up and ends with
it. Of a process that was killed there is no reason to be found: it is named as the one that does
not answer. Over NCCL nothing is closed by a process that dies, so there `heartbeat.py` watches.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from npt.base.device import default_device
from npt.distributed.heartbeat import Heartbeat, abort_groups, reachable
from npt.errors import ConfigError, NPTError, ProcessError, StoppedError

TIMEOUT = 600.0
"""Seconds that a process waits for the others before it gives up."""

ANSWER_SECONDS = 5.0
"""How long a process that lost its connections waits for the others to say that they are still
there.
"""

ABORT_SECONDS = 20.0
"""How long the abort of NCCL's communicators is waited for; it is left to itself then."""

# A launcher's names for the same number, torchrun's first (which `accelerate launch` uses), then
# those of MPI's starters and of srun. SLURM_NTASKS is not among them: in a shell that salloc
# opened, and in a batch script, it is set without there being several processes.
_SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")

# How torch's NCCL watchdog, a thread of its own, deals with a collective that fails or takes too
# long. By default it ends the process with SIGABRT: no process would be named and nothing saved.
# What is lost is decided here, by `heartbeat.py`.
_WATCHDOG = {
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nor does the thread that watches the watchdog
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # or a dump on one process ends the others
    # of which four are slept with a lock held, a minute by default, dump or no dump
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    # the main thread meets the same error, and tells the others
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}

_KEY = "npt/left/"

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


class ProcessGroup:
    """The processes of a run, seen from one of them. Alone, as it is by default, nothing here costs
    anything.

    Args:
        index: of this process, from 0.
        size: how many there are.
        device: that this process computes on; None where there is nothing to choose.
        store: the launcher's key-value store, where it is known.
        owned: whether the process group is to be taken down at the end.
    """

    def __init__(
        self,
        index: int = 0,
        size: int = 1,
        device: torch.device | None = None,
        store: dist.Store | None = None,
        *,
        owned: bool = False,
    ):
        self.index, self.size, self.device = index, size, device
        self.broken = False
        """The group is of no use any more: a process was lost, or this one has left."""
        self._store, self._owned = store, owned
        self._heartbeat: Heartbeat | None = None
        self._known: BaseException | None = None

    @property
    def main(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.index == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place. The host does not wait for a device. NaN of any
        process is NaN in the sum.

        Raises:
            ProcessError: another process is lost, or has left with a reason.
        """
        if self.size > 1:
            self._collect(lambda: dist.all_reduce(tensor), tensor.device)
        return tensor

    def wait_for(self, arrival: Any) -> None:
        """Wait until what needed the other processes has happened on the device, while signal
        handlers run; its results may be read then.

        Args:
            arrival: a `torch.cuda.Event`, or another object with `query` and `synchronize`.

        Raises:
            ProcessError: a process was lost before, and what the device holds now means nothing.
        """
        if self.broken:
            raise self._left()
        if self._heartbeat is None:
            arrival.synchronize()
        elif not self._heartbeat.wait_for(arrival):
            raise self._lost(RuntimeError(self._heartbeat.lost))

    def watch(self, timeout: float, **settings: float) -> None:
        """Beat for this process and watch the others from here on; `timeout` and `settings` are
        those of a `Heartbeat`.
        """
        assert self._store is not None
        own: Any = self._store
        if hasattr(own, "clone"):  # a connection whose requests wait for nobody else's
            own = own.clone()
            own.set_timeout(timedelta(seconds=ANSWER_SECONDS))

        def end() -> None:
            with contextlib.suppress(RuntimeError):
                # those that look for the lost process as well need not wait for this one
                own.set(f"{_KEY}{self.index}", "{}")
            abort_groups(ABORT_SECONDS)

        self._heartbeat = Heartbeat(
            own, self.index, self.size, timeout, end, self.device, **settings
        )
        self._heartbeat.start()

    def each(self, value: Tensor) -> Tensor:
        """A number of every process, by process: [W] in fp32, which has to hold it exactly.

        Args:
            value: scalar, this process's.
        """
        places = torch.zeros(self.size, dtype=torch.float32, device=value.device)
        places[self.index] = value
        return self.sum_(places)

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """The sum over all processes of each of these numbers, which the host has."""
        if self.size == 1:
            return list(numbers)
        return self.sum_(torch.tensor(numbers, dtype=torch.float64, device=self._speaking)).tolist()

    def gather_json(self, value: Any) -> list[Any]:
        """A value of every process, by process, through JSON; alone as it is.

        Raises:
            ProcessError: as `sum_`.
        """
        if self.size == 1:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.index] = len(own)
        lengths = self.sum_(lengths.to(self._speaking)).cpu()
        filled = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        filled[: len(own)] = own
        filled = filled.to(self._speaking)
        everyone = [torch.empty_like(filled) for _ in range(self.size)]
        self._collect(lambda: dist.all_gather(everyone, filled))
        return [
            json.loads(part.cpu()[:length].numpy().tobytes())
            for part, length in zip(everyone, lengths.tolist(), strict=True)
        ]

    def first(self, act: Callable[[], T]) -> T:
        """What `act` gives on process 0, which alone does it, on every process; elsewhere it has
        been through JSON.

        Raises:
            ProcessError: `act` failed; on process 0 what it raised.
        """
        told: dict[str, Any] = {}
        value, failure = None, None
        if self.main:
            try:
                value = act()
            except Exception as error:
                if self.size == 1:
                    raise
                failure, told = error, reason_of(error)
            else:
                told = {"value": value}
        if self.size == 1:
            return value  # type: ignore[return-value]
        said = self.gather_json(told)[0]
        if failure is not None:
            raise self.everywhere(failure)
        if "value" not in said:
            raise self.everywhere(_failed(0, said))
        return value if self.main else said["value"]  # type: ignore[return-value]

    def agree(self, values: Mapping[str, Any]) -> None:
        """Refuse to go on with processes that differ.

        Args:
            values: by a name to show, what has to be the same everywhere.

        Raises:
            ConfigError: which process differs from process 0, in what, and both values; the same on
                every process.
        """
        everyone = self.gather_json(values)
        for process, theirs in enumerate(everyone):
            for name in everyone[0] | theirs:
                one, other = everyone[0].get(name), theirs.get(name)
                if one != other:
                    raise self.everywhere(
                        ConfigError(
                            f"process {process} has {name} {other}, process 0 has {one}; start"
                            " every process with the same settings and files"
                        )
                    )

    def wait(self) -> None:
        """Until every process has come here.

        Raises:
            ProcessError: as `sum_`.
        """
        if self.size > 1:
            self.sum_(torch.zeros((), device=self._speaking))

    def everywhere(self, error: E) -> E:
        """The error, which every process raises at this point, be it in other words: nobody has to
        be told of it.
        """
        self._known = error
        return error

    def met_by_all(self, error: BaseException) -> bool:
        """Whether all processes are where this one is: they have met the same error, and can go on
        speaking.
        """
        return self.size == 1 or (error is self._known and not self.broken)

    @contextmanager
    def member(self) -> Iterator[None]:
        """Within the context this process is counted on: with an error that it alone meets it
        leaves, and the others learn why.

        Of an error that all meet the processes wait for one another, so that what process 0 still
        writes is not cut off by the launcher, which ends all processes when the first one has
        failed.
        """
        try:
            yield
        except BaseException as error:
            if not self.met_by_all(error):
                self.leave(error)
            else:
                with contextlib.suppress(ProcessError):
                    self.wait()
            raise

    def leave(self, error: BaseException) -> None:
        """Tell the others why this process stops, and close the connections that they may be
        waiting at.
        """
        if self.size == 1 or self.broken:
            return
        self._tell(reason_of(error))
        self._disconnect()

    def close(self) -> None:
        """Take the process group down, where it was made here."""
        if not self.broken and self._owned and dist.is_initialized():
            self._owned = False
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        self._disconnect()

    @property
    def _speaking(self) -> torch.device:
        """Where numbers that the host wants have to lie to be sent: on the host, if the group can
        do that.
        """
        with_host = "gloo" in str(dist.get_backend_config())
        return torch.device("cpu") if with_host or self.device is None else self.device

    def _collect(self, collective: Callable[[], Any], device: torch.device | None = None) -> None:
        """Do what all processes do together, on this device; on a GPU it has not happened when this
        returns.
        """
        if self.broken:
            raise self._left()
        if self._heartbeat is not None and self._heartbeat.lost is not None:
            raise self._lost(RuntimeError(self._heartbeat.lost))
        try:
            collective()
        except Exception as error:
            # Where the heartbeat has taken the process group down meanwhile, torch misses it with
            # errors of any class.
            lost = self._heartbeat is not None and self._heartbeat.lost
            if not lost and not isinstance(error, RuntimeError):
                raise
            raise self._lost(RuntimeError(lost) if lost else error) from error  # type: ignore[arg-type]
        if self._heartbeat is not None and device is not None and device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._heartbeat.expect(event)

    def _left(self) -> ProcessError:
        return ProcessError(f"process {self.index} has left the other processes already")

    def _lost(self, error: RuntimeError) -> ProcessError:
        """Who is missing, and why, as far as it can be found out."""
        self._tell({})
        self._disconnect()  # whoever waits for this process is woken, and looks as well
        reasons, silent = self._answers()
        for process, reason in reasons.items():
            return _failed(process, reason)
        said = str(error).splitlines()[0].split("] ", 1)[-1].split(". ", 1)[0]
        if self._store is not None and not silent:
            return ProcessError(
                f"the other processes have gone on to end without process {self.index} ({said});"
                " see what they say"
            )
        names = ", ".join(map(str, silent)) if silent else "unknown"
        return ProcessError(
            f"process {names} does not answer any more ({said}); look at that process, then go on"
            " with --resume auto"
        )

    def _answers(self) -> tuple[dict[int, dict[str, Any]], list[int]]:
        """Reasons that other processes have left, and the processes that say nothing within a few
        seconds.
        """
        silent = [process for process in range(self.size) if process != self.index]
        reasons: dict[int, dict[str, Any]] = {}
        if self._store is None:
            return {}, silent if self.size == 2 else []
        until = time.monotonic() + ANSWER_SECONDS
        while silent and not reasons and time.monotonic() < until:
            if not reachable(self._store):
                return {}, [0]  # it keeps the store, where no launcher does
            with contextlib.suppress(RuntimeError, ValueError):
                for process in list(silent):
                    if self._store is not None and self._store.check([f"{_KEY}{process}"]):
                        reason = json.loads(self._store.get(f"{_KEY}{process}"))
                        silent.remove(process)
                        if reason:
                            reasons[process] = reason
            if self.size == 2:
                break
            time.sleep(0.05)
        return reasons, silent

    def _tell(self, reason: dict[str, Any]) -> None:
        if self._store is not None and reachable(self._store):
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{_KEY}{self.index}", json.dumps(reason))

    def _disconnect(self) -> None:
        self.broken = self.size > 1
        if self._owned and dist.is_initialized():
            self._owned = False
            # kernels may be waiting for others, and to destroy a group is to wait for its kernels
            if self._heartbeat is not None:
                abort_groups(ABORT_SECONDS)
            else:
                with contextlib.suppress(RuntimeError):
                    dist.destroy_process_group()
        if self._heartbeat is not None:
            self._heartbeat.stop()


def join_processes(
    timeout: float = TIMEOUT, environment: Mapping[str, str] | None = None
) -> ProcessGroup:
    """The processes that the launcher started, this process among them; `ProcessGroup()` where it
    started one.

    A process group that exists already is used as it is.

    Args:
        timeout: seconds to wait for another process, now and at every sum.
        environment: default the process's.

    Raises:
        ConfigError: the launcher's variables do not fit together, or two processes would share a
            GPU.
        ProcessError: not all processes came.
    """
    if dist.is_available() and dist.is_initialized():
        return (
            ProcessGroup(dist.get_rank(), dist.get_world_size(), _current_device())
            if dist.get_world_size() > 1
            else ProcessGroup()
        )
    environment = os.environ if environment is None else environment
    size = _number(environment, _SIZE, 1)
    if size < 2:
        if (
            "MASTER_ADDR" in environment
            and "ACCELERATE_MIXED_PRECISION" in environment
            and not any(n in environment for n in _SIZE)
        ):
            warnings.warn(
                "accelerate launch started one process, though it was set up for several: without"
                " GPUs it takes `accelerate launch --multi_gpu --num_processes N`, or torchrun"
                " --nproc_per_node N",
                stacklevel=2,
            )
        return ProcessGroup()
    index = _number(environment, _RANK, None)
    if not 0 <= index < size:
        raise ConfigError(
            f"{_RANK[0]} is {index} of {_SIZE[0]} {size}; start the processes with accelerate"
            " launch or torchrun"
        )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in environment:
            counted = next(n for n in _SIZE if n in environment)
            remedy = "start the processes with accelerate launch or torchrun"
            if counted.startswith("SLURM"):
                remedy = (
                    "export MASTER_ADDR (a node of the job) and MASTER_PORT (a free port) before"
                    f" srun, or {remedy}"
                )
                remedy += (
                    "; for processes that have nothing to do with one another, export WORLD_SIZE=1"
                )
            raise ConfigError(f"{counted} is {size}, but {name} is not set; {remedy}")
    device = _own_device(environment, _number(environment, _LOCAL_RANK, index))
    try:
        store, index, size = next(
            dist.rendezvous("env://", index, size, timeout=timedelta(seconds=timeout))
        )
        store = dist.PrefixStore("npt", store)
        _check_devices(store, index, size, device)
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        if device.type == "cuda":
            # torchrun sets it to 1, so nobody can be told to have meant it
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
            for name, value in _WATCHDOG.items():
                os.environ.setdefault(name, value)
        dist.init_process_group(
            backend, store=store, rank=index, world_size=size, timeout=timedelta(seconds=timeout)
        )
    except ConfigError:
        raise
    except (RuntimeError, ValueError) as error:
        where = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        raise ProcessError(
            f"process {index} did not meet the {size - 1} other processes at {where} within"
            f" {timeout:g} s: {str(error).splitlines()[0][:200]}"
        ) from error
    processes = ProcessGroup(index, size, device, store, owned=True)
    if device.type == "cuda":
        processes.watch(timeout)
    return processes


def reason_of(error: BaseException) -> dict[str, Any]:
    """What other processes are told of an error, as JSON."""
    text = " ".join(str(error).split())[:500]
    plain = isinstance(error, NPTError | StoppedError)
    return {
        "error": text if plain else f"{type(error).__name__}: {text}",
        "exit_status": exit_status_of(error),
    }


def exit_status_of(error: BaseException) -> int:
    """What the command line ends with on this error."""
    if isinstance(error, NPTError | StoppedError):
        return error.exit_status
    return (
        2
        if isinstance(error, torch.OutOfMemoryError)
        else 130
        if isinstance(error, KeyboardInterrupt)
        else 1
    )


def process_failure(reasons: list[dict[str, Any] | None]) -> ProcessError:
    """The error of a process that is well, where others are not.

    Args:
        reasons: by process, `reason_of` its error; None of a process without one. One at least has
            a reason.
    """
    return next(
        _failed(process, reason) for process, reason in enumerate(reasons) if reason is not None
    )


def _failed(process: int, reason: Mapping[str, Any]) -> ProcessError:
    return ProcessError(f"process {process} failed: {reason['error']}", int(reason["exit_status"]))


def _number(environment: Mapping[str, str], names: tuple[str, ...], default: int | None) -> int:
    """The whole number that the first of these variables holds which is set."""
    found = next((name for name in names if name in environment), None)
    if found is None:
        if default is None:
            raise ConfigError(
                f"{_SIZE[0]} is set, but {names[0]} is not; start the processes with accelerate"
                " launch or torchrun"
            )
        return default
    try:
        return int(environment[found])
    except ValueError as error:
        raise ConfigError(
            f"{found} is {environment[found]!r}, expected a whole number; the launcher sets it"
        ) from error


def _own_device(environment: Mapping[str, str], local_rank: int) -> torch.device:
    """The GPU of this process on its machine, or the CPU where there is none or accelerate was told
    to use it.

    A launcher may show each process one GPU, its own; `_check_devices` tells that from several
    processes on the only GPU.
    """
    if (
        environment.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
        or default_device().type == "cpu"
    ):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count > 1:
        raise ConfigError(
            f"process {local_rank} of this machine has no GPU of its own, there are {count}; start"
            f" at most {count} here"
        )
    index = local_rank if count > 1 else 0
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _check_devices(store: dist.Store, process: int, size: int, device: torch.device) -> None:
    """Refuse processes that compute on one GPU, or partly on GPUs; every process comes to the same
    end.

    Raises:
        ConfigError: which processes, and where.
        RuntimeError: not all processes came.
    """
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    store.set(f"npt/device/{process}", json.dumps([socket.gethostname(), uuid]))
    found: dict[str, int] = {}
    first = ""
    for other in range(size):
        host, uuid = json.loads(store.get(f"npt/device/{other}"))
        first = uuid if other == 0 else first
        if bool(uuid) != bool(first):
            with_gpu, without = (0, other) if first else (other, 0)
            raise ConfigError(
                f"process {with_gpu} computes on a GPU and process {without} finds none that it can"
                " use; give every process a GPU, or set NPT_DEVICE=cpu for all of them"
            )
        if uuid and uuid in found:
            raise ConfigError(
                f"process {found[uuid]} and process {other} would share the GPU {uuid} of {host};"
                " start one process for each GPU, or show each process its own with"
                " CUDA_VISIBLE_DEVICES"
            )
        found[uuid] = other


def _current_device() -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if default_device().type == "cuda"
        else torch.device("cpu")
    )
