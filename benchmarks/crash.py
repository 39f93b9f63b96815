"""Kill training processes with SIGKILL at random instants, resume them, and compare the results.

    python benchmarks/crash.py [--kills 100] [--json]

The script trains one run without interruption. Then it starts the same run again and again with
`--resume auto` and kills it after a random time, often during a save: the run writes a checkpoint
after every step, keeps one, and evaluates every fourth step. A run that reaches its end is compared
with the first one, byte for byte: adapters, moments, random state, counters, position, metrics and
figures. Processes are forked from a server that never computes, because a fork after OpenMP has
started its threads hangs.

    kills       processes that were killed
    resumed     kills after which the next process resumed from the newest checkpoint
    bit_equal   kills in runs that ended equal to the uninterrupted one
    lost        processes that failed, and kills after which a reported checkpoint was missing or
                damaged

Then it flips single bits in the files of a finished checkpoint: `bit_flips_found` of `bit_flips`
are refused with a message that names the file.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import crash_run
from npt.console import put
from npt.errors import CheckpointError
from npt.manifest import verify_checkpoint
from npt.runs.checkpoint import newest_good

STEPS = 24

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["npt.train.trainer", "npt.demo", "crash_run"])


@dataclass
class Figures:
    """The figures: the first six are promises, the others describe the trial."""

    kills: int = 0
    resumed: int = 0
    bit_equal: int = 0
    lost: int = 0
    bit_flips: int = 0
    bit_flips_found: int = 0
    runs: int = 0
    killed_in_a_save: int = 0
    killed_before_the_first_checkpoint: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


def result_of(folder: Path) -> dict[str, Any]:
    """Return a run's results without times and paths."""
    (checkpoint,) = (folder / "checkpoints").glob("step-*")
    state = json.loads((checkpoint / "state.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "step": checkpoint.name,
        "state": {n: value for n, value in state.items() if n not in ("settings", "date")},
        "metrics": [
            {name: value for name, value in line.items() if name != "tokens_per_second"}
            for line in lines
        ],
        "fidelity": json.loads((folder / "fidelity.json").read_text()),
        "moments": (checkpoint / "state.safetensors").read_bytes(),
        "adapter": (checkpoint / "adapter" / "adapter_model.safetensors").read_bytes(),
        "best": (folder / "best" / "adapter" / "adapter_model.safetensors").read_bytes(),
    }


class Campaign:
    """Kills and their outcomes.

    Args:
        place: folder for the runs.
        seed: seed of the instants.
        steps: steps of a run.
    """

    def __init__(self, place: Path, seed: int, steps: int):
        self.place, self.steps = place, steps
        self.source = random.Random(seed)
        self.figures = Figures()
        # for each kill since the last resume: the step that the next process must resume from
        self.pending: list[int] = []

    def make_reference(self) -> None:
        """Train the uninterrupted run and time it."""
        folder = self.place / "reference"
        process = started(folder, self.steps)
        begun = time.perf_counter()
        status = wait(process, None)
        if status != 0:
            raise SystemExit(f"the uninterrupted run exited with status {status}")
        self.seconds = time.perf_counter() - begun
        self.reference = result_of(folder)

    def kill(self, kills: int) -> None:
        """Kill so many processes, then finish the last run."""
        while self.figures.kills < kills:
            folder = self.place / f"run-{self.figures.runs}"
            before, losses = self.figures.kills, self.figures.lost
            while self._one_process(folder, kills):
                pass
            self.figures.runs += 1
            if self.figures.lost == losses and result_of(folder) == self.reference:
                self.figures.bit_equal += self.figures.kills - before
            else:
                self.figures.problems.append(f"{folder.name} differs from the uninterrupted run")
            shutil.rmtree(folder, ignore_errors=True)

    def _one_process(self, folder: Path, kills: int) -> bool:
        """Start a process, and kill it if kills are left; return False at the run's end."""
        figures = self.figures
        before = len(events(folder, "resume"))
        kill = figures.kills < kills
        process = started(folder, self.steps)
        status = wait(process, self.source.uniform(0.0, 1.2 * self.seconds) if kill else None)
        self._check_resumption(folder, before)
        if status is None:
            figures.kills += 1
            self._check_checkpoints(folder)
            return True
        if status != 0:
            figures.lost += 1
            figures.problems.append(f"a process of {folder.name} exited with status {status}")
            return status == -signal.SIGKILL
        return False

    def _check_resumption(self, folder: Path, before: int) -> None:
        """Check the step that the last process resumed from, if it reported one."""
        if len(events(folder, "resume")) == before or not self.pending:
            return
        step = events(folder, "resume")[-1]["step"]
        good = sum(step == wanted for wanted in self.pending)
        self.figures.resumed += good
        self.figures.lost += len(self.pending) - good
        if good != len(self.pending):
            problem = f"resumed from step {step}, not from {self.pending}"
            self.figures.problems.append(f"{folder.name} {problem}")
        self.pending.clear()

    def _check_checkpoints(self, folder: Path) -> None:
        """Check after a kill that every checkpoint verifies and the last reported one exists."""
        below = folder / "checkpoints"
        found, broken = newest_good(below)
        step = 0 if found is None else found.step
        saved = max((event["step"] for event in events(folder, "save")), default=0)
        self.pending.append(step)
        names = [path.name for path in below.iterdir()] if below.is_dir() else []
        self.figures.killed_in_a_save += any(name.endswith(".partial") for name in names)
        self.figures.killed_before_the_first_checkpoint += found is None
        if broken or step < saved:
            self.figures.lost += 1
            self.figures.problems.append(
                f"{folder.name}: {broken or f'step {saved} was saved, but {step} is the newest'}"
            )

    def flip_bits(self, flips: int) -> None:
        """Flip single bits in the files of a finished checkpoint, one file after another."""
        (checkpoint,) = (self.place / "reference" / "checkpoints").glob("step-*")
        files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
        for path in itertools.islice(itertools.cycle(files), flips):
            original = path.read_bytes()
            content, bit = bytearray(original), self.source.randrange(8 * len(original))
            content[bit // 8] ^= 1 << bit % 8
            path.write_bytes(content)
            self.figures.bit_flips += 1
            try:
                verify_checkpoint(checkpoint)
            except CheckpointError as error:
                name = path.relative_to(checkpoint).as_posix()
                self.figures.bit_flips_found += name in str(error) or name == "manifest.json"
            path.write_bytes(original)
        verify_checkpoint(checkpoint)


def started(folder: Path, steps: int) -> BaseProcess:
    """Resume the run in a new process; return the process once the model is loaded."""
    process = _CONTEXT.Process(target=crash_run.work, args=(folder, steps))
    process.start()
    while not crash_run.alive(folder).exists() and process.exitcode is None:
        time.sleep(0.02)
    crash_run.alive(folder).unlink(missing_ok=True)
    return process


def wait(process: BaseProcess, seconds: float | None) -> int | None:
    """Return a process's exit status (negative: the signal that ended it), or None if it was killed
    here after so many seconds.
    """
    process.join(seconds)
    status = process.exitcode
    if status is None:
        process.kill()
        process.join()
    return status


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return events of a kind; ignore a last line that was cut off."""
    path, records = folder / "events.jsonl", []
    for line in path.read_text().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if record["event"] == kind]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print the figures on one line")
    parser.add_argument("--kills", type=int, default=100, help="processes to kill")
    parser.add_argument("--bit_flips", type=int, default=240, help="bits to flip")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps per run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the times of the kills")
    args = parser.parse_args(arguments)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        campaign = Campaign(Path(place), args.seed, args.steps)
        campaign.make_reference()
        campaign.kill(args.kills)
        campaign.flip_bits(args.bit_flips)
    figures = campaign.figures
    figures.seconds = round(time.perf_counter() - begun, 1)
    put(json.dumps(asdict(figures), indent=None if args.json else 2))
    complete = figures.kills == figures.resumed == figures.bit_equal and not figures.lost
    return 0 if complete and figures.bit_flips == figures.bit_flips_found else 1


if __name__ == "__main__":
    sys.exit(main())
