"""Load randomly changed adapters, checkpoints and post-mortem bundles.

    python benchmarks/fuzz.py [--inputs 100000] [--json]

Each input is a valid folder with one file changed: bits, bytes and pieces of it; values anywhere in
its JSON; names, dtypes, shapes and offsets in the header of its tensors; or it is missing, a
folder, or another one's. Most of the checkpoints get right sums again, so that later checks are
reached. Each must be read, or refused by an error of one line that is meant for the user, in less
than SLOW seconds, with the model unchanged.

    inputs      that were tried
    read        that were valid all the same
    refused     by a clean error
    failures    anything else: these are bugs
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import npt
from npt.adapters.converted import adapter_parameters
from npt.adapters.files.adapter_files import read_adapter
from npt.console import silent_console
from npt.errors import NPTError, TooManyRefusalsError
from npt.forensics.replay import StoredState
from npt.forensics.student import read_student
from npt.manifest import MANIFEST, write_manifest
from npt.runs.checkpoint import read_checkpoint
from npt.runs.resume import changed_settings, check_same_data

SLOW = 5.0
NUMBERS: list[Any] = [0, 1, -1, 2, 0.5, -0.0, 1e308, 1e-320]
NUMBERS += [2**31, 2**62, 2**63, 2**64, -(2**63), 10**30]
TEXTS: list[Any] = ["", "x", "0", "nf4", "1,3", "../../etc/passwd", "a\nb", "\ud800", "\x00"]
TEXTS += ["9" * 5000, "x" * 10_000, "cuda.0", "0-99999999999", "rng.1.cpu", "spikes.x"]
TEXTS += ["__metadata__"]
OTHERS: list[Any] = [None, True, False, [], {}, [[]], [None], {"a": 1}, [1, 2, 3], [0] * 1000]
TENSORS: list[Any] = ["F64", "F32", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "F4", "Q4"]
TENSORS += [[2**40, 2**40], [0], [-1], ["1"], [0, 0], [4, 0], [-1, 3], [0, 2**63], [0.5, 4]]
"""What a tensor's entry may have for its dtype, shape or place."""
LENGTHS = [2**20, 101 << 20, 2**40, 2**63, 2**64 - 1]


@dataclass
class Target:
    """A loader, and a folder that it reads. files: that are changed."""

    name: str
    folder: Path
    read: Callable[[Path], Any]
    files: list[str]


class Fuzzer:
    """Changes and reads copies of a small run's files.

    Args:
        place: a folder to write in, best in memory.
        seed: of all changes; an input is found again by seed and number.
    """

    def __init__(self, place: Path, seed: int):
        self.seed = seed
        self.outcomes: Counter[str] = Counter()
        self.by_target: dict[str, Counter[str]] = {}
        self.failures: list[str] = []
        self.model, tokenizer = npt.load_base("tiny", quantization="nf4", device="cpu")
        npt.attach(self.model, npt.NPTConfig(rank=1, layers="7", targets=("down", "up")))
        checkpoint, bundle = make_seeds(self.model, tokenizer, place / "seeds")
        self.base = npt.base_identity(self.model)
        self.record = read_checkpoint(checkpoint).record
        self.parameters = adapter_parameters(self.model)
        self.before = {name: value.detach().clone() for name, value in self.parameters.items()}
        self.targets = [
            self._target("adapter", checkpoint / "adapter", place, self._read_adapter),
            self._target("checkpoint", checkpoint, place, self._read_checkpoint),
            self._target("bundle", bundle, place, self._read_bundle),
        ]
        self.others = [
            path.read_bytes()
            for target in self.targets
            for path in sorted(target.folder.rglob("*"))
            if path.is_file()
        ]

    def _target(self, name: str, folder: Path, place: Path, read: Callable[[Path], Any]) -> Target:
        copy = Path(shutil.copytree(folder, place / name))
        paths = [p for p in copy.rglob("*") if p.is_file() and p.suffix != ".md"]
        target = Target(name, copy, read, sorted(p.relative_to(copy).as_posix() for p in paths))
        target.read(copy)  # valid before it is changed
        return target

    def _read_adapter(self, folder: Path) -> Any:
        return read_adapter(self.model, folder, base=self.base)

    def _read_checkpoint(self, folder: Path) -> Any:
        read = read_checkpoint(folder)
        changed_settings(read.record["settings"], self.record["settings"])
        check_same_data(read.record["data"], self.record["data"])
        return read.state(self.model, self.base), read.position, read.initial

    def _read_bundle(self, folder: Path) -> Any:
        return StoredState(read_student(folder).postmortem, self.model)

    def run(self, inputs: int, first: int = 0) -> None:
        """Try inputs by their numbers."""
        for number in range(first, first + inputs):
            self.one(number)
        for name, parameter in self.parameters.items():
            if not torch.equal(parameter, self.before[name]):
                self.failures.append(f"{name} of the model was changed")

    def one(self, number: int) -> None:
        """Change, read, and put back."""
        source = random.Random(f"{self.seed}/{number}")
        target = self.targets[number % len(self.targets)]
        path = target.folder / source.choice(target.files)
        original = path.read_bytes()
        manifest = target.folder / MANIFEST
        sums = manifest.read_bytes() if manifest.is_file() else None
        change(path, original, source, self.others)
        right_sums(target.folder, source)
        started = time.perf_counter()
        try:
            target.read(target.folder)
            outcome = "read"
        except NPTError as error:
            outcome = "refused"
            if not str(error).isprintable():
                self._fail(number, target, f"a message that is not one line: {error!r}")
        except BaseException as error:
            outcome = "failed"
            self._fail(number, target, "".join(traceback.format_exception(error)[-3:]))
            if isinstance(error, KeyboardInterrupt):
                raise
        if time.perf_counter() - started > SLOW:
            self._fail(number, target, f"it took {time.perf_counter() - started:.1f} s")
        if path.is_dir():
            path.rmdir()
        path.write_bytes(original)
        if sums is not None:
            manifest.write_bytes(sums)
        self.outcomes[outcome] += 1
        self.by_target.setdefault(target.name, Counter())[outcome] += 1

    def _fail(self, number: int, target: Target, why: str) -> None:
        self.failures.append(f"input {number} of seed {self.seed} ({target.name}): {why}")


