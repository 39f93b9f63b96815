"""Render chat templates under limits to time, memory and length.

A template is a program that comes with a model's files. It may not end, or not even one operation
of it (`10 ** (10 ** 9)`), and a string that doubles fills the memory within seconds. Neither can be
stopped in one's own process, so templates are rendered in another (`template_process.py`), which is
started when first needed and shared by all threads. It is a new program, not a fork: a process that
has used OpenMP must not fork.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from npt.errors import DataError

RENDER_SECONDS = 10.0
"""Many times what any template takes, which is less than a millisecond."""

TIMED_OUT = -signal.SIGALRM
"""The status of a process that the limit has ended."""

_SCRIPT = Path(__file__).with_name("template_process.py")


class TemplateError(Exception):
    """A template refuses its variables."""


class TemplateLimitError(DataError):
    """A template takes too long or too much memory, as it may for every record."""


def render_template(template: str, **variables: Any) -> str:
    """Return what a chat template writes; see transformers' `render_jinja_template`.

    Raises:
        TemplateError: the template raises, is malformed or writes too much.
        TemplateLimitError: it does not end in RENDER_SECONDS, or fills the memory.
    """
    request = json.dumps({"chat_template": template, **variables}, default=plain)
    answer = _renderer(os.getpid()).ask(f"{RENDER_SECONDS} {request}")
    if "limit" in answer:
        raise TemplateLimitError(answer["limit"])
    if "error" in answer:
        raise TemplateError(answer["error"])
    return str(answer["text"])


def plain(value: Any) -> Any:
    """Return a value that JSON lacks as one that it has: an array as lists, others as text."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


class _Renderer:
    """The process that renders, and the lock of its pipes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self._stop)

    def ask(self, request: str) -> dict[str, Any]:
        """Return the answer to a request, a line of JSON."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._stop()
                self._process = _started()
            process = self._process
            if answer := self._answer_of(process, request):
                return dict(json.loads(answer))
            status = process.wait()
            self._stop()
        if status == TIMED_OUT:
            return {"limit": f"did not finish within {RENDER_SECONDS:g} seconds"}
        return {"limit": f"ended the process that renders it (status {status})"}

    def _answer_of(self, process: subprocess.Popen[str], request: str) -> str:
        """Return the line that answers a request; empty if the process has ended."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            return process.stdout.readline()
        except BrokenPipeError:
            return ""
        except BaseException:  # an interrupt, after which answers would be out of step
            self._stop()
            raise

    def _stop(self) -> None:
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError):  # a request that it has not read
                process.communicate()


@cache
def _renderer(pid: int) -> _Renderer:
    """Return the renderer of this process; a forked child must not share its parent's pipes."""
    return _Renderer()


def _started() -> subprocess.Popen[str]:
    # the modules that this process finds; one thread, since a pool reserves memory for each
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", str(_SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"},
        text=True,
        encoding="ascii",
        process_group=0,  # Ctrl-C is for the run, which may still need templates to end well
    )
