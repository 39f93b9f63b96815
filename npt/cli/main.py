"""`npt VERB`: the command line. A verb is a module with `add_flags` and a function of its own name,
from parsed flags to an exit status.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Sequence
from importlib import import_module

from npt.console import complain
from npt.errors import NPTError, StoppedError, is_out_of_memory, printable
from npt.flags import OneLineParser
from npt.version import __version__

VERBS = (
    "pretrain", "evaluate", "generate", "trace", "replay", "report", "sweep", "doctor", "collect",
    "consolidate", "transplant", "push", "export", "import",
)  # fmt: skip
"""Modules of this package, in the order of `--help`."""

STATUSES = (
    "Exit status: 0 done, 1 trace found a fault, 2 wrong arguments or data, 3 stopped after too"
    " many refusals, 4 smoke test failed, 5 adapter, checkpoint or bundle unusable, 6 another"
    " process was lost, 128+n after signal n."
)

_NAMED = {"import": "import_base"}
"""Verbs whose name no module and no function can have."""

CROWDED = 0.4
"""Load per core over the last minute from which on others are taken to be computing here."""


def main(argv: Sequence[str] | None = None, prog: str = "npt") -> int:
    """Parse, run, and turn an error meant for the user into one line and its exit status.

    Args:
        argv: arguments after the program's name; default the process's.
        prog: name shown in messages.

    Returns:
        The exit status; if another process of the run failed, that one's.
    """
    _share_cores()
    flags = vars(make_parser(prog).parse_args(argv))
    debug, verb = flags.pop("debug"), flags.pop("verb")
    speaker = prog
    if os.environ.get("WORLD_SIZE", "1") != "1":  # several processes share the terminal
        speaker += f": process {os.environ.get('RANK')}"
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return verb(flags)
    except KeyboardInterrupt:
        complain(f"{speaker}: interrupted")
        return 130
    except (NPTError, StoppedError, OSError, RuntimeError, MemoryError) as error:
        message, status = str(error), getattr(error, "exit_status", None)
        if status is None:  # the disk's, rights, or memory
            status = 2
            if isinstance(error, OSError) and error.strerror is not None:
                message = ": ".join(filter(None, (str(error.filename or ""), error.strerror)))
            elif is_out_of_memory(error):
                reason = next(iter(message.split(". ")[0].splitlines()), "") or "MemoryError"
                message = f"out of memory: {reason}; lower --batch_size or --max_length"
            else:
                raise
        if debug:
            raise
        complain(f"{speaker}: error: {printable(message, one_line=True)}")
        return int(status)


def make_parser(prog: str = "npt") -> argparse.ArgumentParser:
    """Return the parser of all verbs; `prog` is the name shown in messages."""
    parser = OneLineParser(
        prog=prog, description="Distil Neuro-Plastic adapters into quantised language models."
    )
    parser.add_argument("--version", action="version", version=f"npt {__version__}")
    verbs = parser.add_subparsers(required=True, metavar="VERB", parser_class=OneLineParser)
    for name in VERBS:
        called = _NAMED.get(name, name)
        module = import_module(f"npt.cli.{called}")
        run = getattr(module, called)
        texts = {"help": run.__doc__, "description": run.__doc__, "epilog": STATUSES}
        sub = verbs.add_parser(name, **texts, allow_abbrev=False)
        sub.set_defaults(verb=run)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        if name != "pretrain":
            sub.add_argument("--json", action="store_true", help="print the result as JSON")
        module.add_flags(sub)
    return parser


def _share_cores() -> None:
    """Let OpenMP's waiting threads sleep if others compute on this machine, unless the environment
    says otherwise; torch reads it when it is loaded. Spinning, they take a core from whoever has
    work for it; alone they wake sooner (docs/results/speed.md).
    """
    if os.getloadavg()[0] > CROWDED * (os.cpu_count() or 1):
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _show_warning(
    message: Warning | str, category: type[Warning], *_: object, **__: object
) -> None:
    if os.environ.get("RANK", "0") == "0":
        complain(f"warning: {printable(str(message), one_line=True)}")
