"""A process that is lost is named while the host waits for a device: arrivals are fakes, stores and
processes are real.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from several import several
from windows import Sums, add_filled, window_over

from npt.distributed.heartbeat import Heartbeat, Pace
from npt.distributed.join import _check_devices, _own_device, join_processes
from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError, ProcessError

FAST: dict[str, Any] = {"period": 0.02, "silence": 0.3}


class Arrival:
    """An event of a device: it happens when `happen` is called, or never."""

    def __init__(self, happened: bool = False):
        self.happened = happened

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        raise AssertionError("the host blocked where no signal handler runs")

    def happen(self) -> None:
        self.happened = True


@pytest.fixture(params=["hash", "tcp"])
def store(request: pytest.FixtureRequest) -> dist.Store:
    if request.param == "hash":
        return dist.PrefixStore("npt", dist.HashStore())
    return dist.PrefixStore(
        "npt", dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    )


@pytest.fixture
def beating(store: dist.Store) -> Iterator[Any]:
    """`beating(process, size, timeout)`: a started heartbeat; each ends with the test. `losses`
    counts what each gave up.
    """
    made: list[Heartbeat] = []

    def make(process: int, size: int = 2, timeout: float = 60.0, **settings: Any) -> Heartbeat:
        losses: list[str | None] = []
        heartbeat = Heartbeat(
            store.clone(),
            process,
            size,
            Pace(timeout, **{**FAST, **settings}),
            lambda: losses.append(heartbeat.lost),
        )
        heartbeat.losses = losses  # type: ignore[attr-defined]
        heartbeat.start()
        made.append(heartbeat)
        return heartbeat

    yield make
    for heartbeat in made:
        heartbeat.stop()


def until(said: Any, seconds: float = 5.0) -> Any:
    limit = time.monotonic() + seconds
    while not said() and time.monotonic() < limit:
        time.sleep(0.01)
    return said()


def freeze(heartbeat: Heartbeat) -> None:
    """No beat comes any more, and nothing says so: what a SIGKILL leaves."""
    heartbeat._beat = lambda value: None  # type: ignore[method-assign]


# --- what is waited for
# ----------------------------------------------------------------------------------------------


def test_an_arrival_ends_the_wait(beating: Any) -> None:
    heartbeat, _ = beating(0), beating(1)
    arrival = Arrival()
    threading.Timer(0.1, arrival.happen).start()
    assert heartbeat.wait_for(arrival) and heartbeat.lost is None and heartbeat.losses == []


def test_a_heartbeat_that_stops_is_a_lost_process(beating: Any) -> None:
    heartbeat, others = beating(0, 3), [beating(1, 3), beating(2, 3)]
    assert until(lambda: len(heartbeat._seen) == 2)
    freeze(others[1])
    assert not heartbeat.wait_for(Arrival())
    assert heartbeat.lost is not None and heartbeat.lost.startswith(
        "no heartbeat of process 2 for "
    )
    assert until(lambda: heartbeat.losses) == [heartbeat.lost]  # once, and with the reason known


def test_communicators_are_aborted_before_the_host_waits(beating: Any) -> None:
    """The queue of launches is full: the main thread is inside CUDA, and only this thread can end
    what it waits for.
    """
    heartbeat, other = beating(0), beating(1)
    assert until(lambda: heartbeat._seen)
    heartbeat.expect(Arrival())
    freeze(other)
    assert until(lambda: heartbeat.losses)


def test_silence_is_nothing_while_nothing_is_waited_for(beating: Any) -> None:
    heartbeat, other = beating(0), beating(1)
    assert until(lambda: heartbeat._seen)
    heartbeat.expect(Arrival(happened=True))
    freeze(other)
    time.sleep(2 * FAST["silence"])
    assert heartbeat.lost is None


def test_a_process_that_has_not_begun_to_beat_is_waited_for(beating: Any) -> None:
    heartbeat, arrival = beating(0), Arrival()
    threading.Timer(2 * FAST["silence"], arrival.happen).start()
    assert heartbeat.wait_for(arrival)


def test_a_beating_process_without_progress_times_out(beating: Any) -> None:
    heartbeat, _ = beating(0, timeout=0.6), beating(1)
    started = time.monotonic()
    assert not heartbeat.wait_for(Arrival())
    assert heartbeat.lost == "Timed out after 0.6 s" and time.monotonic() - started > 0.6


def test_a_process_that_ended_is_missed_by_one_that_waits(beating: Any) -> None:
    heartbeat, other = beating(0), beating(1)
    assert until(lambda: heartbeat._seen)
    other.stop()
    assert not heartbeat.wait_for(Arrival())
    assert heartbeat.lost == "process 1 has ended"


def test_a_stuck_thread_does_not_make_the_wait_endless(beating: Any) -> None:
    heartbeat = beating(0, timeout=0.2)
    heartbeat.stop()
    assert not heartbeat.wait_for(Arrival())
    assert heartbeat.lost == "Timed out after 0.2 s"


def test_a_signal_is_handled_during_the_wait(beating: Any) -> None:
    heartbeat, _ = beating(0), beating(1)
    arrival = Arrival()
    before = signal.signal(signal.SIGUSR1, lambda *_: arrival.happen())
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        assert heartbeat.wait_for(arrival)
    finally:
        signal.signal(signal.SIGUSR1, before)


# --- what processes make of it
# -------------------------------------------------------------------------------------------


def test_a_reason_that_another_process_left_is_what_is_raised(
    store: dist.Store, beating: Any
) -> None:
    processes = ProcessGroup(0, 2, None, store)
    processes.watch(60.0, **FAST)
    other = beating(1)
    assert until(lambda: processes._heartbeat is not None and processes._heartbeat._seen)
    store.set("npt/left/1", json.dumps({"error": "the disk is full", "exit_status": 5}))
    other.stop()
    with pytest.raises(ProcessError, match=r"^process 1 failed: the disk is full$") as raised:
        processes.wait_for(Arrival())
    assert raised.value.exit_status == 5 and processes.broken
    with pytest.raises(ProcessError, match="process 1 failed: the disk is full"):
        processes.wait_for(Arrival(happened=True))  # whatever has arrived since means nothing


def test_of_three_processes_the_silent_one_is_named(store: dist.Store, beating: Any) -> None:
    processes = ProcessGroup(0, 3, None, store)
    processes.watch(60.0, **FAST)
    lost = beating(2, 3)
    assert until(lambda: processes._heartbeat is not None and processes._heartbeat._seen)
    store.set("npt/left/1", "{}")  # it has lost process 2 as well
    freeze(lost)
    with (
        mock.patch("npt.distributed.processes.ANSWER_SECONDS", 0.2),
        pytest.raises(ProcessError, match=r"^process 2 does not answer any more"),
    ):
        processes.wait_for(Arrival())


def waiting(processes: ProcessGroup) -> str:
    """Process 0 waits for what never arrives, process 1 is killed meanwhile; what 0 says."""
    processes.watch(20.0, period=0.05, silence=1.0)
    processes.wait()
    if processes.index == 1:
        time.sleep(0.3)  # some beats
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        processes.wait_for(Arrival())
    except ProcessError as error:
        assert not dist.is_initialized()
        return str(error)
    return "it arrived"


def test_a_killed_process_is_named_by_one_that_waits_for_a_device() -> None:
    left, killed = several(2, waiting)
    assert killed.status == -signal.SIGKILL
    assert left.value is not None and left.value.startswith(
        "process 1 does not answer any more (no heartbeat of process 1 for "
    ), left.trace
    assert left.seconds < 15


# --- what is left of the windows that were under way
# -----------------------------------------------------------------


class Broken(ProcessGroup):
    """One process of one, whose second window's sums never come."""

    waits = 0

    def wait_for(self, arrival: Any) -> None:
        self.waits += 1
        if self.waits == 2:
            self.broken = True
            raise ProcessError("process 1 does not answer any more")
        if self.broken:
            raise ProcessError("process 0 has left the other processes already")


