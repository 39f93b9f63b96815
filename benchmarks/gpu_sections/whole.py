"""Sections 13 and 14: the fault campaign, a replay and the tests of the GPU; runs of several
processes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import npt
from faults.campaign import campaign, clean_steps, every_case, summary
from faults.runs import NoTokenizer
from gpu_sections.models import embedded_student
from gpu_sections.runner import NEEDS_TWO, Bench, Findings, Section, UnavailableError
from npt.data.batch import Batch
from npt.distill.local import MicroBatch
from npt.errors import TooManyRefusalsError
from npt.postmortem.replay import replay

ROOT = Path(__file__).resolve().parents[2]


def run_campaign(bench: Bench, found: Findings) -> None:
    """The tests of the GPU and the replay first; the campaign, which plants its faults on the CPU,
    last.
    """
    _replayed(bench, found)
    _tests(bench, found)
    cases = every_case()
    if bench.small:  # one of each kind
        kinds = {case.group: case for case in reversed(cases) if case.group not in ("clean", "run")}
        cases = [*kinds.values(), clean_steps(20)]
    figures = summary(campaign(cases))
    failed = [
        f"{case['id']}: {case['verdict']} {case['detail']}"
        for case in figures["cases"]
        if not case["passed"]
    ]
    found.check(
        "fault campaign", not failed and figures["false_alarms"] == 0, "; ".join(failed[:3])
    )
    found.figures["campaign"] = figures
    found.notes.append(
        f"campaign on the CPU {figures['passed']} of {figures['total']}, {figures['false_alarms']}"
        " false alarms"
    )


def _replayed(bench: Bench, found: Findings) -> None:
    """A run that stops for a weight that is no number, and its bundle replayed on the
    same device.
    """
    model = embedded_student(bench.device)
    rows = [[3 + (7 * i + j) % 2000 for j in range(12)] for i in range(24)]
    config = npt.TrainConfig(
        batch_size=2, max_consecutive_bad=4, smoke_test=False, output_dir=str(bench.folder / "run")
    )
    trainer = npt.Trainer(
        model,
        NoTokenizer(),
        [{"input_ids": row} for row in rows],
        config,
        data_config=npt.DataConfig(max_length=16),
        eval_data=[{"input_ids": list(range(5, 15))}],
        console=Console(file=io.StringIO()),
    )
    plain, calls = trainer.setup.strategy, iter(range(1000))

    def poisoning(model: Any, batch: Batch, config: Any) -> MicroBatch:
        if next(calls) == 3:
            model.get_parameter("model.layers.5.npt.A").data[0, 1] = float("nan")
        return plain(model, batch, config)

    trainer.setup.strategy = poisoning
    with contextlib.suppress(TooManyRefusalsError):
        trainer.train()
    (bundle,) = (bench.folder / "run" / "postmortem").iterdir()
    again = replay(bundle, device=bench.device)
    found.check(
        "replay reproduces",
        again.reproduced and again.classification == "state",
        str(again.classification),
    )
    found.check("replay is on the device", again.device.startswith(bench.device.type), again.device)
    found.check(
        "replay names the weight",
        "model.layers.5.npt.A[0, 1] is nan" in str(again.findings["adapters"]),
    )


def _tests(bench: Bench, found: Findings) -> None:
    """`pytest -m gpu tests/gpu`; without a GPU, which deselects them, they are collected."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        "tests/gpu",
    ]
    if not bench.cuda:
        command.append("--collect-only")
    answer = _call(command)
    closing = next(
        (line.strip("= ") for line in reversed(answer.stdout.splitlines()) if line.strip()),
        answer.stderr[-200:],
    )
    nothing_ran = 5  # pytest's status if all are deselected
    found.check(
        "pytest -m gpu tests/gpu", answer.returncode == (0 if bench.cuda else nothing_ran), closing
    )
    found.figures["pytest"] = {
        "status": answer.returncode,
        "closing": closing,
        "tail": answer.stdout.splitlines()[-40:],
    }
    found.notes.append(f"tests/gpu: {closing}" + ("" if bench.cuda else " (needs CUDA)"))


def check_two(bench: Bench, found: Findings) -> None:
    """Two processes against one, a killed one, a sharded base, and a base on two cards of one
    process.
    """
    if torch.cuda.device_count() < 2:
        raise UnavailableError(NEEDS_TWO)
    several_processes(bench, found)
    spread = _losses(_pretrain(bench, "spread", 4, more=("--device_map", "balanced")))
    # the same kernels; what is added up across cards may be so in another order
    found.check("--device_map", _near(spread, found.figures["losses"], 1e-3), str(spread))