def make_seeds(model: Any, tokenizer: Any, place: Path) -> tuple[Path, Path]:
    """Return checkpoint and bundle of a run of three steps that then refuses two samples."""

    def break_down(strategy: Callable[..., Any]) -> Callable[..., Any]:
        calls = iter(range(10**6))

        def broken(*arguments: Any) -> Any:
            sums = strategy(*arguments)
            if next(calls) > 2:
                first = next(iter(adapter_parameters(model).values()))
                assert first.grad is not None
                first.grad.fill_(float("nan"))
            return sums

        return broken

    data = [{"input_ids": [3 + (7 * i + j) % 90 for j in range(5)]} for i in range(6)]
    folder = str(place / "run")
    refusing: dict[str, Any] = {"max_consecutive_bad": 2, "skip_spikes": True}
    config = npt.TrainConfig(
        batch_size=1, save_steps=3, smoke_test=False, output_dir=folder, **refusing
    )
    settings, console = npt.DataConfig(max_length=8), silent_console()
    trainer = npt.Trainer(
        model, tokenizer, data, config, data_config=settings, eval_data=data[:1], console=console
    )
    trainer.strategy = break_down(trainer.strategy)
    with contextlib.suppress(TooManyRefusalsError):
        trainer.train()
    (bundle,) = (place / "run" / "postmortem").iterdir()
    return place / "run" / "checkpoints" / "step-00000003", bundle


def right_sums(folder: Path, source: random.Random) -> None:
    """Write sums of the changed files, as somebody would who wants them loaded."""
    folders = [p for p in folder.iterdir() if p.is_dir() and p.name != "adapter"]
    if source.random() < 0.9 and (folder / MANIFEST).is_file() and not folders:
        write_manifest(folder)


def change(path: Path, content: bytes, source: random.Random, others: list[bytes]) -> None:
    """Change one file at random."""
    way = source.random()
    if way < 0.01:
        path.unlink()
        if way < 0.005:
            path.mkdir()
    elif way < 0.03:
        path.write_bytes(source.choice(others))
    elif way < 0.35:
        path.write_bytes(changed_bytes(content, source))
    elif path.suffix == ".json":
        path.write_bytes(changed_json(content, source))
    else:
        path.write_bytes(changed_tensors(content, source))


