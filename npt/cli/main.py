"""`npt VERB`: the command line. A verb is a module with `add_flags` and a function of its own name,
from parsed flags to an exit status, whose docstring is the verb's help.
"""

from __future__ import annotations

import argparse
import inspect
import locale
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from npt.console import STDOUT, complain
from npt.errors import NPTError, StoppedError, is_out_of_memory, printable
from npt.files import FULL
from npt.flags import OneLineParser
from npt.version import __version__

GROUPS = {
    "Train": ("pretrain", "sweep", "collect", "consolidate"),
    "Look": ("evaluate", "generate", "report", "transplant"),
    "Debug": ("doctor", "trace", "replay"),
    "Share": ("import", "export", "push"),
}
"""Verbs by heading, in the order of `npt --help`."""
VERBS = tuple(verb for group in GROUPS.values() for verb in group)

ABOUT = """\
NPT (Neuro-Plastic Transformer) distils a frozen language model into a student
in which attention acts only by adjusting each token's MLP. A guard keeps NaN
and Inf out of its weights. To try it on a CPU, run `npt pretrain --config
tiny`. See also `npt VERB --help`."""

STATUSES = """\
Exit status of every npt command: 0 done, 1 fault found (npt trace), 2 wrong
arguments or data, 3 stopped after too many refusals, 4 smoke test failed,
5 damaged adapter, checkpoint or post-mortem bundle, 6 another process failed,
128+n after signal n."""

_NAMED = {"import": "import_base"}
"""Verbs whose name is a Python keyword."""

CROWDED = 0.4
"""Load per core over the last minute above which other programs are computing here."""


def main(argv: Sequence[str] | None = None, prog: str = "npt") -> int:
    """Run a verb, print an expected error as one line, and return the exit status."""
    _share_cores()
    parser = make_parser(prog)
    if not (sys.argv[1:] if argv is None else argv):
        # not on standard output: the status is that of wrong arguments
        parser.print_help(sys.stderr)
        return 2
    flags = vars(parser.parse_args(argv))
    debug = flags.pop("debug")
    verb = flags.pop("verb")
    speaker = prog
    if os.environ.get("WORLD_SIZE", "1") != "1":  # several processes share the terminal
        speaker += f": process {os.environ.get('RANK')}"
    try:
        with warnings.catch_warnings(), _failing_threads():
            warnings.showwarning = _show_warning
            return verb(flags)
    except KeyboardInterrupt:
        # the status is 128 + SIGINT
        complain(f"{speaker}: interrupted")
        return 130
    except StoppedError as stop:
        complain(f"{speaker}: {stop}")
        return stop.exit_status
    except (NPTError, OSError, RuntimeError, MemoryError, UnicodeDecodeError) as error:
        message = str(error) if isinstance(error, NPTError) else _described(error)
        # without a message it is a bug, of which the traceback is needed
        if debug or message is None:
            raise
        complain(f"{speaker}: error: {printable(message, one_line=True)}")
        return getattr(error, "exit_status", 2)


def _described(error: Exception) -> str | None:
    """Return what to say of an error of the disk, of permissions or of memory; None of others."""
    if is_out_of_memory(error):
        reason = next(iter(str(error).split(". ")[0].splitlines()), "") or "MemoryError"
        return f"out of memory: {reason}; lower --batch_size or --max_length"
    if isinstance(error, UnicodeDecodeError) and _locale().lower() != "utf-8":
        return (
            f"Python reads files as {_locale()} in this locale, and a library's own file is not:"
            " set PYTHONUTF8=1"
        )
    if not isinstance(error, OSError) or error.strerror is None:
        return None
    message = ": ".join(filter(None, (str(error.filename or ""), error.strerror)))
    if error.errno in FULL and error.filename != STDOUT:
        message += "; free disk space or choose another place"
    return message


def make_parser(prog: str = "npt") -> argparse.ArgumentParser:
    """Return the parser of all verbs; `prog` is the name in messages."""
    parser = OneLineParser(
        prog=prog,
        usage="%(prog)s VERB [flags]",
        description=ABOUT,
        formatter_class=_GroupedHelp,
        takes_others=True,
    )
    parser.add_argument("--version", action="version", version=f"npt {__version__}")
    # the verbs have headings of their own
    parser._positionals.title = argparse.SUPPRESS
    verbs = parser.add_subparsers(
        required=True, metavar="VERB", prog=prog, parser_class=OneLineParser
    )
    for name in VERBS:
        # without torch, which a verb loads when it runs
        called = _NAMED.get(name, name)
        module = import_module(f"npt.cli.{called}")
        run = getattr(module, called)
        text = inspect.getdoc(run) or ""
        # without abbreviations, since the next setting may make one ambiguous
        sub = verbs.add_parser(
            name,
            allow_abbrev=False,
            help=text.partition("\n")[0].rstrip("."),
            description=text,
            epilog=STATUSES,
            formatter_class=_GroupedHelp,
        )
        sub.set_defaults(verb=run)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        # a run writes its figures to a folder
        if name != "pretrain":
            sub.add_argument("--json", action="store_true", help="print the result as JSON")
        module.add_flags(sub)
    return parser


class _GroupedHelp(argparse.RawDescriptionHelpFormatter):
    """List the verbs under the headings of GROUPS, one line each."""

    def _format_action(self, action: argparse.Action) -> str:
        if not isinstance(action, argparse._SubParsersAction):
            return super()._format_action(action)
        helps = {verb.dest: verb.help for verb in action._get_subactions()}
        lines = []
        for title, names in GROUPS.items():
            lines += [f"{title}:", *(f"  {name:<12} {helps[name]}" for name in names), ""]
        return "\n".join(lines)


def _locale() -> str:
    """Return the encoding in which Python opens a text file by default."""
    return locale.getpreferredencoding(False)


def _share_cores() -> None:
    """Let idle OpenMP threads sleep if other programs compute here: spinning ones would take their
    cores (docs/results/speed.md). torch reads the variable when it is loaded.
    """
    if os.getloadavg()[0] > CROWDED * (os.cpu_count() or 1):
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@contextmanager
def _failing_threads() -> Iterator[None]:
    """Print the disk errors of libraries' threads, as TensorBoard's, as one line."""

    def show(failure: threading.ExceptHookArgs) -> None:
        if isinstance(failure.exc_value, OSError):
            complain(f"warning: {printable(str(failure.exc_value), one_line=True)}")
        else:
            before(failure)

    before = threading.excepthook
    threading.excepthook = show
    try:
        yield
    finally:
        threading.excepthook = before


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    if os.environ.get("RANK", "0") == "0":
        complain(f"warning: {printable(str(message), one_line=True)}")
