"""`npt <verb>`: the command line. A verb is a module that adds its flags and is a function of
parsed settings to an exit status.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from npt.cli import (
    collect,
    completion,
    consolidate,
    doctor,
    evaluate,
    export,
    generate,
    pretrain,
    push,
    replay,
    report,
    sweep,
    trace,
    transplant,
)
from npt.errors import NPTError, StoppedError, is_out_of_memory
from npt.flags import OneLineParser
from npt.version import __version__

VERBS = (
    pretrain,
    evaluate,
    generate,
    trace,
    replay,
    report,
    sweep,
    doctor,
    collect,
    consolidate,
    transplant,
    push,
    export,
    completion,
)


def _keeps_matmul_precision(run: Callable[..., int]) -> Callable[..., int]:
    """A call that leaves torch's precision of fp32 products, which holds for the whole process, as
    it was. Torch need not be loaded.
    """

    @functools.wraps(run)
    def wrapped(*arguments: Any, **named: Any) -> int:
        torch = sys.modules.get("torch")
        before = "highest" if torch is None else torch.get_float32_matmul_precision()
        try:
            return run(*arguments, **named)
        finally:
            torch = sys.modules.get("torch")
            if torch is not None:
                torch.set_float32_matmul_precision(before)

    return wrapped


@_keeps_matmul_precision
def main(argv: Sequence[str] | None = None, prog: str = "npt") -> int:
    """Parse, run, and turn an error meant for the user into one line and its exit status.

    Args:
        argv: arguments behind the program's name; default the process's.
        prog: name shown in messages.

    Returns:
        The exit status: 0 done, 2 wrong arguments or data, 3 stopped after too many refusals, 4
            smoke test failed, 5 adapter,
        checkpoint or bundle unusable, 6 another process of the run was lost (of one that failed its
        status), 128+n after signal n.
    """
    _share_cores()
    parser = make_parser(prog)
    args = parser.parse_args(argv)
    given = vars(args)
    debug, verb = given.pop("debug"), given.pop("verb")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return verb(given)
    except (NPTError, StoppedError) as error:
        if debug:
            raise
        print(f"{_speaker(prog)}: error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print(f"{_speaker(prog)}: interrupted", file=sys.stderr)
        return 130
    except (RuntimeError, MemoryError) as error:
        if debug or not is_out_of_memory(error):
            raise
        reason = next(iter(str(error).split(". ")[0].splitlines()), "") or type(error).__name__
        print(
            f"{_speaker(prog)}: error: out of memory: {reason}; lower --batch_size or --max_length",
            file=sys.stderr,
        )
        return 2


CROWDED = 0.4
"""Load of a core, over the last minute, from which on somebody else is taken to be computing."""


def _share_cores() -> None:
    """Let OpenMP's threads sleep where they wait, if others are computing here: it is read when
    torch is loaded, unless somebody has said how. Spinning, they take a core from whoever has work
    for it, themselves included; alone they wake sooner (benchmarks/neighbour.py)."""
    if os.getloadavg()[0] > CROWDED * (os.cpu_count() or 1):
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Make the parser of all verbs.

    Args:
        prog: name shown in messages.
    """
    parser = OneLineParser(
        prog=prog, description="Distil Neuro-Plastic adapters into quantised language models."
    )
    parser.add_argument("--version", action="version", version=f"npt {__version__}")
    verbs = parser.add_subparsers(required=True, metavar="VERB", parser_class=OneLineParser)
    for module in VERBS:
        name = module.__name__.rpartition(".")[2]
        run = getattr(module, name)
        sub = verbs.add_parser(name, help=run.__doc__, description=run.__doc__, allow_abbrev=False)
        sub.set_defaults(verb=run)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        module.add_flags(sub)
    return parser


def _show_warning(
    message: Warning | str, category: type[Warning], *_: object, **__: object
) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"warning: {message}", file=sys.stderr)


def _speaker(prog: str) -> str:
    """Who says it, where several processes share a terminal."""
    return (
        f"{prog}: process {os.environ.get('RANK')}"
        if os.environ.get("WORLD_SIZE", "1") != "1"
        else prog
    )