def changed_bytes(content: bytes, source: random.Random) -> bytes:
    """Change bits, bytes and pieces; half of them in the first kilobytes, the header."""
    made = bytearray(content)
    for _ in range(source.choice([1, 1, 1, 2, 5])):
        size = max(1, len(made))
        at = source.randrange(min(size, 2048) if source.random() < 0.5 else size)
        length = source.choice([1, 1, 2, 8, 64, size])
        way = source.randrange(6)
        if way == 0 and made:
            made[at] ^= 1 << source.randrange(8)
        elif way == 1:
            made[at : at + length] = source.randbytes(min(length, 256))
        elif way == 2:
            del made[at : at + length]
        elif way == 3:
            made[at:at] = made[at : at + length]
        elif way == 4:
            del made[at:]
        else:
            byte = source.choice([0, 255, 0x22, 0x5B, 0x7B, 0x7D])
            made[at : at + length] = bytes([byte]) * min(length, 4096)
    return bytes(made)


def changed_json(content: bytes, source: random.Random) -> bytes:
    value = json.loads(content)
    for _ in range(source.choice([1, 1, 2, 4])):
        value = changed_value(value, source)
    text = json.dumps(value)
    way = source.random()
    if way < 0.02:
        number = source.choice(["NaN", "Infinity", "1e999", "1" * 5000, "01", "1.", "0x1"])
        return text.replace("1", number, 1).encode()
    if way < 0.03:
        return (source.choice(["[", '{"a":']) * source.choice([10, 500, 50_000]) + text).encode()
    return text.encode()


def changed_value(value: Any, source: random.Random) -> Any:
    """Replace, remove, repeat or move one value somewhere in it."""
    if isinstance(value, dict) and value and source.random() < 0.9:
        key = source.choice(list(value))
        made = dict(value)
        way = source.random()
        if way < 0.1:
            del made[key]
        elif way < 0.2:
            made[source.choice([*map(str, TEXTS), key + "x", key[:-1]])] = made[key]
        elif way < 0.25:
            other = source.choice(list(value))
            made[key], made[other] = made[other], made[key]
        else:
            made[key] = changed_value(made[key], source)
        return made
    if isinstance(value, list) and value and source.random() < 0.8:
        index = source.randrange(len(value))
        way = source.random()
        if way < 0.15:
            return value[:index] + value[index + 1 :]
        if way < 0.3:
            return [*value, value[index]]
        return [*value[:index], changed_value(value[index], source), *value[index + 1 :]]
    if isinstance(value, int | float) and not isinstance(value, bool) and source.random() < 0.5:
        return source.choice([value + 1, value - 1, -value, value * 2, float(value), str(value)])
    if isinstance(value, str) and value and source.random() < 0.5:
        at = source.randrange(len(value))
        return value[:at] + source.choice(["", "x", "\n", "é", "9"]) + value[at + 1 :]
    return source.choice(source.choice([NUMBERS, TEXTS, OTHERS, TENSORS]))


def changed_tensors(content: bytes, source: random.Random) -> bytes:
    """Change a safetensors file's header (entries, its own length) or the numbers after it."""
    (length,) = struct.unpack("<Q", content[:8])
    header, body = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
    way = source.random()
    if way < 0.15:
        wrong = source.choice([0, 1, length - 1, length + 1, *LENGTHS])
        return struct.pack("<Q", wrong) + content[8:]
    if way < 0.35 and len(body) >= 8:  # numbers that are not finite, or far away
        at = source.randrange(len(body) // 4) * 4
        number = source.choice([float("nan"), float("inf"), -float("inf"), 3e38, -1.0, 1e-45])
        body[at : at + 4] = struct.pack("<f", number)
    else:
        for _ in range(source.choice([1, 1, 2])):
            header = changed_value(header, source)
    made = json.dumps(header).encode()
    made += b" " * (-len(made) % 8)
    if source.random() < 0.1:
        body += source.randbytes(source.choice([1, 4, 4096]))
    return struct.pack("<Q", len(made)) + made + bytes(body)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print the figures in one line")
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    memory = Path("/dev/shm")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        fuzzer = Fuzzer(Path(place), args.seed)
        fuzzer.run(args.inputs, args.first)
    figures = {
        "inputs": fuzzer.outcomes.total(),
        "read": fuzzer.outcomes["read"],
        "refused": fuzzer.outcomes["refused"],
        "failures": len(fuzzer.failures),
        "by_loader": {name: dict(outcomes) for name, outcomes in fuzzer.by_target.items()},
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(figures, indent=None if args.json else 2))
    for failure in fuzzer.failures[:20]:
        print(failure, file=sys.stderr)
    return 1 if fuzzer.failures else 0


if __name__ == "__main__":
    sys.exit(main())
