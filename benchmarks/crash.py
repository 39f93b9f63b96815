"""What a run loses when it is killed: training processes ended by SIGKILL at random instants, resumed until they are through.

    python benchmarks/crash.py [--kills 100] [--json]

One run is made without interruption. Then the same run is started again and again with `--resume auto` and killed after a random
time, saves included, which are a large part of it: a checkpoint after every step, rotation that leaves one, an evaluation every
fourth. A run that comes to its end is compared with the first one: adapters, moments, random state, counters, position, metrics and
figures, byte for byte; then the next one begins. Most processes are forked from one that has loaded the base but computed nothing,
which saves them eight seconds each; one in ten is a fresh interpreter.

    kills       processes that were killed
    resumed     kills after which the next process went on from the newest checkpoint there was
    bit_equal   kills behind a run that ended equal to the uninterrupted one
    lost        processes that failed, and kills after which a checkpoint was missing that had been reported, or one that stood
                under its name did not verify

Then single bits are flipped in all files of a finished checkpoint, in turn: `bit_flips_found` of `bit_flips` were refused by a
message that names the file.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

import npt
from npt.distill.checkpoint import newest_good, verify_checkpoint
from npt.distill.run_folder import RunFolder
from npt.errors import CheckpointError

STEPS = 24
FRESH_EVERY = 10
MODEL = "tiny"


@dataclass
class Figures:
    """What is reported; the first six are promised, the others say what was tried."""

    kills: int = 0
    resumed: int = 0
    bit_equal: int = 0
    lost: int = 0
    bit_flips: int = 0
    bit_flips_found: int = 0
    runs: int = 0
    fresh_processes: int = 0
    killed_in_a_save: int = 0
    killed_before_the_first_checkpoint: int = 0
    saving_share: float = 0.0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Training:
    """The run that is made over and over. The base is loaded here, once; nothing is computed in this process."""

    def __init__(self, steps: int = STEPS) -> None:
        self.model, self.tokenizer = npt.load_base(MODEL, quantization="nf4", device="cpu")
        self.steps = steps

    def run(self, folder: Path) -> int:
        """The run in this process, taken up where it is; its exit status."""
        npt.attach(self.model, npt.NPTConfig(rank=2, layers="6,7"))
        config = npt.TrainConfig(
            max_steps=self.steps,
            num_epochs=99,
            batch_size=1,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            warmup_steps=4,
            max_refused_share=1.0,
            log_steps=1,
            save_steps=1,
            save_total_limit=1,
            eval_steps=4,
            smoke_test=False,
            output_dir=str(folder),
            resume="auto",
        )
        data = npt.DataConfig(max_length=16, packing=True)
        console = Console(file=io.StringIO())
        trainer = npt.Trainer(
            self.model, self.tokenizer, records(30), config, data_config=data, eval_data=records(1, seed=1), console=console
        )
        return trainer.train().exit_status

    def fork(self, folder: Path, run: Callable[[Path], int] | None = None) -> int:
        """Start the run in a child; its process number."""
        child = os.fork()
        if child == 0:
            status = 70
            try:
                status = (run or self.run)(folder)
            except BaseException as error:
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
            finally:
                os._exit(status)
        return child

    def timed(self, folder: Path) -> int:
        """The run, and in `times.json` beside its folder how long all of it and its saves took."""
        saving, original = 0.0, RunFolder.save_checkpoint

        def save(*arguments: Any) -> Path:
            nonlocal saving
            started = time.perf_counter()
            try:
                return original(*arguments)
            finally:
                saving += time.perf_counter() - started

        RunFolder.save_checkpoint = save  # type: ignore[method-assign, assignment]
        started = time.perf_counter()
        status = self.run(folder)
        times = {"all": time.perf_counter() - started, "saving": saving}
        (folder.parent / "times.json").write_text(json.dumps(times))
        return status


def records(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Short records of token ids, one in ten with an id that is refused."""
    source = random.Random(seed)
    made = [[source.randrange(3, 2000) for _ in range(source.randint(4, 14))] for _ in range(count)]
    for ids in made[5::10]:
        ids[1] = 10**6
    return [{"id": f"{seed}-{number}", "input_ids": ids} for number, ids in enumerate(made)]


