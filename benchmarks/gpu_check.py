"""Everything that only a GPU shows, in one command: PASS or FAIL a line, figures as JSON and as
Markdown for docs/results/gpu-check.md.

    python benchmarks/gpu_check.py --output FOLDER --part 1     whether it computes what it should
    python benchmarks/gpu_check.py --output FOLDER --part 2     how fast it is
    python benchmarks/gpu_check.py --output FOLDER --part 3     tests/gpu, a checkpoint
    python benchmarks/gpu_check.py --output FOLDER --only 3,4   some sections; other results stay
    python benchmarks/gpu_check.py --output FOLDER --small      tiny shapes, without a GPU too

Each part is a call of at most ten minutes on one card, and of use alone; without --part and --only
all sections run, as far as --minutes go. FOLDER/gpu_check.json and FOLDER/gpu_check.md are written
anew as each section ends, so that a run which is cut off leaves all that it had found. MISS is a
figure that misses its target, and no failure. Sections that take a GPU say so without one.

Exit status: 0 nothing failed; 1 a section failed; 2 wrong arguments; 3 nothing failed, but
--minutes did not do for all sections.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
PARTS = {1: range(1, 10), 2: range(10, 13), 3: range(13, 15)}
"""Sections by their numbers, in calls of at most ten minutes."""

ROOT = Path(__file__).resolve().parent.parent
# a checkout need not be installed; the fault rig lies in debug/
FOLDERS = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "debug")]
sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]

import torch  # noqa: E402
from transformers.utils.logging import disable_progress_bar  # noqa: E402

from gpu_sections import SECTIONS  # noqa: E402
from gpu_sections.numbers import machine  # noqa: E402
from gpu_sections.runner import Bench, Report, Section, run_sections  # noqa: E402


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[Section]]:
    """The flags, and the sections that they select, in the order in which they run."""
    numbers = ", ".join(f"{s.number} {s.name}" for s in sorted(SECTIONS, key=lambda s: s.number))
    parts = ", ".join(f"--part {part}: {of[0]} to {of[-1]}" for part, of in PARTS.items())
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n", 1)[0],
        epilog=f"three calls of at most ten minutes: {parts}; sections: {numbers}",
    )
    chosen_by = parser.add_mutually_exclusive_group()
    chosen_by.add_argument("--part", type=int, choices=PARTS, help="one of three calls")
    chosen_by.add_argument("--only", help="numbers of sections, comma-separated; default all")
    add_flags(parser, 9.0)
    args = parser.parse_args(argv)
    chosen = [s for s in SECTIONS if args.part is None or s.number in PARTS[args.part]]
    if args.only is not None:
        wanted = [number.strip() for number in args.only.split(",")]
        unknown = [number for number in wanted if number not in {str(s.number) for s in SECTIONS}]
        if unknown:
            parser.error(f"--only names {unknown[0]!r}; choose from {numbers}")
        chosen = [s for s in SECTIONS if str(s.number) in wanted]
    check_flags(parser, args)
    return args, chosen


def add_flags(parser: argparse.ArgumentParser, minutes: float) -> None:
    """Add the flags of every program that runs sections."""
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for the figures, JSON and Markdown"
    )
    parser.add_argument("--small", action="store_true", help="tiny models and shapes")
    parser.add_argument(
        "--minutes",
        type=float,
        default=minutes,
        help="for all sections; what is left then is not reached (default %(default)g)",
    )
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=usual)


def check_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with status 2 if they cannot work here; make the folder."""
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but torch finds no GPU here; see nvidia-smi")
    if args.device == "cpu" and not args.small:
        parser.error("without a GPU only --small ends in reasonable time; add it")
    if not args.minutes > 0:
        parser.error(f"--minutes is {args.minutes:g}; it must be positive")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output is {args.output}, which cannot be made: {error.strerror}")


def run(args: argparse.Namespace, sections: list[Section], program: str) -> int:
    """Run sections as the flags say; return the exit status."""
    disable_progress_bar()
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # at these sizes the fastest
    else:
        # torch's setters of memory limits take no device without an index
        device = torch.device("cuda", torch.cuda.current_device())
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(device, args.small, Path(folder) / "work")
        bench.folder.mkdir()
        report = Report(args.output, machine(device), args.small, program)
        return run_sections(
            sections, bench, report, args.minutes, lambda line: print(line, flush=True)
        )


def main(argv: list[str] | None = None) -> int:
    return run(*parse(argv), program="gpu_check")


if __name__ == "__main__":
    sys.exit(main())