@pytest.mark.parametrize("flush_only", [False, True])
def test_windows_whose_sums_never_came_have_not_happened(flush_only: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    processes = Broken()
    transaction = window_over(
        {"p": parameter}, optimizer, 1.0, [0.1], late=True, processes=processes
    )

    def fill() -> Any:
        parameter.grad += torch.ones(3)
        return Sums(torch.ones(()), 1)

    after = []
    with mock.patch(
        "npt.step.launched_window.to_host", lambda record: (record, Arrival(happened=True))
    ):
        for _ in range(2):
            add_filled(transaction, fill)
            transaction._launched.append(transaction._launch(0))
            after.append((parameter.detach().clone(), transaction.update.checksum()))
        if flush_only:  # the loss was met elsewhere, and told of there
            (result,) = transaction._read(keep=1)
            processes.broken, processes.waits = True, 2
            assert result.applied and transaction.flush() == []
        else:
            with pytest.raises(ProcessError, match="process 1 does not answer"):
                transaction.flush()
            assert transaction.flush() == []
    assert not torch.equal(after[0][0], after[1][0])  # there was something to take back
    assert torch.equal(parameter, after[0][0]) and transaction.update.checksum() == after[0][1]
    assert transaction.applied_steps == 1 and transaction.in_flight == 0


class Uncompared(ProcessGroup):
    """One of two processes, of which the other is lost between the window's sum and the comparison
    of what the step left.
    """

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def each(self, value: torch.Tensor) -> torch.Tensor:
        raise ProcessError("process 1 does not answer any more")


@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_could_not_be_compared_has_not_happened(late: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    processes = Uncompared(0, 2)
    transaction = window_over(
        {"p": parameter}, optimizer, 1.0, [0.1], late=late, processes=processes
    )
    before = transaction.update.checksum()

    def fill() -> Any:
        parameter.grad += torch.ones(3)
        return Sums(torch.ones(()), 1)

    add_filled(transaction, fill)
    with pytest.raises(ProcessError):
        transaction.commit()
    assert torch.equal(parameter, torch.ones(3)) and transaction.update.checksum() == before
    assert transaction.applied_steps == 0


# --- who computes where
# ----------------------------------------------------------------------------------------------


def placed(gpus: list[str]) -> list[str]:
    """Return what `_check_devices` says to each process, by the GPU that each has ("" for none)."""
    store, said = dist.HashStore(), {}

    def check(process: int) -> None:
        device = torch.device("cuda" if gpus[process] else "cpu")
        try:
            _check_devices(store, process, len(gpus), device)
        except ConfigError as error:
            said[process] = str(error)

    uuids = iter(gpus)
    with mock.patch("torch.cuda.get_device_properties", lambda device: mock.Mock(uuid=next(uuids))):
        for process, gpu in enumerate(gpus[:-1]):  # what the others will have written
            store.set(f"npt/device/{process}", json.dumps([socket.gethostname(), gpu]))
        uuids = iter(gpus[-1:])
        check(len(gpus) - 1)
    return list(said.values())


def test_two_processes_on_one_gpu_are_named() -> None:
    assert placed(["GPU-a", "GPU-b"]) == [] and placed(["", ""]) == []
    (said,) = placed(["GPU-a", "GPU-b", "GPU-a"])
    assert said.startswith(
        f"process 0 and process 2 would share the GPU GPU-a of {socket.gethostname()}; "
    )
    (said,) = placed(["GPU-a", ""])
    assert said.startswith("process 0 computes on a GPU and process 1 finds none that it can use; ")


@pytest.mark.parametrize(("count", "local_rank", "index"), [(1, 0, 0), (1, 3, 0), (4, 3, 3)])
def test_a_process_that_is_shown_one_gpu_takes_it(
    monkeypatch: pytest.MonkeyPatch, count: int, local_rank: int, index: int
) -> None:
    chosen: list[int] = []
    monkeypatch.setenv("NPT_DEVICE", "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    assert _own_device({}, local_rank) == torch.device("cuda", index) and chosen == [index]
    if count > 1:
        with pytest.raises(
            ConfigError,
            match=(
                "process 4 of this machine has no GPU of its own, there are 4; start at most 4 here"
            ),
        ):
            _own_device({}, 4)


SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
}


def test_srun_says_what_it_lacks() -> None:
    said = (
        r"SLURM_STEP_NUM_TASKS is 2, but MASTER_ADDR is not set; export MASTER_ADDR .* and"
        r" MASTER_PORT .* before srun"
    )
    with pytest.raises(ConfigError, match=said):
        join_processes(environment=SRUN)
    # with both it is a launcher
    with pytest.raises(ProcessError, match="process 1 did not meet the 1 other processes"):
        join_processes(0.1, {**SRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})


@pytest.mark.parametrize(
    "environment",
    [
        # a shell that salloc opened
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4"},
        # a batch script
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        # an interactive step
        {
            "SLURM_NTASKS": "4",
            "SLURM_PROCID": "0",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_STEP_ID": "4294967290",
        },
        {**SRUN, "WORLD_SIZE": "1"},  # processes that have nothing to do with one another
    ],
)
def test_one_process_of_a_slurm_job_is_alone(environment: dict[str, str]) -> None:
    assert join_processes(environment=environment).size == 1