def several_processes(bench: Bench, found: Findings) -> None:
    """Run on the script's own choice of device: cards, or the CPU without one."""
    alone = found.figures["losses"] = _losses(_pretrain(bench, "alone", 4))
    found.check("one process", len(alone) == STEPS, f"{len(alone)} of {STEPS} steps")
    # Sums over two processes are in another order than those over one.
    together = _losses(_pretrain(bench, "together", 2, processes=2))
    found.check("two processes", _near(together, alone, 1e-3), f"{together} and {alone}")
    sharded = _losses(_pretrain(bench, "sharded", 2, processes=2, more=("--shard_base",)))
    found.check("--shard_base", _near(sharded, alone, 1e-3), f"{sharded} and {alone}")
    seconds, status, said = _killed(bench)
    found.figures["killed"] = {"seconds": seconds, "status": status, "said": said}
    found.check(
        "the other process ends when one is killed",
        status not in (None, 0),
        f"after {seconds:.0f} s: {said}",
    )
    found.notes.append(f"one of two killed: the other ended after {seconds:.0f} s")


STEPS = 6

RANK_TIMEOUT = 20.0


def _near(one: list[float], other: list[float], tolerance: float) -> bool:
    return len(one) == len(other) > 0 and all(
        abs(a / b - 1) <= tolerance for a, b in zip(one, other, strict=True)
    )


def _losses(folder: Path) -> list[float]:
    return [
        json.loads(line)["loss"]
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def _arguments(
    folder: Path, accumulation: int, more: tuple[str, ...], steps: int = STEPS
) -> list[str]:
    settings = {
        "model_name": "tiny",
        "max_steps": steps,
        "batch_size": 2,
        "gradient_accumulation_steps": accumulation,
        "max_length": 64,
        "log_steps": 1,
        "eval_samples": 4,
        "rank_timeout": RANK_TIMEOUT,
        "output_dir": folder,
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return [
        str(ROOT / "pretrain_npt_safe.py"),
        "--use_quantization",
        "--init",
        "random",
        *flags,
        *more,
    ]


def _pretrain(
    bench: Bench, name: str, accumulation: int, processes: int = 1, more: tuple[str, ...] = ()
) -> Path:
    """The folder of a run of the training script.

    Raises:
        RuntimeError: it failed; what it said last.
    """
    folder = bench.folder / name
    launcher = [sys.executable]
    if processes > 1:
        launcher += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(processes),
        ]
    answer = _call([*launcher, *_arguments(folder, accumulation, more)])
    if answer.returncode:
        raise RuntimeError(
            f"{name}: status {answer.returncode}: {(answer.stderr or answer.stdout).strip()[-250:]}"
        )
    return folder


def _killed(bench: Bench) -> tuple[float, int | None, str]:
    """Kill one of two processes once they have made steps: seconds until the other ends, its
    status, and what it said last.
    """
    folder = bench.folder / "killed"
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    logs = [bench.folder / f"killed-{index}.log" for index in range(2)]
    processes = []
    for index, log in enumerate(logs):
        places = {
            "RANK": index,
            "LOCAL_RANK": index,
            "WORLD_SIZE": 2,
            "LOCAL_WORLD_SIZE": 2,
            "MASTER_PORT": port,
        }
        variables = {
            **_environment(),
            **{key: str(value) for key, value in places.items()},
            "MASTER_ADDR": "127.0.0.1",
        }
        # or as many as the data give: hundreds
        command = [sys.executable, *_arguments(folder, 2, (), steps=5_000)]
        with log.open("w") as out:
            processes.append(
                subprocess.Popen(
                    command, env=variables, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT
                )
            )
    survivor, victim = processes
    try:
        metrics, until = folder / "metrics.jsonl", time.monotonic() + 240
        while not (
            metrics.is_file() and len(metrics.read_text(encoding="utf-8").splitlines()) >= 3
        ):
            if time.monotonic() > until or any(process.poll() is not None for process in processes):
                ended = [process.poll() for process in processes]
                raise RuntimeError(
                    f"two processes made no three steps; statuses {ended}; the first said:"
                    f" {_closing(logs[0])}"
                )
            time.sleep(0.2)
        victim.send_signal(signal.SIGKILL)
        started = time.monotonic()
        try:
            survivor.wait(timeout=RANK_TIMEOUT + 60)
        except subprocess.TimeoutExpired:
            return time.monotonic() - started, None, "still running"
        return time.monotonic() - started, survivor.returncode, _closing(logs[0])
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _closing(log: Path) -> str:
    """The last line of a log."""
    lines = [
        line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
    ]
    return next((line for line in reversed(lines) if line), "")


def _call(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=300
    )


def _environment() -> dict[str, str]:
    """This process's, in which `npt` is found; without MPI's or a launcher's notion of processes
    is one process.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


CAMPAIGN = Section(13, "faults, a replay, tests/gpu", run_campaign)
TWO_GPUS = Section(14, "two GPUs", check_two)
