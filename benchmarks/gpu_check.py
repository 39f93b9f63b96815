"""Check NPT on one GPU: numerics, memory and speed, with PASS, MISS or FAIL for each section.

    python benchmarks/gpu_check.py --output FOLDER --part 1     check numerics
    python benchmarks/gpu_check.py --output FOLDER --part 2     measure speed
    python benchmarks/gpu_check.py --output FOLDER --part 3     run tests/gpu, load a checkpoint
    python benchmarks/gpu_check.py --output FOLDER --only 3,4   run some sections; keep the others
    python benchmarks/gpu_check.py --output FOLDER --small      use tiny shapes, also without a GPU

Each part takes at most ten minutes and is useful alone. Without --part and --only all sections run,
within --minutes. FOLDER/gpu_check.json and FOLDER/gpu_check.md are rewritten after each section, so
an interrupted run keeps its results. MISS means that a figure misses its target; it is not a
failure. Sections that need a GPU say so without one.

Exit status: 0 nothing failed; 1 a section failed; 2 wrong arguments; 3 nothing failed, but
--minutes ran out before the last section.
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
"""Section numbers of each part, which takes at most ten minutes."""

ROOT = Path(__file__).resolve().parent.parent
# so that a checkout works without installation; the fault rig is in debug/
FOLDERS = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "debug")]
sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]

import torch  # noqa: E402
from transformers.utils.logging import disable_progress_bar  # noqa: E402

from gpu_sections import SECTIONS  # noqa: E402
from gpu_sections.numbers import machine  # noqa: E402
from gpu_sections.runner import Bench, Report, Section, run_sections  # noqa: E402
from npt.console import make_console  # noqa: E402


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[Section]]:
    """Return the flags and the sections that they select, in running order."""
    numbers = "; ".join(f"{s.number} {s.name}" for s in sorted(SECTIONS, key=lambda s: s.number))
    parts = ", ".join(f"--part {part} runs {of[0]} to {of[-1]}" for part, of in PARTS.items())
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n", 1)[0],
        epilog=f"Sections: {numbers}. {parts}, each at most ten minutes.",
    )
    chosen_by = parser.add_mutually_exclusive_group()
    chosen_by.add_argument("--part", type=int, choices=PARTS, help="run one of the three parts")
    chosen_by.add_argument("--only", help="comma-separated numbers of sections to run")
    add_flags(parser, 9.0)
    args = parser.parse_args(argv)
    chosen = [s for s in SECTIONS if args.part is None or s.number in PARTS[args.part]]
    if args.only is not None:
        wanted = [number.strip() for number in args.only.split(",")]
        unknown = [number for number in wanted if number not in {str(s.number) for s in SECTIONS}]
        if unknown:
            parser.error(f"--only has no section {unknown[0]!r}: choose from {numbers}")
        chosen = [s for s in SECTIONS if str(s.number) in wanted]
    check_flags(parser, args)
    return args, chosen


def add_flags(parser: argparse.ArgumentParser, minutes: float) -> None:
    """Add the flags of all programs that run sections."""
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for the figures, as JSON and Markdown"
    )
    parser.add_argument("--small", action="store_true", help="use tiny models and shapes")
    parser.add_argument(
        "--minutes",
        type=float,
        default=minutes,
        help="stop after this many minutes (default: %(default)g)",
    )
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=usual)


def check_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with status 2 if the flags cannot work here; create the folder."""
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU; check nvidia-smi")
    if args.device == "cpu" and not args.small:
        parser.error("--device cpu is too slow for full shapes: add --small")
    if not args.minutes > 0:
        parser.error(f"--minutes {args.minutes:g} is not positive")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output {args.output} cannot be created: {error.strerror}")


def run(args: argparse.Namespace, sections: list[Section], program: str) -> int:
    """Run the sections; return the exit status."""
    disable_progress_bar()
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # fastest at these sizes
    else:
        # torch's memory limits need a device with an index
        device = torch.device("cuda", torch.cuda.current_device())
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(device, args.small, Path(folder) / "work")
        bench.folder.mkdir()
        report = Report(args.output, machine(device), args.small, program)
        return run_sections(sections, bench, report, args.minutes, make_console().say)


def main(argv: list[str] | None = None) -> int:
    return run(*parse(argv), program="gpu_check")


if __name__ == "__main__":
    sys.exit(main())
