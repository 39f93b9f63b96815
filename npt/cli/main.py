"""`npt VERB`: the command line. A verb is a module with `add_flags` and a function of its own name,
from parsed flags to an exit status, whose docstring is the verb's help.
"""

from __future__ import annotations

import argparse
import locale
import os
import sys
import threading
import warnings
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from npt.errors import FULL, NPTError, StoppedError, is_out_of_memory, printable
from npt.parser import OneLineParser
from npt.streams import STDOUT, complain
from npt.version import __version__

GROUPS = {
    "Train": {
        "pretrain": "Train a student: adapters on a frozen base, by distillation",
        "sweep": "Run a study: many short runs that vary settings",
        "collect": "Collect prompts where student and teacher disagree",
        "consolidate": "Write texts or a context permanently into a student",
    },
    "Look": {
        "evaluate": "Measure how closely a student matches its teacher",
        "generate": "Continue a prompt with the student, its teacher, or both",
        "report": "Rebuild report.html for a run",
        "transplant": (
            "Give one text's modulation, or the code of a context, to another text; show the effect"
        ),
    },
    "Debug": {
        "doctor": "Check a dataset or predict memory before a run",
        "trace": "Find the first operation that produces a NaN or Inf",
        "replay": "Re-run the last window of a failed run and find the cause",
    },
    "Share": {
        "import": "Convert a GGUF file to a transformers folder of 16-bit weights",
        "export": "Write a student that transformers loads without npt",
        "push": "Upload an adapter to the Hugging Face Hub",
    },
}
"""Verbs by heading, as `npt --help` lists them: it imports none of their modules."""
VERBS = {name: summary for verbs in GROUPS.values() for name, summary in verbs.items()}

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
    words = sys.argv[1:] if argv is None else argv
    # the flags of other verbs would only take time
    parser = make_parser(prog, words)
    if not words:
        # not on standard output: the status is that of wrong arguments
        parser.print_help(sys.stderr)
        return 2
    flags = vars(parser.parse_args(words))
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
    encoding = locale.getpreferredencoding(False)
    if isinstance(error, UnicodeDecodeError) and encoding.lower() != "utf-8":
        return (
            f"Python reads files as {encoding} in this locale, and a library's own file is not:"
            " set PYTHONUTF8=1"
        )
    if not isinstance(error, OSError) or error.strerror is None:
        return None
    message = ": ".join(filter(None, (str(error.filename or ""), error.strerror)))
    if error.errno in FULL and error.filename != STDOUT:
        message += "; free disk space or choose another place"
    return message


def make_parser(prog: str = "npt", needed: Container[str] = VERBS) -> argparse.ArgumentParser:
    """Return the parser of all verbs, with the flags of the `needed` ones; `prog` is the name in
    messages.
    """
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
    for name, summary in VERBS.items():
        # without abbreviations, since the next setting may make one ambiguous
        verb = verbs.add_parser(
            name, allow_abbrev=False, help=summary, epilog=STATUSES, formatter_class=_GroupedHelp
        )
        if name in needed:
            _complete(verb, name)
    return parser


def _complete(parser: argparse.ArgumentParser, verb: str) -> None:
    """Add a verb's description and flags to its parser."""
    import inspect

    called = _NAMED.get(verb, verb)
    # without torch, which a verb loads when it runs
    module = import_module(f"npt.cli.{called}")
    run = getattr(module, called)
    parser.description = inspect.getdoc(run)
    parser.set_defaults(verb=run)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    # a run writes its figures to a folder
    if verb != "pretrain":
        parser.add_argument("--json", action="store_true", help="print the result as JSON")
    module.add_flags(parser)


class _GroupedHelp(argparse.RawDescriptionHelpFormatter):
    """List the verbs under the headings of GROUPS, one line each."""

    def _format_action(self, action: argparse.Action) -> str:
        if not isinstance(action, argparse._SubParsersAction):
            return super()._format_action(action)
        lines = []
        for title, verbs in GROUPS.items():
            lines += [f"{title}:", *(f"  {name:<12} {text}" for name, text in verbs.items()), ""]
        return "\n".join(lines)


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