def result_of(folder: Path) -> dict[str, Any]:
    """Everything that a run came to, but for what depends on the clock or on where it is."""
    (checkpoint,) = (path for path in (folder / "checkpoints").iterdir() if path.name.startswith("step-"))
    state = json.loads((checkpoint / "state.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "step": checkpoint.name,
        "state": {name: value for name, value in state.items() if name != "settings"},
        "metrics": [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines],
        "fidelity": json.loads((folder / "fidelity.json").read_text()),
        "moments": (checkpoint / "state.safetensors").read_bytes(),
        "adapter": (checkpoint / "adapter" / "adapter_model.safetensors").read_bytes(),
        "best": (folder / "best" / "adapter" / "adapter_model.safetensors").read_bytes(),
    }


class Campaign:
    """Kills, and what came of them.

    Args:
        place: a folder for the runs.
        seed: of the instants.
    """

    def __init__(self, place: Path, seed: int, training: Training):
        self.place, self.training = place, training
        self.source = random.Random(seed)
        self.figures = Figures()
        self.pending: list[int] = []  # steps that the next process has to go on from, of kills since the last one that said so

    def make_reference(self) -> None:
        """The run without interruption, and how long it takes."""
        folder = self.place / "reference"
        status = os.waitstatus_to_exitcode(os.waitpid(self.training.fork(folder, self.training.timed), 0)[1])
        if status != 0:
            raise SystemExit(f"the uninterrupted run ended with {status}")
        self.reference = result_of(folder)
        times = json.loads((self.place / "times.json").read_text())
        self.seconds, self.figures.saving_share = times["all"], round(times["saving"] / times["all"], 3)

    def kill(self, kills: int, fresh_every: int) -> None:
        """Runs until so many processes have been killed, and the last of them to its end."""
        while self.figures.kills < kills:
            folder = self.place / f"run-{self.figures.runs}"
            before, losses = self.figures.kills, self.figures.lost
            while self._one_process(folder, kills, fresh_every):
                pass
            self.figures.runs += 1
            if self.figures.lost == losses and result_of(folder) == self.reference:
                self.figures.bit_equal += self.figures.kills - before
            else:
                self.figures.problems.append(f"{folder.name} is not the run without interruption")
            shutil.rmtree(folder, ignore_errors=True)

    def _one_process(self, folder: Path, kills: int, fresh_every: int) -> bool:
        """Start one, and kill it if there are kills left; False where the run has come to its end."""
        figures = self.figures
        said = resumptions(folder)
        kill = figures.kills < kills
        fresh = kill and fresh_every > 0 and figures.kills % fresh_every == fresh_every - 1
        figures.fresh_processes += fresh
        process = fresh_process(folder) if fresh else None
        number = process.pid if process is not None else self.training.fork(folder)
        if fresh:  # the import takes seconds, in which there is nothing to lose
            wait_for(lambda: alive(folder).exists() or exited(number))
            alive(folder).unlink(missing_ok=True)
        status = wait(number, self.source.uniform(0.0, 1.2 * self.seconds) if kill else None)
        if process is not None:
            process.returncode = 0  # it has been waited for
        self._check_resumption(folder, said)
        if status is None:
            figures.kills += 1
            self._check_what_stands(folder)
            return True
        if status != 0:
            figures.lost += 1
            figures.problems.append(f"a process of {folder.name} ended with {status}")
            return status == -signal.SIGKILL
        return False

    def _check_resumption(self, folder: Path, said: int) -> None:
        """Whether the process that has just ended went on from where it had to, if it came so far as to say it."""
        found = resumptions(folder)
        if found == said or not self.pending:
            return
        step = events(folder, "resume")[-1]["step"]
        good = sum(step == wanted for wanted in self.pending)
        self.figures.resumed += good
        self.figures.lost += len(self.pending) - good
        if good != len(self.pending):
            self.figures.problems.append(f"{folder.name} went on from step {step}, not from {self.pending}")
        self.pending.clear()

    def _check_what_stands(self, folder: Path) -> None:
        """After a kill: everything under a checkpoint's name verifies, and the last one that was reported is there."""
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
            self.figures.problems.append(f"{folder.name}: {broken or f'step {saved} was saved, {step} stands'}")

    def flip_bits(self, flips: int) -> None:
        """Single bits of every file of a finished checkpoint, in turn."""
        (checkpoint,) = (path for path in (self.place / "reference" / "checkpoints").iterdir() if path.name.startswith("step-"))
        files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
        for number in range(flips):
            path = files[number % len(files)]
            content = bytearray(path.read_bytes())
            bit = self.source.randrange(8 * len(content))
            content[bit // 8] ^= 1 << bit % 8
            original = path.read_bytes()
            path.write_bytes(content)
            self.figures.bit_flips += 1
            try:
                verify_checkpoint(checkpoint)
            except CheckpointError as error:
                named = path.relative_to(checkpoint).as_posix() in str(error) or path.name == "manifest.json"
                self.figures.bit_flips_found += named
            path.write_bytes(original)
        verify_checkpoint(checkpoint)


def fresh_process(folder: Path) -> subprocess.Popen[bytes]:
    """A new interpreter that takes the run up."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", str(folder)]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def alive(folder: Path) -> Path:
    """What a new interpreter makes beside the folder once its imports are done."""
    return folder.with_suffix(".alive")


def exited(number: int) -> bool:
    """Whether a child is there no more; it can be waited for all the same."""
    return os.waitid(os.P_PID, number, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait(number: int, seconds: float | None) -> int | None:
    """A child's exit status; None where it had to be killed after so many seconds."""
    if seconds is not None:
        end = time.perf_counter() + seconds
        while not exited(number) and time.perf_counter() < end:
            time.sleep(min(0.002, max(0.0, end - time.perf_counter())))
        if not exited(number):
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)
            return None
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Events of a kind; a last line that was cut off is none."""
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    found = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event["event"] == kind:
            found.append(event)
    return found


def resumptions(folder: Path) -> int:
    return len(events(folder, "resume"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--kills", type=int, default=100, help="processes to kill")
    parser.add_argument("--bit_flips", type=int, default=240)
    parser.add_argument("--fresh_every", type=int, default=FRESH_EVERY, help="every so many kills hit a fresh interpreter; 0 for none")
    parser.add_argument("--steps", type=int, default=STEPS, help="of the run")
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    training = Training(args.steps)
    if args.child is not None:
        alive(args.child).touch()
        return training.run(args.child)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        campaign = Campaign(Path(place), args.seed, training)
        campaign.make_reference()
        campaign.kill(args.kills, args.fresh_every)
        campaign.flip_bits(args.bit_flips)
    figures = campaign.figures
    figures.seconds = round(time.perf_counter() - started, 1)
    if args.json:
        print(json.dumps(asdict(figures)))
    else:
        print(f"{figures.kills} kills in {figures.runs} runs, {figures.fresh_processes} of them of fresh interpreters")
        print(f"{figures.killed_in_a_save} in a save (saves are {figures.saving_share:.0%} of a run)")
        print(f"{figures.killed_before_the_first_checkpoint} before the first checkpoint")
        print(
            f"{figures.resumed} resumed from the newest checkpoint, {figures.bit_equal} in runs that ended bit-equal, {figures.lost} lost"
        )
        print(f"bit flips found: {figures.bit_flips_found} of {figures.bit_flips}")
        print("\n".join(figures.problems) or f"no problem in {figures.seconds:.0f} s")
    complete = figures.kills == figures.resumed == figures.bit_equal and figures.bit_flips == figures.bit_flips_found
    return 0 if complete and not figures.lost else 1


if __name__ == "__main__":
    sys.exit(main())
